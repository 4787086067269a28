/* Recency: an engine's KV blocks by last use, within a number of blocks. It says what the engine should still have, and
 * what it must have evicted.
 *
 * The rules (the list has some of its own, see recency_list.h):
 * - A prompt that is touched becomes the most recent of all, its first block the most: engines free the tail of a prompt
 *   first, so a prefix outlives what follows it.
 * - What is evicted is returned to the caller. A touch never evicts a block of the prompt that is being touched.
 * - A call that fails changes nothing.
 * - Hashes have to be a prompt's, from its first block on, without repetition. For others a block may be counted twice; the
 *   list stays within its capacity.
 *
 * tests/index/test_recency.py compares it with an OrderedDict.
 */
#include "recency_list.h"
#include <math.h>
#include <sys/random.h>

#define MAX_CAPACITY INT32_MAX /* a touch may hold twice as many for a moment, and numbers have 32 bits */

/* ---- Arguments and results ---- */

static int read_capacity(PyObject *from, uint64_t *capacity) {
    long number;
    if (as_number(from, 1, MAX_CAPACITY, &number, "capacity") < 0)
        return -1;
    *capacity = (uint64_t)number;
    return 0;
}

int recency_read_count(PyObject *from, uint64_t *count) {
    long number;
    if (as_number(from, 0, LONG_MAX, &number, "count") < 0)
        return -1;
    *count = (uint64_t)number;
    return 0;
}

int recency_read_stamp(PyObject *from, double *stamp) {
    *stamp = PyFloat_AsDouble(from);
    if (*stamp == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (isfinite(*stamp)) {
        return 0;
    }
    PyErr_SetString(PyExc_ValueError, "stamp must be finite");
    return -1;
}

/* Opens a contiguous buffer of 64-bit integers, or of bytes that hold such. Returns their number; -1 with an exception. */
static Py_ssize_t open_prompt(PyObject *from, Py_buffer *view) {
    if (PyObject_GetBuffer(from, view, PyBUF_SIMPLE) == 0) {
        if (view->len % 8 == 0 && (view->itemsize == 1 || view->itemsize == 8))
            return view->len / 8;
        PyBuffer_Release(view);
    } else if (!PyErr_ExceptionMatches(PyExc_BufferError)) { /* a BufferError: it is not contiguous */
        return -1;
    }
    PyErr_SetString(PyExc_ValueError, "hashes must be a contiguous buffer of 64-bit integers");
    return -1;
}

static PyObject *make_hashes(uint64_t n) { return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n * 8); }

static uint8_t *bytes_of(PyObject *bytes) { return (uint8_t *)PyBytes_AS_STRING(bytes); }

/* Shortens bytes that nobody else has seen yet to what was written. It does not reallocate, and so can't fail: the list has
 * changed, and the caller must learn what was evicted. */
static PyObject *shortened(PyObject *bytes, const uint8_t *end) {
    Py_ssize_t len = end - bytes_of(bytes);
    if (len != PyBytes_GET_SIZE(bytes)) {
        Py_SET_SIZE(bytes, len);
        bytes_of(bytes)[len] = 0;
    }
    return bytes;
}

/* ---- Touching a prompt ---- */

/* A part of the prompt that is being touched: the beginning of a known piece, or a new piece. */
typedef struct {
    uint32_t at, n;  /* the first of its blocks in the prompt, and their number */
    uint32_t slot;   /* of the known piece; NONE for a new one */
    double stamp;    /* of its last use before; NaN for a new one */
    uint64_t *rest;  /* room for the hashes of the new piece, or of what is split from the known one */
} step;

#define FEW_STEPS 32

