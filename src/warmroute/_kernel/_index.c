/* Block hashes, and who holds which block.
 *
 * The rules:
 * - A block's hash chains over its tokens, the blocks before it and the namespace. No two prompts share one unless their
 *   beginnings are equal, token by token.
 * - A pair is one engine hash at one place. It counts stores and removes by tier; while any count is above zero, the place
 *   holds the block in that tier. Nothing is believed of a place that a store did not say and a remove did not take back.
 * - What the index may at most need for what it holds stays within the budget, checked before each insert.
 * - No step takes longer than its share: tables grow by a page, a cleared place is swept bit by bit.
 *
 * The layout: a table is a row of small pages, found by linear hashing on the key's low bits; in it, the key's highest
 * byte finds the entry. A page grows by a few entries and one page at a time is split, so there is little slack and no
 * rehash. `blocks` maps a block to its holders in 12 bytes: one place with its tiers, or two places
 * that hold it on the GPU, or the number of a set. Equal sets are kept once, so a prefix that 64 places hold costs a
 * match one comparison a block. Each place has a table of pairs, 20 bytes each: engine hash, block, counts by tier, age.
 * A mirrored place has none: its blocks are those of a Recency, once each and on the GPU, and when some must go, that says
 * which.
 *
 * tests/index/reference_index.py is the same in plain Python; the tests compare the two.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_match.h"
#include "_mirror.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_PLACES 32767
#define MIN_BUDGET_BYTES 65536
#define MAX_BLOCK_TOKENS 65536
#define MAX_ENGINE_HASH_BYTES 64

#define NONE UINT32_MAX
#define NO_PARENT -1
#define PARENT_LOST -2

#define always_inline inline __attribute__((always_inline))
#define prefetch(p) __builtin_prefetch(p)

/* ---- Hashing ---- */

static const uint64_t K[8] = {0xa0761d6478bd642fULL, 0xe7037ed1a0b428dbULL, 0x8ebc6af09c88c6e3ULL, 0x589965cc75374cc3ULL,
                              0x1d8e4e27c47d124fULL, 0xeb44accab455d165ULL, 0x9e3779b97f4a7c15ULL, 0xd6e8feb86659fd93ULL};

/* The 128-bit product folded to 64 bits, with the factors kept in it, so that a zero factor loses nothing. */
static always_inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return a ^ b ^ (uint64_t)product ^ (uint64_t)(product >> 64);
}

static always_inline uint64_t read64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* Hash of bytes. Independent of the blocks before, so that several blocks are under way at once. */
static always_inline uint64_t content(uint64_t seed, const uint8_t *p, size_t len) {
    uint64_t a = fold(seed ^ K[0], len ^ K[1]), b = a ^ K[2];
    for (; len >= 32; p += 32, len -= 32) {
        a = fold(read64(p) ^ K[1], read64(p + 8) ^ a);
        b = fold(read64(p + 16) ^ K[2], read64(p + 24) ^ b);
    }
    a = fold(a ^ K[3], b ^ K[4]);
    for (; len >= 16; p += 16, len -= 16)
        a = fold(read64(p) ^ K[1], read64(p + 8) ^ a);
    if (len) {
        uint8_t rest[16] = {0};
        memcpy(rest, p, len);
        a = fold(read64(rest) ^ K[5], read64(rest + 8) ^ a);
    }
    return fold(a ^ K[6], K[7]);
}

static always_inline uint64_t chained(uint64_t namespace, uint64_t parent, uint64_t block) {
    return fold(fold(block ^ K[4], parent ^ K[5]) ^ K[6], namespace ^ K[7]);
}

/* Spreads a hash over the tables; one to one, so it can be undone and adds no collision. */
static always_inline uint64_t spread(uint64_t h) {
    h ^= h >> 32;
    h *= K[6];
    h ^= h >> 32;
    h *= K[7];
    return h ^ h >> 32;
}

/* What undoes the two products, modulo 2^64. */
static const uint64_t UNDO_K6 = 0xf1de83e19937733dULL, UNDO_K7 = 0xcfee444d8b59a89bULL;

static always_inline uint64_t gathered(uint64_t h) {
    h ^= h >> 32;
    h *= UNDO_K7;
    h ^= h >> 32;
    h *= UNDO_K6;
    return h ^ h >> 32;
}

/* ---- Tables: pages of entries that begin with a 64-bit key ---- */

typedef struct __attribute__((packed, aligned(4))) {
    uint64_t key;
    uint32_t value;
} slot;

typedef struct __attribute__((packed, aligned(4))) {
    uint64_t key;
    uint64_t block;
    uint32_t counts;
} pair;

#define SLOT sizeof(slot)
#define PAIR sizeof(pair)
#define PAGE_ENTRIES 32
#define MAX_PAGE_ENTRIES 65528

/* Entries in no order, behind a tag for each: the key's highest byte. */
typedef struct {
    uint16_t n, room; /* room is a multiple of 4 */
    uint8_t tags[];
} page;

typedef struct {
    page **pages;
    uint32_t n_pages, page_room;
    uint32_t low_mask; /* 2^k - 1 with 2^k <= n_pages < 2^(k+1) */
    uint32_t of_sets;  /* paid for by the charge for sets */
    uint64_t count;
} table;

#define TAGS_AT_ONCE 48 /* even the smallest page has so many bytes behind its head */

/* Stands for a page of none. */
static const struct {
    page head;
    uint8_t tags[TAGS_AT_ONCE];
} no_entries;
#define EMPTY ((page *)&no_entries.head)

/* What malloc takes for this many bytes. */
static always_inline uint64_t taken(uint64_t bytes) {
    return bytes == 0 ? 0 : bytes <= 24 ? 32 : (bytes + 8 + 15) & ~15ULL;
}

typedef struct {
    uint32_t refs, n;
    uint32_t members[]; /* place << 4 | tiers, rising */
} holders_set;

enum { FREE, LIVE, DYING };

/* A place as the tables know it. A clear leaves its pairs to be swept, and the open place goes on with a fresh one. */
typedef struct {
    table held;
    PyObject *mirror; /* a Recency, whose blocks it holds; NULL for a place with pairs */
    uint32_t door;    /* the number it is known by outside */
    uint32_t next;    /* among the free, or among the dying */
    uint8_t state, lost;
} place;

static const mirror_api *mirrors;

/* An open place, by the number it is known by outside. */
typedef struct {
    uint32_t number; /* in places, or NONE */
    uint32_t next;   /* among the closed */
} door;

typedef struct {
    uint32_t from, to, place, tiers;
    int adds;
} step;

typedef struct {
    PyObject_HEAD
    uint64_t budget_bytes, soft_bytes, secret, random;
    uint64_t table_bytes, set_bytes, set_charge;
    table blocks, interned, aliases;
    holders_set **sets;
    uint32_t n_sets, set_room, free_set, live_sets;
    step last_step;
    uint32_t *scratch;
    uint32_t scratch_room;
    place *places;
    uint32_t n_places, place_room, free_place, dying_place;
    door *doors;
    uint32_t n_doors, door_room, closed_door;
    uint64_t pairs, dying_pairs;
    uint32_t epoch, largest, evictions_until_look;
    uint64_t stores_until_epoch;
    uint64_t evicted, refused, unknown_removes, unresolved, saturated, conflicts;
} BlockIndex;

/* Bytes that can be needed for what is held: sets count once for each block, since removes may part them. */
static always_inline uint64_t charged_bytes(const BlockIndex *ix) {
    return ix->table_bytes + (ix->set_bytes > ix->set_charge ? ix->set_bytes : ix->set_charge);
}

/* Whether an allocation may go from so many bytes to so many: always where it shrinks or the charge for sets covers it. */
static always_inline int affordable(const BlockIndex *ix, uint64_t old_bytes, uint64_t new_bytes, int of_sets) {
    return of_sets || new_bytes <= old_bytes || charged_bytes(ix) + taken(new_bytes) - taken(old_bytes) <= ix->budget_bytes;
}

/* Resizes one allocation, and the account it stands in. */
static void *resize(BlockIndex *ix, void *at, uint64_t old_bytes, uint64_t new_bytes, int of_sets) {
    void *moved = affordable(ix, old_bytes, new_bytes, of_sets) ? PyMem_RawRealloc(at, new_bytes) : NULL;
    if (moved)
        *(of_sets ? &ix->set_bytes : &ix->table_bytes) += taken(new_bytes) - taken(old_bytes);
    return moved;
}

static void release(BlockIndex *ix, void *at, uint64_t bytes, int of_sets) {
    PyMem_RawFree(at);
    *(of_sets ? &ix->set_bytes : &ix->table_bytes) -= taken(bytes);
}

static always_inline uint8_t *entry(const page *p, uint32_t i, size_t size) {
    return (uint8_t *)p + sizeof(page) + p->room + i * size;
}

static always_inline uint64_t page_bytes(uint32_t room, size_t size) { return sizeof(page) + room * (1 + size); }

static always_inline uint32_t roomy(uint32_t n) { return n < 8 ? (n + 4) & ~3u : (n + 8) & ~7u; }

/* The page with room for so many; 0 where the budget or the memory does not allow it. */
static int page_fit(BlockIndex *ix, const table *t, page **at, uint32_t room, size_t size) {
    page *old = *at, *new = EMPTY;
    if (room) {
        uint64_t bytes = page_bytes(room, size), old_bytes = old->room ? page_bytes(old->room, size) : 0;
        new = affordable(ix, old_bytes, bytes, t->of_sets) ? PyMem_RawMalloc(bytes) : NULL;
        if (!new)
            return 0;
        *(t->of_sets ? &ix->set_bytes : &ix->table_bytes) += taken(bytes);
        new->n = old->n;
        new->room = room;
        memcpy(new->tags, old->tags, old->n);
        memcpy(entry(new, 0, size), entry(old, 0, size), old->n * size);
    }
    if (old != EMPTY)
        release(ix, old, page_bytes(old->room, size), t->of_sets);
    *at = new;
    return 1;
}

static always_inline page **page_of(const table *t, uint64_t key) {
    uint32_t i = (uint32_t)key & (2 * t->low_mask + 1);
    return &t->pages[i < t->n_pages ? i : i & t->low_mask];
}

static always_inline uint8_t tag_of(uint64_t key) { return key >> 56; }

/* A bit for each of the next tags that is equal to this one. */
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

