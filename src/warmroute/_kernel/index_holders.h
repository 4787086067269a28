/* The holders of a block, in 32 bits.
 *
 * The flag MATCHED (a match used the block since eviction last looked), and one of:
 * - a holder and its tiers;
 * - TWO_HOLDERS, and two holders that have the block on the GPU alone;
 * - IN_SET, and the number of a set.
 * There is one way to write each group of holders, except that equal sets may have two numbers where memory is short.
 */
#ifndef WARMROUTE_INDEX_HOLDERS_H
#define WARMROUTE_INDEX_HOLDERS_H

#include "index_table.h"

#define MATCHED 0x80000000u
#define TWO_HOLDERS 0x40000000u
#define IN_SET 0x20000000u
#define SET_NUMBER 0x1fffffffu
#define ON_GPU 1u
#define MEMBER(number, tiers) ((number) << 4 | (tiers))

static always_inline int is_set(uint32_t holders) { return (holders & (TWO_HOLDERS | IN_SET)) == IN_SET; }

static always_inline holder_set *set_at(const BlockIndex *ix, uint32_t holders) { return ix->sets[holders & SET_NUMBER]; }

/* Bytes that a set of n members is charged with: its own, its slot in `sets`, and its entry in `set_numbers`. */
static always_inline uint64_t set_charge(uint32_t n) { return malloc_bytes(sizeof(holder_set) + 4ULL * n) + 26; }

static always_inline uint64_t charge_of(const BlockIndex *ix, uint32_t holders) {
    return is_set(holders) ? set_charge(set_at(ix, holders)->n) : 0;
}

/* The holders as members (number << 4 | tiers). `two` has room for those that are in no set. */
static always_inline const uint32_t *members_of(const BlockIndex *ix, uint32_t holders, uint32_t two[2], uint32_t *n) {
    if (holders & TWO_HOLDERS) {
        two[0] = MEMBER(holders & 0x7fff, ON_GPU);
        two[1] = MEMBER(holders >> 15 & 0x7fff, ON_GPU);
        *n = 2;
        return two;
    }
    if (holders & IN_SET) {
        const holder_set *s = set_at(ix, holders);
        *n = s->n;
        return s->members;
    }
    two[0] = holders & ~MATCHED;
    *n = 1;
    return two;
}

/* Where the first member is whose number is at least this one. */
static always_inline uint32_t find_member(const uint32_t *members, uint32_t n, uint32_t number) {
    uint32_t low = 0;
    while (n) {
        uint32_t half = n / 2;
        if (members[low + half] >> 4 < number) {
            low += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return low;
}

/* The tiers in which a holder has the block. */
static always_inline uint32_t tiers_of(const BlockIndex *ix, uint32_t holders, uint32_t number) {
    uint32_t two[2], n;
    const uint32_t *members = members_of(ix, holders, two, &n);
    uint32_t at = find_member(members, n, number);
    return at < n && members[at] >> 4 == number ? members[at] & 15 : 0;
}

/* Gives up one reference to a set; does nothing for other holders. */
void release_set(BlockIndex *ix, uint32_t holders);

/* The holders with these tiers of one holder added or removed, with one reference to their set. NONE without memory. */
uint32_t change_holders(BlockIndex *ix, uint32_t holders, uint32_t number, uint32_t tiers, int adds);

/* The same where it is the change that was made last; else NONE. The blocks of a prompt usually have equal holders, and
 * change to equal holders, so this is the common case. */
static always_inline uint32_t repeat_change(BlockIndex *ix, uint32_t holders, uint32_t number, uint32_t tiers, int adds) {
    const transition *last = &ix->last_transition;
    if (last->from != holders || last->holder != number || last->tiers != tiers || last->adds != adds)
        return NONE;
    if (is_set(last->to))
        set_at(ix, last->to)->refs++;
    return last->to;
}

/* Replaces a block's holders. The new ones come with a reference to their set, and the old ones give theirs up. */
static always_inline void replace_holders(BlockIndex *ix, uint32_t *holders, uint32_t to) {
    uint32_t old = *holders;
    ix->set_charge += charge_of(ix, to) - charge_of(ix, old);
    *holders = to | (old & MATCHED);
    release_set(ix, old);
}

#endif
