/* What holders have: storing and removing pairs, evicting near the budget, and sweeping what cleared holders left. index.h
 * has the rules. */
#include "index_holders.h"

/* ---- Blocks and their holders ---- */

/* Two engine hashes of one holder may mean the same block. Then the tier is held until both are removed: an alias counts the
 * engine hashes beyond the first. */
static always_inline uint64_t alias_key(uint64_t block, uint32_t number, uint32_t tier) {
    return mix(block ^ fold_product(number << 2 | tier, K[3]));
}

static int add_alias(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tier) {
    uint64_t key = alias_key(block, number, tier);
    position where;
    slot *known = find(&ix->aliases, key, SLOT, &where);
    if (known) {
        known->value++;
        return 1;
    }
    return insert(ix, &ix->aliases, where, &(slot){key, 1}, SLOT);
}

static int remove_alias(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tier) {
    position where;
    slot *known = find(&ix->aliases, alias_key(block, number, tier), SLOT, &where);
    if (!known)
        return 0;
    if (!--known->value)
        erase(ix, &ix->aliases, where, SLOT);
    return 1;
}

int hold_slot(BlockIndex *ix, slot *known, uint32_t number, uint32_t bit) {
    uint32_t holders = known->value, to = repeat_change(ix, holders & ~MATCHED, number, bit, 1);
    if (to == NONE) {
        if (tiers_of(ix, holders, number) & bit)
            return -1;
        to = change_holders(ix, holders & ~MATCHED, number, bit, 1);
        if (to == NONE)
            return 0;
    }
    if (charged_bytes(ix) + charge_of(ix, to) - charge_of(ix, holders) > ix->budget_bytes) {
        release_set(ix, to);
        return 0;
    }
    replace_holders(ix, &holders, to);
    known->value = holders;
    return 1;
}

int hold_block(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tier) {
    position where;
    uint32_t bit = 1u << tier;
    slot *known = find(&ix->blocks, block, SLOT, &where);
    if (!known)
        return insert(ix, &ix->blocks, where, &(slot){block, MEMBER(number, bit)}, SLOT);
    int held = hold_slot(ix, known, number, bit);
    return held < 0 ? add_alias(ix, block, number, tier) : held;
}

int release_slot(BlockIndex *ix, slot *known, position where, uint32_t number, uint32_t tiers) {
    uint32_t holders = known->value, to = 0;
    if ((holders & ~MATCHED) != MEMBER(number, tiers)) {
        to = repeat_change(ix, holders & ~MATCHED, number, tiers, 0);
        if (to == NONE)
            to = change_holders(ix, holders & ~MATCHED, number, tiers, 0);
        if (to == NONE) /* no memory for a smaller set: forget the block, since the index may claim too little, not too much */
            to = 0;
    }
    int changed = to != (holders & ~MATCHED);
    replace_holders(ix, &holders, to);
    if (to)
        known->value = holders;
    else
        erase(ix, &ix->blocks, where, SLOT);
    return changed;
}

int release_block(BlockIndex *ix, uint64_t block, uint32_t number, uint32_t tiers) {
    if (ix->aliases.count)
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (tiers & 1u << tier && remove_alias(ix, block, number, tier))
                tiers &= ~(1u << tier);
    position where;
    slot *known = tiers ? find(&ix->blocks, block, SLOT, &where) : NULL;
    return known ? release_slot(ix, known, where, number, tiers) : 0;
}

/* ---- Pairs: a count for each tier, and an age ---- */

static const uint32_t count_shift[TIERS] = {0, 14, 18, 22}, count_max[TIERS] = {16383, 15, 15, 15};
#define AGE_SHIFT 26
#define AGES 64
#define COUNTS ((1u << AGE_SHIFT) - 1)

static always_inline uint32_t count_in(uint32_t counts, uint32_t tier) { return counts >> count_shift[tier] & count_max[tier]; }

static always_inline uint32_t tiers_in(uint32_t counts) {
    uint32_t tiers = 0;
    for (uint32_t tier = 0; tier < TIERS; tier++)
        tiers |= (uint32_t)(count_in(counts, tier) != 0) << tier;
    return tiers;
}

static always_inline uint32_t with_age_now(const BlockIndex *ix, uint32_t counts) {
    return (counts & COUNTS) | ix->epoch << AGE_SHIFT;
}

pair *find_pair(BlockIndex *ix, uint32_t number, uint64_t key) {
    position where;
    return find(&ix->holders[number].pairs, key, PAIR, &where);
}

uint32_t stores_of(const pair *p, uint32_t tier) { return count_in(p->counts, tier); }

void refresh_pair(const BlockIndex *ix, pair *p) { p->counts = with_age_now(ix, p->counts); }

static void drop_pair(BlockIndex *ix, uint32_t number, position where) {
    pair gone;
    memcpy(&gone, entry_at(*where.in, where.at, PAIR), PAIR);
    erase(ix, &ix->holders[number].pairs, where, PAIR);
    ix->pairs--;
    release_block(ix, gone.block, number, tiers_in(gone.counts));
}