/* The entry with this key, and where it is: in which page, at which place of it. */
static always_inline void *find(const table *t, uint64_t key, size_t size, page ***in, uint32_t *at) {
    if (!t->n_pages) {
        *in = NULL;
        return NULL;
    }
    page **where = page_of(t, key);
    const page *p = *where;
    *in = where;
    uint32_t first = 0, n = p->n;
    do {
        uint32_t left = n - first;
        uint64_t bits = equal_tags(p->tags + first, tag_of(key));
        if (left < TAGS_AT_ONCE)
            bits &= (1ULL << left) - 1;
        for (; bits; bits &= bits - 1) {
            uint32_t i = first + (uint32_t)__builtin_ctzll(bits);
            uint8_t *e = entry(p, i, size);
            if (read64(e) == key) {
                *at = i;
                return e;
            }
        }
        first += TAGS_AT_ONCE;
    } while (__builtin_expect(first < n, 0));
    return NULL;
}

static always_inline slot *find_slot(const table *t, uint64_t key) {
    page **in;
    uint32_t at;
    return find(t, key, SLOT, &in, &at);
}

#define AHEAD 32 /* keys that are looked for at once */

/* A smaller index is in the processor's caches anyway. */
#define PREFETCH_BYTES (4 << 20)

/* Called for many keys before they are needed: all rows of pages first, then all pages, of each the better part. */
static always_inline void prefetch_keys(const BlockIndex *ix, const table *t, const uint64_t *keys, size_t n) {
    if (ix->table_bytes < PREFETCH_BYTES || !t->n_pages)
        return;
    for (size_t i = 0; i < n; i++)
        prefetch(page_of(t, keys[i]));
    for (size_t i = 0; i < n; i++)
        for (size_t line = 0; line < 256; line += 64)
            prefetch((const uint8_t *)*page_of(t, keys[i]) + line);
}

static int add_page(BlockIndex *ix, table *t) {
    if (t->n_pages == t->page_room) {
        uint32_t room = t->page_room < 4 ? t->page_room * 2 + (t->page_room == 0) : t->page_room + t->page_room / 8 + 4;
        void *pages = resize(ix, t->pages, t->page_room * sizeof(page *), room * sizeof(page *), t->of_sets);
        if (!pages)
            return 0;
        t->pages = pages;
        t->page_room = room;
    }
    t->pages[t->n_pages++] = EMPTY;
    return 1;
}

static always_inline void append(page *p, const void *e, size_t size) {
    p->tags[p->n] = tag_of(read64(e));
    memcpy(entry(p, p->n++, size), e, size);
}

/* The last entry takes the place of the one that goes. */
static always_inline void cut(page *p, uint32_t at, size_t size) {
    uint32_t last = --p->n;
    if (at != last) {
        p->tags[at] = p->tags[last];
        memcpy(entry(p, at, size), entry(p, last, size), size);
    }
}

/* One page more: half of the next page in line goes there. Not to split costs speed only, so a failure is no matter. */
static void split_page(BlockIndex *ix, table *t, size_t size) {
    uint32_t high = t->low_mask + 1, from = t->n_pages - high, moving = 0;
    if (!add_page(ix, t))
        return;
    page **old = &t->pages[from], **new = &t->pages[t->n_pages - 1];
    for (uint32_t i = 0; i < (*old)->n; i++)
        moving += (read64(entry(*old, i, size)) & high) != 0;
    if (moving && !page_fit(ix, t, new, roomy(moving), size)) {
        t->n_pages--;
        return;
    }
    for (uint32_t i = 0; i < (*old)->n;) {
        const uint8_t *e = entry(*old, i, size);
        if (read64(e) & high) {
            append(*new, e, size);
            cut(*old, i, size);
        } else {
            i++;
        }
    }
    if (moving)
        page_fit(ix, t, old, (*old)->n ? roomy((*old)->n) : 0, size);
    if (t->n_pages == 2 * high)
        t->low_mask = 2 * high - 1;
}

/* One page less: the last goes back to the page it was split from. */
static void merge_page(BlockIndex *ix, table *t, size_t size) {
    uint32_t last = t->n_pages - 1, low = t->low_mask;
    if (last == low)
        low >>= 1;
    page **from = &t->pages[last], **into = &t->pages[last & low];
    uint32_t n = (*from)->n + (*into)->n;
    if (n > MAX_PAGE_ENTRIES || (n > (*into)->room && !page_fit(ix, t, into, roomy(n), size)))
        return;
    for (uint32_t i = 0; i < (*from)->n; i++)
        append(*into, entry(*from, i, size), size);
    page_fit(ix, t, from, 0, size);
    t->n_pages = last;
    t->low_mask = low;
    if (t->page_room > 2 * last + 4) {
        void *pages = resize(ix, t->pages, t->page_room * sizeof(page *), (last + 1) * sizeof(page *), t->of_sets);
        if (pages) {
            t->pages = pages;
            t->page_room = last + 1;
        }
    }
}

/* Puts an entry into the page where find() looked for it; 0 where the budget does not allow it. */
static always_inline int put(BlockIndex *ix, table *t, page **in, const void *e, size_t size) {
    if (!in) {
        if (!add_page(ix, t))
            return 0;
        in = t->pages;
    }
    if ((*in)->n == (*in)->room && ((*in)->n >= MAX_PAGE_ENTRIES || !page_fit(ix, t, in, roomy((*in)->n), size)))
        return 0;
    append(*in, e, size);
    if (++t->count > (uint64_t)t->n_pages * PAGE_ENTRIES)
        split_page(ix, t, size);
    return 1;
}

static always_inline void take(BlockIndex *ix, table *t, page **in, uint32_t at, size_t size) {
    cut(*in, at, size);
    uint32_t n = (*in)->n, slack = (*in)->room - n;
    if (slack > 12 && slack > n / 4) /* well beyond what roomy() gives, or pages that stay about as full would keep moving */
        page_fit(ix, t, in, n ? roomy(n) : 0, size);
    if (--t->count < (uint64_t)t->n_pages * (PAGE_ENTRIES / 4) && t->n_pages > 1)
        merge_page(ix, t, size);
}

static void table_free(BlockIndex *ix, table *t, size_t size) {
    for (uint32_t i = 0; i < t->n_pages; i++)
        page_fit(ix, t, &t->pages[i], 0, size);
    if (t->pages)
        release(ix, t->pages, t->page_room * sizeof(page *), t->of_sets);
    *t = (table){.of_sets = t->of_sets};
}

/* ---- Holders of a block, in 32 bits ----
 *
 * USED (matched since eviction last looked), then one of: a place and its tiers; two places that hold it on the GPU alone;
 * the number of a set. There is one way to write each group of holders, apart from the set's number.
 */
#define USED 0x80000000u
#define TWO 0x40000000u
#define SET 0x20000000u
#define SET_NUMBER 0x1fffffffu
#define ON_GPU 1u
#define MEMBER(place, tiers) ((place) << 4 | (tiers))

static const uint64_t set_overhead_bytes = 26; /* its slot in sets[], its entry in interned, with slack */

static always_inline uint64_t set_charge(uint32_t n) { return taken(sizeof(holders_set) + 4ULL * n) + set_overhead_bytes; }

static always_inline const holders_set *set_at(const BlockIndex *ix, uint32_t holders) { return ix->sets[holders & SET_NUMBER]; }

static always_inline uint64_t charge_of(const BlockIndex *ix, uint32_t holders) {
    return holders & TWO || !(holders & SET) ? 0 : set_charge(set_at(ix, holders)->n);
}

/* The holders one by one; `two` has room for those that are in no set. */
static always_inline const uint32_t *members_of(const BlockIndex *ix, uint32_t holders, uint32_t two[2], uint32_t *n) {
    if (holders & TWO) {
        two[0] = MEMBER(holders & 0x7fff, ON_GPU);
        two[1] = MEMBER(holders >> 15 & 0x7fff, ON_GPU);
        *n = 2;
        return two;
    }
    if (holders & SET) {
        const holders_set *s = set_at(ix, holders);
        *n = s->n;
        return s->members;
    }
    two[0] = holders & ~USED;
    *n = 1;
    return two;
}

static uint64_t set_hash(const uint32_t *members, uint32_t n) {
    uint64_t sum = n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t h = (members[i] + K[0]) * K[6];
        sum += (h ^ h >> 31) * K[7];
    }
    return spread(sum);
}

/* The number of the set with these members, one holder of it more. NONE where there is no memory left at all. */
static uint32_t set_of(BlockIndex *ix, const uint32_t *members, uint32_t n) {
    uint64_t hash = set_hash(members, n);
    page **in;
    uint32_t at;
    const slot *known = find(&ix->interned, hash, SLOT, &in, &at);
    if (known) {
        holders_set *s = ix->sets[known->value];
        if (s->n == n && !memcmp(s->members, members, n * 4)) {
            s->refs++;
            return known->value;
        }
    }
    uint64_t bytes = sizeof(holders_set) + 4ULL * n;
    holders_set *s = resize(ix, NULL, 0, bytes, 1);
    if (!s)
        return NONE;
    uint32_t number = ix->free_set;
    if (number != NONE) {
        ix->free_set = (uint32_t)((uintptr_t)ix->sets[number] >> 1);
    } else {
        if (ix->n_sets == ix->set_room) {
            uint32_t room = ix->set_room + ix->set_room / 8 + 16;
            void *sets = room > SET_NUMBER ? NULL : resize(ix, ix->sets, ix->set_room * 8ULL, room * 8ULL, 1);
            if (!sets) {
                release(ix, s, bytes, 1);
                return NONE;
            }
            ix->sets = sets;
            ix->set_room = room;
        }
        number = ix->n_sets++;
    }
    s->refs = 1;
    s->n = n;
    memcpy(s->members, members, n * 4);
    ix->sets[number] = s;
    ix->live_sets++;
    /* Where the entry can't be made, or another set has this hash, the set is just not shared. */
    if (!known)
        put(ix, &ix->interned, in, &(slot){hash, number}, SLOT);
    return number;
}

static void set_drop(BlockIndex *ix, uint32_t holders) {
    if (holders & TWO || !(holders & SET))
        return;
    uint32_t number = holders & SET_NUMBER;
    holders_set *s = ix->sets[number];
    if (--s->refs)
        return;
    page **in;
    uint32_t at;
    const slot *known = find(&ix->interned, set_hash(s->members, s->n), SLOT, &in, &at);
    if (known && known->value == number)
        take(ix, &ix->interned, in, at, SLOT);
    release(ix, s, sizeof(holders_set) + 4ULL * s->n, 1);
    ix->sets[number] = (holders_set *)(((uintptr_t)ix->free_set << 1) | 1);
    ix->free_set = number;
    ix->live_sets--;
    ix->last_step.from = NONE;
}

