/* Routing hashes: FNV-1a over the key's bytes, Murmur3's 64-bit finalizer, and rendezvous choice over nodes.
 *
 * A node's score for a key is mix(key ^ seed of the node); the highest score is the key's home, and the order of scores
 * is the order in which others stand in for it. tests/routing/test_rendezvous.py holds this equal to plain Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
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
static int read_args(PyObject *const *args, Py_ssize_t n, uint64_t *hash, Py_buffer *seeds) {
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "expected (hash, seeds)");
        return -1;
    }
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

static PyObject *rendezvous_home(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    uint64_t hash, best_score = 0;
    Py_buffer seeds;
    (void)self;
    if (read_args(args, n, &hash, &seeds) < 0)
        return NULL;
    const uint64_t *seed = seeds.buf;
    Py_ssize_t count = seeds.len / 8, best = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t score = mix(hash ^ seed[i]);
        if (score > best_score) {
            best_score = score;
            best = i;
        }
    }
    PyBuffer_Release(&seeds);
    return PyLong_FromSsize_t(best);
}

typedef struct {
    uint64_t score;
    Py_ssize_t at;
} scored;

static int by_score(const void *a, const void *b) {
    const scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static PyObject *rendezvous_order(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    uint64_t hash;
    Py_buffer seeds;
    (void)self;
    if (read_args(args, n, &hash, &seeds) < 0)
        return NULL;
    const uint64_t *seed = seeds.buf;
    Py_ssize_t count = seeds.len / 8;
    scored *all = PyMem_Malloc(count * sizeof(scored));
    if (!all) {
        PyBuffer_Release(&seeds);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++)
        all[i] = (scored){mix(hash ^ seed[i]), i};
    PyBuffer_Release(&seeds);
    qsort(all, count, sizeof(scored), by_score);
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

static PyMethodDef methods[] = {
    {"key_hash", key_hash, METH_O, "64-bit hash of a routing key: FNV-1a, then Murmur3's finalizer."},
    {"rendezvous_home", (PyCFunction)(void (*)(void))rendezvous_home, METH_FASTCALL,
     "Index of the seed with the highest score for this hash."},
    {"rendezvous_order", (PyCFunction)(void (*)(void))rendezvous_order, METH_FASTCALL,
     "Indices of all seeds by falling score for this hash."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hash", "Routing hashes.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__hash(void) { return PyModule_Create(&module); }
