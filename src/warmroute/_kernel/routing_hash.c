/* Routing hashes: FNV-1a over the key's bytes, Murmur3's 64-bit finalizer, and rendezvous hashing over nodes.
 *
 * A node's score for a key is mix(key ^ seed of the node). The node with the highest score is the key's home. Where the
 * home can't serve, the node with the next score does. tests/routing/test_rendezvous.py compares it with plain Python.
 */
#include "kernel.h"
#include <stdlib.h>

static inline uint64_t mix(uint64_t h) {
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdULL;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ULL;
    h ^= h >> 33;
    return h;
}

static PyObject *key_hash(PyObject *self, PyObject *key) {
    Py_buffer view;
    (void)self;
    if (PyObject_GetBuffer(key, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    uint64_t h = 0xcbf29ce484222325ULL;
    const unsigned char *p = view.buf;
    for (Py_ssize_t i = 0; i < view.len; i++) {
        h ^= p[i];
        h *= 0x100000001b3ULL;
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(mix(h));
}

/* Reads (hash: int, seeds: buffer of uint64). */
static int read_arguments(PyObject *const *args, Py_ssize_t n, uint64_t *hash, Py_buffer *seeds) {
    if (check_signature(n, 2, 2, "(hash, seeds)") < 0)
        return -1;
    *hash = PyLong_AsUnsignedLongLong(args[0]);
    if (*hash == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    if (PyObject_GetBuffer(args[1], seeds, PyBUF_SIMPLE) < 0)
        return -1;
    if (seeds->len == 0 || seeds->len % 8) {
        PyBuffer_Release(seeds);
        PyErr_SetString(PyExc_ValueError, "seeds must be a non-empty buffer of 64-bit integers");
        return -1;
    }
    return 0;
}

static always_inline uint64_t score(uint64_t hash, const uint8_t *seeds, Py_ssize_t at) {
    return mix(hash ^ read64(seeds + 8 * at));
}

static PyObject *rendezvous_home(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    uint64_t hash, best_score = 0;
    Py_buffer seeds;
    (void)self;
    if (read_arguments(args, n, &hash, &seeds) < 0)
        return NULL;
    Py_ssize_t count = seeds.len / 8, best = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t scored = score(hash, seeds.buf, i);
        if (scored > best_score) {
            best_score = scored;
            best = i;
        }
    }
    PyBuffer_Release(&seeds);
    return PyLong_FromSsize_t(best);
}

typedef struct {
    uint64_t score;
    Py_ssize_t at;
} scored_seed;

static int by_falling_score(const void *a, const void *b) {
    const scored_seed *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static PyObject *rendezvous_order(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    uint64_t hash;
    Py_buffer seeds;
    (void)self;
    if (read_arguments(args, n, &hash, &seeds) < 0)
        return NULL;
    Py_ssize_t count = seeds.len / 8;
    scored_seed *all = PyMem_Malloc((size_t)count * sizeof(scored_seed));
    if (!all) {
        PyBuffer_Release(&seeds);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++)
        all[i] = (scored_seed){score(hash, seeds.buf, i), i};
    PyBuffer_Release(&seeds);
    qsort(all, (size_t)count, sizeof(scored_seed), by_falling_score);
    PyObject *order = PyList_New(count);
    for (Py_ssize_t i = 0; order && i < count; i++) {
        PyObject *at = PyLong_FromSsize_t(all[i].at);
        if (!at)
            Py_CLEAR(order);
        else
            PyList_SET_ITEM(order, i, at);
    }
    PyMem_Free(all);
    return order;
}

static PyMethodDef functions[] = {
    {"key_hash", key_hash, METH_O, "Return the 64-bit hash of a routing key: FNV-1a, then Murmur3's finalizer."},
    {"rendezvous_home", FAST(rendezvous_home), "Return the index of the seed with the highest score for this hash."},
    {"rendezvous_order", FAST(rendezvous_order), "Return the indices of all seeds by falling score for this hash."},
    NO_METHOD};

int add_routing_hashes(PyObject *module) { return PyModule_AddFunctions(module, functions); }
