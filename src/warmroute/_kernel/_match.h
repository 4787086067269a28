/* What _index.c offers to _price.c: what a match finds, as numbers. */
#ifndef WARMROUTE_MATCH_H
#define WARMROUTE_MATCH_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define TIERS 4

/* A depth for each tier: how far this tier and those nearer to the GPU reach without a gap. */
typedef struct {
    uint32_t place;
    uint32_t depth[TIERS];
} reach;

/* A prompt that is sent: what is asked, and what comes back, as new references. */
typedef struct {
    Py_ssize_t depth; /* of the uses that are asked for */
    double latest;
    PyObject *new, *uses;
    Py_ssize_t free_blocks;
    double oldest_s; /* not a number where nothing is held */
} sending;

typedef struct {
    PyTypeObject *index;
    /* Calls `each` with what every place reaches; -1 with an error, as soon as that says so. It must not change the
     * index. */
    int (*match)(PyObject *index, const uint8_t *hashes, size_t n, int (*each)(const reach *, void *), void *with);
    /* BlockIndex.keep, with the mirror's uses from before, and its room from then on; -1 with an error. `args`: as for
     * that. */
    int (*send)(PyObject *index, PyObject *const *args, sending *s);
    /* `args`: place, count, stamp. Recency.push of a mirrored place; of `s`, the room is told. -1 with an error. */
    int (*push)(PyObject *index, PyObject *const *args, sending *s);
} match_api;

#define MATCH_MODULE "warmroute._kernel._index"
#define MATCH_API "match_api"

#endif
