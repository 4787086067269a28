/* Digests of messages: the router recognises a conversation by the digest of its first messages.
 *
 * A digest has 128 bits. It is made with keys that are drawn when the process starts, so nobody outside can construct two
 * conversations with equal digests. A digest has no meaning outside this process.
 */
#include "digest.h"
#include <sys/random.h>

#define KEYS 12

static uint64_t key[KEYS];

/* The 128-bit product, folded to 64 bits. */
static inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Two hashes of the same words in different combinations: what one loses in a product, the other keeps. */
digest extend_digest(digest before, const uint8_t *p, size_t len) {
    uint64_t a = before.low ^ key[8], b = before.high ^ key[9], c = before.high ^ key[10], d = before.low ^ key[11];
    uint8_t rest[32] = {0};
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

static PyObject *outside(void) {
    PyErr_SetString(PyExc_ValueError, "a span lies outside of the bytes");
    return NULL;
}

static PyObject *digest_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_ssize_t start, end;
    (void)self;
    if (check_signature(n, 3, 3, "(text: bytes, start, end)") < 0 || check_type(args[0], &PyBytes_Type) < 0 ||
        as_size(args[1], &start) < 0 || as_size(args[2], &end) < 0)
        return NULL;
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(args[0]))
        return outside();
    PyThreadState *released = end - start > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    digest made = extend_digest((digest){0, 0}, (const uint8_t *)PyBytes_AS_STRING(args[0]) + start, (size_t)(end - start));
    if (released)
        PyEval_RestoreThread(released);
    return PyBytes_FromStringAndSize((char *)&made, DIGEST_BYTES);
}

typedef struct {
    uint32_t start, end;
} span;

static PyObject *prefix_digests(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (check_signature(n, 2, 2, "(body: bytes, spans: bytes)") < 0 || check_type(args[0], &PyBytes_Type) < 0 ||
        check_type(args[1], &PyBytes_Type) < 0)
        return NULL;
    const uint8_t *body = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const uint8_t *spans = (const uint8_t *)PyBytes_AS_STRING(args[1]);
    size_t count = (size_t)PyBytes_GET_SIZE(args[1]) / sizeof(span);
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * DIGEST_BYTES));
    digest so_far = {0, 0};
    if (!made)
        return NULL;
    int inside = 1;
    PyThreadState *released = PyBytes_GET_SIZE(args[0]) > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    for (size_t i = 0; i < count; i++) {
        span item;
        memcpy(&item, spans + i * sizeof item, sizeof item);
        if (item.end < item.start || item.end > (size_t)PyBytes_GET_SIZE(args[0])) {
            inside = 0;
            break;
        }
        so_far = extend_digest(so_far, body + item.start, item.end - item.start);
        memcpy(PyBytes_AS_STRING(made) + i * DIGEST_BYTES, &so_far, DIGEST_BYTES);
    }
    if (released)
        PyEval_RestoreThread(released);
    if (inside)
        return made;
    Py_DECREF(made);
    return outside();
}

static PyMethodDef functions[] = {
    {"digest", FAST(digest_of), "Return the digest of text[start:end], valid within this process."},
    {"prefix_digests", FAST(prefix_digests), "Return, for each span, the digest of all spans up to and including it."},
    NO_METHOD};

int add_digests(PyObject *module) {
    static int has_keys;
    if (!has_keys && getrandom(key, sizeof key, 0) != (ssize_t)sizeof key) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    has_keys = 1;
    return PyModule_AddFunctions(module, functions);
}
