/* Block hashes: 64 bits that chain over a block's tokens, the blocks before it, and the namespace. No two prompts share a
 * block hash unless their beginnings are equal, token by token (but for collisions of 64 bits). */
#ifndef WARMROUTE_BLOCK_HASH_H
#define WARMROUTE_BLOCK_HASH_H

#include "kernel.h"

static const uint64_t K[8] __attribute__((unused)) = {
    0xa0761d6478bd642fULL, 0xe7037ed1a0b428dbULL, 0x8ebc6af09c88c6e3ULL, 0x589965cc75374cc3ULL,
    0x1d8e4e27c47d124fULL, 0xeb44accab455d165ULL, 0x9e3779b97f4a7c15ULL, 0xd6e8feb86659fd93ULL};

/* The 128-bit product folded to 64 bits, combined with both factors, so that a factor of zero loses nothing. */
static always_inline uint64_t fold_product(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return a ^ b ^ (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Distributes hashes evenly over tables. One to one: it adds no collision, and unmix undoes it. */
static always_inline uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= K[6];
    h ^= h >> 32;
    h *= K[7];
    return h ^ h >> 32;
}

static always_inline uint64_t unmix(uint64_t h) {
    const uint64_t inverse_k6 = 0xf1de83e19937733dULL, inverse_k7 = 0xcfee444d8b59a89bULL; /* modulo 2^64 */
    h ^= h >> 32;
    h *= inverse_k7;
    h ^= h >> 32;
    h *= inverse_k6;
    return h ^ h >> 32;
}

/* ---- Arguments. Functions that return int return -1 with an exception where an argument is wrong. ---- */

#define FEW_VALUES 256

/* A copy of 64-bit values that Python gave, which the caller may change. close_values() ends it. */
typedef struct {
    uint64_t *at;
    size_t n;
    uint64_t few[FEW_VALUES];
} values;

int make_values(values *v, size_t n);
void close_values(values *v);

/* Token ids as 32-bit integers: the caller's buffer where it has such, else a copy. close_tokens() ends it. */
typedef struct {
    const uint8_t *at;
    size_t n;
    Py_buffer view;
    uint32_t *copy;
    int has_view;
} tokens;

int open_tokens(PyObject *from, tokens *out);
void close_tokens(tokens *t);

/* A signed or unsigned integer, as 64 bits. */
int read_int64(PyObject *item, uint64_t *out, const char *what);

/* An engine's hash of a block: an integer, or bytes. */
int read_engine_hash(PyObject *item, uint64_t *out);

/* Hashes: a buffer of 64-bit integers, or a list or tuple of integers (and bytes, for an engine's hashes). */
int open_hashes(PyObject *from, values *out);

/* A contiguous buffer of integers of `size` (or `other_size`) bytes, or of bytes that hold integers of `size` bytes.
 * Returns their number, or -1 with an exception. */
Py_ssize_t open_integers(PyObject *from, Py_buffer *view, Py_ssize_t size, Py_ssize_t other_size, const char *what);

/* Whether `extra` is NULL, or a list or tuple with bytes or None for each of n blocks; -1 with an exception where not. */
int check_extra(PyObject *extra, size_t n);

/* Writes the hashes of n blocks to `out`. `parent`: the hash of the block before the first, or the namespace. `extra`: what
 * else distinguishes a block (LoRA, salt, images), as check_extra() accepts it. */
void hash_blocks(uint64_t namespace, uint64_t parent, const uint8_t *token_ids, size_t block_bytes, PyObject *extra, size_t n,
                 uint8_t *out);

#endif