/* Members to 32 bits, holding the set where one is needed. NONE where there is no memory. */
static uint32_t holders_of(BlockIndex *ix, const uint32_t *members, uint32_t n) {
    if (n == 0)
        return 0;
    if (n == 1)
        return members[0];
    if (n == 2 && (members[0] & 15) == ON_GPU && (members[1] & 15) == ON_GPU)
        return TWO | (members[1] >> 4) << 15 | members[0] >> 4;
    uint32_t number = set_of(ix, members, n);
    return number == NONE ? NONE : SET | number;
}

static always_inline uint32_t place_among(const uint32_t *members, uint32_t n, uint32_t place) {
    uint32_t low = 0;
    while (n) {
        uint32_t half = n / 2;
        if (members[low + half] >> 4 < place) {
            low += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return low;
}

static int scratch_for(BlockIndex *ix, uint32_t n) {
    if (n <= ix->scratch_room)
        return 1;
    uint32_t room = n + n / 2 + 64;
    void *at = resize(ix, ix->scratch, ix->scratch_room * 4ULL, room * 4ULL, 1);
    if (!at)
        return 0;
    ix->scratch = at;
    ix->scratch_room = room;
    return 1;
}

/* Where the last step of this kind led, one reference held, or NONE. Blocks of one prompt tend to go from the same holders
 * to the same holders, so it often is the one. */
static always_inline uint32_t as_before(BlockIndex *ix, uint32_t holders, uint32_t place, uint32_t tiers, int adds) {
    const step *last = &ix->last_step;
    if (last->from != holders || last->place != place || last->tiers != tiers || last->adds != adds)
        return NONE;
    if (last->to & SET && !(last->to & TWO))
        ix->sets[last->to & SET_NUMBER]->refs++;
    return last->to;
}

/* The holders with these tiers of this place added or taken away, one reference held; NONE where there is no memory. */
static uint32_t changed(BlockIndex *ix, uint32_t holders, uint32_t place, uint32_t tiers, int adds) {
    uint32_t two[2], n;
    const uint32_t *members = members_of(ix, holders, two, &n);
    if (!scratch_for(ix, n + 1))
        return NONE;
    uint32_t *out = ix->scratch, at = place_among(members, n, place);
    int there = at < n && members[at] >> 4 == place;
    uint32_t had = there ? members[at] & 15 : 0, has = adds ? had | tiers : had & ~tiers, skip = there;
    memcpy(out, members, at * 4);
    if (has)
        out[at] = MEMBER(place, has);
    memcpy(out + at + (has != 0), members + at + skip, (n - at - skip) * 4);
    uint32_t to = holders_of(ix, out, n - skip + (has != 0));
    if (to != NONE)
        ix->last_step = (step){holders, to, place, tiers, adds};
    return to;
}

/* Gives a block its new holders; the old ones lose theirs. */
static always_inline void settle(BlockIndex *ix, uint32_t *holders, uint32_t to) {
    uint32_t old = *holders;
    ix->set_charge += charge_of(ix, to) - charge_of(ix, old);
    *holders = to | (old & USED);
    set_drop(ix, old);
}

static always_inline uint32_t tiers_at(const BlockIndex *ix, uint32_t holders, uint32_t place) {
    uint32_t two[2], n;
    const uint32_t *members = members_of(ix, holders, two, &n);
    uint32_t at = place_among(members, n, place);
    return at < n && members[at] >> 4 == place ? members[at] & 15 : 0;
}

/* ---- A place holds a block ---- */

/* Two engine hashes of one place may stand for one block; then the tier is held until both are gone. */
static always_inline uint64_t alias_key(uint64_t block, uint32_t place, uint32_t tier) {
    return spread(block ^ fold(place << 2 | tier, K[3]));
}

static int add_alias(BlockIndex *ix, uint64_t block, uint32_t place, uint32_t tier) {
    uint64_t key = alias_key(block, place, tier);
    page **in;
    uint32_t at;
    slot *known = find(&ix->aliases, key, SLOT, &in, &at);
    if (known) {
        known->value++;
        return 1;
    }
    return put(ix, &ix->aliases, in, &(slot){key, 1}, SLOT);
}

static int drop_alias(BlockIndex *ix, uint64_t block, uint32_t place, uint32_t tier) {
    page **in;
    uint32_t at;
    slot *known = find(&ix->aliases, alias_key(block, place, tier), SLOT, &in, &at);
    if (!known)
        return 0;
    if (!--known->value)
        take(ix, &ix->aliases, in, at, SLOT);
    return 1;
}

/* The place holds the block in this tier from now on; 0 where the budget does not allow it. */
static int hold(BlockIndex *ix, uint64_t block, uint32_t place, uint32_t tier) {
    page **in;
    uint32_t at, bit = 1u << tier;
    slot *known = find(&ix->blocks, block, SLOT, &in, &at);
    if (!known)
        return put(ix, &ix->blocks, in, &(slot){block, MEMBER(place, bit)}, SLOT);
    uint32_t holders = known->value, to = as_before(ix, holders & ~USED, place, bit, 1);
    if (to == NONE) {
        if (tiers_at(ix, holders, place) & bit)
            return add_alias(ix, block, place, tier);
        to = changed(ix, holders & ~USED, place, bit, 1);
        if (to == NONE)
            return 0;
    }
    if (charged_bytes(ix) + charge_of(ix, to) - charge_of(ix, holders) > ix->budget_bytes) {
        set_drop(ix, to);
        return 0;
    }
    settle(ix, &holders, to);
    known->value = holders;
    return 1;
}

/* The place lets go of the block in these tiers; whether the block has other holders from then on. */
static int let_go(BlockIndex *ix, uint64_t block, uint32_t place, uint32_t tiers) {
    if (ix->aliases.count)
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (tiers & 1u << tier && drop_alias(ix, block, place, tier))
                tiers &= ~(1u << tier);
    page **in;
    uint32_t at;
    slot *known = tiers ? find(&ix->blocks, block, SLOT, &in, &at) : NULL;
    if (!known)
        return 0;
    uint32_t holders = known->value, to = 0;
    if ((holders & ~USED) != MEMBER(place, tiers)) {
        to = as_before(ix, holders & ~USED, place, tiers, 0);
        if (to == NONE)
            to = changed(ix, holders & ~USED, place, tiers, 0);
        if (to == NONE) /* without memory for a smaller set, the block is forgotten: less is believed, nothing wrong */
            to = 0;
    }
    int other = to != (holders & ~USED);
    settle(ix, &holders, to);
    if (to)
        known->value = holders;
    else
        take(ix, &ix->blocks, in, at, SLOT);
    return other;
}

/* ---- Pairs: counts by tier, and an age ---- */

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

static always_inline uint32_t aged_now(const BlockIndex *ix, uint32_t counts) {
    return (counts & COUNTS) | ix->epoch << AGE_SHIFT;
}

static always_inline uint64_t random_of(BlockIndex *ix) {
    ix->random ^= ix->random << 13;
    ix->random ^= ix->random >> 7;
    return ix->random ^= ix->random << 17;
}

static void drop_pair(BlockIndex *ix, uint32_t at_place, page **in, uint32_t at) {
    pair gone;
    memcpy(&gone, entry(*in, at, PAIR), PAIR);
    take(ix, &ix->places[at_place].held, in, at, PAIR);
    ix->pairs--;
    let_go(ix, gone.block, at_place, tiers_in(gone.counts));
}

static always_inline uint64_t block_key(const BlockIndex *ix, uint64_t hash) { return spread(hash ^ ix->secret); }

static always_inline uint64_t count_of(const place *p) { return p->mirror ? mirrors->count(p->mirror) : p->held.count; }

/* A mirrored place lets go of these; how many of them it held. */
static uint64_t let_go_all(BlockIndex *ix, uint32_t at_place, const uint8_t *hashes, size_t n) {
    uint64_t blocks[AHEAD], held = 0;
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t few = n - start < AHEAD ? n - start : AHEAD;
        for (size_t i = 0; i < few; i++)
            blocks[i] = block_key(ix, read64(hashes + 8 * (start + i)));
        prefetch_keys(ix, &ix->blocks, blocks, few);
        for (size_t i = 0; i < few; i++)
            held += let_go(ix, blocks[i], at_place, ON_GPU);
    }
    return held;
}

/* Lets up to so many of a mirrored place's blocks go, the oldest first; how many there were. */
static size_t shed(BlockIndex *ix, uint32_t at_place, size_t most) {
    uint64_t hashes[AHEAD];
    size_t n = mirrors->shed(ix->places[at_place].mirror, hashes, most < AHEAD ? most : AHEAD);
    let_go_all(ix, at_place, (const uint8_t *)hashes, n);
    return n;
}

/* Forgets one old pair of the place that has most: of a few that lie side by side, the one stored longest ago whose block
 * no prompt matched of late. No place falls below another that floods. */
static int evict(BlockIndex *ix) {
    if (!ix->n_places)
        return 0;
    if (!ix->evictions_until_look-- || ix->places[ix->largest].state != LIVE || !count_of(&ix->places[ix->largest])) {
        ix->evictions_until_look = 256;
        uint64_t most = 0;
        for (uint32_t i = 0; i < ix->n_places; i++)
            if (ix->places[i].state == LIVE && count_of(&ix->places[i]) > most) {
                most = count_of(&ix->places[i]);
                ix->largest = i;
            }
        if (!most)
            return 0;
    }
    place *from = &ix->places[ix->largest];
    if (from->mirror) {
        ix->evicted++;
        return shed(ix, ix->largest, 1) > 0;
    }
    uint32_t i, tries = 16; /* a page by how many entries it has, or pages would run dry */
    do
        i = (uint32_t)(random_of(ix) % from->held.n_pages);
    while (tries-- && random_of(ix) % (2 * PAGE_ENTRIES) >= from->held.pages[i]->n);
    while (!from->held.pages[i]->n)
        i = (i + 1) % from->held.n_pages;
    page *p = from->held.pages[i];
    pair *pairs = (pair *)entry(p, 0, PAIR);
    uint32_t first = (uint32_t)(random_of(ix) % p->n), looks = p->n < 16 ? p->n : 16, oldest = 0;
    for (int chances = 8; chances >= 0; chances--) {
        uint32_t most_age = 0;
        for (uint32_t k = 0; k < looks; k++) {
            uint32_t at = (first + k) % p->n;
            uint32_t age = (ix->epoch - (pairs[at].counts >> AGE_SHIFT)) % AGES + 1;
            if (age > most_age) {
                most_age = age;
                oldest = at;
            }
        }
        pair *candidate = &pairs[oldest];
        slot *block = chances ? find_slot(&ix->blocks, candidate->block) : NULL;
        if (!block || !(block->value & USED))
            break;
        block->value &= ~USED;
        candidate->counts = aged_now(ix, candidate->counts);
    }
    from->lost = 1;
    ix->evicted++;
    drop_pair(ix, ix->largest, &from->held.pages[i], oldest);
    return 1;
}

/* Sweeps up to so many pairs of places that were cleared. */
static void sweep(BlockIndex *ix, uint64_t pairs) {
    while (ix->dying_place != NONE && pairs) {
        uint32_t number = ix->dying_place;
        place *p = &ix->places[number];
        table *t = &p->held;
        while (p->mirror && pairs) {
            size_t most = pairs < AHEAD ? (size_t)pairs : AHEAD, gone = shed(ix, number, most);
            ix->dying_pairs -= gone;
            pairs -= gone;
            if (gone < most)
                Py_CLEAR(p->mirror);
        }
        if (p->mirror)
            return;
        while (t->n_pages && pairs) {
            page **where = &t->pages[t->n_pages - 1], *last = *where;
            uint32_t few = last->n < 16 ? last->n : 16;
            few = pairs < few ? (uint32_t)pairs : few;
            const pair *gone = (pair *)entry(last, last->n - few, PAIR);
            uint64_t blocks[16];
            for (uint32_t i = 0; i < few; i++)
                blocks[i] = gone[i].block;
            prefetch_keys(ix, &ix->blocks, blocks, few);
            for (uint32_t i = 0; i < few; i++)
                let_go(ix, gone[i].block, number, tiers_in(gone[i].counts));
            if (few)
                last->n -= few;
            t->count -= few;
            ix->dying_pairs -= few;
            pairs -= few;
            if (!last->n) {
                page_fit(ix, t, where, 0, PAIR);
                t->n_pages--;
            }
        }
        if (!t->n_pages) {
            table_free(ix, t, PAIR);
            ix->dying_place = p->next;
            p->state = FREE;
            p->next = ix->free_place;
            ix->free_place = number;
        }
    }
}

/* Before a store: near the budget, some of what is held goes. What still does not fit is refused where it is put. */
static always_inline void make_room(BlockIndex *ix) {
    uint64_t charged = charged_bytes(ix);
    if (__builtin_expect(charged <= ix->soft_bytes, 1))
        return;
    int few = charged - ix->soft_bytes > (ix->budget_bytes - ix->soft_bytes) / 2 ? 8 : 2;
    if (ix->dying_place != NONE)
        sweep(ix, few);
    while (few-- && charged_bytes(ix) > ix->soft_bytes && evict(ix))
        ;
}

/* One block stored at a place. 0 where the budget refuses it. */
static int store_one(BlockIndex *ix, uint32_t at_place, uint64_t key, uint64_t block, uint32_t tier) {
    make_room(ix);
    place *to = &ix->places[at_place];
    page **in;
    uint32_t at;
    pair *known = find(&to->held, key, PAIR, &in, &at);
    if (known && known->block != block) { /* the engine uses this hash for something else now */
        ix->conflicts++;
        drop_pair(ix, at_place, in, at);
        known = find(&to->held, key, PAIR, &in, &at);
    }
    if (!known) {
        pair fresh = {key, block, aged_now(ix, 1u << count_shift[tier])};
        if (!hold(ix, block, at_place, tier))
            goto refuse;
        if (!put(ix, &to->held, in, &fresh, PAIR)) {
            let_go(ix, block, at_place, 1u << tier);
            goto refuse;
        }
        ix->pairs++;
        if (!ix->stores_until_epoch--) {
            ix->epoch = (ix->epoch + 1) % AGES;
            ix->stores_until_epoch = ix->pairs / 16 + 256;
        }
        return 1;
    }
    uint32_t count = count_in(known->counts, tier);
    if (!count && !hold(ix, block, at_place, tier))
        goto refuse;
    if (count == count_max[tier])
        ix->saturated++;
    else
        known->counts += 1u << count_shift[tier];
    known->counts = aged_now(ix, known->counts);
    return 1;
refuse:
    to->lost = 1;
    ix->refused++;
    return 0;
}

static uint64_t store_all(BlockIndex *ix, uint32_t at_place, const uint64_t *keys, const uint64_t *blocks, size_t n,
                          uint32_t tier) {
    uint64_t stored = 0;
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t end = n - start < AHEAD ? n : start + AHEAD;
        prefetch_keys(ix, &ix->places[at_place].held, keys + start, end - start);
        prefetch_keys(ix, &ix->blocks, blocks + start, end - start);
        for (size_t i = start; i < end; i++)
            stored += store_one(ix, at_place, keys[i], blocks[i], tier);
    }
    if (ix->dying_place != NONE)
        sweep(ix, 16 + 2 * n);
    return stored;
}

