/* What the fuzz targets share: an embedded Python, a reader of bytes, and checks.
 *
 * A target is one C file with `fuzz_setup` and `fuzz_one`. It is linked with the kernel's C files, with libpython, and with
 * a driver: libFuzzer (clang), or driver.c, which needs no clang. A failed check aborts, like a sanitizer's finding.
 */
#ifndef WARMROUTE_FUZZ_HARNESS_H
#define WARMROUTE_FUZZ_HARNESS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Implemented by the target. */
void fuzz_setup(void);
void fuzz_one(const uint8_t *data, size_t size);

/* The entry that both drivers call. It returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CHECK(condition)                                                                                                   \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);                                  \
            if (PyErr_Occurred())                                                                                          \
                PyErr_Print();                                                                                             \
            abort();                                                                                                       \
        }                                                                                                                  \
    } while (0)

/* A function or type of the kernel, as a borrowed reference. */
PyObject *kernel(const char *name);

/* ---- The input as a stream of numbers. Past its end, it is all zeros. ---- */

typedef struct {
    const uint8_t *at, *end;
} input;

static inline uint8_t next_byte(input *in) { return in->at < in->end ? *in->at++ : 0; }

static inline unsigned next_below(input *in, unsigned limit) { return next_byte(in) % limit; }

static inline int has_more(const input *in) { return in->at < in->end; }

/* ---- Python ---- */

/* Calls a function or method, and gives up the reference to each argument. NULL with an exception set. */
PyObject *call(PyObject *function, unsigned n, ...);
PyObject *call_method(PyObject *self, const char *name, unsigned n, ...);

/* The same, where it must succeed. */
PyObject *must_call(PyObject *function, unsigned n, ...);
PyObject *must_call_method(PyObject *self, const char *name, unsigned n, ...);

/* Clears the exception, which has to be one of these. */
void expect_error(PyObject *type, PyObject *other);

static inline PyObject *bytes(const void *at, size_t n) { return PyBytes_FromStringAndSize(at, (Py_ssize_t)n); }
static inline PyObject *integer(long long value) { return PyLong_FromLongLong(value); }
static inline PyObject *none(void) { return Py_NewRef(Py_None); }

/* An attribute's value; gives up nothing. */
long attribute(PyObject *object, const char *name);

/* The value of an int, whose reference is given up. */
long long as_integer(PyObject *number);

#endif