/* ---- Eviction ---- */

static always_inline uint64_t next_random(BlockIndex *ix) {
    ix->random ^= ix->random << 13;
    ix->random ^= ix->random >> 7;
    return ix->random ^= ix->random << 17;
}

/* Finds the holder that has most, which is then looked for again only after some evictions. Returns 0 where none has any. */
static int find_largest(BlockIndex *ix) {
    if (ix->evictions_until_search && ix->holders[ix->largest].state == HOLDER_LIVE && count_of(&ix->holders[ix->largest])) {
        ix->evictions_until_search--;
        return 1;
    }
    uint64_t most = 0;
    ix->evictions_until_search = 256;
    for (uint32_t i = 0; i < ix->n_holders; i++)
        if (ix->holders[i].state == HOLDER_LIVE && count_of(&ix->holders[i]) > most) {
            most = count_of(&ix->holders[i]);
            ix->largest = i;
        }
    return most > 0;
}

/* A page of the holder's table, chosen by how many entries it has, so that none runs empty. It has at least one. */
static page **choose_page(BlockIndex *ix, const table *t) {
    uint32_t i, tries = 16;
    do
        i = (uint32_t)(next_random(ix) % t->n_pages);
    while (tries-- && next_random(ix) % (2 * PAGE_ENTRIES) >= t->pages[i]->n);
    while (!t->pages[i]->n)
        i = (i + 1) % t->n_pages;
    return &t->pages[i];
}

/* Of a few pairs of a page, the one that was stored longest ago. One whose block was matched since eviction last looked is
 * made young instead, up to eight times. */
static uint32_t choose_pair(BlockIndex *ix, page *p) {
    pair *pairs = (pair *)(void *)entry_at(p, 0, PAIR);
    uint32_t first = (uint32_t)(next_random(ix) % p->n), looks = p->n < 16 ? p->n : 16, oldest = 0;
    for (int spared = 0; spared <= 8; spared++) {
        uint32_t most_age = 0;
        for (uint32_t k = 0; k < looks; k++) {
            uint32_t at = (first + k) % p->n, age = (ix->epoch - (pairs[at].counts >> AGE_SHIFT)) % AGES + 1;
            if (age > most_age) {
                most_age = age;
                oldest = at;
            }
        }
        slot *block = spared < 8 ? find_slot(&ix->blocks, pairs[oldest].block) : NULL;
        if (!block || !(block->value & MATCHED))
            break;
        block->value &= ~MATCHED;
        refresh_pair(ix, &pairs[oldest]);
    }
    return oldest;
}

/* Takes from the holder that has most, so that a holder which stores without end evicts its own pairs only. */
int evict_one(BlockIndex *ix) {
    if (!ix->n_holders || !find_largest(ix))
        return 0;
    holder *from = &ix->holders[ix->largest];
    ix->evicted++;
    if (from->lru)
        return evict_from_lru(ix, ix->largest, 1) > 0;
    from->lost_pairs = 1;
    page **in = choose_page(ix, &from->pairs);
    drop_pair(ix, ix->largest, (position){in, choose_pair(ix, *in)});
    return 1;
}

/* ---- Retired holders ---- */

/* Removes up to this number of pairs of a retired holder. Returns how many it removed. */
static uint32_t sweep_page(BlockIndex *ix, uint32_t number, uint64_t most) {
    table *t = &ix->holders[number].pairs;
    page **where = &t->pages[t->n_pages - 1], *last = *where;
    uint32_t n = last->n < 16 ? last->n : 16;
    n = most < n ? (uint32_t)most : n;
    const pair *gone = (pair *)(void *)entry_at(last, last->n - n, PAIR);
    uint64_t blocks[16];
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = gone[i].block;
    prefetch_keys(ix, &ix->blocks, blocks, n);
    for (uint32_t i = 0; i < n; i++)
        release_block(ix, gone[i].block, number, tiers_in(gone[i].counts));
    if (n)
        last->n = (uint16_t)(last->n - n);
    t->count -= n;
    if (!last->n) {
        resize_page(ix, t, where, 0, PAIR);
        t->n_pages--;
    }
    return n;
}

void sweep(BlockIndex *ix, uint64_t pairs) {
    while (ix->first_retired != NONE && pairs) {
        uint32_t number = ix->first_retired;
        holder *h = &ix->holders[number];
        while (h->lru && pairs) {
            size_t most = pairs < AHEAD ? (size_t)pairs : AHEAD, gone = evict_from_lru(ix, number, most);
            ix->retired_pairs -= gone;
            pairs -= gone;
            if (gone < most)
                Py_CLEAR(h->lru);
        }
        if (h->lru)
            return;
        while (h->pairs.n_pages && pairs) {
            uint32_t gone = sweep_page(ix, number, pairs);
            ix->retired_pairs -= gone;
            pairs -= gone;
        }
        if (h->pairs.n_pages)
            return;
        free_table(ix, &h->pairs, PAIR);
        ix->first_retired = h->next;
        h->state = HOLDER_FREE;
        h->next = ix->free_holder;
        ix->free_holder = number;
    }
}