typedef struct {
    step *steps, few[FEW_STEPS];
    uint32_t n, room;
    uint64_t new_blocks;
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

/* Finds the known pieces of a prompt, and flags each as IN_PROMPT; what lies between them becomes new pieces. Returns 0
 * without memory. */
static int plan_touch(Recency *r, const uint8_t *hashes, uint32_t n, plan *p) {
    uint32_t at = 0;
    while (at < n) {
        uint32_t i = find_piece(r, hash_at(hashes, at));
        if (i == NONE) {
            /* Without gaps, nothing after a missing block is held, since a beginning outlives what follows it. */
            uint32_t missing = r->has_gaps ? 1 : n - at;
            step *last = p->n ? &p->steps[p->n - 1] : NULL;
            if (last && last->slot == NONE && last->at + last->n == at)
                last->n += missing;
            else if (!add_step(p, (step){at, missing, NONE, NAN, NULL}))
                return 0;
            p->new_blocks += missing;
            at += missing;
            continue;
        }
        entry *e = entry_at(r, i);
        if (e->n & IN_PROMPT) { /* a repeated hash counts where it comes first */
            at++;
            continue;
        }
        uint32_t same = common_prefix(e, hashes + 8 * (size_t)at, n - at);
        if (!add_step(p, (step){at, same, i, e->stamp, NULL}))
            return 0;
        e->n |= IN_PROMPT;
        at += same;
    }
    return 1;
}

/* Allocates all that the plan needs. Returns 0 without memory. */
static int allocate_for(Recency *r, plan *p) {
    uint32_t slots = 0;
    for (uint32_t k = 0; k < p->n; k++) {
        step *s = &p->steps[k];
        uint32_t made = s->slot == NONE ? s->n : (entry_at(r, s->slot)->n & ~IN_PROMPT) - s->n;
        if (made > 1 && !(s->rest = allocate_rest(made)))
            return 0;
        slots += made > 0;
    }
    return reserve_slots(r, slots);
}

/* Makes the pieces the most recent of all, the first the most. */
static void apply_plan(Recency *r, plan *p, const uint8_t *hashes, double stamp) {
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
                memcpy(e->rest, hashes + 8 * ((size_t)s->at + 1), (s->n - 1) * sizeof(uint64_t));
            r->blocks += s->n;
            r->bytes += rest_bytes(s->n);
            add_to_table(r, i, e);
        } else {
            entry *e = entry_at(r, i);
            e->n &= ~IN_PROMPT;
            if (s->n < e->n)
                split_piece(r, i, s->n, s->rest);
            unlink_entry(r, e);
        }
        s->rest = NULL; /* the piece owns it */
        s->slot = NONE; /* its flag is cleared */
        entry *e = entry_at(r, i);
        e->stamp = stamp;
        link_newest(r, i, e);
    }
}

/* Frees what the plan did not use, and clears the flags that are left. */
static void close_plan(Recency *r, plan *p) {
    for (uint32_t k = 0; k < p->n; k++) {
        PyMem_RawFree(p->steps[k].rest);
        if (p->steps[k].slot != NONE)
            entry_at(r, p->steps[k].slot)->n &= ~IN_PROMPT;
    }
    if (p->steps != p->few)
        PyMem_RawFree(p->steps);
}

/* The hashes of the new blocks; the given bytes themselves where all of them are new. */
static PyObject *new_hashes(const plan *p, PyObject *given, const uint8_t *hashes) {
    if (PyBytes_CheckExact(given) && p->new_blocks * 8 == (uint64_t)PyBytes_GET_SIZE(given))
        return Py_NewRef(given);
    PyObject *new = make_hashes(p->new_blocks);
    uint8_t *out = new ? bytes_of(new) : NULL;
    for (uint32_t k = 0; new && k < p->n; k++)
        if (p->steps[k].slot == NONE) {
            memcpy(out, hashes + 8 * (size_t)p->steps[k].at, 8 * (size_t)p->steps[k].n);
            out += 8 * (size_t)p->steps[k].n;
        }
    return new;
}

static int add_use(PyObject *list, Py_ssize_t first, Py_ssize_t end, double stamp) {
    PyObject *use = Py_BuildValue("nnd", first, end, stamp);
    int failed = !use || PyList_Append(list, use) < 0;
    Py_XDECREF(use);
    return failed ? -1 : 0;
}

