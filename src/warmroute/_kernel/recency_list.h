/* The list behind Recency: pieces of prompts in the order of their last use.
 *
 * A block's hash chains over all that is before it: no two prompts share a block unless they share their beginning. So
 * blocks that follow one another and were last used together are kept together, as a piece. A prompt is a few pieces, and
 * they are compared with other prompts' pieces by memcmp, not block by block.
 *
 * The rules:
 * - Beyond the capacity the oldest block is evicted; of a piece, its last block first.
 * - Blocks with unknown hashes (of generated tokens) are anonymous. They take up capacity, and are evicted in order.
 * - Memory that an operation needs is reserved before the operation changes anything.
 *
 * The layout: pieces are entries of 40 bytes in a paged array, linked by number both in the order of use and in the chains
 * of a hash table, where a piece is found by its first hash. Its other hashes are in an allocation of their own. The table
 * grows by linear hashing: one chain is split (or two are joined) at a time, so there is no rehash. Anonymous blocks that
 * came together are one entry. Free slots are used again; where there are many, the last entries move into them, and pages
 * are freed.
 */
#ifndef WARMROUTE_RECENCY_LIST_H
#define WARMROUTE_RECENCY_LIST_H

#include "recency.h"

#define PAGE_ITEMS 256

/* Numbers that are no entry's. */
#define NONE UINT32_MAX
#define FREE (UINT32_MAX - 1)      /* as an entry's chain: the slot is free */
#define ANONYMOUS (UINT32_MAX - 2) /* as an entry's chain: blocks without hashes */

#define IN_PROMPT 0x80000000u /* flag in an entry's n: the prompt that is being touched has this piece */

typedef struct {
    uint64_t hash;  /* of the first block */
    uint64_t *rest; /* of the blocks after it */
    double stamp;   /* of its last use */
    uint32_t n;     /* blocks */
    uint32_t chain; /* the next entry of its chain in the table */
    uint32_t newer, older; /* by last use; of a free slot, its neighbours in the list of free slots */
} entry;

/* An array in pages of equal size, so that growing copies nothing. */
typedef struct {
    uint8_t **at;
    uint32_t n, room;
} paged_array;

struct Recency {
    PyObject_HEAD
    uint64_t capacity, blocks, bytes;
    uint64_t anonymous; /* of the blocks */
    paged_array entries, table;
    uint32_t newest, oldest;
    uint32_t n_slots, n_free, free; /* slots used so far; the free ones among them */
    uint32_t n_pieces;
    uint32_t n_chains, low_mask; /* 2^k - 1 with 2^k <= n_chains < 2^(k+1) */
    int has_gaps;                /* some blocks were dropped: a block may be held where one before it is not */
    int is_attached;             /* it is the list of a holder */
};

extern uint64_t recency_key; /* random, so that nobody can choose prompts that all fall into one chain */

/* ---- Access ---- */

static always_inline entry *entry_at(const Recency *r, uint32_t i) {
    return (entry *)(void *)r->entries.at[i / PAGE_ITEMS] + i % PAGE_ITEMS;
}

static always_inline uint32_t *chain_at(const Recency *r, uint32_t i) {
    return (uint32_t *)(void *)r->table.at[i / PAGE_ITEMS] + i % PAGE_ITEMS;
}

static always_inline uint64_t table_hash(uint64_t h) {
    h ^= recency_key;
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15ULL;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ULL;
    return h ^ h >> 32;
}

static always_inline uint32_t *chain_of(const Recency *r, uint64_t hash_in_table) {
    uint32_t i = (uint32_t)hash_in_table & (2 * r->low_mask + 1);
    return chain_at(r, i < r->n_chains ? i : i & r->low_mask);
}

/* The piece that begins with this hash, or NONE. */
static always_inline uint32_t find_piece(const Recency *r, uint64_t hash) {
    uint32_t i = r->n_chains ? *chain_of(r, table_hash(hash)) : NONE;
    while (i != NONE && entry_at(r, i)->hash != hash)
        i = entry_at(r, i)->chain;
    return i;
}

static always_inline uint64_t hash_at(const uint8_t *hashes, size_t i) { return read64(hashes + 8 * i); }

/* How many of these hashes are a piece's, given that it begins with the first of them. */
static inline uint32_t common_prefix(const entry *e, const uint8_t *hashes, size_t n) {
    uint32_t most = n < e->n ? (uint32_t)n : e->n, same = 1;
    if (most > 1 && !memcmp(e->rest, hashes + 8, (most - 1) * sizeof(uint64_t)))
        return most;
    while (same < most && e->rest[same - 1] == hash_at(hashes, same))
        same++;
    return same;
}

/* ---- The order of use ---- */

static always_inline void set_older(Recency *r, uint32_t i, uint32_t older) {
    *(i == NONE ? &r->newest : &entry_at(r, i)->older) = older;
}

static always_inline void set_newer(Recency *r, uint32_t i, uint32_t newer) {
    *(i == NONE ? &r->oldest : &entry_at(r, i)->newer) = newer;
}

static always_inline void unlink_entry(Recency *r, const entry *e) {
    set_older(r, e->newer, e->older);
    set_newer(r, e->older, e->newer);
}

static always_inline void link_newest(Recency *r, uint32_t i, entry *e) {
    e->newer = NONE;
    e->older = r->newest;
    set_newer(r, r->newest, i);
    r->newest = i;
}

/* ---- Changes; recency_list.c ---- */

/* Makes sure that `n` slots and a table exist. Returns 0 without memory. */
int reserve_slots(Recency *r, uint64_t n);

/* A slot, out of those that were reserved. */
uint32_t take_slot(Recency *r);

/* Room for the hashes after the first of n blocks. NULL is right for one block, and an error for more. */
uint64_t *allocate_rest(uint32_t n);
uint64_t rest_bytes(uint32_t n);

/* Puts the entry of a new piece into the table. */
void add_to_table(Recency *r, uint32_t i, entry *e);

void remove_piece(Recency *r, uint32_t i, entry *e);

/* Forgets all but the first n blocks of a piece; at least one. */
void truncate_piece(Recency *r, entry *e, uint32_t n);

/* Makes a piece of its own of what comes after the first n blocks, next to them in the order of use. It takes a reserved
 * slot and `rest`, which is room for its hashes after the first. */
void split_piece(Recency *r, uint32_t i, uint32_t n, uint64_t *rest);

/* Evicts the oldest blocks until `capacity` blocks are left, and writes their hashes to `out`. Returns the end of these. */
uint8_t *evict_to(Recency *r, uint64_t capacity, uint8_t *out);

/* The most hashes that are evicted where `more` blocks come in. */
uint64_t most_evicted(const Recency *r, uint64_t more, uint64_t capacity);

/* Frees memory that is no longer needed. */
void trim(Recency *r);

/* Forgets everything, and frees the memory. */
void clear_list(Recency *r);

#endif