/* ---- Storing and removing ---- */

/* Before a store: near the budget, some pairs are evicted. What still does not fit is refused when it is inserted. */
static always_inline void make_room(BlockIndex *ix) {
    uint64_t charged = charged_bytes(ix);
    if (__builtin_expect(charged <= ix->soft_bytes, 1))
        return;
    int few = charged - ix->soft_bytes > (ix->budget_bytes - ix->soft_bytes) / 2 ? 8 : 2;
    if (ix->first_retired != NONE)
        sweep(ix, (uint64_t)few);
    while (few-- && charged_bytes(ix) > ix->soft_bytes && evict_one(ix))
        ;
}

/* An epoch ends after this many new pairs: pairs stored in the same epoch have the same age. */
static always_inline void count_new_pair(BlockIndex *ix) {
    ix->pairs++;
    if (!ix->stores_until_epoch--) {
        ix->epoch = (ix->epoch + 1) % AGES;
        ix->stores_until_epoch = ix->pairs / 16 + 256;
    }
}

/* Returns 0 where the budget refuses the pair. */
static int store_pair(BlockIndex *ix, uint32_t number, uint64_t key, uint64_t block, uint32_t tier) {
    make_room(ix);
    holder *to = &ix->holders[number];
    position where;
    pair *known = find(&to->pairs, key, PAIR, &where);
    if (known && known->block != block) { /* the engine uses this hash for another block now */
        ix->conflicts++;
        drop_pair(ix, number, where);
        known = find(&to->pairs, key, PAIR, &where);
    }
    if (!known) {
        pair fresh = {key, block, with_age_now(ix, 1u << count_shift[tier])};
        if (!hold_block(ix, block, number, tier))
            goto refuse;
        if (!insert(ix, &to->pairs, where, &fresh, PAIR)) {
            release_block(ix, block, number, 1u << tier);
            goto refuse;
        }
        count_new_pair(ix);
        return 1;
    }
    uint32_t count = count_in(known->counts, tier);
    if (!count && !hold_block(ix, block, number, tier))
        goto refuse;
    if (count == count_max[tier])
        ix->saturated++;
    else
        known->counts += 1u << count_shift[tier];
    refresh_pair(ix, known);
    return 1;
refuse:
    to->lost_pairs = 1;
    ix->refused++;
    return 0;
}

/* After a call that stored or removed n pairs: removes some retired pairs. */
static always_inline void sweep_along(BlockIndex *ix, size_t n) {
    if (ix->first_retired != NONE)
        sweep(ix, 16 + 2 * n);
}

uint64_t store_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, const uint64_t *blocks, size_t n, uint32_t tier) {
    uint64_t stored = 0;
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t end = n - start < AHEAD ? n : start + AHEAD;
        prefetch_keys(ix, &ix->holders[number].pairs, keys + start, end - start);
        prefetch_keys(ix, &ix->blocks, blocks + start, end - start);
        for (size_t i = start; i < end; i++)
            stored += (uint64_t)store_pair(ix, number, keys[i], blocks[i], tier);
    }
    sweep_along(ix, n);
    return stored;
}

uint64_t store_known_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, size_t n, uint32_t tier) {
    uint64_t stored = 0;
    for (size_t i = 0; i < n; i++) {
        const pair *known = find_pair(ix, number, keys[i]);
        if (!known)
            ix->unresolved++;
        else
            stored += (uint64_t)store_pair(ix, number, keys[i], known->block, tier);
    }
    sweep_along(ix, n);
    return stored;
}

uint64_t remove_pairs(BlockIndex *ix, uint32_t number, const uint64_t *keys, size_t n, uint32_t tier) {
    uint64_t removed = 0, gone[AHEAD];
    table *pairs = &ix->holders[number].pairs;
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t end = n - start < AHEAD ? n : start + AHEAD, n_gone = 0;
        prefetch_keys(ix, pairs, keys + start, end - start);
        for (size_t i = start; i < end; i++) {
            position where;
            pair *known = find(pairs, keys[i], PAIR, &where);
            uint32_t count = known ? count_in(known->counts, tier) : 0;
            if (!count) {
                ix->unknown_removes++;
                continue;
            }
            removed++;
            known->counts -= 1u << count_shift[tier];
            if (count > 1)
                continue;
            gone[n_gone++] = known->block;
            if (!(known->counts & COUNTS)) {
                erase(ix, pairs, where, PAIR);
                ix->pairs--;
            }
        }
        prefetch_keys(ix, &ix->blocks, gone, n_gone);
        for (size_t i = 0; i < n_gone; i++)
            release_block(ix, gone[i], number, 1u << tier);
    }
    sweep_along(ix, n);
    return removed;
}
