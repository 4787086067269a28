/* Digests of 128 bits, with keys that are drawn when the process starts. digest.c says more. */
#ifndef WARMROUTE_DIGEST_H
#define WARMROUTE_DIGEST_H

#include "kernel.h"

typedef struct {
    uint64_t low, high;
} digest;

_Static_assert(sizeof(digest) == DIGEST_BYTES, "a digest is copied as it lies in memory");

/* The digest of what `before` is the digest of, and these bytes. */
digest extend_digest(digest before, const uint8_t *p, size_t len);

#endif
