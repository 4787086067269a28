/* The list behind Recency: pieces of prompts in the order of their last use. recency_list.h has the rules and the layout. */
#include "recency_list.h"

uint64_t recency_key;

/* ---- Paged arrays ---- */

static int add_page(Recency *r, paged_array *a, size_t size) {
    if (a->n == a->room) {
        uint32_t room = a->room + a->room / 8 + 4;
        void *at = PyMem_RawRealloc(a->at, room * sizeof(*a->at));
        if (!at)
            return 0;
        r->bytes += malloc_bytes(room * sizeof(*a->at)) - malloc_bytes(a->room * sizeof(*a->at));
        a->at = at;
        a->room = room;
    }
    void *page = PyMem_RawMalloc(PAGE_ITEMS * size);
    if (!page)
        return 0;
    r->bytes += malloc_bytes(PAGE_ITEMS * size);
    a->at[a->n++] = page;
    return 1;
}

/* Frees the pages beyond this number of items, but for one. */
static void free_spare_pages(Recency *r, paged_array *a, uint32_t items, size_t size) {
    while (a->n > items / PAGE_ITEMS + 2) {
        PyMem_RawFree(a->at[--a->n]);
        r->bytes -= malloc_bytes(PAGE_ITEMS * size);
    }
    uint32_t room = a->n + 4;
    if (a->room > 2 * room) {
        void *at = PyMem_RawRealloc(a->at, room * sizeof(*a->at));
        if (at) {
            r->bytes -= malloc_bytes(a->room * sizeof(*a->at)) - malloc_bytes(room * sizeof(*a->at));
            a->at = at;
            a->room = room;
        }
    }
}

static void free_pages(paged_array *a) {
    for (uint32_t i = 0; i < a->n; i++)
        PyMem_RawFree(a->at[i]);
    PyMem_RawFree(a->at);
    *a = (paged_array){0};
}

/* ---- The table: the first entry of each chain. A chain has 0.6 to 1 entries on average. ---- */

/* Adds a chain, and moves the entries there that belong there from the chain whose turn it is. Without memory it stays
 * as it is, which only costs time. */
static void split_chain(Recency *r) {
    uint32_t high = r->low_mask + 1;
    if (r->n_chains == r->table.n * PAGE_ITEMS && !add_page(r, &r->table, sizeof(uint32_t)))
        return;
    uint32_t *ends[2] = {chain_at(r, r->n_chains - high), chain_at(r, r->n_chains)}, i = *ends[0];
    while (i != NONE) {
        entry *e = entry_at(r, i);
        uint32_t **end = &ends[(table_hash(e->hash) & high) != 0];
        **end = i;
        *end = &e->chain;
        i = e->chain;
    }
    *ends[0] = *ends[1] = NONE;
    if (++r->n_chains == 2 * high)
        r->low_mask = 2 * high - 1;
}

/* Removes the last chain, and appends it to the chain it was split from. */
static void join_chains(Recency *r) {
    uint32_t last = r->n_chains - 1;
    if (last == r->low_mask)
        r->low_mask >>= 1;
    uint32_t *end = chain_at(r, last & r->low_mask);
    while (*end != NONE)
        end = &entry_at(r, *end)->chain;
    *end = *chain_at(r, last);
    r->n_chains = last;
    free_spare_pages(r, &r->table, last, sizeof(uint32_t));
}

void add_to_table(Recency *r, uint32_t i, entry *e) {
    uint32_t *first = chain_of(r, table_hash(e->hash));
    e->chain = *first;
    *first = i;
    if (++r->n_pieces > r->n_chains)
        split_chain(r);
}

/* What points to this entry in its chain. */
static always_inline uint32_t *link_to(const Recency *r, uint32_t i, const entry *e) {
    uint32_t *link = chain_of(r, table_hash(e->hash));
    while (*link != i)
        link = &entry_at(r, *link)->chain;
    return link;
}

static always_inline void remove_from_table(Recency *r, uint32_t i, const entry *e) {
    *link_to(r, i, e) = e->chain;
    r->n_pieces--;
    while (5ULL * r->n_pieces < 3ULL * r->n_chains && r->n_chains > 1)
        join_chains(r);
}

/* ---- Slots ---- */

int reserve_slots(Recency *r, uint64_t n) {
    while ((uint64_t)r->entries.n * PAGE_ITEMS < r->n_slots - r->n_free + n)
        if (!add_page(r, &r->entries, sizeof(entry)))
            return 0;
    if (n && !r->n_chains) {
        if (!r->table.n && !add_page(r, &r->table, sizeof(uint32_t)))
            return 0;
        *chain_at(r, 0) = NONE;
        r->n_chains = 1;
    }
    return 1;
}

static always_inline void unlink_free_slot(Recency *r, const entry *e) {
    if (e->older != NONE)
        entry_at(r, e->older)->newer = e->newer;
    *(e->newer == NONE ? &r->free : &entry_at(r, e->newer)->older) = e->older;
    r->n_free--;
}