static uint64_t remove_all(BlockIndex *ix, uint32_t at_place, const uint64_t *keys, size_t n, uint32_t tier) {
    uint64_t removed = 0, gone[AHEAD];
    table *held = &ix->places[at_place].held;
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t end = n - start < AHEAD ? n : start + AHEAD, n_gone = 0;
        prefetch_keys(ix, held, keys + start, end - start);
        for (size_t i = start; i < end; i++) {
            page **in;
            uint32_t at;
            pair *known = find(held, keys[i], PAIR, &in, &at);
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
                take(ix, held, in, at, PAIR);
                ix->pairs--;
            }
        }
        prefetch_keys(ix, &ix->blocks, gone, n_gone);
        for (size_t i = 0; i < n_gone; i++)
            let_go(ix, gone[i], at_place, 1u << tier);
    }
    if (ix->dying_place != NONE)
        sweep(ix, 16 + 2 * n);
    return removed;
}

/* ---- Match ---- */

/* Those still running, by rising place. */
typedef struct {
    uint32_t *who;  /* as a member that has it on the GPU */
    uint32_t *runs; /* its entry in reached << 4 | the tiers whose depth still grows */
    uint32_t n;
    reach *reached;
} race;

/* The tiers that a block in these tiers counts for: the nearest of them, and all farther ones. */
static always_inline uint32_t counts_for(uint32_t tiers) {
    uint32_t t = tiers | tiers << 1;
    return (t | t << 2) & 15;
}

static always_inline void stop(race *r, uint32_t run, uint32_t tiers, uint32_t depth) {
    for (uint32_t tier = 0; tier < TIERS; tier++)
        if (tiers & 1u << tier)
            r->reached[run >> 4].depth[tier] = depth;
}

/* Whether a member is this runner and has the block on the GPU: then every tier runs on. */
static always_inline int runs_on(uint32_t member, uint32_t who) { return !((member ^ who) & ~14u); }

/* Every runner meets the holders of the block at this depth. */
static void meet(race *r, const uint32_t *members, uint32_t n, uint32_t depth) {
    if (n == r->n) {
        uint32_t differs = 0;
        for (uint32_t i = 0; i < n; i++)
            differs |= (members[i] ^ r->who[i]) & ~14u;
        if (!differs)
            return;
    }
    int leap = n / 16 > r->n;
    uint32_t m = 0, left = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        uint32_t who = r->who[i], run = r->runs[i];
        if (m < n && runs_on(members[m], who)) {
            m++;
        } else {
            if (leap)
                m += place_among(members + m, n - m, who >> 4);
            else
                while (m < n && members[m] >> 4 < who >> 4)
                    m++;
            uint32_t tiers = m < n && members[m] >> 4 == who >> 4 ? counts_for(members[m] & 15) : 0;
            uint32_t ends = run & 15 & ~tiers;
            if (ends) {
                stop(r, run, ends, depth);
                run &= ~ends;
                if (!(run & 15))
                    continue;
            }
        }
        r->who[left] = who;
        r->runs[left++] = run;
    }
    r->n = left;
}

#define FEW 128

typedef struct {
    race race;
    uint32_t few[2 * FEW];
    reach few_reached[FEW];
    void *many;
    uint32_t n_reached;
} heat;

static int start_race(const BlockIndex *ix, heat *h, uint32_t holders) {
    uint32_t two[2], n;
    const uint32_t *members = members_of(ix, holders, two, &n);
    uint32_t *rows = h->few;
    h->race.reached = h->few_reached;
    if (n > FEW) {
        rows = h->many = PyMem_RawMalloc(n * (sizeof(reach) + 2 * sizeof(uint32_t)));
        if (!rows)
            return 0;
        h->race.reached = (reach *)(rows + 2 * (size_t)n);
    }
    h->race.who = rows;
    h->race.runs = rows + n;
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        const place *p = &ix->places[members[i] >> 4];
        if (p->state != LIVE)
            continue;
        h->race.who[k] = (members[i] & ~15u) | ON_GPU;
        h->race.runs[k] = k << 4 | counts_for(members[i] & 15);
        h->race.reached[k] = (reach){p->door, {0}};
        k++;
    }
    h->race.n = h->n_reached = k;
    return 1;
}

#define FEW_MIRRORS 4 /* where there are so many blocks for each runner, it is quicker to ask their mirrors */

/* Where all runners are mirrored: their mirrors say how far each of them gets, piece by piece. 0 where that is not so. */
static int ask_mirrors(const BlockIndex *ix, race *r, const uint8_t *hashes, size_t n) {
    if (n < FEW_MIRRORS * (size_t)r->n)
        return 0;
    for (uint32_t i = 0; i < r->n; i++)
        if (!ix->places[r->who[i] >> 4].mirror)
            return 0;
    for (uint32_t i = 0; i < r->n; i++)
        stop(r, r->runs[i], r->runs[i], (uint32_t)mirrors->held(ix->places[r->who[i] >> 4].mirror, hashes, n));
    r->n = 0;
    return 1;
}

