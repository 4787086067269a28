/* Recency lists, as the index uses them: the blocks of an LRU holder (index_lru.c) are those of its recency list. */
#ifndef WARMROUTE_RECENCY_H
#define WARMROUTE_RECENCY_H

#include "kernel.h"

typedef struct Recency Recency;

extern PyTypeObject RecencyType;

/* When the first `depth` blocks of a prompt were used before a touch, as Recency.last_uses returns it. Nothing is asked for
 * where depth is 0. `uses` is a new reference, or NULL. */
typedef struct {
    Py_ssize_t depth;
    double latest;
    PyObject *uses;
} earlier_uses;

/* Read arguments; -1 with an exception where they are wrong. */
int recency_read_stamp(PyObject *from, double *stamp);
int recency_read_count(PyObject *from, uint64_t *count);

/* Recency.touch: returns (new hashes, evicted hashes). `before` may be NULL. */
PyObject *recency_touch(Recency *r, PyObject *hashes, double stamp, earlier_uses *before);

/* Recency.add_anonymous: returns the evicted hashes. */
PyObject *recency_add_anonymous(Recency *r, uint64_t count, double stamp);

/* Makes it the list of a holder; returns 0 where it is another holder's. recency_detach() ends that. */
int recency_attach(Recency *r);
void recency_detach(Recency *r);

/* Moves all blocks to a new list, and leaves this one empty. NULL with an exception without memory. */
Recency *recency_move(Recency *r);

/* Forgets the last of the blocks that were new in a prompt, which was touched just now. */
void recency_untouch(Recency *r, const uint8_t *hashes, size_t n, const uint8_t *last, size_t n_last);

uint64_t recency_capacity(const Recency *r);

/* Blocks that can be added before one is evicted, and the stamp of that one; NaN where nothing is held. */
void recency_room(const Recency *r, Py_ssize_t *blocks, double *oldest);

/* Blocks with hashes. */
uint64_t recency_count(const Recency *r);

/* How many leading ones of a prompt's hashes are held. */
size_t recency_match(const Recency *r, const uint8_t *hashes, size_t n);

/* Evicts the oldest blocks until up to `most` with hashes are gone, and writes these to `out`. Returns their number. */
size_t recency_evict_oldest(Recency *r, uint64_t *out, size_t most);

/* All hashes, as bytes, in no order. */
PyObject *recency_hashes(const Recency *r);

#endif
