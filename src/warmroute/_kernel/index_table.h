/* The index's tables: linear hashing over small pages, within the budget.
 *
 * An entry begins with its 64-bit key. `size` is the entry's size, SLOT or PAIR, and always a constant, so that the compiler
 * makes a version for each. A page grows by a few entries, and the table by one page at a time: there is little unused
 * memory, and no rehash.
 */
#ifndef WARMROUTE_INDEX_TABLE_H
#define WARMROUTE_INDEX_TABLE_H

#include "index.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SLOT sizeof(slot)
#define PAIR sizeof(pair)
#define PAGE_ENTRIES 32 /* on average, before the table gets another page */
#define MAX_PAGE_ENTRIES 65520 /* with room_for() it still fits 16 bits */
#define TAGS_AT_ONCE 48 /* even the smallest page has this many bytes after its head */
#define AHEAD 32        /* keys that are looked up at once, so that their cache misses overlap */

/* Stands for a page without entries. */
extern page *const empty_page;

/* ---- Memory ---- */

/* Bytes that can be needed for what is held. A set is charged for each block that has it: removes may make the blocks' sets
 * different, and a remove must not fail. */
static always_inline uint64_t charged_bytes(const BlockIndex *ix) {
    return ix->table_bytes + (ix->set_bytes > ix->set_charge ? ix->set_bytes : ix->set_charge);
}

/* Resizes an allocation and adjusts the bytes in use; NULL where the budget or the memory does not allow it. Memory of sets
 * is covered by their charge. */
void *resize_allocation(BlockIndex *ix, void *at, uint64_t old_bytes, uint64_t new_bytes, int of_sets);

void free_allocation(BlockIndex *ix, void *at, uint64_t bytes, int of_sets);

/* Gives a page this room; 0 where the budget or the memory does not allow it. */
int resize_page(BlockIndex *ix, const table *t, page **at, uint32_t room, size_t size);

/* Adds an empty page, without moving entries; 0 as above. */
int add_page(BlockIndex *ix, table *t);

/* Adds a page and moves half of the entries there of the page whose turn it is. A failure only costs speed. */
void split_page(BlockIndex *ix, table *t, size_t size);

/* Removes the last page, and moves its entries to the page it was split from. */
void merge_page(BlockIndex *ix, table *t, size_t size);

void free_table(BlockIndex *ix, table *t, size_t size);

/* ---- Pages ---- */

static always_inline uint8_t *entry_at(const page *p, uint32_t i, size_t size) {
    return (uint8_t *)p + sizeof(page) + p->room + i * size;
}

static always_inline uint64_t page_bytes(uint32_t room, size_t size) { return sizeof(page) + room * (1 + size); }

/* Room for n entries and a few more. */
static always_inline uint32_t room_for(uint32_t n) { return n < 8 ? (n + 4) & ~3u : (n + 8) & ~7u; }

static always_inline uint8_t tag_of(uint64_t key) { return (uint8_t)(key >> 56); }

static always_inline void append_entry(page *p, const void *e, size_t size) {
    p->tags[p->n] = tag_of(read64(e));
    memcpy(entry_at(p, p->n++, size), e, size);
}

/* The last entry takes the place of the removed one. */
static always_inline void cut_entry(page *p, uint32_t at, size_t size) {
    uint32_t last = --p->n;
    if (at != last) {
        p->tags[at] = p->tags[last];
        memcpy(entry_at(p, at, size), entry_at(p, last, size), size);
    }
}

/* A bit for each of the next TAGS_AT_ONCE tags that is equal to this one. */
static always_inline uint64_t equal_tags(const uint8_t *tags, uint8_t tag) {
    uint64_t bits = 0;
#ifdef __SSE2__
    __m128i same = _mm_set1_epi8((char)tag);
    for (int i = 0; i < TAGS_AT_ONCE; i += 16)
        bits |= (uint64_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const void *)(tags + i)), same)) << i;