/* Runs the hashes down to where nobody holds the next block. Returns 0 without memory. */
static int run_match(BlockIndex *ix, heat *h, const uint8_t *hashes, size_t n) {
    uint32_t last = 0, depth = 0;
    uint64_t keys[AHEAD];
    h->many = NULL;
    h->n_reached = h->race.n = 0;
    size_t batch = 2;
    for (size_t start = 0; start < n; start += batch, batch = batch < AHEAD ? batch * 4 : batch) {
        batch = batch > AHEAD ? AHEAD : batch;
        size_t end = n - start < batch ? n : start + batch;
        for (size_t i = start; i < end; i++)
            keys[i - start] = spread(read64(hashes + 8 * i) ^ ix->secret);
        prefetch_keys(ix, &ix->blocks, keys, end - start);
        for (size_t i = start; i < end; i++) {
            slot *block = find_slot(&ix->blocks, keys[i - start]);
            if (!block)
                goto end;
            uint32_t holders = block->value & ~USED;
            if (i == 0) {
                if (!start_race(ix, h, holders))
                    return 0;
                if (ask_mirrors(ix, &h->race, hashes, n))
                    return 1;
            } else if (holders != last) {
                uint32_t two[2], n_members;
                const uint32_t *members = members_of(ix, holders, two, &n_members);
                meet(&h->race, members, n_members, depth);
            }
            if (!h->race.n)
                goto end;
            if (!(block->value & USED))
                block->value |= USED;
            last = holders;
            depth++;
        }
    }
end:
    for (uint32_t i = 0; i < h->race.n; i++)
        stop(&h->race, h->race.runs[i], h->race.runs[i], depth);
    return 1;
}

/* ---- Reading what Python gives ---- */

#define SOME 256

/* 64-bit values, from a buffer as it lies or from a sequence; close_values() when done. */
typedef struct {
    uint64_t *at; /* ours to change */
    size_t n;
    uint64_t some[SOME];
} values;

static int room_for(values *v, size_t n) {
    v->n = n;
    v->at = n <= SOME ? v->some : PyMem_RawMalloc(n * sizeof(uint64_t));
    if (v->at)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void close_values(values *v) {
    if (v->at && v->at != v->some)
        PyMem_RawFree(v->at);
    v->at = NULL;
}

/* Signed or unsigned, as 64 bits. Hashes come as ints by the thousand, so those of the usual size are read as they lie. */
static always_inline int read_int(PyObject *item, uint64_t *out, const char *what) {
    if (!PyLong_Check(item)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %.80s", what, Py_TYPE(item)->tp_name);
        return -1;
    }
#if PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    const digit *digits = ((PyLongObject *)item)->ob_digit;
    if (Py_SIZE(item) == 3 && digits[2] < 16) {
        *out = digits[0] | (uint64_t)digits[1] << 30 | (uint64_t)digits[2] << 60;
        return 0;
    }
#endif
    int over;
    long v = PyLong_AsLongAndOverflow(item, &over);
    if (!over) {
        *out = (uint64_t)v;
        return 0;
    }
    if (over > 0) {
        *out = PyLong_AsUnsignedLong(item);
        if (!PyErr_Occurred())
            return 0;
        PyErr_Clear();
    }
    PyErr_Format(PyExc_ValueError, "%s does not fit 64 bits", what);
    return -1;
}

static always_inline int read_hash(PyObject *item, uint64_t *out) {
    if (PyLong_CheckExact(item))
        return read_int(item, out, "a hash");
    if (PyBytes_CheckExact(item)) {
        Py_ssize_t n = PyBytes_GET_SIZE(item);
        if (n == 0 || n > MAX_ENGINE_HASH_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a hash must have 1 to 64 bytes");
            return -1;
        }
        *out = content(K[3], (const uint8_t *)PyBytes_AS_STRING(item), n);
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "a hash must be an int or bytes, not %.80s", Py_TYPE(item)->tp_name);
    return -1;
}

/* A buffer of integers of this size, or of bytes that hold such; -1 with an error, else the number of them. */
static Py_ssize_t open_buffer(PyObject *from, Py_buffer *view, Py_ssize_t size, Py_ssize_t other_size, const char *what) {
    if (PyObject_GetBuffer(from, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return -1;
    const char *format = view->format ? view->format : view->itemsize == 1 ? "B" : "?";
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    int integers = strlen(format) == 1 && strchr("bBchHiIlLqQnN", *format) != NULL;
    if (integers && view->itemsize == 1 && view->len % size == 0)
        return view->len / size;
    if (integers && (view->itemsize == size || view->itemsize == other_size))
        return view->len / view->itemsize;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "%s must be integers of %zd bits", what, 8 * size);
    return -1;
}

/* Hashes: a buffer of 64-bit integers, or a sequence of ints (and bytes, for what an engine calls a hash). */
static int open_hashes(PyObject *from, values *out) {
    out->at = NULL;
    if (PyList_CheckExact(from) || PyTuple_CheckExact(from)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(from);
        if (room_for(out, n) < 0)
            return -1;
        PyObject **items = PySequence_Fast_ITEMS(from);
        for (Py_ssize_t i = 0; i < n; i++)
            if (read_hash(items[i], &out->at[i]) < 0) {
                close_values(out);
                return -1;
            }
        return 0;
    }
    Py_buffer view;
    Py_ssize_t n = open_buffer(from, &view, 8, 8, "hashes");
    if (n < 0)
        return -1;
    int failed = room_for(out, n);
    if (!failed)
        memcpy(out->at, view.buf, (size_t)n * 8);
    PyBuffer_Release(&view);
    return failed;
}

/* Token ids as 32-bit integers, from a buffer of those (used as it lies), of 64-bit ones, or from a sequence of ints. */
typedef struct {
    const uint8_t *at;
    size_t n;
    Py_buffer view;
    uint32_t *own;
    int viewed;
} tokens;

static void close_tokens(tokens *t) {
    if (t->viewed)
        PyBuffer_Release(&t->view);
    PyMem_RawFree(t->own);
}

static int bad_token(void) {
    PyErr_SetString(PyExc_ValueError, "a token id must be within 32 bits, and not negative");
    return -1;
}

static int own_tokens(tokens *out, size_t n) {
    out->n = n;
    out->own = PyMem_RawMalloc(n * 4 + 1);
    out->at = (const uint8_t *)out->own;
    if (out->own)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int token_sequence(PyObject *from, tokens *out) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(from);
    if (own_tokens(out, n) < 0)
        return -1;
    PyObject **items = PySequence_Fast_ITEMS(from);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyLong_Check(items[i])) {
            PyErr_Format(PyExc_TypeError, "a token id must be an int, not %.80s", Py_TYPE(items[i])->tp_name);
            return -1;
        }
        long v = PyLong_AsLong(items[i]);
        if (v < 0 || v > UINT32_MAX)
            return PyErr_Clear(), bad_token();
        out->own[i] = (uint32_t)v;
    }
    return 0;
}

static int token_buffer(PyObject *from, tokens *out) {
    Py_ssize_t n = open_buffer(from, &out->view, 4, 8, "token_ids");
    if (n < 0)
        return -1;
    out->viewed = 1;
    out->n = n;
    out->at = out->view.buf;
    uint64_t high = 0;
    if (out->view.itemsize == 8) {
        const uint8_t *wide = out->view.buf;
        if (own_tokens(out, n) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < n; i++) {
            uint64_t v = read64(wide + 8 * i);
            high |= v >> 32;
            out->own[i] = (uint32_t)v;
        }
    } else if (out->view.itemsize == 4 && strpbrk(out->view.format, "il")) {
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t v;
            memcpy(&v, out->at + 4 * i, 4);
            high |= v < 0;
        }
    }
    return high ? bad_token() : 0;
}

static int open_tokens(PyObject *from, tokens *out) {
    *out = (tokens){0};
    int failed = PyList_CheckExact(from) || PyTuple_CheckExact(from) ? token_sequence(from, out) : token_buffer(from, out);
    if (failed)
        close_tokens(out);
    return failed;
}

static int read_number(PyObject *from, long least, long most, long *out, const char *what) {
    *out = PyLong_AsLong(from);
    if (*out == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (*out >= least && *out <= most) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be %ld to %ld", what, least, most);
    return -1;
}

static int expect(Py_ssize_t n, Py_ssize_t least, Py_ssize_t most, const char *signature) {
    if (n >= least && n <= most)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %s", signature);
    return -1;
}

/* ---- The chain ---- */

/* `extra` is NULL, or a sequence with bytes or None for each of n blocks. */
static int check_extra(PyObject *extra, size_t n) {
    if (!extra)
        return 0;
    if (!PyList_CheckExact(extra) && !PyTuple_CheckExact(extra)) {
        PyErr_SetString(PyExc_TypeError, "extra must be a list or a tuple");
        return -1;
    }
    if ((size_t)PySequence_Fast_GET_SIZE(extra) < n) {
        PyErr_SetString(PyExc_ValueError, "extra must have an entry for each block");
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(extra, i);
        if (item != Py_None && !PyBytes_CheckExact(item)) {
            PyErr_SetString(PyExc_TypeError, "an entry of extra must be bytes or None");
            return -1;
        }
    }
    return 0;
}

/* Hashes of n blocks into out. What is mixed into a block beyond its tokens (LoRA, salt, pictures) comes in `extra`. */
static void chain_blocks(uint64_t namespace, uint64_t parent, const uint8_t *ids, size_t block_bytes, PyObject *extra, size_t n,
                         uint8_t *out) {
    for (size_t i = 0; i < n; i++) {
        uint64_t block = content(K[0], ids + i * block_bytes, block_bytes);
        if (extra) {
            PyObject *item = PySequence_Fast_GET_ITEM(extra, i);
            if (item != Py_None && PyBytes_GET_SIZE(item))
                block = fold(block ^ K[2],
                             content(K[1], (const uint8_t *)PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item)) ^ K[3]);
        }
        parent = chained(namespace, parent, block);
        memcpy(out + 8 * i, &parent, 8);
    }
}

static PyObject *chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    uint64_t namespace, parent;
    long block_size;
    tokens ids;
    (void)self;
    if (expect(n_args, 4, 5, "(namespace, parent, token_ids, block_size, extra=None)") < 0 ||
        read_int(args[0], &namespace, "namespace") < 0 || (parent = namespace, 0) ||
        (args[1] != Py_None && read_int(args[1], &parent, "parent") < 0) ||
        read_number(args[3], 1, MAX_BLOCK_TOKENS, &block_size, "block_size") < 0 || open_tokens(args[2], &ids) < 0)
        return NULL;
    PyObject *extra = n_args == 5 && args[4] != Py_None ? args[4] : NULL, *hashes = NULL;
    size_t n = ids.n / block_size;
    if (!check_extra(extra, n) && (hashes = PyBytes_FromStringAndSize(NULL, n * 8)))
        chain_blocks(namespace, parent, ids.at, 4 * (size_t)block_size, extra, n, (uint8_t *)PyBytes_AS_STRING(hashes));
    close_tokens(&ids);
    return hashes;
}

static PyObject *engine_hash(PyObject *self, PyObject *item) {
    uint64_t hash;
    (void)self;
    return read_hash(item, &hash) < 0 ? NULL : PyLong_FromUnsignedLongLong(hash);
}

/* ---- BlockIndex ---- */

