/* What an engine still has of its KV blocks: a mirror of its least-recently-used order, within a number of blocks.
 *
 * The rules:
 * - A prompt that is touched becomes the most recent of all, its first block first: engines free the tail first, so a
 *   prefix outlives what follows it.
 * - Beyond the capacity the oldest goes, and the caller is told; never a block of the prompt that is being touched.
 * - Blocks whose tokens nobody knows (answers) take their room and go in their turn, without a name.
 * - All that a call needs is allocated before it changes anything.
 *
 * The layout: entries of 28 bytes in segments, linked by number both in the order of use and in the chains of a table.
 * The table grows by linear hashing: one chain is split (or two are joined) at a time, so there is no rehash, and what is
 * held costs under 32 bytes a block. A run of blocks without names is one entry. Slots that fall free are used again;
 * where they are many, the last entries move into them, and segments go back.
 *
 * tests/index/test_recency.py holds it equal to an OrderedDict.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#define MAX_CAPACITY INT32_MAX /* a touch may hold twice as many for a moment, and numbers have 32 bits */
#define SEGMENT 512

/* Numbers that are no entry's. */
#define NONE UINT32_MAX
#define FREE (UINT32_MAX - 1) /* as a chain: this slot holds nothing */
#define RUN (UINT32_MAX - 2)  /* as a chain: blocks without names, and `hash` says how many */

#define always_inline inline __attribute__((always_inline))
#define prefetch(p) __builtin_prefetch(p)

typedef struct __attribute__((packed, aligned(4))) {
    uint64_t hash;
    uint32_t chain;
    uint32_t newer, older; /* by use; among free slots, the neighbours in their list */
    double stamp;
} entry;

/* Segments of equal size, so that what grows is never copied. */
typedef struct {
    uint8_t **at;
    uint32_t n, room;
} segments;

