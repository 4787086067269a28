/* The holders of a block: sets that are shared by blocks with equal holders. index_holders.h has the encoding. */
#include "index_holders.h"

/* ---- Sets ---- */

static uint64_t hash_of_set(const uint32_t *members, uint32_t n) {
    uint64_t sum = n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t h = (members[i] + K[0]) * K[6];
        sum += (h ^ h >> 31) * K[7];
    }
    return mix(sum);
}

static uint64_t bytes_of_set(uint32_t n) { return sizeof(holder_set) + 4ULL * n; }

/* A number that no set has; NONE without memory. A free number's slot in `sets` has the next free number, marked by 1. */
static uint32_t take_set_number(BlockIndex *ix) {
    uint32_t number = ix->free_set;
    if (number != NONE) {
        ix->free_set = (uint32_t)((uintptr_t)ix->sets[number] >> 1);
        return number;
    }
    if (ix->n_sets == ix->set_room) {
        uint32_t room = ix->set_room + ix->set_room / 8 + 16;
        void *sets = room > SET_NUMBER ? NULL : resize_allocation(ix, ix->sets, ix->set_room * 8ULL, room * 8ULL, 1);
        if (!sets)
            return NONE;
        ix->sets = sets;
        ix->set_room = room;
    }
    return ix->n_sets++;
}

/* The number of the set with these members, with one reference. NONE without memory. */
static uint32_t find_or_make_set(BlockIndex *ix, const uint32_t *members, uint32_t n) {
    uint64_t hash = hash_of_set(members, n);
    position where;
    const slot *known = find(&ix->set_numbers, hash, SLOT, &where);
    if (known) {
        holder_set *s = ix->sets[known->value];
        if (s->n == n && !memcmp(s->members, members, n * 4)) {
            s->refs++;
            return known->value;
        }
    }
    holder_set *s = resize_allocation(ix, NULL, 0, bytes_of_set(n), 1);
    if (!s)
        return NONE;
    uint32_t number = take_set_number(ix);
    if (number == NONE) {
        free_allocation(ix, s, bytes_of_set(n), 1);
        return NONE;
    }
    s->refs = 1;
    s->n = n;
    memcpy(s->members, members, n * 4);
    ix->sets[number] = s;
    ix->live_sets++;
    /* Where there is no memory for the entry, or another set has this hash, the set is just not shared. */
    if (!known)
        insert(ix, &ix->set_numbers, where, &(slot){hash, number}, SLOT);
    return number;
}

void release_set(BlockIndex *ix, uint32_t holders) {
    if (!is_set(holders))
        return;
    uint32_t number = holders & SET_NUMBER;
    holder_set *s = ix->sets[number];
    if (--s->refs)
        return;
    position where;
    const slot *known = find(&ix->set_numbers, hash_of_set(s->members, s->n), SLOT, &where);
    if (known && known->value == number)
        erase(ix, &ix->set_numbers, where, SLOT);
    free_allocation(ix, s, bytes_of_set(s->n), 1);
    ix->sets[number] = (holder_set *)(((uintptr_t)ix->free_set << 1) | 1);
    ix->free_set = number;
    ix->live_sets--;
    ix->last_transition.from = NONE; /* it may name the set */
}

/* ---- Changing holders ---- */

/* Encodes members, with a reference to the set where one is needed. NONE without memory; 0 for no members. */
static uint32_t encode(BlockIndex *ix, const uint32_t *members, uint32_t n) {
    if (n == 0)
        return 0;
    if (n == 1)
        return members[0];
    if (n == 2 && (members[0] & 15) == ON_GPU && (members[1] & 15) == ON_GPU)
        return TWO_HOLDERS | (members[1] >> 4) << 15 | members[0] >> 4;
    uint32_t number = find_or_make_set(ix, members, n);
    return number == NONE ? NONE : IN_SET | number;
}

static int reserve_scratch(BlockIndex *ix, uint32_t n) {
    if (n <= ix->scratch_room)
        return 1;
    uint32_t room = n + n / 2 + 64;
    void *at = resize_allocation(ix, ix->scratch, ix->scratch_room * 4ULL, room * 4ULL, 1);
    if (!at)
        return 0;
    ix->scratch = at;
    ix->scratch_room = room;
    return 1;
}

uint32_t change_holders(BlockIndex *ix, uint32_t holders, uint32_t number, uint32_t tiers, int adds) {
    uint32_t two[2], n;
    const uint32_t *members = members_of(ix, holders, two, &n);
    if (!reserve_scratch(ix, n + 1))
        return NONE;
    uint32_t *out = ix->scratch, at = find_member(members, n, number);
    uint32_t is_there = at < n && members[at] >> 4 == number;
    uint32_t had = is_there ? members[at] & 15 : 0, has = adds ? had | tiers : had & ~tiers;
    memcpy(out, members, at * 4);
    if (has)
        out[at] = MEMBER(number, has);
    memcpy(out + at + (has != 0), members + at + is_there, (n - at - is_there) * 4);
    uint32_t to = encode(ix, out, n - is_there + (has != 0));
    if (to != NONE)
        ix->last_transition = (transition){holders, to, number, tiers, adds};
    return to;
}