/* A pair's key: by the engine's hash, or by our own where no engine hash is known. */
static always_inline uint64_t engine_key(const BlockIndex *ix, uint64_t hash) { return spread(hash ^ ix->secret ^ K[1]); }
static always_inline uint64_t own_key(const BlockIndex *ix, uint64_t hash) { return spread(hash ^ ix->secret ^ K[2]); }

static int read_place(const BlockIndex *ix, PyObject *from, uint32_t *out) {
    long number = PyLong_AsLong(from);
    if (number == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (number >= 0 && number < ix->n_doors && ix->doors[number].number != NONE) {
        *out = ix->doors[number].number;
        return 0;
    }
    PyErr_SetString(PyExc_ValueError, "no such place is open");
    return -1;
}

static int read_place_and_tier(const BlockIndex *ix, PyObject *a, PyObject *b, uint32_t *at_place, uint32_t *tier) {
    long t;
    if (read_place(ix, a, at_place) < 0 || read_number(b, 0, TIERS - 1, &t, "tier") < 0)
        return -1;
    *tier = (uint32_t)t;
    return 0;
}

/* What comes to a mirrored place comes by `keep`. */
static int read_stored(const BlockIndex *ix, PyObject *a, PyObject *b, uint32_t *at_place, uint32_t *tier) {
    if (read_place_and_tier(ix, a, b, at_place, tier) < 0)
        return -1;
    if (!ix->places[*at_place].mirror)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a mirrored place keeps what its mirror is told of");
    return -1;
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"budget_bytes", NULL};
    unsigned long long budget;
    PyObject *given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &given))
        return NULL;
    budget = PyLong_AsUnsignedLongLong(given);
    if (budget == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    if (budget < MIN_BUDGET_BYTES || budget > 1ULL << 46) {
        PyErr_Format(PyExc_ValueError, "budget_bytes must be at least %d", MIN_BUDGET_BYTES);
        return NULL;
    }
    BlockIndex *ix = (BlockIndex *)type->tp_alloc(type, 0); /* all zero */
    if (!ix)
        return NULL;
    if (getrandom(&ix->secret, 8, 0) != 8 || getrandom(&ix->random, 8, 0) != 8) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(ix);
        return NULL;
    }
    ix->random |= 1;
    ix->budget_bytes = budget;
    ix->soft_bytes = budget - (budget / 64 > 8192 ? budget / 64 : 8192);
    ix->interned.of_sets = 1;
    ix->free_set = ix->free_place = ix->closed_door = ix->dying_place = NONE;
    ix->last_step.from = NONE;
    ix->table_bytes = taken(sizeof(BlockIndex));
    return (PyObject *)ix;
}

static void index_dealloc(BlockIndex *ix) {
    for (uint32_t i = 0; i < ix->n_places; i++) {
        table_free(ix, &ix->places[i].held, PAIR);
        if (ix->places[i].mirror)
            mirrors->release(ix->places[i].mirror);
        Py_XDECREF(ix->places[i].mirror);
    }
    table_free(ix, &ix->blocks, SLOT);
    table_free(ix, &ix->interned, SLOT);
    table_free(ix, &ix->aliases, SLOT);
    for (uint32_t i = 0; i < ix->n_sets; i++)
        if (!((uintptr_t)ix->sets[i] & 1))
            PyMem_RawFree(ix->sets[i]);
    PyMem_RawFree(ix->sets);
    PyMem_RawFree(ix->scratch);
    PyMem_RawFree(ix->places);
    PyMem_RawFree(ix->doors);
    Py_TYPE(ix)->tp_free(ix);
}

/* A place of the tables behind this door. Places are few, so they stand in the account, not under it. */
static int fresh_place(BlockIndex *ix, uint32_t door) {
    if (ix->free_place == NONE && ix->n_places == MAX_PLACES)
        sweep(ix, UINT64_MAX);
    uint32_t number = ix->free_place;
    if (number != NONE) {
        ix->free_place = ix->places[number].next;
    } else {
        if (ix->n_places == MAX_PLACES)
            return -1;
        if (ix->n_places == ix->place_room) {
            uint32_t room = ix->place_room + ix->place_room / 4 + 16;
            void *places = PyMem_RawRealloc(ix->places, room * sizeof(place));
            if (!places)
                return -1;
            ix->table_bytes += taken(room * sizeof(place)) - taken(ix->place_room * sizeof(place));
            ix->places = places;
            ix->place_room = room;
        }
        number = ix->n_places++;
    }
    ix->places[number] = (place){.door = door, .state = LIVE};
    ix->doors[door].number = number;
    return 0;
}

/* The mirror is the caller's again, and empty; what it held is still to be swept. Without memory, that is done at once. */
static void detach_mirror(BlockIndex *ix, uint32_t number) {
    PyObject *mirror = ix->places[number].mirror, *swept = mirrors->detach(mirror);
    if (!swept) {
        PyErr_Clear();
        while (shed(ix, number, AHEAD))
            ;
    }
    ix->places[number].mirror = swept;
    mirrors->release(mirror);
    Py_DECREF(mirror);
}

static void retire_place(BlockIndex *ix, uint32_t number) {
    place *p = &ix->places[number];
    if (p->mirror)
        detach_mirror(ix, number);
    p->state = DYING;
    p->next = ix->dying_place;
    ix->dying_place = number;
    ix->pairs -= p->held.count;
    ix->dying_pairs += count_of(p);
}

static void close_door(BlockIndex *ix, uint32_t at) {
    ix->doors[at] = (door){NONE, ix->closed_door};
    ix->closed_door = at;
}

#define SWEPT_AT_ONCE 4096

/* A place behind a door of its own, by whose number it is known. */
static PyObject *open_door(BlockIndex *ix, PyObject *mirror) {
    if (ix->closed_door == NONE) {
        if (ix->n_doors == ix->door_room) {
            uint32_t room = ix->door_room + ix->door_room / 4 + 16;
            void *doors = PyMem_RawRealloc(ix->doors, room * sizeof(door));
            if (!doors)
                return PyErr_NoMemory();
            ix->table_bytes += taken(room * sizeof(door)) - taken(ix->door_room * sizeof(door));
            ix->doors = doors;
            ix->door_room = room;
        }
        close_door(ix, ix->n_doors++);
    }
    uint32_t at = ix->closed_door, next = ix->doors[at].next;
    if (fresh_place(ix, at) < 0) {
        PyErr_Format(PyExc_OverflowError, "at most %d places", MAX_PLACES);
        return NULL;
    }
    ix->closed_door = next;
    ix->places[ix->doors[at].number].mirror = Py_XNewRef(mirror);
    return PyLong_FromUnsignedLong(at);
}

static PyObject *index_open_place(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    PyObject *mirror = n_args && args[0] != Py_None ? args[0] : NULL;
    if (expect(n_args, 0, 1, "(mirror=None)") < 0)
        return NULL;
    if (mirror && !PyObject_TypeCheck(mirror, mirrors->type)) {
        PyErr_SetString(PyExc_TypeError, "a mirror must be a Recency");
        return NULL;
    }
    if (mirror && mirrors->count(mirror)) {
        PyErr_SetString(PyExc_ValueError, "a mirror must be empty at first");
        return NULL;
    }
    if (mirror && !mirrors->claim(mirror)) {
        PyErr_SetString(PyExc_ValueError, "a mirror must be of one place only");
        return NULL;
    }
    PyObject *number = open_door(ix, mirror);
    if (mirror && !number)
        mirrors->release(mirror);
    return number;
}

static PyObject *index_clear(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_place(ix, given, &number) < 0)
        return NULL;
    uint32_t at = ix->places[number].door;
    if (ix->places[number].mirror) {
        PyErr_SetString(PyExc_ValueError, "a mirrored place is closed, and another one opened");
        return NULL;
    }
    ix->places[number].lost = 0;
    if (!ix->places[number].held.count)
        Py_RETURN_NONE;
    int fresh = fresh_place(ix, at);
    retire_place(ix, number);
    sweep(ix, fresh < 0 ? UINT64_MAX : SWEPT_AT_ONCE); /* with none to go on with, this one is swept now */
    if (fresh < 0)
        fresh_place(ix, at);
    Py_RETURN_NONE;
}

static PyObject *index_close_place(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_place(ix, given, &number) < 0)
        return NULL;
    close_door(ix, ix->places[number].door);
    retire_place(ix, number);
    sweep(ix, SWEPT_AT_ONCE);
    Py_RETURN_NONE;
}

static PyObject *index_sweep(BlockIndex *ix, PyObject *given) {
    long most;
    if (read_number(given, 0, LONG_MAX, &most, "max_pairs") < 0)
        return NULL;
    sweep(ix, most);
    return PyLong_FromUnsignedLongLong(ix->dying_pairs);
}

static PyObject *index_store(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t at_place, tier;
    uint64_t namespace, parent, parent_hash = 0;
    long block_size;
    if (expect(n_args, 7, 8,
               "(place, namespace, parent_engine_hash, engine_hashes, token_ids, block_size, tier, extra=None)") < 0 ||
        read_stored(ix, args[0], args[6], &at_place, &tier) < 0 || read_int(args[1], &namespace, "namespace") < 0 ||
        (args[2] != Py_None && read_hash(args[2], &parent_hash) < 0) ||
        read_number(args[5], 1, MAX_BLOCK_TOKENS, &block_size, "block_size") < 0)
        return NULL;
    PyObject *extra = n_args == 8 && args[7] != Py_None ? args[7] : NULL, *result = NULL;
    values keys, blocks;
    tokens ids;
    blocks.at = NULL;
    if (open_hashes(args[3], &keys) < 0)
        return NULL;
    if (open_tokens(args[4], &ids) < 0) {
        close_values(&keys);
        return NULL;
    }
    if (ids.n % block_size || ids.n / block_size != keys.n) {
        PyErr_SetString(PyExc_ValueError, "token_ids must fill exactly one block for each engine hash");
        goto done;
    }
    if (check_extra(extra, keys.n) < 0 || room_for(&blocks, keys.n) < 0)
        goto done;
    parent = namespace;
    if (args[2] != Py_None) {
        page **in;
        uint32_t at;
        pair *known = find(&ix->places[at_place].held, engine_key(ix, parent_hash), PAIR, &in, &at);
        if (!known) {
            result = PyLong_FromLong(ix->places[at_place].lost ? PARENT_LOST : NO_PARENT);
            goto done;
        }
        known->counts = aged_now(ix, known->counts);
        parent = gathered(known->block) ^ ix->secret;
    }
    chain_blocks(namespace, parent, ids.at, 4 * (size_t)block_size, extra, keys.n, (uint8_t *)blocks.at);
    for (size_t i = 0; i < keys.n; i++) {
        keys.at[i] = engine_key(ix, keys.at[i]);
        blocks.at[i] = block_key(ix, blocks.at[i]);
    }
    result = PyLong_FromUnsignedLongLong(store_all(ix, at_place, keys.at, blocks.at, keys.n, tier));
done:
    close_tokens(&ids);
    close_values(&keys);
    close_values(&blocks);
    return result;
}

