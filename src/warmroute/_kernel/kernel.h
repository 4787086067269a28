/* What every part of the kernel uses: Python's headers, reading arguments, and the list of parts.
 *
 * The rules:
 * - A part is one C file or a few, with a header for what others call. Parts call each other directly.
 * - Each part has one `add_...` function, which puts its types and functions into the module. The module calls it once.
 * - Objects and tables are process-wide (static types). The module can't be imported into a subinterpreter.
 */
#ifndef WARMROUTE_KERNEL_H
#define WARMROUTE_KERNEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "constants.h"

#define MODULE "warmroute._kernel."

#define always_inline inline __attribute__((always_inline))
#define prefetch(p) __builtin_prefetch(p)

/* A method that takes its arguments as an array, for a PyMethodDef. */
#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
/* The end of a table of members, methods or properties. */
#define NO_MEMBER {NULL, 0, 0, 0, NULL}
#define NO_METHOD {NULL, NULL, 0, NULL}
#define NO_PROPERTY {NULL, NULL, NULL, NULL, NULL}

/* ---- The parts ---- */

int add_accounting(PyObject *module);
int add_block_hashes(PyObject *module);
int add_body_buffer(PyObject *module);
int add_body_scan(PyObject *module);
int add_capture_ids(PyObject *module);
int add_digests(PyObject *module);
int add_exit_deadline(PyObject *module);
int add_first_token(PyObject *module);
int add_first_token_order(PyObject *module);
int add_hits(PyObject *module);
int add_http_chunks(PyObject *module);
int add_http_heads(PyObject *module);
int add_index(PyObject *module);
int add_message_tokens(PyObject *module);
int add_peer_load(PyObject *module);
int add_prices(PyObject *module);
int add_recency(PyObject *module);
int add_response_tail(PyObject *module);
int add_routing_hashes(PyObject *module);
int add_socket_poller(PyObject *module);
int add_traffic(PyObject *module);
int add_usage(PyObject *module);

/* ---- Numbers in memory ---- */

static always_inline uint64_t read64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

static always_inline double read_double(const uint8_t *p) {
    double value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Bytes that glibc's malloc takes from the heap for an allocation of this size. */
static always_inline uint64_t malloc_bytes(uint64_t bytes) {
    return bytes == 0 ? 0 : bytes <= 24 ? 32 : (bytes + 8 + 15) & ~15ULL;
}

static always_inline double larger(double a, double b) { return a > b ? a : b; }

static always_inline double smaller(double a, double b) { return a < b ? a : b; }

/* ---- Arguments. They are read one by one: to parse a format string takes longer than most of these functions. ----
 * Each returns -1 with an exception set where the argument is wrong. */

static always_inline int as_double(PyObject *given, double *to) {
    *to = PyFloat_CheckExact(given) ? PyFloat_AS_DOUBLE(given) : PyFloat_AsDouble(given);
    return *to == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static always_inline int as_size(PyObject *given, Py_ssize_t *to) {
    *to = PyLong_AsSsize_t(given);
    return *to == -1 && PyErr_Occurred() ? -1 : 0;
}

/* An integer from `least` to `most`. */
int as_number(PyObject *given, long least, long most, long *to, const char *what);

/* Set an exception and return -1; arguments.c. */
int wrong_count(Py_ssize_t given, Py_ssize_t expected);
int wrong_signature(const char *signature);
int wrong_type(PyTypeObject *expected);
int wrong_tuple(Py_ssize_t length);

static always_inline int check_count(Py_ssize_t given, Py_ssize_t expected) {
    return given == expected ? 0 : wrong_count(given, expected);
}

static always_inline int check_signature(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char *signature) {
    return given >= least && given <= most ? 0 : wrong_signature(signature);
}

static always_inline int check_type(PyObject *given, PyTypeObject *type) {
    return PyObject_TypeCheck(given, type) ? 0 : wrong_type(type);
}

static always_inline int check_tuple(PyObject *given, Py_ssize_t length) {
    return PyTuple_Check(given) && PyTuple_GET_SIZE(given) == length ? 0 : wrong_tuple(length);
}

/* ---- Registration ---- */

static inline int add_type(PyObject *module, const char *name, PyTypeObject *type) {
    return PyType_Ready(type) < 0 ? -1 : PyModule_AddObjectRef(module, name, (PyObject *)type);
}

#endif
