/* Checks a recency list: the order of use, the table, the free slots, and the sums. */
#include "checks.h"
#include "recency_list.h"

static uint64_t check_order(const Recency *r, uint64_t *anonymous, uint64_t *rest, uint32_t *pieces) {
    uint64_t blocks = 0;
    uint32_t newer = NONE;
    *anonymous = *rest = *pieces = 0;
    for (uint32_t i = r->newest; i != NONE; i = entry_at(r, i)->older) {
        const entry *e = entry_at(r, i);
        CHECK(i < r->n_slots && e->newer == newer && e->n && !(e->n & IN_PROMPT) && e->chain != FREE);
        newer = i;
        blocks += e->n;
        if (e->chain == ANONYMOUS) {
            *anonymous += e->n;
            continue;
        }
        CHECK(!e->rest == (e->n == 1));
        ++*pieces;
        *rest += rest_bytes(e->n);
    }
    CHECK(r->oldest == newer);
    return blocks;
}

static void check_table(const Recency *r) {
    uint32_t found = 0;
    CHECK(r->n_chains ? r->low_mask < r->n_chains && r->n_chains <= 2 * (r->low_mask + 1) : !r->n_pieces);
    for (uint32_t c = 0; c < r->n_chains; c++)
        for (uint32_t i = *chain_at(r, c); i != NONE; i = entry_at(r, i)->chain) {
            CHECK(i < r->n_slots && chain_of(r, table_hash(entry_at(r, i)->hash)) == chain_at(r, c));
            CHECK(++found <= r->n_pieces);
        }
    CHECK(found == r->n_pieces);
}

static void check_free_slots(const Recency *r) {
    uint32_t found = 0, newer = NONE;
    for (uint32_t i = r->n_free ? r->free : NONE; i != NONE; i = entry_at(r, i)->older) {
        CHECK(i < r->n_slots && entry_at(r, i)->chain == FREE && entry_at(r, i)->newer == newer);
        newer = i;
        CHECK(++found <= r->n_free);
    }
    CHECK(found == r->n_free);
}

static uint64_t array_bytes(const paged_array *a, size_t size) {
    return malloc_bytes(a->room * sizeof(*a->at)) + a->n * malloc_bytes(PAGE_ITEMS * size);
}

void check_recency(PyObject *recency) {
    const Recency *r = (Recency *)recency;
    uint64_t anonymous, rest;
    uint32_t pieces;
    CHECK(check_order(r, &anonymous, &rest, &pieces) == r->blocks && r->blocks <= r->capacity);
    CHECK(anonymous == r->anonymous && pieces == r->n_pieces);
    check_table(r);
    check_free_slots(r);
    CHECK(r->n_slots <= (uint64_t)r->entries.n * PAGE_ITEMS && r->n_chains <= (uint64_t)r->table.n * PAGE_ITEMS);
    CHECK(r->bytes == malloc_bytes(sizeof(Recency)) + rest + array_bytes(&r->entries, sizeof(entry)) +
                          array_bytes(&r->table, sizeof(uint32_t)));
}
