/* What _recency.c offers to _index.c: a place whose blocks are those that a Recency holds has no table of its own. */
#ifndef WARMROUTE_MIRROR_H
#define WARMROUTE_MIRROR_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    PyTypeObject *type;
    /* As Recency.touch: (hashes, stamp) to (new hashes, evicted hashes). */
    PyObject *(*touch)(PyObject *mirror, PyObject *const *args, Py_ssize_t n_args);
    /* Blocks with names. */
    uint64_t (*count)(PyObject *mirror);
    /* Lets the oldest go, up to so many with names, and writes them to `out`; how many those were. */
    size_t (*shed)(PyObject *mirror, uint64_t *out, size_t most);
    /* All of them, as bytes, in no order. */
    PyObject *(*hashes)(PyObject *mirror);
} mirror_api;

#define MIRROR_MODULE "warmroute._kernel._recency"
#define MIRROR_API "mirror_api"

#endif
