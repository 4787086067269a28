/* Checks an index: the pages of its tables, who holds what, the references to sets, and the bytes of its accounts. */
#include "checks.h"
#include "index_holders.h"

/* ---- Tables ---- */

static uint64_t check_table(const table *t, size_t size) {
    uint64_t count = 0, bytes = malloc_bytes(t->page_room * sizeof(page *));
    CHECK(t->n_pages <= t->page_room);
    CHECK(t->n_pages ? t->low_mask < t->n_pages && t->n_pages <= 2 * (t->low_mask + 1) : !t->count);
    for (uint32_t i = 0; i < t->n_pages; i++) {
        const page *p = t->pages[i];
        CHECK(p->n <= p->room && p->room % 4 == 0 && (p->room || p == empty_page));
        bytes += p->room ? malloc_bytes(page_bytes(p->room, size)) : 0;
        count += p->n;
        for (uint32_t k = 0; k < p->n; k++) {
            uint64_t key = read64(entry_at(p, k, size));
            position where;
            CHECK(p->tags[k] == tag_of(key) && *page_of(t, key) == p);
            CHECK(find(t, key, size, &where) == entry_at(p, k, size)); /* no key is there twice */
        }
    }
    CHECK(count == t->count);
    return bytes;
}

/* The table of a retired holder loses pages without moving entries. */
static uint64_t retired_table_bytes(const table *t) {
    uint64_t bytes = malloc_bytes(t->page_room * sizeof(page *)), count = 0;
    for (uint32_t i = 0; i < t->n_pages; i++) {
        bytes += t->pages[i]->room ? malloc_bytes(page_bytes(t->pages[i]->room, PAIR)) : 0;
        count += t->pages[i]->n;
    }
    CHECK(count == t->count);
    return bytes;
}

/* ---- Who holds what ---- */

/* Counts, for each holder, the blocks and tiers that it is a member of. */
static void count_memberships(const BlockIndex *ix, const slot *block, uint64_t *memberships) {
    uint32_t two[2], n, before = 0;
    const uint32_t *members = members_of(ix, block->value, two, &n);
    CHECK(n);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t number = members[i] >> 4;
        CHECK(number < ix->n_holders && (members[i] & 15) && (!i || number > before));
        CHECK(ix->holders[number].state != HOLDER_FREE);
        before = number;
        memberships[number] += (uint64_t)__builtin_popcount(members[i] & 15);
    }
}

/* Every pair's block has the holder as a member, in its tiers. Returns how many blocks and tiers there are in pairs. */
static uint64_t check_pairs(const BlockIndex *ix, uint32_t number) {
    const table *t = &ix->holders[number].pairs;
    uint64_t stores = 0;
    for (uint32_t i = 0; i < t->n_pages; i++)
        for (uint32_t k = 0; k < t->pages[i]->n; k++) {
            const pair *p = (pair *)(void *)entry_at(t->pages[i], k, PAIR);
            const slot *block = find_slot(&ix->blocks, p->block);
            uint32_t tiers = 0;
            for (uint32_t tier = 0; tier < TIERS; tier++)
                tiers |= (uint32_t)(stores_of(p, tier) != 0) << tier;
            CHECK(tiers && block && (tiers_of(ix, block->value, number) & tiers) == tiers);
            stores += (uint64_t)__builtin_popcount(tiers);
        }
    return stores;
}

/* The same for the blocks of a recency list. */
static uint64_t check_lru(const BlockIndex *ix, uint32_t number) {
    PyObject *hashes = recency_hashes(ix->holders[number].lru);
    CHECK(hashes);
    Py_ssize_t size = PyBytes_GET_SIZE(hashes);
    for (Py_ssize_t at = 0; at < size; at += 8) {
        uint64_t hash = read64((const uint8_t *)PyBytes_AS_STRING(hashes) + at);
        const slot *block = find_slot(&ix->blocks, block_key(ix, hash));
        CHECK(block && tiers_of(ix, block->value, number) == ON_GPU);
    }
    Py_DECREF(hashes);
    return (uint64_t)size / 8;
}

