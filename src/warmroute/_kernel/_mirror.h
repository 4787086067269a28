/* What _recency.c offers to _index.c: a place whose blocks are those that a Recency holds has no table of its own. */
#ifndef WARMROUTE_MIRROR_H
#define WARMROUTE_MIRROR_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

/* As Recency.uses: what is asked of the moment before a touch, and the answer. */
typedef struct {
    Py_ssize_t depth; /* 0: nothing */
    double latest;
    PyObject *uses;
} mirror_uses;

typedef struct {
    PyTypeObject *type;
    /* As Recency.touch: (hashes, stamp) to (new hashes, evicted hashes). `before` may be NULL. */
    PyObject *(*touch)(PyObject *mirror, PyObject *const *args, Py_ssize_t n_args, mirror_uses *before);
    /* As Recency.push: (count, stamp) to the evicted hashes. */
    PyObject *(*push)(PyObject *mirror, PyObject *const *args, Py_ssize_t n_args);
    /* It is a place's from now on; 0 where it is one's already. */
    int (*claim)(PyObject *mirror);
    /* It is no place's any more. */
    void (*release)(PyObject *mirror);
    /* Another one with all that it holds, which leaves it empty; NULL with an error where there is no memory. */
    PyObject *(*detach)(PyObject *mirror);
    /* Takes back the last of the blocks that were new in a prompt, when it was touched just now. */
    void (*take_back)(PyObject *mirror, const uint8_t *hashes, size_t n, const uint8_t *last, size_t n_last);
    /* In blocks. */
    uint64_t (*capacity)(PyObject *mirror);
    /* As Recency.room. */
    void (*room)(PyObject *mirror, Py_ssize_t *blocks, double *oldest);
    /* Blocks with names. */
    uint64_t (*count)(PyObject *mirror);
    /* How many leading ones of a prompt's hashes are held. */
    size_t (*held)(PyObject *mirror, const uint8_t *hashes, size_t n);
    /* Lets the oldest go, up to so many with names, and writes them to `out`; how many those were. */
    size_t (*shed)(PyObject *mirror, uint64_t *out, size_t most);
    /* All of them, as bytes, in no order. */
    PyObject *(*hashes)(PyObject *mirror);
} mirror_api;

#define MIRROR_MODULE "warmroute._kernel._recency"
#define MIRROR_API "mirror_api"

#endif
