/* The index's tables: allocation, and how pages are split and merged. index_table.h says what each function does. */
#include "index_table.h"

/* All zero: n, room, and the tags that find() reads anyway. Nothing writes to a page without room. */
static const uint16_t no_entries[(sizeof(page) + TAGS_AT_ONCE) / sizeof(uint16_t)];
page *const empty_page = (page *)no_entries;

/* ---- Memory ---- */

static always_inline uint64_t *account(BlockIndex *ix, int of_sets) { return of_sets ? &ix->set_bytes : &ix->table_bytes; }

static always_inline int is_within_budget(const BlockIndex *ix, uint64_t old_bytes, uint64_t new_bytes, int of_sets) {
    return of_sets || new_bytes <= old_bytes ||
           charged_bytes(ix) + malloc_bytes(new_bytes) - malloc_bytes(old_bytes) <= ix->budget_bytes;
}

void *resize_allocation(BlockIndex *ix, void *at, uint64_t old_bytes, uint64_t new_bytes, int of_sets) {
    void *moved = is_within_budget(ix, old_bytes, new_bytes, of_sets) ? PyMem_RawRealloc(at, new_bytes) : NULL;
    if (moved)
        *account(ix, of_sets) += malloc_bytes(new_bytes) - malloc_bytes(old_bytes);
    return moved;
}

void free_allocation(BlockIndex *ix, void *at, uint64_t bytes, int of_sets) {
    PyMem_RawFree(at);
    *account(ix, of_sets) -= malloc_bytes(bytes);
}

static always_inline int resize_page_of(BlockIndex *ix, const table *t, page **at, uint32_t room, size_t size) {
    page *old = *at, *new = empty_page;
    int of_sets = (int)t->of_sets;
    if (room) {
        uint64_t bytes = page_bytes(room, size), old_bytes = old->room ? page_bytes(old->room, size) : 0;
        new = is_within_budget(ix, old_bytes, bytes, of_sets) ? PyMem_RawMalloc(bytes) : NULL;
        if (!new)
            return 0;
        *account(ix, of_sets) += malloc_bytes(bytes);
        new->n = old->n;
        new->room = (uint16_t)room;
        memcpy(new->tags, old->tags, old->n);
        memcpy(entry_at(new, 0, size), entry_at(old, 0, size), old->n * size);
    }
    if (old != empty_page)
        free_allocation(ix, old, page_bytes(old->room, size), of_sets);
    *at = new;
    return 1;
}

/* The functions below are compiled once for each entry size, since a constant size makes copying an entry cheap. */

int resize_page(BlockIndex *ix, const table *t, page **at, uint32_t room, size_t size) {
    return size == SLOT ? resize_page_of(ix, t, at, room, SLOT) : resize_page_of(ix, t, at, room, PAIR);
}

/* ---- Growing and shrinking ---- */

int add_page(BlockIndex *ix, table *t) {
    if (t->n_pages == t->page_room) {
        uint32_t room = t->page_room < 4 ? t->page_room * 2 + (t->page_room == 0) : t->page_room + t->page_room / 8 + 4;
        void *pages =
            resize_allocation(ix, t->pages, t->page_room * sizeof(page *), room * sizeof(page *), (int)t->of_sets);
        if (!pages)
            return 0;
        t->pages = pages;
        t->page_room = room;
    }
    t->pages[t->n_pages++] = empty_page;
    return 1;
}

static always_inline void split_page_of(BlockIndex *ix, table *t, size_t size) {
    uint32_t high = t->low_mask + 1, from = t->n_pages - high, moving = 0;
    if (!add_page(ix, t))
        return;
    page **old = &t->pages[from], **new = &t->pages[t->n_pages - 1];
    for (uint32_t i = 0; i < (*old)->n; i++)
        moving += (read64(entry_at(*old, i, size)) & high) != 0;
    if (moving && !resize_page_of(ix, t, new, room_for(moving), size)) {
        t->n_pages--;
        return;
    }
    for (uint32_t i = 0; i < (*old)->n;) {
        const uint8_t *e = entry_at(*old, i, size);
        if (read64(e) & high) {
            append_entry(*new, e, size);
            cut_entry(*old, i, size);
        } else {
            i++;
        }
    }
    if (moving)
        resize_page_of(ix, t, old, (*old)->n ? room_for((*old)->n) : 0, size);
    if (t->n_pages == 2 * high)
        t->low_mask = 2 * high - 1;
}

static always_inline void merge_page_of(BlockIndex *ix, table *t, size_t size) {
    uint32_t last = t->n_pages - 1, low = t->low_mask;
    if (last == low)
        low >>= 1;
    page **from = &t->pages[last], **into = &t->pages[last & low];
    uint32_t n = (uint32_t)(*from)->n + (*into)->n;
    if (n > MAX_PAGE_ENTRIES || (n > (*into)->room && !resize_page_of(ix, t, into, room_for(n), size)))
        return;
    for (uint32_t i = 0; i < (*from)->n; i++)
        append_entry(*into, entry_at(*from, i, size), size);
    resize_page_of(ix, t, from, 0, size);
    t->n_pages = last;
    t->low_mask = low;
    if (t->page_room > 2 * last + 4) {
        void *pages =
            resize_allocation(ix, t->pages, t->page_room * sizeof(page *), (last + 1) * sizeof(page *), (int)t->of_sets);
        if (pages) {
            t->pages = pages;
            t->page_room = last + 1;
        }
    }
}

void split_page(BlockIndex *ix, table *t, size_t size) {
    if (size == SLOT)
        split_page_of(ix, t, SLOT);
    else
        split_page_of(ix, t, PAIR);
}

void merge_page(BlockIndex *ix, table *t, size_t size) {
    if (size == SLOT)
        merge_page_of(ix, t, SLOT);
    else
        merge_page_of(ix, t, PAIR);
}

void free_table(BlockIndex *ix, table *t, size_t size) {
    for (uint32_t i = 0; i < t->n_pages; i++)
        resize_page(ix, t, &t->pages[i], 0, size);
    if (t->pages)
        free_allocation(ix, t->pages, t->page_room * sizeof(page *), (int)t->of_sets);
    *t = (table){.of_sets = t->of_sets};
}