static PyObject *index_store_known(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t at_place, tier;
    values keys;
    if (expect(n_args, 3, 3, "(place, engine_hashes, tier)") < 0 ||
        read_stored(ix, args[0], args[2], &at_place, &tier) < 0 || open_hashes(args[1], &keys) < 0)
        return NULL;
    uint64_t stored = 0;
    for (size_t i = 0; i < keys.n; i++) {
        page **in;
        uint32_t at;
        uint64_t key = engine_key(ix, keys.at[i]);
        const pair *known = find(&ix->places[at_place].held, key, PAIR, &in, &at);
        if (!known)
            ix->unresolved++;
        else
            stored += store_one(ix, at_place, key, known->block, tier);
    }
    if (ix->dying_place != NONE)
        sweep(ix, 16 + 2 * keys.n);
    close_values(&keys);
    return PyLong_FromUnsignedLongLong(stored);
}

static PyObject *index_store_chain(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t at_place, tier;
    values blocks, keys;
    if (expect(n_args, 3, 4, "(place, hashes, tier, engine_hashes=None)") < 0 ||
        read_stored(ix, args[0], args[2], &at_place, &tier) < 0 || open_hashes(args[1], &blocks) < 0)
        return NULL;
    int named = n_args == 4 && args[3] != Py_None;
    if (named ? open_hashes(args[3], &keys) : room_for(&keys, blocks.n)) {
        close_values(&blocks);
        return NULL;
    }
    PyObject *result = NULL;
    if (keys.n != blocks.n) {
        PyErr_SetString(PyExc_ValueError, "there must be one engine hash for each hash");
    } else {
        for (size_t i = 0; i < keys.n; i++) {
            keys.at[i] = named ? engine_key(ix, keys.at[i]) : own_key(ix, blocks.at[i]);
            blocks.at[i] = block_key(ix, blocks.at[i]);
        }
        result = PyLong_FromUnsignedLongLong(store_all(ix, at_place, keys.at, blocks.at, keys.n, tier));
    }
    close_values(&keys);
    close_values(&blocks);
    return result;
}

/* One block more of a mirrored place; 0 where the budget refuses it. */
static int hold_mirrored(BlockIndex *ix, uint64_t block, uint32_t at_place) {
    const slot *known = find_slot(&ix->blocks, block);
    return (known && tiers_at(ix, known->value, at_place)) || hold(ix, block, at_place, 0);
}

/* Holds these, up to the first that is refused: what follows a gap is of no use. How many it holds. */
static size_t hold_all(BlockIndex *ix, uint32_t at_place, const uint8_t *hashes, size_t n) {
    uint64_t blocks[AHEAD];
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t few = n - start < AHEAD ? n - start : AHEAD;
        for (size_t i = 0; i < few; i++)
            blocks[i] = block_key(ix, read64(hashes + 8 * (start + i)));
        prefetch_keys(ix, &ix->blocks, blocks, few);
        for (size_t i = 0; i < few; i++)
            if (!hold_mirrored(ix, blocks[i], at_place))
                return start + i;
    }
    return n;
}

#define BLOCK_BYTES 16 /* of a block that nobody holds yet, with the slack of its page */

/* Bytes that it may take for one place more to hold the block. */
static always_inline uint64_t needed_for(const BlockIndex *ix, uint64_t block, uint32_t at_place) {
    const slot *known = find_slot(&ix->blocks, block);
    uint32_t two[2], n;
    if (!known)
        return BLOCK_BYTES;
    if (tiers_at(ix, known->value, at_place))
        return 0;
    const uint32_t *members = members_of(ix, known->value, two, &n);
    return n == 1 && (members[0] & 15) == ON_GPU ? 0 : set_charge(n + 1) - charge_of(ix, known->value);
}

static uint64_t needed(const BlockIndex *ix, uint32_t at_place, const uint8_t *hashes, size_t n) {
    uint64_t bytes = 0, blocks[AHEAD];
    for (size_t start = 0; start < n; start += AHEAD) {
        size_t few = n - start < AHEAD ? n - start : AHEAD;
        for (size_t i = 0; i < few; i++)
            blocks[i] = block_key(ix, read64(hashes + 8 * (start + i)));
        prefetch_keys(ix, &ix->blocks, blocks, few);
        for (size_t i = 0; i < few; i++)
            bytes += needed_for(ix, blocks[i], at_place);
    }
    return bytes;
}

/* Makes room for a prompt, before the mirror takes it: what it lets go must not be one of these. A prompt may cost others
 * half of the budget, and a block of it 8 of theirs. */
static void make_room_for(BlockIndex *ix, uint32_t at_place, const uint8_t *hashes, size_t n) {
    PyObject *mirror = ix->places[at_place].mirror;
    uint64_t capacity = mirrors->capacity(mirror);
    n = n < capacity ? n : (size_t)capacity;
    if (charged_bytes(ix) + n * set_charge(ix->n_places) <= ix->soft_bytes)
        return;
    size_t held = mirrors->held(mirror, hashes, n), few = 8 * n;
    uint64_t need = needed(ix, at_place, hashes + 8 * held, n - held);
    need = need < ix->soft_bytes / 2 ? need : ix->soft_bytes / 2;
    if (ix->dying_place != NONE && charged_bytes(ix) + need > ix->soft_bytes)
        sweep(ix, few);
    while (few-- && charged_bytes(ix) + need > ix->soft_bytes && evict(ix))
        ;
}

/* What was refused of a prompt's new blocks is not left in the mirror either: it holds what the place does. The next store
 * shall not find the budget spent. */
static void refuse_last(BlockIndex *ix, uint32_t at_place, PyObject *prompt, const uint8_t *last, size_t n) {
    ix->refused += n;
    mirrors->take_back(ix->places[at_place].mirror, (const uint8_t *)PyBytes_AS_STRING(prompt),
                       (size_t)PyBytes_GET_SIZE(prompt) / 8, last, n);
    let_go_all(ix, at_place, last, n); /* where one hash came twice */
    for (size_t few = 8 * n; few-- && charged_bytes(ix) > ix->soft_bytes && evict(ix);)
        ;
}

static always_inline const uint8_t *bytes_at(PyObject *tuple, Py_ssize_t at, size_t *n) {
    PyObject *bytes = PyTuple_GET_ITEM(tuple, at);
    *n = (size_t)PyBytes_GET_SIZE(bytes) / 8;
    return (const uint8_t *)PyBytes_AS_STRING(bytes);
}

static PyObject *mirror_at(const BlockIndex *ix, uint32_t at_place) {
    PyObject *mirror = ix->places[at_place].mirror;
    if (!mirror)
        PyErr_SetString(PyExc_ValueError, "the place has no mirror");
    return mirror;
}

/* Returns the new ones; into `s`, what else is asked for. */
static PyObject *keep(BlockIndex *ix, PyObject *const *args, sending *s) {
    uint32_t at_place, still;
    if (read_place(ix, args[0], &at_place) < 0)
        return NULL;
    PyObject *mirror = mirror_at(ix, at_place);
    if (!mirror)
        return NULL;
    if (!PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "hashes must be bytes");
        return NULL;
    }
    make_room_for(ix, at_place, (const uint8_t *)PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]) / 8);
    Py_INCREF(mirror);
    mirror_uses before = {s ? s->depth : 0, s ? s->latest : 0.0, NULL};
    PyObject *changes = mirrors->touch(mirror, args + 1, 2, &before), *new = NULL;
    if (changes && read_place(ix, args[0], &still) == 0) { /* which a collection of garbage may have closed */
        size_t n_new, n_gone;
        const uint8_t *came = bytes_at(changes, 0, &n_new), *went = bytes_at(changes, 1, &n_gone);
        if (ix->places[still].mirror == mirror) {
            let_go_all(ix, still, went, n_gone);
            size_t held = hold_all(ix, still, came, n_new);
            if (held < n_new)
                refuse_last(ix, still, args[1], came + 8 * held, n_new - held);
        }
        if (ix->dying_place != NONE)
            sweep(ix, 16 + 2 * n_new);
        new = Py_NewRef(PyTuple_GET_ITEM(changes, 0));
    }
    if (new && s) {
        s->new = new;
        s->uses = before.uses;
        mirrors->room(mirror, &s->free_blocks, &s->oldest_s);
    } else {
        Py_XDECREF(before.uses);
    }
    Py_XDECREF(changes);
    Py_DECREF(mirror);
    return new;
}

static PyObject *index_keep(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    return expect(n_args, 3, 3, "(place, hashes, stamp)") < 0 ? NULL : keep(ix, args, NULL);
}

static PyObject *removed(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args, int own) {
    uint32_t at_place, tier;
    values keys;
    if (expect(n_args, 3, 3, "(place, hashes, tier)") < 0 ||
        read_place_and_tier(ix, args[0], args[2], &at_place, &tier) < 0 || open_hashes(args[1], &keys) < 0)
        return NULL;
    uint64_t n;
    if (ix->places[at_place].mirror) {
        n = let_go_all(ix, at_place, (const uint8_t *)keys.at, own ? keys.n : 0);
    } else {
        for (size_t i = 0; i < keys.n; i++)
            keys.at[i] = own ? own_key(ix, keys.at[i]) : engine_key(ix, keys.at[i]);
        n = remove_all(ix, at_place, keys.at, keys.n, tier);
    }
    close_values(&keys);
    return PyLong_FromUnsignedLongLong(n);
}

static PyObject *index_remove(BlockIndex *ix, PyObject *const *args, Py_ssize_t n) { return removed(ix, args, n, 0); }

static PyObject *index_remove_chain(BlockIndex *ix, PyObject *const *args, Py_ssize_t n) { return removed(ix, args, n, 1); }

