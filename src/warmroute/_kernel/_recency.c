/* What an engine still has of its KV blocks: a mirror of its least-recently-used order, within a number of blocks.
 *
 * A block's hash says all that is before it: no two prompts share a block unless they share their beginning. So what is
 * used together is kept together, as a piece: blocks that follow one another, last used at the same time. A prompt is a few
 * pieces, and they are told from other prompts by comparing memory, not block by block.
 *
 * The rules:
 * - A prompt that is touched becomes the most recent of all, its first block first: engines free the tail first, so a
 *   prefix outlives what follows it.
 * - Beyond the capacity the oldest goes, and the caller is told; never a block of the prompt that is being touched.
 * - Blocks whose tokens nobody knows (answers) take their room and go in their turn, without a name.
 * - All that a call needs is allocated before it changes anything.
 *
 * - Given what is not a prompt's hashes, or one hash twice, it may count a block twice; it stays within its capacity.
 *
 * The layout: pieces are entries of 40 bytes in segments, linked by number both in the order of use and in the chains of a
 * table, where a piece stands by its first hash; the other hashes lie apart. A piece of which only the beginning is used is
 * parted in two. The table grows by linear hashing: one chain is split (or two are joined) at a time, so there is no rehash.
 * A run of blocks without names is one entry. Slots that fall free are used again; where they are many, the last entries
 * move into them, and segments go back.
 *
 * tests/index/test_recency.py holds it equal to an OrderedDict.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_mirror.h"
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#define MAX_CAPACITY INT32_MAX /* a touch may hold twice as many for a moment, and numbers have 32 bits */
#define SEGMENT 256

/* Numbers that are no entry's. */
#define NONE UINT32_MAX
#define FREE (UINT32_MAX - 1) /* as a chain: this slot holds nothing */
#define RUN (UINT32_MAX - 2)  /* as a chain: blocks without names */

#define always_inline inline __attribute__((always_inline))
#define prefetch(p) __builtin_prefetch(p)

#define MET 0x80000000u /* in a piece's number of blocks: the prompt that is being touched has it */

typedef struct {
    uint64_t hash;  /* the first; */
    uint64_t *rest; /* those that follow it */
    double stamp;
    uint32_t n; /* blocks */
    uint32_t chain;
    uint32_t newer, older; /* by use; among free slots, the neighbours in their list */
} entry;

/* Segments of equal size, so that what grows is never copied. */
typedef struct {
    uint8_t **at;
    uint32_t n, room;
} segments;

typedef struct {
    PyObject_HEAD
    uint64_t capacity, blocks, bytes;
    uint64_t nameless; /* of the blocks */
    segments entries, table;
    uint32_t newest, oldest;
    uint32_t n_slots, n_free, free; /* slots in use or free; those beyond were never used */
    uint32_t named;                 /* pieces: entries in the table */
    uint32_t n_chains, low_mask;    /* 2^k - 1 with 2^k <= n_chains < 2^(k+1) */
    int gaps;                       /* something was dropped: a block may be held, and one before it not */
    int claimed;                    /* it is the mirror of a place */
} Recency;

static uint64_t secret; /* so that nobody can choose prompts that all fall into one chain */

/* ---- Segments ---- */

/* What malloc takes for this many bytes. */
static always_inline uint64_t taken(uint64_t bytes) {
    return bytes == 0 ? 0 : bytes <= 24 ? 32 : (bytes + 8 + 15) & ~15ULL;
}

static int add_segment(Recency *r, segments *s, size_t size) {
    if (s->n == s->room) {
        uint32_t room = s->room + s->room / 8 + 4;
        void *at = PyMem_RawRealloc(s->at, room * sizeof(*s->at));
        if (!at)
            return 0;
        r->bytes += taken(room * sizeof(*s->at)) - taken(s->room * sizeof(*s->at));
        s->at = at;
        s->room = room;
    }
    void *segment = PyMem_RawMalloc(SEGMENT * size);
    if (!segment)
        return 0;
    r->bytes += taken(SEGMENT * size);
    s->at[s->n++] = segment;
    return 1;
}

/* Gives back what lies beyond so many items, but for one segment. */
static void fit_segments(Recency *r, segments *s, uint32_t items, size_t size) {
    while (s->n > items / SEGMENT + 2) {
        PyMem_RawFree(s->at[--s->n]);
        r->bytes -= taken(SEGMENT * size);
    }
    uint32_t room = s->n + 4;
    if (s->room > 2 * room) {
        void *at = PyMem_RawRealloc(s->at, room * sizeof(*s->at));
        if (at) {
            r->bytes -= taken(s->room * sizeof(*s->at)) - taken(room * sizeof(*s->at));
            s->at = at;
            s->room = room;
        }
    }
}

