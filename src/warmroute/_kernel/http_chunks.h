/* The chunked transfer coding, for parts that pass chunks on; http_chunks.c. */
#ifndef WARMROUTE_HTTP_CHUNKS_H
#define WARMROUTE_HTTP_CHUNKS_H

#include "kernel.h"

extern PyTypeObject ChunkReaderType;

/* Follows bytes that are neither malformed nor the end of the message, and returns 1. Otherwise returns 0, and the reader stays
 * as it was: its `feed` says why. */
int chunks_continue(PyObject *reader, const char *data, size_t bytes);

#endif