#else
    for (int i = 0; i < TAGS_AT_ONCE; i++)
        bits |= (uint64_t)(tags[i] == tag) << i;
#endif
    return bits;
}

/* ---- Tables ---- */

/* Where an entry is, or would be inserted. `in` is NULL where the table has no page. */
typedef struct {
    page **in;
    uint32_t at;
} position;

static always_inline page **page_of(const table *t, uint64_t key) {
    uint32_t high = t->low_mask + 1, i = (uint32_t)key & (2 * high - 1);
    /* Without a branch, which the processor could not predict. */
    return &t->pages[i - (high & -(uint32_t)(i >= t->n_pages))];
}

/* The entry with this key, or NULL. */
static always_inline void *find(const table *t, uint64_t key, size_t size, position *where) {
    if (!t->n_pages) {
        where->in = NULL;
        return NULL;
    }
    where->in = page_of(t, key);
    const page *p = *where->in;
    uint32_t first = 0, n = p->n;
    do {
        uint32_t left = n - first;
        uint64_t bits = equal_tags(p->tags + first, tag_of(key));
        if (left < TAGS_AT_ONCE)
            bits &= (1ULL << left) - 1;
        for (; bits; bits &= bits - 1) {
            uint32_t i = first + (uint32_t)__builtin_ctzll(bits);
            uint8_t *e = entry_at(p, i, size);
            if (read64(e) == key) {
                where->at = i;
                return e;
            }
        }
        first += TAGS_AT_ONCE;
    } while (__builtin_expect(first < n, 0));
    return NULL;
}

/* The parts of hold_block() and release_block() that follow once the block is found. hold_slot() returns -1 where the holder has
 * the block in this tier already. */
int hold_slot(BlockIndex *ix, slot *known, uint32_t number, uint32_t bit);
int release_slot(BlockIndex *ix, slot *known, position where, uint32_t number, uint32_t tiers);

static always_inline slot *find_slot(const table *t, uint64_t key) {
    position where;
    return find(t, key, SLOT, &where);
}

/* Inserts an entry where find() did not find it; 0 where the budget does not allow it. */
static always_inline int insert(BlockIndex *ix, table *t, position where, const void *e, size_t size) {
    page **in = where.in;
    if (!in) {
        if (!add_page(ix, t))
            return 0;
        in = t->pages;
    }
    if ((*in)->n == (*in)->room && ((*in)->n >= MAX_PAGE_ENTRIES || !resize_page(ix, t, in, room_for((*in)->n), size)))
        return 0;
    append_entry(*in, e, size);
    if (++t->count > (uint64_t)t->n_pages * PAGE_ENTRIES)
        split_page(ix, t, size);
    return 1;
}

/* Removes the entry that find() found. */
static always_inline void erase(BlockIndex *ix, table *t, position where, size_t size) {
    page **in = where.in;
    cut_entry(*in, where.at, size);
    uint32_t n = (*in)->n, unused = (*in)->room - n;
    if (unused > 12 && unused > n / 4) /* well beyond room_for(), or a page would be resized again and again */
        resize_page(ix, t, in, n ? room_for(n) : 0, size);
    if (--t->count < (uint64_t)t->n_pages * (PAGE_ENTRIES / 4) && t->n_pages > 1)
        merge_page(ix, t, size);
}

/* A smaller index is in the processor's caches anyway. */
#define PREFETCH_BYTES (4 << 20)

/* Called for many keys before they are looked up: prefetches the pointers to all pages first, then most of each page. */
static always_inline void prefetch_keys(const BlockIndex *ix, const table *t, const uint64_t *keys, size_t n) {
    if (ix->table_bytes < PREFETCH_BYTES || !t->n_pages)
        return;
    for (size_t i = 0; i < n; i++)
        prefetch(page_of(t, keys[i]));
    for (size_t i = 0; i < n; i++)
        for (size_t line = 0; line < 256; line += 64)
            prefetch((const uint8_t *)*page_of(t, keys[i]) + line);
}

#endif
