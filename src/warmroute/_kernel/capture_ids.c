/* The ids of blocks in a capture: SipHash-2-4 of each block hash under the capture's key, cut to 48 bits.
 *
 * SipHash is a pseudorandom function: without the key, ids cannot be computed from a text, nor compared between two
 * captures. 48 bits are exact in every JSON reader, also in those that read numbers as doubles.
 */
#include "kernel.h"

#define KEY_BYTES 16
#define ID_MASK 0xffffffffffffULL

static always_inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

#define ROUND                                                                                                                    \
    do {                                                                                                                         \
        v0 += v1, v2 += v3, v1 = rotate(v1, 13) ^ v0, v3 = rotate(v3, 16) ^ v2, v0 = rotate(v0, 32);                             \
        v2 += v1, v0 += v3, v1 = rotate(v1, 17) ^ v2, v3 = rotate(v3, 21) ^ v0, v2 = rotate(v2, 32);                             \
    } while (0)

/* SipHash-2-4 of a message of eight bytes. */
static always_inline uint64_t siphash(uint64_t k0, uint64_t k1, uint64_t message) {
    uint64_t v0 = k0 ^ 0x736f6d6570736575ULL, v1 = k1 ^ 0x646f72616e646f6dULL;
    uint64_t v2 = k0 ^ 0x6c7967656e657261ULL, v3 = k1 ^ 0x7465646279746573ULL;
    const uint64_t length = 8ULL << 56;
    v3 ^= message;
    ROUND;
    ROUND;
    v0 ^= message;
    v3 ^= length;
    ROUND;
    ROUND;
    v0 ^= length;
    v2 ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    ROUND;
    return v0 ^ v1 ^ v2 ^ v3;
}

static PyObject *capture_ids(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (check_signature(n, 2, 2, "(chain: bytes, key: bytes)") < 0 || check_type(args[0], &PyBytes_Type) < 0 ||
        check_type(args[1], &PyBytes_Type) < 0)
        return NULL;
    if (PyBytes_GET_SIZE(args[1]) != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key must have %d bytes", KEY_BYTES);
        return NULL;
    }
    const uint8_t *key = (const uint8_t *)PyBytes_AS_STRING(args[1]), *chain = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    uint64_t k0 = read64(key), k1 = read64(key + 8);
    Py_ssize_t count = PyBytes_GET_SIZE(args[0]) / 8;
    PyObject *ids = PyList_New(count);
    if (!ids)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *id = PyLong_FromUnsignedLongLong(siphash(k0, k1, read64(chain + 8 * i)) & ID_MASK);
        if (!id) {
            Py_DECREF(ids);
            return NULL;
        }
        PyList_SET_ITEM(ids, i, id);
    }
    return ids;
}

static PyMethodDef functions[] = {
    {"capture_ids", FAST(capture_ids), "Return the id of each block hash (8 bytes each) under a key of 16 bytes."}, NO_METHOD};

int add_capture_ids(PyObject *module) { return PyModule_AddFunctions(module, functions); }
