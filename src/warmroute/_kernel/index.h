/* The block index: which holder has which block, within a budget of bytes. A holder is one cache: a node's, as one
 * data-parallel rank of one incarnation has it.
 *
 * The rules:
 * - A pair is one engine hash at one holder. It counts stores and removes by tier. While a count is above zero, the holder
 *   has the block in that tier. The index claims nothing that no store said, or that a remove took back.
 * - The memory that the index may need for what it holds stays within the budget. Every insert checks that beforehand.
 * - No call takes long: tables grow page by page, and the pairs of a cleared holder are removed a few at a time.
 *
 * The layout:
 * - A table (index_table.h) is an array of small pages, found by linear hashing on the key's low bits. Within a page, the
 *   key's highest byte finds the entry.
 * - `blocks` maps a block to its holders in 12 bytes (index_holders.h): one holder with its tiers, two holders that have it
 *   on the GPU, or the number of a set. Equal sets are stored once. So a prefix that 64 holders have costs a match one
 *   comparison a block.
 * - Each holder has a table of pairs, 20 bytes each: engine hash, block, counts by tier, age.
 * - An LRU holder (index_lru.c) has no pairs. Its blocks are those of a Recency, all on the GPU, and the Recency says which
 *   of them are evicted first.
 *
 * index_store.c changes what holders have, index_match.c reads it, index.c is the Python type.
 * tests/index/reference_index.py is the same in plain Python, without the budget.
 */
#ifndef WARMROUTE_INDEX_H
#define WARMROUTE_INDEX_H

#include "block_hash.h"
#include "recency.h"

#define MAX_HOLDERS 32767
#define NONE UINT32_MAX

/* ---- Structures ---- */

/* An entry of `blocks`, `set_numbers` and `aliases`. */
typedef struct __attribute__((packed, aligned(4))) {
    uint64_t key;
    uint32_t value;
} slot;

/* An entry of a holder's table. */
typedef struct __attribute__((packed, aligned(4))) {
    uint64_t key;   /* of the engine's hash */
    uint64_t block; /* key in `blocks` */
    uint32_t counts;
} pair;

/* Entries in no order, after a tag for each: the key's highest byte. */
typedef struct {
    uint16_t n, room; /* room is a multiple of 4 */
    uint8_t tags[];
} page;

typedef struct {
    page **pages;
    uint32_t n_pages, page_room;
    uint32_t low_mask; /* 2^k - 1 with 2^k <= n_pages < 2^(k+1) */
    uint32_t of_sets;  /* its memory is part of the sets' */
    uint64_t count;
} table;

/* A set of holders, shared by all blocks that have just these. */
typedef struct {
    uint32_t refs, n;
    uint32_t members[]; /* holder << 4 | tiers, rising */
} holder_set;

enum { HOLDER_FREE, HOLDER_LIVE, HOLDER_RETIRED };

/* A holder as the tables know it, by number. Python knows it by its id: clearing a holder retires its number, whose pairs
 * are then removed bit by bit, and gives the id a fresh one. */
typedef struct {
    table pairs;
    Recency *lru;  /* of an LRU holder; else NULL */
    uint32_t id;
    uint32_t next; /* the next free, or the next retired number */
    uint8_t state;
    uint8_t lost_pairs; /* whether the budget has cost it a pair */
} holder;

typedef struct {
    uint32_t number; /* NONE where the id is unused */
    uint32_t next;   /* the next unused id */
} holder_id;

/* The last change of a block's holders. */
typedef struct {
    uint32_t from, to, holder, tiers;
    int adds;
} transition;

typedef struct {
    PyObject_HEAD
    uint64_t budget_bytes, soft_bytes; /* above soft_bytes, stores evict */
    uint64_t secret;                   /* mixed into every key, so that nobody can choose keys that fall into one page */
    uint64_t random;
    uint64_t table_bytes, set_bytes, set_charge;
    table blocks, set_numbers, aliases;
    holder_set **sets;
    uint32_t n_sets, set_room, free_set, live_sets;
    transition last_transition;
    uint32_t *scratch;
    uint32_t scratch_room;
    holder *holders;
    uint32_t n_holders, holder_room, free_holder, first_retired;
    holder_id *ids;
    uint32_t n_ids, id_room, free_id;
    uint64_t pairs, retired_pairs;
    uint32_t epoch, largest, evictions_until_search;
    uint64_t stores_until_epoch;
    uint64_t evicted, refused, unknown_removes, unresolved, saturated, conflicts;
} BlockIndex;