typedef struct {
    PyObject_HEAD
    uint64_t capacity, blocks, bytes;
    segments entries, table;
    uint32_t newest, oldest;
    uint32_t n_slots, n_free, free; /* slots in use or free; those beyond were never used */
    uint32_t named;                 /* entries in the table */
    uint32_t n_chains, low_mask;    /* 2^k - 1 with 2^k <= n_chains < 2^(k+1) */
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

/* ---- The table: where each chain of entries begins. A chain has 1.25 to 1.5 of them on average ---- */

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

/* What points to the entry with this hash, or the end of its chain. */
static always_inline uint32_t *find_link(const Recency *r, uint64_t hash, uint64_t spread_hash) {
    uint32_t *link = chain_of(r, spread_hash);
    while (*link != NONE) {
        entry *e = entry_at(r, *link);
        if (e->hash == hash)
            break;
        link = &e->chain;
    }
    return link;
}

static always_inline uint32_t find(const Recency *r, uint64_t hash) {
    return r->n_chains ? *find_link(r, hash, spread(hash)) : NONE;
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

/* At the end of its chain: so the oldest, which is the next to go, tends to be the first there. */
static always_inline void enter(Recency *r, uint32_t i, entry *e, uint32_t *end) {
    e->chain = NONE;
    *end = i;
    if (2ULL * ++r->named > 3ULL * r->n_chains)
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
    if (4ULL * --r->named < 5ULL * r->n_chains && r->n_chains > 1)
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

static void remove_entry(Recency *r, uint32_t i, entry *e) {
    leave(r, i, e);
    unlink_entry(r, e);
    free_slot(r, i, e);
    r->blocks--;
}

/* Lets the oldest go until so many blocks are left. Returns where the hashes written to `out` end. */
static uint8_t *evict(Recency *r, uint64_t capacity, uint8_t *out) {
    while (r->blocks > capacity) {
        uint32_t i = r->oldest;
        entry *e = entry_at(r, i);
        if (e->chain == RUN) {
            uint64_t excess = r->blocks - capacity;
            if (e->hash > excess) {
                e->hash -= excess;
                r->blocks = capacity;
                break;
            }
            r->blocks -= e->hash;
            unlink_entry(r, e);
            free_slot(r, i, e);
            continue;
        }
        memcpy(out, &e->hash, 8);
        out += 8;
        remove_entry(r, i, e);
    }
    trim(r);
    return out;
}

/* At most so many hashes are evicted where so many blocks come in. */
static uint64_t most_evicted(const Recency *r, uint64_t more, uint64_t capacity) {
    uint64_t excess = r->blocks + more > capacity ? r->blocks + more - capacity : 0;
    return excess < r->named ? excess : r->named;
}

/* ---- Arguments ---- */

static int expect(Py_ssize_t n, const char *signature) {
    if (n == 2)
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

static always_inline uint64_t hash_at(const uint8_t *hashes, size_t i) {
    uint64_t hash;
    memcpy(&hash, hashes + 8 * i, 8);
    return hash;
}

static PyObject *room_for_hashes(uint64_t n) { return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n * 8); }

static uint8_t *bytes_of(PyObject *bytes) { return (uint8_t *)PyBytes_AS_STRING(bytes); }

/* Cuts bytes to what was written. NULL with an error where that fails. */
static PyObject *cut(PyObject *bytes, const uint8_t *end) {
    Py_ssize_t len = end - bytes_of(bytes);
    if (len != PyBytes_GET_SIZE(bytes))
        _PyBytes_Resize(&bytes, len);
    return bytes;
}

/* ---- Recency ---- */

static void forget_all(Recency *r) {
    free_segments(&r->entries);
    free_segments(&r->table);
    r->newest = r->oldest = r->free = NONE;
    r->n_slots = r->n_free = r->named = r->n_chains = r->low_mask = 0;
    r->blocks = 0;
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

#define AT_ONCE 16

/* Fills `kept` with the prompt's entries, each once. While it does, an entry's `newer` says where in `kept` it stands; so
 * one that is met again is known. Returns where the hashes written to `new` end. */
static uint8_t *touch_all(Recency *r, const uint8_t *hashes, size_t n, double stamp, uint32_t *kept, uint8_t *new) {
    uint32_t n_kept = 0;
    uint64_t spread_hashes[AT_ONCE];
    for (size_t at = 0; at < n && n_kept < r->capacity; at++) {
        if (at % AT_ONCE == 0) { /* several searches are under way at once */
            size_t m = n - at < AT_ONCE ? n - at : AT_ONCE;
            for (size_t k = 0; k < m; k++)
                prefetch(chain_of(r, spread_hashes[k] = spread(hash_at(hashes, at + k))));
            for (size_t k = 0; k < m; k++) {
                uint32_t first = *chain_of(r, spread_hashes[k]);
                if (first != NONE)
                    prefetch(entry_at(r, first));
            }
        }
        uint64_t hash = hash_at(hashes, at);
        uint32_t *link = find_link(r, hash, spread_hashes[at % AT_ONCE]), i = *link;
        entry *e;
        if (i == NONE) {
            i = take_slot(r);
            e = entry_at(r, i);
            e->hash = hash;
            enter(r, i, e, link);
            r->blocks++;
            memcpy(new, &hash, 8);
            new += 8;
        } else {
            e = entry_at(r, i);
            if (e->newer < n_kept && kept[e->newer] == i)
                continue;
            unlink_entry(r, e);
        }
        e->stamp = stamp;
        e->newer = n_kept;
        kept[n_kept++] = i;
    }
    for (uint32_t k = n_kept; k--;) {
        entry *e = entry_at(r, kept[k]);
        e->newer = NONE;
        e->older = r->newest;
        set_newer(r, r->newest, kept[k]);
        r->newest = kept[k];
    }
    return new;
}

static PyObject *recency_touch(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    double stamp;
    Py_buffer view;
    if (expect(n_args, "(hashes, stamp)") < 0 || read_stamp(args[1], &stamp) < 0)
        return NULL;
    Py_ssize_t n = open_hashes(args[0], &view);
    if (n < 0)
        return NULL;
    PyObject *result = PyTuple_New(2), *new = NULL, *evicted = NULL; /* the tuple first: it may collect garbage */
    uint64_t most = (uint64_t)n < r->capacity ? (uint64_t)n : r->capacity;
    uint32_t *kept = PyMem_RawMalloc(most * sizeof(*kept));
    if (result && kept && (new = room_for_hashes(most)) && (evicted = room_for_hashes(most_evicted(r, most, r->capacity))) &&
        reserve(r, most)) {
        new = cut(new, touch_all(r, view.buf, n, stamp, kept, bytes_of(new)));
        evicted = cut(evicted, evict(r, r->capacity, bytes_of(evicted)));
    } else {
        Py_CLEAR(new);
    }
    PyMem_RawFree(kept);
    PyBuffer_Release(&view);
    if (!new || !evicted) {
        Py_XDECREF(result);
        Py_XDECREF(new);
        Py_XDECREF(evicted);
        return PyErr_NoMemory();
    }
    PyTuple_SET_ITEM(result, 0, new);
    PyTuple_SET_ITEM(result, 1, evicted);
    return result;
}

static PyObject *recency_push(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    uint64_t count;
    double stamp;
    if (expect(n_args, "(count, stamp)") < 0 || read_number(args[0], 0, LONG_MAX, &count, "count") < 0 ||
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
    *entry_at(r, i) = (entry){.hash = count, .chain = RUN, .newer = NONE, .older = r->newest, .stamp = stamp};
    set_newer(r, r->newest, i);
    r->newest = i;
    r->blocks += count;
    return cut(evicted, evict(r, r->capacity, bytes_of(evicted)));
}

static PyObject *recency_drop(Recency *r, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_hashes(given, &view);
    if (n < 0)
        return NULL;
    uint64_t before = r->blocks;
    for (Py_ssize_t at = 0; at < n; at++) {
        uint32_t i = find(r, hash_at(view.buf, at));
        if (i != NONE)
            remove_entry(r, i, entry_at(r, i));
    }
    trim(r);
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

static PyObject *recency_held(Recency *r, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_hashes(given, &view), at = 0;
    if (n < 0)
        return NULL;
    while (at < n && find(r, hash_at(view.buf, at)) != NONE)
        at++;
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(at);
}

static PyObject *recency_stamp_of(Recency *r, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_hashes(given, &view);
    if (n < 0)
        return NULL;
    uint32_t i = n == 1 ? find(r, hash_at(view.buf, 0)) : NONE;
    PyBuffer_Release(&view);
    if (n != 1) {
        PyErr_SetString(PyExc_ValueError, "expected one hash of 8 bytes");
        return NULL;
    }
    if (i == NONE)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(entry_at(r, i)->stamp);
}

/* Of every `step`th block of the first `depth` ones: (number, stamp) of those held, and touched no later than `latest`. */
static PyObject *recency_stamps(Recency *r, PyObject *args) {
    Py_buffer view;
    PyObject *hashes, *list = NULL;
    Py_ssize_t depth, step;
    double latest;
    if (!PyArg_ParseTuple(args, "Onnd", &hashes, &depth, &step, &latest))
        return NULL;
    Py_ssize_t n = open_hashes(hashes, &view);
    if (n < 0)
        return NULL;
    if (step < 1)
        PyErr_SetString(PyExc_ValueError, "expected a step of 1 or more");
    else
        list = PyList_New(0);
    for (Py_ssize_t at = step - 1; list && at < depth && at < n; at += step) {
        uint32_t i = find(r, hash_at(view.buf, at));
        if (i == NONE || entry_at(r, i)->stamp > latest)
            continue;
        PyObject *pair = Py_BuildValue("nd", at, entry_at(r, i)->stamp);
        if (!pair || PyList_Append(list, pair) < 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
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
    {"drop", (PyCFunction)recency_drop, METH_O, "Forgets these; the number of those that were held."},
    {"resize", (PyCFunction)recency_resize, METH_O, "Another capacity; the evicted hashes."},
    {"clear", (PyCFunction)recency_clear, METH_NOARGS, "Forgets all, and gives the memory back."},
    {"held", (PyCFunction)recency_held, METH_O, "How many leading ones are held."},
    {"stamp_of", (PyCFunction)recency_stamp_of, METH_O, "When this block was last touched, or None."},
    {"stamps", (PyCFunction)recency_stamps, METH_VARARGS, "When some of the first blocks were last touched."},
    {"sample", (PyCFunction)recency_sample, METH_O | METH_STATIC, "One in 64 of these, chosen by the hash."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef recency_properties[] = {
    {"oldest", (getter)recency_oldest, NULL, "Stamp of what would be evicted next; None where nothing is held.", NULL},
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

/* ---- The module ---- */

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_recency", "KV blocks by last use.", -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__recency(void) {
    if (getrandom(&secret, sizeof(secret), 0) != sizeof(secret))
        return PyErr_SetFromErrno(PyExc_OSError);
    if (PyType_Ready(&RecencyType) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    if (m && PyModule_AddObjectRef(m, "Recency", (PyObject *)&RecencyType) < 0)
        Py_CLEAR(m);
    return m;
}