/* As list_last_uses(), from a plan that was applied. */
static PyObject *uses_in_plan(const plan *p, Py_ssize_t depth, double latest) {
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < p->n && p->steps[k].at < depth; k++) {
        const step *s = &p->steps[k];
        Py_ssize_t end = (Py_ssize_t)s->at + s->n;
        if (s->stamp <= latest && add_use(list, s->at, end < depth ? end : depth, s->stamp) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyObject *recency_touch(Recency *r, PyObject *hashes, double stamp, earlier_uses *before) {
    Py_buffer view;
    Py_ssize_t n = open_prompt(hashes, &view);
    if (n < 0)
        return NULL;
    plan p; /* too large to be cleared each time */
    p.steps = p.few;
    p.room = FEW_STEPS;
    p.n = 0;
    p.new_blocks = 0;
    PyObject *new = NULL, *evicted = NULL;
    PyObject *result = PyTuple_New(2); /* first, since this may collect garbage, and a finalizer may change the list */
    uint32_t touched = (uint64_t)n < r->capacity ? (uint32_t)n : (uint32_t)r->capacity;
    if (result && plan_touch(r, view.buf, touched, &p) && (new = new_hashes(&p, hashes, view.buf)) &&
        (evicted = make_hashes(most_evicted(r, p.new_blocks, r->capacity))) && allocate_for(r, &p)) {
        apply_plan(r, &p, view.buf, stamp);
        evicted = shortened(evicted, evict_to(r, r->capacity, bytes_of(evicted)));
        int collects = PyGC_Disable(); /* a finalizer might remove the holder before the index releases what was evicted */
        if (before && before->depth > 0 && !(before->uses = uses_in_plan(&p, before->depth, before->latest)))
            PyErr_Clear(); /* without memory, the router learns less */
        if (collects)
            PyGC_Enable();
    } else {
        Py_CLEAR(new);
    }
    close_plan(r, &p);
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

/* ---- Dropping blocks of a prompt ---- */

/* The hashes that are to be dropped, in the prompt's order, and how many of them are dealt with. */
typedef struct {
    const uint8_t *hashes;
    size_t at, n;
} dropped_hashes;

/* How many of these hashes are to be dropped, one after the other. */
static uint32_t count_dropped(dropped_hashes *d, const uint8_t *hashes, uint32_t n) {
    uint32_t k = 0;
    while (k < n && d->at < d->n && hash_at(d->hashes, d->at) == hash_at(hashes, k)) {
        k++;
        d->at++;
    }
    return k;
}

/* How many of these hashes stay before one is to be dropped. */
static uint32_t count_kept(const dropped_hashes *d, const uint8_t *hashes, uint32_t n) {
    uint32_t k = 0;
    while (k < n && (d->at == d->n || hash_at(d->hashes, d->at) != hash_at(hashes, k)))
        k++;
    return k;
}

/* Drops blocks of a piece that begins with these hashes. Returns how many of the hashes that deals with. */
static uint32_t drop_from_piece(Recency *r, uint32_t i, const uint8_t *hashes, size_t n, dropped_hashes *d) {
    entry *e = entry_at(r, i);
    uint32_t same = common_prefix(e, hashes, n), kept = count_kept(d, hashes, same);
    if (kept == same)
        return same;
    r->has_gaps = 1;
    uint32_t to = kept + count_dropped(d, hashes + 8 * (size_t)kept, same - kept);
    if (to < e->n) {
        uint64_t *rest = allocate_rest(e->n - to);
        if ((rest || e->n - to == 1) && reserve_slots(r, 1))
            split_piece(r, i, to, rest);
        else /* without memory the rest of the piece is dropped, too: the list then claims less than is there */
            PyMem_RawFree(rest);
    }
    if (kept)
        truncate_piece(r, e, kept);
    else
        remove_piece(r, i, e);
    return to;
}

static void drop_blocks(Recency *r, const uint8_t *hashes, size_t n, dropped_hashes d) {
    for (size_t at = 0; at < n;) {
        const uint8_t *here = hashes + 8 * at;
        uint32_t i = find_piece(r, hash_at(here, 0));
        if (i == NONE) {
            count_dropped(&d, here, 1);
            at++;
        } else {
            at += drop_from_piece(r, i, here, n - at, &d);
        }
    }
    trim(r);
}

/* ---- For the index ---- */

PyObject *recency_add_anonymous(Recency *r, uint64_t count, double stamp) {
    if (count > r->capacity)
        count = r->capacity;
    PyObject *evicted = make_hashes(most_evicted(r, count, r->capacity));
    if (!evicted || !count)
        return evicted;
    if (!reserve_slots(r, 1)) {
        Py_DECREF(evicted);
        return PyErr_NoMemory();
    }
    uint32_t i = take_slot(r);
    *entry_at(r, i) = (entry){.n = (uint32_t)count, .chain = ANONYMOUS, .stamp = stamp};
    link_newest(r, i, entry_at(r, i));
    r->blocks += count;
    r->anonymous += count;
    return shortened(evicted, evict_to(r, r->capacity, bytes_of(evicted)));
}

int recency_attach(Recency *r) {
    int free = !r->is_attached;
    r->is_attached = 1;
    return free;
}

void recency_detach(Recency *r) { r->is_attached = 0; }

Recency *recency_move(Recency *r) {
    Recency *to = (Recency *)RecencyType.tp_alloc(&RecencyType, 0);
    if (!to)
        return NULL;
    PyObject head = to->ob_base;
    *to = *r;
    to->ob_base = head;
    r->entries = r->table = (paged_array){0};
    r->n_slots = 0;
    clear_list(r);
    return to;
}

void recency_untouch(Recency *r, const uint8_t *hashes, size_t n, const uint8_t *last, size_t n_last) {
    int has_gaps = r->has_gaps; /* dropping the last blocks of a prompt makes no gap */
    drop_blocks(r, hashes, n, (dropped_hashes){last, 0, n_last});
    r->has_gaps = has_gaps;
}

uint64_t recency_capacity(const Recency *r) { return r->capacity; }

void recency_room(const Recency *r, Py_ssize_t *blocks, double *oldest) {
    *blocks = (Py_ssize_t)(r->capacity - r->blocks);
    *oldest = r->oldest == NONE ? Py_NAN : entry_at(r, r->oldest)->stamp;
}

uint64_t recency_count(const Recency *r) { return r->blocks - r->anonymous; }

size_t recency_match(const Recency *r, const uint8_t *hashes, size_t n) {
    size_t at = 0;
    while (at < n) {
        const uint8_t *here = hashes + 8 * at;
        uint32_t i = find_piece(r, hash_at(here, 0));
        if (i == NONE)
            break;
        at += common_prefix(entry_at(r, i), here, n - at);
    }
    return at;
}

size_t recency_evict_oldest(Recency *r, uint64_t *out, size_t most) {
    uint64_t count = recency_count(r);
    size_t n = 0;
    most = most < count ? most : (size_t)count;
    while (n < most) {
        const entry *e = entry_at(r, r->oldest);
        uint64_t some = e->chain == ANONYMOUS || e->n < most - n ? e->n : most - n;
        uint8_t *from = (uint8_t *)(out + n);
        n += (size_t)(evict_to(r, r->blocks - some, from) - from) / 8;
    }
    return n;
}

PyObject *recency_hashes(const Recency *r) {
    PyObject *hashes = make_hashes(recency_count(r));
    uint8_t *out = hashes ? bytes_of(hashes) : NULL;
    for (uint32_t i = r->oldest; hashes && i != NONE; i = entry_at(r, i)->newer) {
        const entry *e = entry_at(r, i);
        if (e->chain == ANONYMOUS)
            continue;
        memcpy(out, &e->hash, 8);
        if (e->n > 1)
            memcpy(out + 8, e->rest, (e->n - 1) * sizeof(uint64_t));
        out += 8 * (size_t)e->n;
    }
    return hashes;
}

/* ---- The Python type ---- */

static PyObject *list_pieces(Recency *r, PyObject *Py_UNUSED(none)) {
    PyObject *pieces = PyList_New(0);
    for (uint32_t i = r->oldest; pieces && i != NONE; i = entry_at(r, i)->newer) {
        const entry *e = entry_at(r, i);
        if (e->chain == ANONYMOUS)
            continue;
        PyObject *hashes = make_hashes(e->n);
        if (hashes) {
            memcpy(bytes_of(hashes), &e->hash, 8);
            if (e->n > 1)
                memcpy(bytes_of(hashes) + 8, e->rest, (e->n - 1) * sizeof(uint64_t));
        }
        PyObject *piece = hashes ? Py_BuildValue("(dN)", e->stamp, hashes) : NULL;
        if (!piece || PyList_Append(pieces, piece) < 0)
            Py_CLEAR(pieces);
        Py_XDECREF(piece);
    }
    return pieces;
}

static PyObject *list_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"capacity", NULL};
    PyObject *given;
    uint64_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &given) ||
        read_capacity(given, &capacity) < 0)
        return NULL;
    Recency *r = (Recency *)type->tp_alloc(type, 0); /* all zero */
    if (!r)
        return NULL;
    clear_list(r);
    r->capacity = capacity;
    return (PyObject *)r;
}