extern PyTypeObject BlockIndexType;

/* Keys. A pair's key is made of the engine's hash, or of our own hash where the engine's is not known. */
static always_inline uint64_t block_key(const BlockIndex *ix, uint64_t hash) { return mix(hash ^ ix->secret); }
static always_inline uint64_t engine_key(const BlockIndex *ix, uint64_t hash) { return mix(hash ^ ix->secret ^ K[1]); }
static always_inline uint64_t own_key(const BlockIndex *ix, uint64_t hash) { return mix(hash ^ ix->secret ^ K[2]); }
static always_inline uint64_t hash_of_block(const BlockIndex *ix, uint64_t block) { return unmix(block) ^ ix->secret; }

/* Pairs of a holder, or blocks of an LRU holder. */
static always_inline uint64_t count_of(const holder *h) { return h->lru ? recency_count(h->lru) : h->pairs.count; }

/* ---- index_store.c. Holders are given by number. ---- */

/* Gives a holder a block in a tier. Returns 0 where the budget does not allow it. */
int hold_block(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tier);

/* Takes a block from a holder in these tiers. Returns whether the block's holders changed. */
int release_block(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tiers);

/* Stores n pairs. Returns how many the budget allowed. */
uint64_t store_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, const uint64_t *blocks, size_t n, uint32_t tier);

/* Stores pairs again in another tier, by their keys. Returns how many of them were known and stored. */
uint64_t store_known_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, size_t n, uint32_t tier);

/* Takes back one store of each pair. Returns how many of them were known. */
uint64_t remove_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, size_t n, uint32_t tier);

/* The block of a pair, by its key, or NULL. */
pair *find_pair(BlockIndex *ix, uint32_t number, uint64_t key);

/* Stores of the holder that are in a pair, in a tier. */
uint32_t stores_of(const pair *p, uint32_t tier);

/* Makes a pair the youngest. */
void refresh_pair(const BlockIndex *ix, pair *p);

/* Evicts one old pair of the holder that has most. Returns 0 where nothing is held. */
int evict_one(BlockIndex *ix);

/* Removes up to this number of retired pairs. */
void sweep(BlockIndex *ix, uint64_t pairs);

/* ---- index_match.c ---- */

/* For one holder, how many leading blocks it has without a gap in each tier and the nearer ones. */
typedef struct {
    uint32_t holder; /* its id */
    uint32_t depth[TIERS];
} match_row;

/* The rows as BlockIndex.match returns them; NULL with an exception without memory. */
PyObject *index_match_rows(BlockIndex *ix, const uint8_t *hashes, size_t n);

/* Calls `each` with the row of every holder of the first block. Returns -1 with an exception, as soon as `each` does. `each`
 * may change the index. */
int index_match(BlockIndex *ix, const uint8_t *hashes, size_t n, int (*each)(const match_row *, void *), void *with);

/* ---- index_lru.c ---- */

/* What a touch of an LRU holder is asked for, and what it returns. */
typedef struct {
    Py_ssize_t depth; /* as for earlier_uses */
    double latest;
    PyObject *new_hashes, *uses; /* new references; `uses` may be NULL */
    Py_ssize_t free_blocks;
    double oldest_s; /* NaN where nothing is held */
} lru_touch;

/* BlockIndex.touch: `args` are (holder, hashes, stamp). Returns -1 with an exception. */
int index_touch(BlockIndex *ix, PyObject *const *args, lru_touch *t);

/* The same for anonymous blocks: `args` are (holder, count, stamp). Fills in the room only. */
int index_add_anonymous(BlockIndex *ix, PyObject *const *args, lru_touch *t);

/* Releases blocks of an LRU holder. Returns how many of them it had. */
uint64_t release_hashes(BlockIndex *ix, uint32_t number, const uint8_t *hashes, size_t n);

/* Evicts up to this number of an LRU holder's blocks, the oldest first. Returns how many there were. */
size_t evict_from_lru(BlockIndex *ix, uint32_t number, size_t most);

/* ---- index.c ---- */

/* The number of an open holder; -1 with an exception where there is none. */
int read_holder(const BlockIndex *ix, PyObject *from, uint32_t *number);

#endif