uint32_t take_slot(Recency *r) {
    if (!r->n_free)
        return r->n_slots++;
    uint32_t i = r->free;
    unlink_free_slot(r, entry_at(r, i));
    return i;
}

static always_inline void free_slot(Recency *r, uint32_t i, entry *e) {
    if (r->free != NONE)
        entry_at(r, r->free)->newer = i;
    e->chain = FREE;
    e->newer = NONE;
    e->older = r->free;
    r->free = i;
    r->n_free++;
}

/* Moves the last entries into free slots, until few are free. Each freed slot causes at most one move. */
static void fill_free_slots(Recency *r) {
    while (r->n_free > PAGE_ITEMS) {
        uint32_t last = --r->n_slots;
        const entry *from = entry_at(r, last);
        if (from->chain == FREE) {
            unlink_free_slot(r, from);
            continue;
        }
        uint32_t into = take_slot(r);
        *entry_at(r, into) = *from;
        set_older(r, from->newer, into);
        set_newer(r, from->older, into);
        if (from->chain != ANONYMOUS)
            *link_to(r, last, from) = into;
    }
}

void trim(Recency *r) {
    if (r->n_free > 2 * PAGE_ITEMS + r->n_slots / 64)
        fill_free_slots(r);
    free_spare_pages(r, &r->entries, r->n_slots, sizeof(entry));
}

/* ---- Pieces ---- */

uint64_t rest_bytes(uint32_t n) { return malloc_bytes((uint64_t)(n - 1) * sizeof(uint64_t)); }

uint64_t *allocate_rest(uint32_t n) { return n > 1 ? PyMem_RawMalloc((uint64_t)(n - 1) * sizeof(uint64_t)) : NULL; }

void remove_piece(Recency *r, uint32_t i, entry *e) {
    remove_from_table(r, i, e);
    unlink_entry(r, e);
    r->blocks -= e->n;
    r->bytes -= rest_bytes(e->n);
    PyMem_RawFree(e->rest);
    free_slot(r, i, e);
}

void truncate_piece(Recency *r, entry *e, uint32_t n) {
    r->blocks -= e->n - n;
    r->bytes -= rest_bytes(e->n) - rest_bytes(n);
    e->n = n;
    if (n > 1) {
        void *rest = PyMem_RawRealloc(e->rest, (uint64_t)(n - 1) * sizeof(uint64_t));
        if (rest)
            e->rest = rest;
    } else {
        PyMem_RawFree(e->rest);
        e->rest = NULL;
    }
}

void split_piece(Recency *r, uint32_t i, uint32_t n, uint64_t *rest) {
    entry *e = entry_at(r, i);
    uint32_t j = take_slot(r);
    entry *f = entry_at(r, j);
    *f = (entry){.hash = e->rest[n - 1], .rest = rest, .stamp = e->stamp, .n = e->n - n, .newer = i, .older = e->older};
    if (f->n > 1)
        memcpy(rest, e->rest + n, (f->n - 1) * sizeof(uint64_t));
    set_newer(r, e->older, j);
    e->older = j;
    r->blocks += f->n;
    r->bytes += rest_bytes(f->n);
    add_to_table(r, j, f);
    truncate_piece(r, e, n);
}

uint8_t *evict_to(Recency *r, uint64_t capacity, uint8_t *out) {
    while (r->blocks > capacity) {
        uint32_t i = r->oldest;
        entry *e = entry_at(r, i);
        uint64_t excess = r->blocks - capacity;
        uint32_t left = e->n > excess ? e->n - (uint32_t)excess : 0;
        if (e->chain == ANONYMOUS) {
            r->blocks -= e->n - left;
            r->anonymous -= e->n - left;
            e->n = left;
            if (!left) {
                unlink_entry(r, e);
                free_slot(r, i, e);
            }
            continue;
        }
        for (uint32_t k = e->n; k-- > left; out += 8)
            memcpy(out, k ? &e->rest[k - 1] : &e->hash, 8);
        if (left)
            truncate_piece(r, e, left);
        else
            remove_piece(r, i, e);
    }
    trim(r);
    return out;
}

uint64_t most_evicted(const Recency *r, uint64_t more, uint64_t capacity) {
    uint64_t excess = r->blocks + more > capacity ? r->blocks + more - capacity : 0;
    return !r->n_pieces ? 0 : excess < r->blocks ? excess : r->blocks;
}

void clear_list(Recency *r) {
    for (uint32_t i = 0; i < r->n_slots; i++)
        if (entry_at(r, i)->chain != FREE && entry_at(r, i)->chain != ANONYMOUS)
            PyMem_RawFree(entry_at(r, i)->rest);
    free_pages(&r->entries);
    free_pages(&r->table);
    r->newest = r->oldest = r->free = NONE;
    r->n_slots = r->n_free = r->n_pieces = r->n_chains = r->low_mask = 0;
    r->blocks = r->anonymous = 0;
    r->has_gaps = 0;
    r->bytes = malloc_bytes(sizeof(Recency));
}