static void free_segments(segments *s) {
    for (uint32_t i = 0; i < s->n; i++)
        PyMem_RawFree(s->at[i]);
    PyMem_RawFree(s->at);
    *s = (segments){0};
}

static always_inline entry *entry_at(const Recency *r, uint32_t i) {
    return (entry *)r->entries.at[i / SEGMENT] + i % SEGMENT;
}

static always_inline uint32_t *chain_at(const Recency *r, uint32_t i) {
    return (uint32_t *)r->table.at[i / SEGMENT] + i % SEGMENT;
}

/* ---- The table: where each chain of entries begins. A chain has 0.6 to 1 of them on average ---- */

static always_inline uint64_t spread(uint64_t h) {
    h ^= secret;
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15ULL;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ULL;
    return h ^ h >> 32;
}

static always_inline uint32_t *chain_of(const Recency *r, uint64_t spread_hash) {
    uint32_t i = (uint32_t)spread_hash & (2 * r->low_mask + 1);
    return chain_at(r, i < r->n_chains ? i : i & r->low_mask);
}

/* The piece that begins with this hash. */
static always_inline uint32_t find(const Recency *r, uint64_t hash) {
    uint32_t i = r->n_chains ? *chain_of(r, spread(hash)) : NONE;
    while (i != NONE && entry_at(r, i)->hash != hash)
        i = entry_at(r, i)->chain;
    return i;
}

/* One chain more: those of the next chain in line that belong there go there. Without memory it stays as it is, only
 * slower. */
static void split_chain(Recency *r) {
    uint32_t high = r->low_mask + 1;
    if (r->n_chains == r->table.n * SEGMENT && !add_segment(r, &r->table, sizeof(uint32_t)))
        return;
    uint32_t *ends[2] = {chain_at(r, r->n_chains - high), chain_at(r, r->n_chains)}, i = *ends[0];
    while (i != NONE) {
        entry *e = entry_at(r, i);
        uint32_t **end = &ends[(spread(e->hash) & high) != 0];
        **end = i;
        *end = &e->chain;
        i = e->chain;
    }
    *ends[0] = *ends[1] = NONE;
    if (++r->n_chains == 2 * high)
        r->low_mask = 2 * high - 1;
}

/* One chain less: the last goes back to the one it was split from. */
static void join_chains(Recency *r) {
    uint32_t last = r->n_chains - 1;
    if (last == r->low_mask)
        r->low_mask >>= 1;
    uint32_t *end = chain_at(r, last & r->low_mask);
    while (*end != NONE)
        end = &entry_at(r, *end)->chain;
    *end = *chain_at(r, last);
    r->n_chains = last;
    fit_segments(r, &r->table, last, sizeof(uint32_t));
}

static always_inline void enter(Recency *r, uint32_t i, entry *e) {
    uint32_t *first = chain_of(r, spread(e->hash));
    e->chain = *first;
    *first = i;
    if (++r->named > r->n_chains)
        split_chain(r);
}

/* What points to this entry, in its chain. */
static always_inline uint32_t *link_to(const Recency *r, uint32_t i, const entry *e) {
    uint32_t *link = chain_of(r, spread(e->hash));
    while (*link != i)
        link = &entry_at(r, *link)->chain;
    return link;
}

static always_inline void leave(Recency *r, uint32_t i, const entry *e) {
    *link_to(r, i, e) = e->chain;
    r->named--;
    while (5ULL * r->named < 3ULL * r->n_chains && r->n_chains > 1)
        join_chains(r);
}

/* ---- The order of use ---- */

static always_inline void set_older(Recency *r, uint32_t i, uint32_t older) {
    *(i == NONE ? &r->newest : &entry_at(r, i)->older) = older;
}

static always_inline void set_newer(Recency *r, uint32_t i, uint32_t newer) {
    *(i == NONE ? &r->oldest : &entry_at(r, i)->newer) = newer;
}

static always_inline void unlink_entry(Recency *r, const entry *e) {
    set_older(r, e->newer, e->older);
    set_newer(r, e->older, e->newer);
}

static always_inline void link_newest(Recency *r, uint32_t i, entry *e) {
    e->newer = NONE;
    e->older = r->newest;
    set_newer(r, r->newest, i);
    r->newest = i;
}

/* ---- Slots ---- */

/* Room for so many entries more, and a table to put them into. */
static int reserve(Recency *r, uint64_t n) {
    while ((uint64_t)r->entries.n * SEGMENT < r->n_slots - r->n_free + n)
        if (!add_segment(r, &r->entries, sizeof(entry)))
            return 0;
    if (n && !r->n_chains) {
        if (!r->table.n && !add_segment(r, &r->table, sizeof(uint32_t)))
            return 0;
        *chain_at(r, 0) = NONE;
        r->n_chains = 1;
    }
    return 1;
}