/* Each holder is a member of the blocks that it has, and of no others. Two pairs of one block need an alias. */
static void check_holders(const BlockIndex *ix) {
    uint64_t *memberships = calloc(ix->n_holders + 1, sizeof *memberships), surplus = 0, aliases = 0;
    CHECK(memberships);
    for (uint32_t i = 0; i < ix->blocks.n_pages; i++)
        for (uint32_t k = 0; k < ix->blocks.pages[i]->n; k++)
            count_memberships(ix, (slot *)(void *)entry_at(ix->blocks.pages[i], k, SLOT), memberships);
    for (uint32_t i = 0; i < ix->n_holders; i++) {
        uint64_t has = ix->holders[i].lru ? check_lru(ix, i) : check_pairs(ix, i);
        CHECK(has >= memberships[i] && (has == memberships[i] || !ix->holders[i].lru));
        surplus += has - memberships[i];
    }
    for (uint32_t i = 0; i < ix->aliases.n_pages; i++)
        for (uint32_t k = 0; k < ix->aliases.pages[i]->n; k++)
            aliases += ((slot *)(void *)entry_at(ix->aliases.pages[i], k, SLOT))->value;
    CHECK(aliases == surplus);
    free(memberships);
}

/* ---- Sets ---- */

static uint64_t check_sets(const BlockIndex *ix) {
    uint32_t *refs = calloc(ix->n_sets + 1, sizeof *refs), live = 0, free_sets = 0;
    uint64_t charge = 0, bytes = malloc_bytes(ix->set_room * 8ULL) + malloc_bytes(ix->scratch_room * 4ULL);
    CHECK(refs);
    for (uint32_t i = 0; i < ix->blocks.n_pages; i++)
        for (uint32_t k = 0; k < ix->blocks.pages[i]->n; k++) {
            const slot *block = (slot *)(void *)entry_at(ix->blocks.pages[i], k, SLOT);
            charge += charge_of(ix, block->value);
            if (is_set(block->value)) {
                CHECK((block->value & SET_NUMBER) < ix->n_sets);
                refs[block->value & SET_NUMBER]++;
            }
        }
    for (uint32_t i = ix->free_set; i != NONE; i = (uint32_t)((uintptr_t)ix->sets[i] >> 1)) {
        CHECK(i < ix->n_sets && (uintptr_t)ix->sets[i] & 1 && ++free_sets <= ix->n_sets);
        CHECK(!refs[i]);
    }
    for (uint32_t i = 0; i < ix->n_sets; i++)
        if (!((uintptr_t)ix->sets[i] & 1)) {
            CHECK(ix->sets[i]->refs == refs[i] && refs[i]);
            bytes += malloc_bytes(sizeof(holder_set) + 4ULL * ix->sets[i]->n);
            live++;
        }
    CHECK(live == ix->live_sets && live + free_sets == ix->n_sets && charge == ix->set_charge);
    free(refs);
    return bytes;
}

void check_index(PyObject *index) {
    const BlockIndex *ix = (BlockIndex *)index;
    uint64_t bytes = malloc_bytes(sizeof(BlockIndex)) + malloc_bytes(ix->holder_room * sizeof(holder)) +
                     malloc_bytes(ix->id_room * sizeof(holder_id));
    uint64_t holders_bytes = bytes, pairs = 0, retired = 0;
    bytes += check_table(&ix->blocks, SLOT) + check_table(&ix->aliases, SLOT);
    for (uint32_t i = 0; i < ix->n_holders; i++) {
        const holder *h = &ix->holders[i];
        if (h->state == HOLDER_RETIRED) {
            bytes += retired_table_bytes(&h->pairs);
            retired += count_of(h);
        } else {
            bytes += check_table(&h->pairs, PAIR);
            pairs += h->pairs.count;
            CHECK(h->state == HOLDER_LIVE ? ix->ids[h->id].number == i : !h->pairs.count && !h->lru);
        }
    }
    CHECK(pairs == ix->pairs && retired == ix->retired_pairs && bytes == ix->table_bytes);
    check_holders(ix);
    CHECK(check_table(&ix->set_numbers, SLOT) + check_sets(ix) == ix->set_bytes);
    /* Holders themselves count, but are not refused. The memory that the sets really use may exceed their charge by little. */
    CHECK(charged_bytes(ix) <= ix->budget_bytes + holders_bytes + 4096);
}
