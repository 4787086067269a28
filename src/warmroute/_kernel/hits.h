/* Hits: leading tokens of a prompt that a node's cache holds, and the caches they come from. */
#ifndef WARMROUTE_HITS_H
#define WARMROUTE_HITS_H

#include "accounting.h"

/* core/node_cache.py inherits from it. */
typedef struct {
    PyObject_HEAD
    double predicted, confirmed, at_s;
} AccuracyState;

/* core/node_cache.py inherits from it. */
typedef struct {
    Named named; /* its part: an AccuracyState */
    Py_ssize_t block_size, capacity_blocks, free_blocks;
    double oldest_s; /* NaN where nothing is held */
    double last_contact_s, event_lag_s;
    char complete, token_mismatch;
} CacheState;

typedef struct {
    PyObject_HEAD
    Py_ssize_t tokens, rank;
    double expected;
} Hit;

extern PyTypeObject CacheType, HitType;

#endif