/* (place, depth, depth, depth, depth); equal depths are one int. */
static PyObject *reach_tuple(const reach *r) {
    PyObject *t = PyTuple_New(1 + TIERS), *number = PyLong_FromUnsignedLong(r->place);
    if (!t || !number) {
        Py_XDECREF(number);
        goto fail;
    }
    PyTuple_SET_ITEM(t, 0, number);
    for (int tier = 0; tier < TIERS; tier++) {
        if (tier && r->depth[tier] == r->depth[tier - 1])
            number = Py_NewRef(PyTuple_GET_ITEM(t, tier));
        else if (!(number = PyLong_FromUnsignedLong(r->depth[tier])))
            goto fail;
        PyTuple_SET_ITEM(t, 1 + tier, number);
    }
    return t;
fail:
    Py_XDECREF(t);
    return NULL;
}

static PyObject *index_match(BlockIndex *ix, PyObject *given) {
    values listed; /* filled where it is used: too large to be cleared each time */
    Py_buffer view;
    const uint8_t *hashes;
    Py_ssize_t n;
    int sequence = PyList_CheckExact(given) || PyTuple_CheckExact(given);
    if (sequence) {
        if (open_hashes(given, &listed) < 0)
            return NULL;
        hashes = (const uint8_t *)listed.at;
        n = listed.n;
    } else {
        if ((n = open_buffer(given, &view, 8, 8, "hashes")) < 0)
            return NULL;
        hashes = view.buf;
    }
    heat h;
    int ran = run_match(ix, &h, hashes, n);
    if (sequence)
        close_values(&listed);
    else
        PyBuffer_Release(&view);
    PyObject *list = ran ? PyList_New(h.n_reached) : PyErr_NoMemory();
    for (uint32_t i = 0; list && i < h.n_reached; i++) {
        PyObject *t = reach_tuple(&h.race.reached[i]);
        if (t)
            PyList_SET_ITEM(list, i, t);
        else
            Py_CLEAR(list);
    }
    PyMem_RawFree(h.many);
    return list;
}

static PyObject *index_our_hash(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t at_place, at;
    uint64_t hash;
    page **in;
    if (expect(n_args, 2, 2, "(place, engine_hash)") < 0 || read_place(ix, args[0], &at_place) < 0 || read_hash(args[1], &hash) < 0)
        return NULL;
    const pair *known = find(&ix->places[at_place].held, engine_key(ix, hash), PAIR, &in, &at);
    if (!known)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(gathered(known->block) ^ ix->secret);
}

/* Of those that the mirror has, those that the budget did not refuse. */
static PyObject *mirrored_holdings(BlockIndex *ix, uint32_t number) {
    PyObject *list = PyList_New(0), *hashes = list ? mirrors->hashes(ix->places[number].mirror) : NULL;
    for (Py_ssize_t at = 0; hashes && list && at < PyBytes_GET_SIZE(hashes); at += 8) {
        uint64_t hash = read64((const uint8_t *)PyBytes_AS_STRING(hashes) + at);
        const slot *known = find_slot(&ix->blocks, block_key(ix, hash));
        if (!known || !tiers_at(ix, known->value, number))
            continue;
        PyObject *row = Py_BuildValue("KIIII", (unsigned long long)hash, 1, 0, 0, 0);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    if (!hashes)
        Py_CLEAR(list);
    Py_XDECREF(hashes);
    return list;
}

static PyObject *paired_holdings(const BlockIndex *ix, uint32_t number) {
    const table *t = &ix->places[number].held;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < t->n_pages; i++)
        for (uint32_t k = 0; list && k < t->pages[i]->n; k++) {
            const pair *e = (pair *)entry(t->pages[i], k, PAIR);
            PyObject *row = Py_BuildValue("KIIII", (unsigned long long)(gathered(e->block) ^ ix->secret), count_in(e->counts, 0),
                                          count_in(e->counts, 1), count_in(e->counts, 2), count_in(e->counts, 3));
            if (!row || PyList_Append(list, row) < 0)
                Py_CLEAR(list);
            Py_XDECREF(row);
        }
    return list;
}

static PyObject *index_holdings(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_place(ix, given, &number) < 0)
        return NULL;
    int collects = PyGC_Disable(); /* a finalizer might change the place while it is read */
    PyObject *list = ix->places[number].mirror ? mirrored_holdings(ix, number) : paired_holdings(ix, number);
    if (collects)
        PyGC_Enable();
    return list;
}

static PyObject *index_pairs_of(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_place(ix, given, &number) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(count_of(&ix->places[number]));
}

static PyObject *index_stats(BlockIndex *ix, PyObject *unused) {
    uint64_t mirrored = 0;
    (void)unused;
    for (uint32_t i = 0; i < ix->n_places; i++)
        if (ix->places[i].mirror && ix->places[i].state == LIVE)
            mirrored += count_of(&ix->places[i]);
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"budget_bytes", ix->budget_bytes},
        {"bytes", ix->table_bytes + ix->set_bytes},
        {"charged_bytes", charged_bytes(ix)},
        {"pairs", ix->pairs + mirrored},
        {"blocks", ix->blocks.count},
        {"sets", ix->live_sets},
        {"aliases", ix->aliases.count},
        {"unswept_pairs", ix->dying_pairs},
        {"evicted", ix->evicted},
        {"refused", ix->refused},
        {"unknown_removes", ix->unknown_removes},
        {"unresolved", ix->unresolved},
        {"saturated", ix->saturated},
        {"conflicts", ix->conflicts},
    };
    PyObject *stats = PyDict_New();
    for (size_t i = 0; stats && i < sizeof(rows) / sizeof(*rows); i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(rows[i].value);
        if (!value || PyDict_SetItemString(stats, rows[i].name, value) < 0)
            Py_CLEAR(stats);
        Py_XDECREF(value);
    }
    return stats;
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef index_methods[] = {
    {"open_place", FAST(index_open_place), "A number for a place that holds nothing yet."},
    {"close_place", (PyCFunction)index_close_place, METH_O, "Forgets the place; its number may be handed out again."},
    {"clear", (PyCFunction)index_clear, METH_O, "The place holds nothing any more, and stays open."},
    {"store", FAST(index_store), "A store as KV events bring it; the number of blocks stored, NO_PARENT or PARENT_LOST."},
    {"store_known", FAST(index_store_known), "Another tier for engine hashes that the place has stored before."},
    {"store_chain", FAST(index_store_chain), "A store by our own hashes."},
    {"keep", FAST(index_keep), "A prompt is used at a mirrored place; the hashes that are new there."},
    {"remove", FAST(index_remove), "Takes back one store of each engine hash; the number of those that were known."},
    {"remove_chain", FAST(index_remove_chain), "Takes back one store_chain of each hash; the number of those that were known."},
    {"match", (PyCFunction)index_match, METH_O, "(place, depth by tier…) for every place that holds the first block."},
    {"our_hash", FAST(index_our_hash), "Our hash for this engine hash of the place, or None."},
    {"holdings", (PyCFunction)index_holdings, METH_O, "(our hash, count by tier…) for every pair of the place."},
    {"pairs_of", (PyCFunction)index_pairs_of, METH_O, "How many pairs the place has."},
    {"sweep", (PyCFunction)index_sweep, METH_O, "Sweeps up to so many pairs of cleared places; the number left."},
    {"stats", (PyCFunction)index_stats, METH_NOARGS, "Sizes and counters."},
    {NULL, NULL, 0, NULL}};

static PyTypeObject BlockIndexType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._index.BlockIndex",
    .tp_doc = "Which place holds which block, within a budget of bytes.",
    .tp_basicsize = sizeof(BlockIndex),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = index_new,
    .tp_dealloc = (destructor)index_dealloc,
    .tp_methods = index_methods,
};

/* ---- For prices ---- */

static int match_each(PyObject *index, const uint8_t *hashes, size_t n, int (*each)(const reach *, void *), void *with) {
    heat h;
    if (!run_match((BlockIndex *)index, &h, hashes, n)) {
        PyErr_NoMemory();
        return -1;
    }
    int failed = 0;
    for (uint32_t i = 0; i < h.n_reached && !failed; i++)
        failed = each(&h.race.reached[i], with) < 0;
    PyMem_RawFree(h.many);
    return failed ? -1 : 0;
}

static int send_to(PyObject *index, PyObject *const *args, sending *s) { return keep((BlockIndex *)index, args, s) ? 0 : -1; }

static int push_to(PyObject *index, PyObject *const *args, sending *s) {
    BlockIndex *ix = (BlockIndex *)index;
    uint32_t at_place;
    PyObject *mirror = read_place(ix, args[0], &at_place) < 0 ? NULL : mirror_at(ix, at_place);
    PyObject *evicted = Py_XNewRef(mirror) ? mirrors->push(mirror, args + 1, 2) : NULL;
    if (evicted) {
        if (ix->places[at_place].mirror == mirror) /* which reading the arguments may have closed */
            let_go_all(ix, at_place, (const uint8_t *)PyBytes_AS_STRING(evicted), (size_t)PyBytes_GET_SIZE(evicted) / 8);
        mirrors->room(mirror, &s->free_blocks, &s->oldest_s);
    }
    Py_XDECREF(mirror);
    Py_XDECREF(evicted);
    return evicted ? 0 : -1;
}

static match_api for_prices = {&BlockIndexType, match_each, send_to, push_to};

/* ---- The module ---- */

static PyMethodDef methods[] = {
    {"chain", FAST(chain), "Hashes of the full blocks of token_ids, packed: 8 bytes each."},
    {"engine_hash", engine_hash, METH_O, "An engine's hash as 64 bits."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_index", "Block hashes, and who holds which block.", -1, methods,
                                    NULL, NULL, NULL, NULL};

static int find_mirrors(void) {
    PyObject *module = PyImport_ImportModule(MIRROR_MODULE);
    PyObject *api = module ? PyObject_GetAttrString(module, MIRROR_API) : NULL;
    mirrors = api ? PyCapsule_GetPointer(api, MIRROR_API) : NULL;
    Py_XDECREF(api);
    Py_XDECREF(module);
    return mirrors ? 0 : -1;
}

PyMODINIT_FUNC PyInit__index(void) {
    if (find_mirrors() < 0)
        return NULL;
    if (PyType_Ready(&BlockIndexType) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module), *api = PyCapsule_New(&for_prices, MATCH_API, NULL);
    if (m && (!api || PyModule_AddObjectRef(m, MATCH_API, api) < 0 ||
              PyModule_AddObjectRef(m, "BlockIndex", (PyObject *)&BlockIndexType) < 0 ||
              PyModule_AddIntMacro(m, NO_PARENT) < 0 || PyModule_AddIntMacro(m, PARENT_LOST) < 0 ||
              PyModule_AddIntMacro(m, MIN_BUDGET_BYTES) < 0))
        Py_CLEAR(m);
    Py_XDECREF(api);
    return m;
}