static always_inline void unlink_free(Recency *r, const entry *e) {
    if (e->older != NONE)
        entry_at(r, e->older)->newer = e->newer;
    *(e->newer == NONE ? &r->free : &entry_at(r, e->newer)->older) = e->older;
    r->n_free--;
}

/* A slot, out of what was reserved. */
static always_inline uint32_t take_slot(Recency *r) {
    if (!r->n_free)
        return r->n_slots++;
    uint32_t i = r->free;
    unlink_free(r, entry_at(r, i));
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

/* Where many slots are free, the last entries move into them. A slot that fell free costs one such step at most. */
static void close_gaps(Recency *r) {
    while (r->n_free > SEGMENT) {
        uint32_t last = --r->n_slots;
        const entry *from = entry_at(r, last);
        if (from->chain == FREE) {
            unlink_free(r, from);
            continue;
        }
        uint32_t into = take_slot(r);
        *entry_at(r, into) = *from;
        set_older(r, from->newer, into);
        set_newer(r, from->older, into);
        if (from->chain != RUN)
            *link_to(r, last, from) = into;
    }
}

static void trim(Recency *r) {
    if (r->n_free > 2 * SEGMENT + r->n_slots / 64)
        close_gaps(r);
    fit_segments(r, &r->entries, r->n_slots, sizeof(entry));
}

/* ---- Pieces ---- */

static always_inline uint64_t rest_bytes(uint32_t n) { return taken((uint64_t)(n - 1) * sizeof(uint64_t)); }

/* Room for what follows the first of so many blocks; NULL is right where that is nothing. */
static always_inline uint64_t *rest_of(uint32_t n) {
    return n > 1 ? PyMem_RawMalloc((uint64_t)(n - 1) * sizeof(uint64_t)) : NULL;
}

static void remove_entry(Recency *r, uint32_t i, entry *e) {
    leave(r, i, e);
    unlink_entry(r, e);
    r->blocks -= e->n;
    r->bytes -= rest_bytes(e->n);
    PyMem_RawFree(e->rest);
    free_slot(r, i, e);
}

/* Forgets all but the first n blocks of a piece, of which there is at least one. */
static void shorten(Recency *r, entry *e, uint32_t n) {
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

/* Parts a piece: what is beyond its first n blocks becomes one of its own, in a slot that was reserved, next to it in the
 * order of use. `rest` is room for what follows the first block there. */
static void part(Recency *r, uint32_t i, uint32_t n, uint64_t *rest) {
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
    enter(r, j, f);
    shorten(r, e, n);
}

static always_inline uint64_t hash_at(const uint8_t *hashes, size_t i) {
    uint64_t hash;
    memcpy(&hash, hashes + 8 * i, 8);
    return hash;
}

/* How many of these hashes are those of a piece, which begins with the first of them. */
static uint32_t common(const entry *e, const uint8_t *hashes, size_t n) {
    uint32_t most = n < e->n ? (uint32_t)n : e->n, same = 1;
    if (most > 1 && !memcmp(e->rest, hashes + 8, (most - 1) * sizeof(uint64_t)))
        return most;
    while (same < most && e->rest[same - 1] == hash_at(hashes, same))
        same++;
    return same;
}

/* Lets the oldest go until so many blocks are left, of a piece its last one first. Returns where the hashes written to
 * `out` end. */
static uint8_t *evict(Recency *r, uint64_t capacity, uint8_t *out) {
    while (r->blocks > capacity) {
        uint32_t i = r->oldest;
        entry *e = entry_at(r, i);
        uint64_t excess = r->blocks - capacity;
        uint32_t left = e->n > excess ? e->n - (uint32_t)excess : 0;
        if (e->chain == RUN) {
            r->blocks -= e->n - left;
            r->nameless -= e->n - left;
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
            shorten(r, e, left);
        else
            remove_entry(r, i, e);
    }
    trim(r);
    return out;
}

/* Lets the oldest go, up to so many with names; how many those were. */
static size_t shed(Recency *r, uint64_t *out, size_t most) {
    uint64_t named = r->blocks - r->nameless;
    size_t n = 0;
    most = most < named ? most : named;
    while (n < most) {
        entry *e = entry_at(r, r->oldest);
        uint64_t few = e->chain == RUN || e->n < most - n ? e->n : most - n;
        n = (size_t)((uint64_t *)evict(r, r->blocks - few, (uint8_t *)(out + n)) - out);
    }
    return n;
}

/* At most so many hashes are evicted where so many blocks come in. */
static uint64_t most_evicted(const Recency *r, uint64_t more, uint64_t capacity) {
    uint64_t excess = r->blocks + more > capacity ? r->blocks + more - capacity : 0;
    return !r->named ? 0 : excess < r->blocks ? excess : r->blocks;
}

/* ---- Arguments ---- */

static int expect(Py_ssize_t n, Py_ssize_t wanted, const char *signature) {
    if (n == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %s", signature);
    return -1;
}

static int read_number(PyObject *from, long least, long most, uint64_t *out, const char *what) {
    long number = PyLong_AsLong(from);
    if (number == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (number >= least && number <= most) {
        *out = number;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be %ld to %ld", what, least, most);
    return -1;
}

static int read_stamp(PyObject *from, double *out) {
    *out = PyFloat_AsDouble(from);
    if (*out == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (isfinite(*out)) {
        return 0;
    }
    PyErr_SetString(PyExc_ValueError, "stamp must be finite");
    return -1;
}

/* A buffer of 64-bit integers, or of bytes that hold such; -1 with an error, else the number of them. */
static Py_ssize_t open_hashes(PyObject *from, Py_buffer *view) {
    if (PyObject_GetBuffer(from, view, PyBUF_SIMPLE) == 0) {
        if (view->len % 8 == 0 && (view->itemsize == 1 || view->itemsize == 8))
            return view->len / 8;
        PyBuffer_Release(view);
    } else if (!PyErr_ExceptionMatches(PyExc_BufferError)) { /* which is said of one with gaps */
        return -1;
    }
    PyErr_SetString(PyExc_ValueError, "hashes must be integers of 64 bits, one beside the other");
    return -1;
}

static PyObject *room_for_hashes(uint64_t n) { return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n * 8); }

static uint8_t *bytes_of(PyObject *bytes) { return (uint8_t *)PyBytes_AS_STRING(bytes); }

/* Cuts bytes, which nobody has seen yet, to what was written. They stay where they are: what was evicted is to be told, so
 * this must not fail. */
static PyObject *cut(PyObject *bytes, uint8_t *end) {
    Py_ssize_t len = end - bytes_of(bytes);
    if (len != PyBytes_GET_SIZE(bytes)) {
        Py_SET_SIZE(bytes, len);
        *end = 0;
    }
    return bytes;
}

/* ---- Recency ---- */

static void forget_all(Recency *r) {
    for (uint32_t i = 0; i < r->n_slots; i++)
        if (entry_at(r, i)->chain != FREE && entry_at(r, i)->chain != RUN)
            PyMem_RawFree(entry_at(r, i)->rest);
    free_segments(&r->entries);
    free_segments(&r->table);
    r->newest = r->oldest = r->free = NONE;
    r->n_slots = r->n_free = r->named = r->n_chains = r->low_mask = 0;
    r->blocks = r->nameless = 0;
    r->gaps = 0;
    r->bytes = taken(sizeof(Recency));
}

static PyObject *recency_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"capacity", NULL};
    PyObject *given;
    uint64_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &given) ||
        read_number(given, 1, MAX_CAPACITY, &capacity, "capacity") < 0)
        return NULL;
    Recency *r = (Recency *)type->tp_alloc(type, 0); /* all zero */
    if (!r)
        return NULL;
    forget_all(r);
    r->capacity = capacity;
    return (PyObject *)r;
}

static void recency_dealloc(Recency *r) {
    forget_all(r);
    Py_TYPE(r)->tp_free(r);
}

/* A part of the prompt that is being touched: the beginning of a piece, or a piece that is to be. */
typedef struct {
    uint32_t at, n, slot; /* NONE: of a new piece */
    double stamp;         /* of its last use, until now */
    uint64_t *rest;       /* room for what follows the first block of the new piece, or of what is parted from the old one */
} step;

#define FEW 32

typedef struct {
    step *steps, few[FEW];
    uint32_t n, room;
    uint64_t new; /* blocks */
} plan;

static int add_step(plan *p, step s) {
    if (p->n == p->room) {
        uint32_t room = 4 * p->room;
        step *steps = PyMem_RawMalloc(room * sizeof(*steps));
        if (!steps)
            return 0;
        memcpy(steps, p->steps, p->n * sizeof(*steps));
        if (p->steps != p->few)
            PyMem_RawFree(p->steps);
        p->steps = steps;
        p->room = room;
    }
    p->steps[p->n++] = s;
    return 1;
}

/* Finds the pieces of a prompt, each of which is marked as met, and what lies between them. */
static int find_steps(Recency *r, const uint8_t *hashes, uint32_t n, plan *p) {
    uint32_t at = 0;
    while (at < n) {
        uint32_t i = find(r, hash_at(hashes, at));
        if (i == NONE) {
            uint32_t unknown = r->gaps ? 1 : n - at; /* a beginning outlives what follows it */
            step *last = p->n ? &p->steps[p->n - 1] : NULL;
            if (last && last->slot == NONE && last->at + last->n == at)
                last->n += unknown;
            else if (!add_step(p, (step){at, unknown, NONE, NAN, NULL}))
                return 0;
            p->new += unknown;
            at += unknown;
            continue;
        }
        entry *e = entry_at(r, i);
        if (e->n & MET) { /* one hash twice: it counts where it comes first */
            at++;
            continue;
        }
        uint32_t same = common(e, hashes + 8 * (size_t)at, n - at);
        if (!add_step(p, (step){at, same, i, e->stamp, NULL}))
            return 0;
        e->n |= MET;
        at += same;
    }
    return 1;
}

static always_inline uint32_t blocks_of(const entry *e) { return e->n & ~MET; }

/* All that the steps need. */
static int allocate(Recency *r, plan *p) {
    uint32_t slots = 0;
    for (uint32_t k = 0; k < p->n; k++) {
        step *s = &p->steps[k];
        uint32_t made = s->slot == NONE ? s->n : blocks_of(entry_at(r, s->slot)) - s->n;
        if (made > 1 && !(s->rest = rest_of(made)))
            return 0;
        slots += made > 0;
    }
    return reserve(r, slots);
}

/* Makes the steps the most recent of all, the first the most. */
static void take_steps(Recency *r, plan *p, const uint8_t *hashes, double stamp) {
    for (uint32_t k = p->n; k--;) {
        step *s = &p->steps[k];
        uint32_t i = s->slot;
        if (i == NONE) {
            i = take_slot(r);
            entry *e = entry_at(r, i);
            e->hash = hash_at(hashes, s->at);
            e->rest = s->rest;
            e->n = s->n;
            if (s->n > 1)
                memcpy(e->rest, hashes + 8 * (size_t)(s->at + 1), (s->n - 1) * sizeof(uint64_t));
            r->blocks += s->n;
            r->bytes += rest_bytes(s->n);
            enter(r, i, e);
        } else {
            entry *e = entry_at(r, i);
            e->n &= ~MET;
            if (s->n < e->n)
                part(r, i, s->n, s->rest);
            unlink_entry(r, e);
        }
        s->rest = NULL;
        s->slot = NONE; /* done with it */
        entry *e = entry_at(r, i);
        e->stamp = stamp;
        link_newest(r, i, e);
    }
}

static int add_use(PyObject *list, Py_ssize_t first, Py_ssize_t end, double stamp) {
    PyObject *use = Py_BuildValue("nnd", first, end, stamp);
    int failed = !use || PyList_Append(list, use) < 0;
    Py_XDECREF(use);
    return failed ? -1 : 0;
}

/* As recency_uses, of a plan that was carried out. */
static PyObject *uses_before(const plan *p, Py_ssize_t depth, double latest) {
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < p->n && p->steps[k].at < depth; k++) {
        const step *s = &p->steps[k];
        Py_ssize_t end = (Py_ssize_t)s->at + s->n;
        if (s->stamp <= latest && add_use(list, s->at, end < depth ? end : depth, s->stamp) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static void close_plan(Recency *r, plan *p) {
    for (uint32_t k = 0; k < p->n; k++) {
        PyMem_RawFree(p->steps[k].rest);
        if (p->steps[k].slot != NONE)
            entry_at(r, p->steps[k].slot)->n &= ~MET;
    }
    if (p->steps != p->few)
        PyMem_RawFree(p->steps);
}

/* The new blocks, as hashes: all of what was given, where all of it is new. */
static PyObject *new_hashes(const plan *p, PyObject *given, const uint8_t *hashes) {
    if (PyBytes_CheckExact(given) && p->new * 8 == (uint64_t)PyBytes_GET_SIZE(given))
        return Py_NewRef(given);
    PyObject *new = room_for_hashes(p->new);
    uint8_t *out = new ? bytes_of(new) : NULL;
    for (uint32_t k = 0; new && k < p->n; k++)
        if (p->steps[k].slot == NONE) {
            memcpy(out, hashes + 8 * (size_t)p->steps[k].at, 8 * (size_t)p->steps[k].n);
            out += 8 * (size_t)p->steps[k].n;
        }
    return new;
}

static PyObject *touch(Recency *r, PyObject *const *args, Py_ssize_t n_args, mirror_uses *before) {
    double stamp;
    Py_buffer view;
    if (expect(n_args, 2, "(hashes, stamp)") < 0 || read_stamp(args[1], &stamp) < 0)
        return NULL;
    Py_ssize_t n = open_hashes(args[0], &view);
    if (n < 0)
        return NULL;
    plan p; /* filled where it is used */
    p.steps = p.few;
    p.room = FEW;
    p.n = 0;
    p.new = 0;
    PyObject *result = PyTuple_New(2), *new = NULL, *evicted = NULL; /* the tuple first: it may collect garbage */
    if (result && find_steps(r, view.buf, (uint64_t)n < r->capacity ? (uint32_t)n : (uint32_t)r->capacity, &p) &&
        (new = new_hashes(&p, args[0], view.buf)) && (evicted = room_for_hashes(most_evicted(r, p.new, r->capacity))) &&
        allocate(r, &p)) {
        take_steps(r, &p, view.buf, stamp);
        evicted = cut(evicted, evict(r, r->capacity, bytes_of(evicted)));
        int collects = PyGC_Disable(); /* a finalizer might close the place before it is told what went */
        if (before && before->depth > 0 && !(before->uses = uses_before(&p, before->depth, before->latest)))
            PyErr_Clear(); /* without memory, less is learned */
        if (collects)
            PyGC_Enable();
    } else {
        Py_CLEAR(new);
    }
    close_plan(r, &p);
    PyBuffer_Release(&view);
    if (!new || !evicted) {
        if (before)
            Py_CLEAR(before->uses);
        Py_XDECREF(result);
        Py_XDECREF(new);
        Py_XDECREF(evicted);
        return PyErr_NoMemory();
    }
    PyTuple_SET_ITEM(result, 0, new);
    PyTuple_SET_ITEM(result, 1, evicted);
    return result;
}

static PyObject *recency_touch(Recency *r, PyObject *const *args, Py_ssize_t n_args) { return touch(r, args, n_args, NULL); }

static PyObject *recency_push(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    uint64_t count;
    double stamp;
    if (expect(n_args, 2, "(count, stamp)") < 0 || read_number(args[0], 0, LONG_MAX, &count, "count") < 0 ||
        read_stamp(args[1], &stamp) < 0)
        return NULL;
    if (count > r->capacity)
        count = r->capacity;
    PyObject *evicted = room_for_hashes(most_evicted(r, count, r->capacity));
    if (!evicted || !count)
        return evicted;
    if (!reserve(r, 1)) {
        Py_DECREF(evicted);
        return PyErr_NoMemory();
    }
    uint32_t i = take_slot(r);
    *entry_at(r, i) = (entry){.n = (uint32_t)count, .chain = RUN, .stamp = stamp};
    link_newest(r, i, entry_at(r, i));
    r->blocks += count;
    r->nameless += count;
    return cut(evicted, evict(r, r->capacity, bytes_of(evicted)));
}

/* Where those of a prompt's hashes are that are to be dropped, which are in the prompt's order. */
typedef struct {
    const uint8_t *hashes;
    size_t at, n;
} dropping;

/* How many of these are dropped, one after the other. */
static uint32_t dropped_here(dropping *d, const uint8_t *hashes, uint32_t n) {
    uint32_t k = 0;
    while (k < n && d->at < d->n && hash_at(d->hashes, d->at) == hash_at(hashes, k)) {
        k++;
        d->at++;
    }
    return k;
}

/* How many of these stay before one is dropped. */
static uint32_t kept_here(const dropping *d, const uint8_t *hashes, uint32_t n) {
    uint32_t k = 0;
    while (k < n && (d->at == d->n || hash_at(d->hashes, d->at) != hash_at(hashes, k)))
        k++;
    return k;
}

/* What is to be dropped, of a piece whose first blocks are these. Returns how many of them that deals with. */
static uint32_t drop_of(Recency *r, uint32_t i, const uint8_t *hashes, size_t n, dropping *d) {
    entry *e = entry_at(r, i);
    uint32_t same = common(e, hashes, n), kept = kept_here(d, hashes, same);
    if (kept == same)
        return same;
    r->gaps = 1;
    uint32_t to = kept + dropped_here(d, hashes + 8 * (size_t)kept, same - kept);
    if (to < e->n) {
        uint64_t *rest = rest_of(e->n - to);
        if ((rest || e->n - to == 1) && reserve(r, 1))
            part(r, i, to, rest);
        else /* without memory, what follows is forgotten with it: less is believed, nothing wrong */
            PyMem_RawFree(rest);
    }
    if (kept)
        shorten(r, e, kept);
    else
        remove_entry(r, i, e);
    return to;
}

static void drop_all(Recency *r, const uint8_t *hashes, size_t n, dropping d) {
    for (size_t at = 0; at < n;) {
        const uint8_t *here = hashes + 8 * at;
        uint32_t i = find(r, hash_at(here, 0));
        if (i == NONE) {
            dropped_here(&d, here, 1);
            at++;
        } else {
            at += drop_of(r, i, here, n - at, &d);
        }
    }
    trim(r);
}

static PyObject *recency_drop(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    Py_buffer whole, view;
    if (expect(n_args, 2, "(hashes, dropped)") < 0)
        return NULL;
    Py_ssize_t n = open_hashes(args[0], &whole), m;
    if (n < 0)
        return NULL;
    if ((m = open_hashes(args[1], &view)) < 0) {
        PyBuffer_Release(&whole);
        return NULL;
    }
    uint64_t before = r->blocks;
    drop_all(r, whole.buf, (size_t)n, (dropping){view.buf, 0, (size_t)m});
    PyBuffer_Release(&whole);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(before - r->blocks);
}

static PyObject *recency_resize(Recency *r, PyObject *given) {
    uint64_t capacity;
    if (read_number(given, 1, MAX_CAPACITY, &capacity, "capacity") < 0)
        return NULL;
    PyObject *evicted = room_for_hashes(most_evicted(r, 0, capacity));
    if (!evicted)
        return NULL;
    r->capacity = capacity;
    return cut(evicted, evict(r, capacity, bytes_of(evicted)));
}

static PyObject *recency_clear(Recency *r, PyObject *unused) {
    (void)unused;
    forget_all(r);
    Py_RETURN_NONE;
}

/* How many leading ones are held. */
static size_t held(const Recency *r, const uint8_t *hashes, size_t n) {
    size_t at = 0;
    while (at < n) {
        const uint8_t *here = hashes + 8 * at;
        uint32_t i = find(r, hash_at(here, 0));
        if (i == NONE)
            break;
        at += common(entry_at(r, i), here, n - at);
    }
    return at;
}

static PyObject *recency_held(Recency *r, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_hashes(given, &view);
    if (n < 0)
        return NULL;
    size_t leading = held(r, view.buf, (size_t)n);
    PyBuffer_Release(&view);
    return PyLong_FromSize_t(leading);
}

/* (first, end, stamp) of the pieces among the first `depth` blocks, where touched no later than `latest`. */
static PyObject *recency_uses(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    Py_buffer view;
    if (expect(n_args, 3, "(hashes, depth, latest)") < 0)
        return NULL;
    Py_ssize_t depth = PyLong_AsSsize_t(args[1]);
    double latest = depth == -1 && PyErr_Occurred() ? -1.0 : PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t n = open_hashes(args[0], &view);
    if (n < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    n = depth < n ? depth : n;
    for (Py_ssize_t at = 0, same; list && at < n; at += same) {
        const uint8_t *here = (const uint8_t *)view.buf + 8 * at;
        uint32_t i = find(r, hash_at(here, 0));
        same = i == NONE ? 1 : (Py_ssize_t)common(entry_at(r, i), here, (size_t)(n - at));
        if (i == NONE || entry_at(r, i)->stamp > latest)
            continue;
        if (add_use(list, at, at + same, entry_at(r, i)->stamp) < 0)
            Py_CLEAR(list);
    }
    PyBuffer_Release(&view);
    return list;
}

/* The blocks of a sample, one in 64 by their hash, the same ones in every prompt that has them. */
static always_inline int in_sample(const uint8_t *hash) { return (hash[0] & 63) == 0; }

static PyObject *recency_sample(PyObject *unused, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_hashes(given, &view);
    (void)unused;
    if (n < 0)
        return NULL;
    const uint8_t *hashes = view.buf;
    Py_ssize_t found = 0;
    for (Py_ssize_t at = 0; at < n; at++)
        found += in_sample(hashes + at * 8);
    PyObject *sample = room_for_hashes(found);
    for (Py_ssize_t at = 0, to = 0; sample && to < found; at++)
        if (in_sample(hashes + at * 8))
            memcpy(bytes_of(sample) + to++ * 8, hashes + at * 8, 8);
    PyBuffer_Release(&view);
    return sample;
}

static PyObject *recency_oldest(Recency *r, void *unused) {
    (void)unused;
    if (r->oldest == NONE)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(entry_at(r, r->oldest)->stamp);
}

static void room_of(const Recency *r, Py_ssize_t *blocks, double *oldest) {
    *blocks = (Py_ssize_t)(r->capacity - r->blocks);
    *oldest = r->oldest == NONE ? Py_NAN : entry_at(r, r->oldest)->stamp;
}

static PyObject *recency_room(Recency *r, void *unused) {
    Py_ssize_t blocks;
    double oldest;
    (void)unused;
    room_of(r, &blocks, &oldest);
    return Py_BuildValue("nd", blocks, oldest);
}

static PyObject *recency_capacity(Recency *r, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(r->capacity);
}

static PyObject *recency_bytes(Recency *r, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(r->bytes);
}

static Py_ssize_t recency_len(PyObject *r) { return (Py_ssize_t)((Recency *)r)->blocks; }

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef recency_methods[] = {
    {"touch", FAST(recency_touch), "A prompt becomes the most recent, first block first; (new hashes, evicted hashes)."},
    {"push", FAST(recency_push), "So many blocks without names become the most recent; the evicted hashes."},
    {"drop", FAST(recency_drop), "Forgets some of a prompt's blocks; the number of those that were held."},
    {"resize", (PyCFunction)recency_resize, METH_O, "Another capacity; the evicted hashes."},
    {"clear", (PyCFunction)recency_clear, METH_NOARGS, "Forgets all, and gives the memory back."},
    {"held", (PyCFunction)recency_held, METH_O, "How many leading ones are held."},
    {"uses", FAST(recency_uses), "When the first blocks were last touched, piece by piece."},
    {"sample", (PyCFunction)recency_sample, METH_O | METH_STATIC, "One in 64 of these, chosen by the hash."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef recency_properties[] = {
    {"oldest", (getter)recency_oldest, NULL, "Stamp of what would be evicted next; None where nothing is held.", NULL},
    {"room", (getter)recency_room, NULL, "Blocks that can come before one goes, and that one's stamp, or nan.", NULL},
    {"capacity", (getter)recency_capacity, NULL, "In blocks.", NULL},
    {"bytes", (getter)recency_bytes, NULL, "Memory allocated.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PySequenceMethods recency_as_sequence = {.sq_length = recency_len};

static PyTypeObject RecencyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._recency.Recency",
    .tp_doc = "An engine's KV blocks by last use, within a number of blocks.",
    .tp_basicsize = sizeof(Recency),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = recency_new,
    .tp_dealloc = (destructor)recency_dealloc,
    .tp_as_sequence = &recency_as_sequence,
    .tp_methods = recency_methods,
    .tp_getset = recency_properties,
};

/* ---- For the index ---- */

static PyObject *mirror_touch(PyObject *r, PyObject *const *args, Py_ssize_t n, mirror_uses *before) {
    return touch((Recency *)r, args, n, before);
}

static PyObject *mirror_push(PyObject *r, PyObject *const *args, Py_ssize_t n) { return recency_push((Recency *)r, args, n); }

static int mirror_claim(PyObject *mirror) {
    Recency *r = (Recency *)mirror;
    int free = !r->claimed;
    r->claimed = 1;
    return free;
}

static void mirror_release(PyObject *r) { ((Recency *)r)->claimed = 0; }

static PyObject *mirror_detach(PyObject *mirror) {
    Recency *from = (Recency *)mirror, *to = (Recency *)RecencyType.tp_alloc(&RecencyType, 0);
    if (!to)
        return NULL;
    PyObject head = to->ob_base;
    *to = *from;
    to->ob_base = head;
    from->entries = from->table = (segments){0};
    from->n_slots = 0;
    forget_all(from);
    return (PyObject *)to;
}

static void mirror_take_back(PyObject *mirror, const uint8_t *hashes, size_t n, const uint8_t *last, size_t n_last) {
    Recency *r = (Recency *)mirror;
    int gaps = r->gaps; /* what was the last leaves none */
    drop_all(r, hashes, n, (dropping){last, 0, n_last});
    r->gaps = gaps;
}

static uint64_t mirror_capacity(PyObject *r) { return ((Recency *)r)->capacity; }

static void mirror_room(PyObject *r, Py_ssize_t *blocks, double *oldest) { room_of((Recency *)r, blocks, oldest); }

static uint64_t mirror_count(PyObject *r) { return ((Recency *)r)->blocks - ((Recency *)r)->nameless; }

static size_t mirror_held(PyObject *r, const uint8_t *hashes, size_t n) { return held((Recency *)r, hashes, n); }

static size_t mirror_shed(PyObject *r, uint64_t *out, size_t most) { return shed((Recency *)r, out, most); }

static PyObject *mirror_hashes(PyObject *mirror) {
    Recency *r = (Recency *)mirror;
    PyObject *hashes = room_for_hashes(mirror_count(mirror));
    uint8_t *out = hashes ? bytes_of(hashes) : NULL;
    for (uint32_t i = r->oldest; hashes && i != NONE; i = entry_at(r, i)->newer) {
        const entry *e = entry_at(r, i);
        if (e->chain == RUN)
            continue;
        memcpy(out, &e->hash, 8);
        if (e->n > 1)
            memcpy(out + 8, e->rest, (e->n - 1) * sizeof(uint64_t));
        out += 8 * (size_t)e->n;
    }
    return hashes;
}

static mirror_api for_index = {&RecencyType,  mirror_touch,     mirror_push,     mirror_claim, mirror_release,
                               mirror_detach, mirror_take_back, mirror_capacity, mirror_room,  mirror_count,
                               mirror_held,   mirror_shed,      mirror_hashes};

/* ---- The module ---- */

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_recency", "KV blocks by last use.", -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__recency(void) {
    if (getrandom(&secret, sizeof(secret), 0) != sizeof(secret))
        return PyErr_SetFromErrno(PyExc_OSError);
    if (PyType_Ready(&RecencyType) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    PyObject *api = PyCapsule_New(&for_index, MIRROR_API, NULL);
    if (m && (!api || PyModule_AddObjectRef(m, "Recency", (PyObject *)&RecencyType) < 0 ||
              PyModule_AddObjectRef(m, MIRROR_API, api) < 0))
        Py_CLEAR(m);
    Py_XDECREF(api);
    return m;
}
