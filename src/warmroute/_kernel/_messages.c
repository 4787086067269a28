/* Digests: a conversation is found again by that of its first messages.
 *
 * A digest is 128 bits, made with keys that are drawn when the process starts: nobody outside can make two beginnings of a
 * conversation meet. It is for finding things again within this process, and for nothing else.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#define DIGEST_BYTES 16
#define KEYS 12

typedef const unsigned char *ptr;

static uint64_t key[KEYS];

typedef struct {
    uint64_t low, high;
} digest;

static inline uint64_t read64(ptr p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Two hashes that read the same words in different company, so that what one loses the other keeps. */
static digest digest_of(digest before, ptr p, size_t len) {
    uint64_t a = before.low ^ key[8], b = before.high ^ key[9], c = before.high ^ key[10], d = before.low ^ key[11];
    unsigned char rest[32] = {0};
    size_t left = len;
    for (;;) {
        if (left < 32) {
            memcpy(rest, p, left);
            p = rest;
        }
        uint64_t w0 = read64(p), w1 = read64(p + 8), w2 = read64(p + 16), w3 = read64(p + 24);
        a = fold(a ^ w0 ^ key[0], w1 ^ key[1]) ^ w2;
        b = fold(b ^ w2 ^ key[2], w3 ^ key[3]) ^ w0;
        c = fold(c ^ w0 ^ key[4], w3 ^ key[5]) ^ w1;
        d = fold(d ^ w2 ^ key[6], w1 ^ key[7]) ^ w3;
        if (left < 32)
            break;
        p += 32;
        left -= 32;
    }
    digest made = {fold(a ^ len ^ key[0], b ^ key[3]), fold(c ^ key[5], d ^ len ^ key[6])};
    made.low = fold(made.low ^ key[1], key[4] ^ b);
    made.high = fold(made.high ^ key[2], key[7] ^ d);
    return made;
}

static PyObject *digest_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected (bytes, start, end)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "not within the bytes");
        return NULL;
    }
    digest made = digest_of((digest){0, 0}, (ptr)PyBytes_AS_STRING(args[0]) + start, end - start);
    return PyBytes_FromStringAndSize((char *)&made, DIGEST_BYTES);
}

typedef struct {
    uint32_t start, end;
} span;

static PyObject *digests(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 2 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected (body: bytes, spans: bytes)");
        return NULL;
    }
    ptr body = (ptr)PyBytes_AS_STRING(args[0]), spans = (ptr)PyBytes_AS_STRING(args[1]);
    Py_ssize_t count = PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(span);
    PyObject *made = PyBytes_FromStringAndSize(NULL, count * DIGEST_BYTES);
    digest so_far = {0, 0};
    for (Py_ssize_t i = 0; made && i < count; i++) {
        span item;
        memcpy(&item, spans + i * sizeof item, sizeof item);
        if (item.end < item.start || item.end > (size_t)PyBytes_GET_SIZE(args[0])) {
            PyErr_SetString(PyExc_ValueError, "not within the bytes");
            Py_CLEAR(made);
            break;
        }
        so_far = digest_of(so_far, body + item.start, item.end - item.start);
        memcpy(PyBytes_AS_STRING(made) + i * DIGEST_BYTES, &so_far, DIGEST_BYTES);
    }
    return made;
}

static PyMethodDef methods[] = {
    {"digest", (PyCFunction)(void (*)(void))digest_bytes, METH_FASTCALL, "Digest of some bytes, within this process."},
    {"digests", (PyCFunction)(void (*)(void))digests, METH_FASTCALL, "For each of some spans: digest of all up to it."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_messages", "Digests of messages.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__messages(void) {
    if (getrandom(key, sizeof key, 0) != (ssize_t)sizeof key)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyModule_Create(&module);
}