static void list_dealloc(Recency *r) {
    clear_list(r);
    Py_TYPE(r)->tp_free(r);
}

static PyObject *list_touch(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    double stamp;
    if (check_signature(n_args, 2, 2, "(hashes, stamp)") < 0 || recency_read_stamp(args[1], &stamp) < 0)
        return NULL;
    return recency_touch(r, args[0], stamp, NULL);
}

static PyObject *list_add_anonymous(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    uint64_t count;
    double stamp;
    if (check_signature(n_args, 2, 2, "(count, stamp)") < 0 || recency_read_count(args[0], &count) < 0 ||
        recency_read_stamp(args[1], &stamp) < 0)
        return NULL;
    return recency_add_anonymous(r, count, stamp);
}

static PyObject *list_drop(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    Py_buffer prompt, dropped;
    Py_ssize_t n, m;
    if (check_signature(n_args, 2, 2, "(hashes, dropped)") < 0 || (n = open_prompt(args[0], &prompt)) < 0)
        return NULL;
    if ((m = open_prompt(args[1], &dropped)) < 0) {
        PyBuffer_Release(&prompt);
        return NULL;
    }
    uint64_t before = r->blocks;
    drop_blocks(r, prompt.buf, (size_t)n, (dropped_hashes){dropped.buf, 0, (size_t)m});
    PyBuffer_Release(&prompt);
    PyBuffer_Release(&dropped);
    return PyLong_FromUnsignedLongLong(before - r->blocks);
}

static PyObject *list_resize(Recency *r, PyObject *given) {
    uint64_t capacity;
    if (read_capacity(given, &capacity) < 0)
        return NULL;
    PyObject *evicted = make_hashes(most_evicted(r, 0, capacity));
    if (!evicted)
        return NULL;
    r->capacity = capacity;
    return shortened(evicted, evict_to(r, capacity, bytes_of(evicted)));
}

static PyObject *list_clear(Recency *r, PyObject *unused) {
    (void)unused;
    clear_list(r);
    Py_RETURN_NONE;
}

static PyObject *list_match(Recency *r, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_prompt(given, &view);
    if (n < 0)
        return NULL;
    size_t leading = recency_match(r, view.buf, (size_t)n);
    PyBuffer_Release(&view);
    return PyLong_FromSize_t(leading);
}

static PyObject *list_last_uses(Recency *r, PyObject *const *args, Py_ssize_t n_args) {
    Py_buffer view;
    Py_ssize_t depth, n;
    double latest;
    if (check_signature(n_args, 3, 3, "(hashes, depth, latest)") < 0 || as_size(args[1], &depth) < 0 ||
        as_double(args[2], &latest) < 0 || (n = open_prompt(args[0], &view)) < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    n = depth < n ? depth : n;
    for (Py_ssize_t at = 0, same; list && at < n; at += same) {
        const uint8_t *here = (const uint8_t *)view.buf + 8 * at;
        uint32_t i = find_piece(r, hash_at(here, 0));
        same = i == NONE ? 1 : (Py_ssize_t)common_prefix(entry_at(r, i), here, (size_t)(n - at));
        if (i == NONE || entry_at(r, i)->stamp > latest)
            continue;
        if (add_use(list, at, at + same, entry_at(r, i)->stamp) < 0)
            Py_CLEAR(list);
    }
    PyBuffer_Release(&view);
    return list;
}

static always_inline int in_sample(const uint8_t *hash) { return (hash[0] & 63) == 0; }

static PyObject *list_sample(PyObject *unused, PyObject *given) {
    Py_buffer view;
    Py_ssize_t n = open_prompt(given, &view), found = 0;
    (void)unused;
    if (n < 0)
        return NULL;
    const uint8_t *hashes = view.buf;
    for (Py_ssize_t at = 0; at < n; at++)
        found += in_sample(hashes + at * 8);
    PyObject *sample = make_hashes((uint64_t)found);
    for (Py_ssize_t at = 0, to = 0; sample && to < found; at++)
        if (in_sample(hashes + at * 8))
            memcpy(bytes_of(sample) + to++ * 8, hashes + at * 8, 8);
    PyBuffer_Release(&view);
    return sample;
}

static PyObject *list_oldest(Recency *r, void *unused) {
    (void)unused;
    if (r->oldest == NONE)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(entry_at(r, r->oldest)->stamp);
}

static PyObject *list_room(Recency *r, void *unused) {
    Py_ssize_t blocks;
    double oldest;
    (void)unused;
    recency_room(r, &blocks, &oldest);
    return Py_BuildValue("nd", blocks, oldest);
}

static PyObject *list_capacity(Recency *r, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(r->capacity);
}

static PyObject *list_bytes(Recency *r, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(r->bytes);
}

static Py_ssize_t list_len(PyObject *r) { return (Py_ssize_t)((Recency *)r)->blocks; }

static PyMethodDef list_methods[] = {
    {"touch", FAST(list_touch), "Make a prompt the most recent; return (new hashes, evicted hashes)."},
    {"add_anonymous", FAST(list_add_anonymous), "Add blocks without hashes as the most recent; return the evicted hashes."},
    {"drop", FAST(list_drop), "Forget some of a prompt's blocks; return how many of them were held."},
    {"resize", (PyCFunction)list_resize, METH_O, "Change the capacity; return the evicted hashes."},
    {"clear", (PyCFunction)list_clear, METH_NOARGS, "Forget everything, and free the memory."},
    {"pieces", (PyCFunction)list_pieces, METH_NOARGS, "Return (stamp, hashes) of each piece, oldest first."},
    {"match", (PyCFunction)list_match, METH_O, "Return how many leading blocks are held."},
    {"last_uses", FAST(list_last_uses), "Return when the first blocks of a prompt were last touched, piece by piece."},
    {"sample", (PyCFunction)list_sample, METH_O | METH_STATIC, "Return one in 64 of these hashes, chosen by the hash."},
    NO_METHOD};

static PyGetSetDef list_properties[] = {
    {"oldest", (getter)list_oldest, NULL, "Stamp of the block that would be evicted next, or None.", NULL},
    {"room", (getter)list_room, NULL, "(blocks that fit before one is evicted, that one's stamp or nan).", NULL},
    {"capacity", (getter)list_capacity, NULL, "In blocks.", NULL},
    {"bytes", (getter)list_bytes, NULL, "Memory allocated.", NULL},
    NO_PROPERTY};

static PySequenceMethods list_as_sequence = {.sq_length = list_len};

PyTypeObject RecencyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "Recency",
    .tp_doc = "An engine's KV blocks by last use, within a number of blocks.",
    .tp_basicsize = sizeof(Recency),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = list_new,
    .tp_dealloc = (destructor)list_dealloc,
    .tp_as_sequence = &list_as_sequence,
    .tp_methods = list_methods,
    .tp_getset = list_properties,
};

int add_recency(PyObject *module) {
    static int has_key;
    if (!has_key && getrandom(&recency_key, sizeof(recency_key), 0) != sizeof(recency_key)) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    has_key = 1;
    return add_type(module, "Recency", &RecencyType);
}
