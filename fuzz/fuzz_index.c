/* The block index: equal to a plain model while the budget is large, and sound and within its budget when it is small. */
#include "checks.h"

#define HOLDERS 6
#define NAMES 24 /* engine hashes in use */
#define MAX_DEPTH 24
#define TIERS 4

static PyObject *BlockIndex, *Recency, *hash_blocks;

void fuzz_setup(void) {
    BlockIndex = kernel("BlockIndex");
    Recency = kernel("Recency");
    hash_blocks = kernel("hash_blocks");
}

/* ---- The model: for each holder, stores by engine hash and by our own hash ---- */

typedef struct {
    uint64_t block;
    unsigned stores[TIERS];
} named_block;

typedef struct {
    long id; /* -1: not open */
    PyObject *recency;
    named_block by_engine_hash[NAMES];
    named_block by_hash[256];
    size_t n_by_hash;
} model_holder;

typedef struct {
    model_holder holders[HOLDERS];
    PyObject *index;
    int is_exact;    /* the budget is large, so that nothing is evicted */
    unsigned floods; /* so far */
} model;

static int is_stored(const named_block *b) {
    unsigned sum = 0;
    for (int tier = 0; tier < TIERS; tier++)
        sum += b->stores[tier];
    return sum > 0;
}

static void add_store(named_block *b, uint64_t block, unsigned tier) {
    if (is_stored(b) && b->block != block)
        memset(b->stores, 0, sizeof b->stores); /* the engine uses this hash for another block now */
    b->block = block;
    if (b->stores[tier] < (tier ? 15u : 16383u))
        b->stores[tier]++;
}

/* The entry of our own hash, made where it is missing; NULL where there are too many. */
static named_block *own_entry(model_holder *h, uint64_t block) {
    for (size_t i = 0; i < h->n_by_hash; i++)
        if (h->by_hash[i].block == block)
            return &h->by_hash[i];
    if (h->n_by_hash == sizeof h->by_hash / sizeof *h->by_hash)
        return NULL;
    h->by_hash[h->n_by_hash] = (named_block){.block = block};
    return &h->by_hash[h->n_by_hash++];
}

static int has_block(const model_holder *h, uint64_t block, unsigned tier) {
    for (size_t i = 0; i < NAMES; i++)
        if (h->by_engine_hash[i].block == block && h->by_engine_hash[i].stores[tier])
            return 1;
    for (size_t i = 0; i < h->n_by_hash; i++)
        if (h->by_hash[i].block == block && h->by_hash[i].stores[tier])
            return 1;
    return 0;
}

static void forget(model_holder *h) {
    memset(h->by_engine_hash, 0, sizeof h->by_engine_hash);
    h->n_by_hash = 0;
}

/* ---- Prompts ---- */

typedef struct {
    uint32_t tokens[MAX_DEPTH];
    uint64_t hashes[MAX_DEPTH];
    size_t n;
} prompt;

static void hash_prompt(prompt *p, PyObject *parent) {
    PyObject *made = must_call(hash_blocks, 4, integer(7), parent, bytes(p->tokens, 4 * p->n), integer(1));
    memcpy(p->hashes, PyBytes_AS_STRING(made), 8 * p->n);
    Py_DECREF(made);
}

static prompt read_prompt(input *in, size_t most) {
    prompt p;
    p.n = next_below(in, (unsigned)most + 1);
    for (size_t i = 0; i < p.n; i += 4) {
        uint8_t choice = next_byte(in);
        for (size_t k = i; k < p.n && k < i + 4; k++, choice >>= 2)
            p.tokens[k] = choice & 3;
    }
    hash_prompt(&p, none());
    return p;
}

static PyObject *packed(const prompt *p) { return bytes(p->hashes, 8 * p->n); }

/* ---- Operations on both ---- */

/* Mostly the GPU. */
static unsigned read_tier(input *in) {
    unsigned tier = next_below(in, 7);
    return tier < TIERS ? tier : 0;
}

static model_holder *choose(model *m, input *in, int with_recency) {
    model_holder *h = &m->holders[next_below(in, HOLDERS)];
    return h->id >= 0 && !h->recency == !with_recency ? h : NULL;
}

static void open_or_close(model *m, input *in) {
    model_holder *h = &m->holders[next_below(in, HOLDERS)];
    if (h->id >= 0) {
        Py_DECREF(must_call_method(m->index, "remove_holder", 1, integer(h->id)));
        if (h->recency) {
            CHECK(PyObject_Length(h->recency) == 0);
            Py_CLEAR(h->recency);
        }
        h->id = -1;
        forget(h);
    } else if (next_below(in, 3)) {
        h->id = (long)as_integer(must_call_method(m->index, "add_holder", 0));
    } else {
        h->recency = must_call(Recency, 1, integer(1 + next_below(in, 100)));
        h->id = (long)as_integer(must_call_method(m->index, "add_holder", 1, Py_NewRef(h->recency)));
    }
}

/* A store as an event reports it: blocks after a parent, with engine hashes. */
static void store(model *m, model_holder *h, input *in) {
    prompt p;
    unsigned parent = next_below(in, NAMES + 1), first = next_below(in, NAMES), tier = read_tier(in);
    const named_block *known = parent < NAMES && is_stored(&h->by_engine_hash[parent]) ? &h->by_engine_hash[parent] : NULL;
    uint64_t known_block = known ? known->block : 0;
    p.n = next_below(in, 9);
    for (size_t i = 0; i < p.n; i++)
        p.tokens[i] = next_byte(in) & 1; /* few different blocks, so that several names mean the same one */
    PyObject *names = PyList_New((Py_ssize_t)p.n);
    for (size_t i = 0; i < p.n; i++)
        PyList_SET_ITEM(names, (Py_ssize_t)i, integer((first + (long long)i) % NAMES));
    PyObject *result = must_call_method(m->index, "store", 7, integer(h->id), integer(7),
                                        parent < NAMES ? integer(parent) : none(), names, bytes(p.tokens, 4 * p.n), integer(1),
                                        integer(tier));
    long long stored = as_integer(result);
    if (!m->is_exact)
        return;
    if (parent < NAMES && !known) {
        CHECK(stored == -1);
        return;
    }
    CHECK(stored == (long long)p.n);
    hash_prompt(&p, known ? PyLong_FromUnsignedLongLong(known_block) : none());
    for (size_t i = 0; i < p.n; i++)
        add_store(&h->by_engine_hash[(first + i) % NAMES], p.hashes[i], tier);
}

static void store_known(model *m, model_holder *h, input *in) {
    unsigned name = next_below(in, NAMES), tier = read_tier(in);
    PyObject *names = PyList_New(1);
    PyList_SET_ITEM(names, 0, integer(name));
    long long stored = as_integer(must_call_method(m->index, "store_known", 3, integer(h->id), names, integer(tier)));
    if (!m->is_exact)
        return;
    CHECK(stored == is_stored(&h->by_engine_hash[name]));
    if (stored)
        add_store(&h->by_engine_hash[name], h->by_engine_hash[name].block, tier);
}

static void store_hashes(model *m, model_holder *h, input *in) {
    prompt p = read_prompt(in, MAX_DEPTH);
    unsigned tier = read_tier(in);
    if (m->is_exact)
        for (size_t i = 0; i < p.n; i++)
            if (!own_entry(h, p.hashes[i]))
                return; /* more than the model has room for */
    Py_DECREF(must_call_method(m->index, "store_hashes", 3, integer(h->id), packed(&p), integer(tier)));
    for (size_t i = 0; m->is_exact && i < p.n; i++)
        add_store(own_entry(h, p.hashes[i]), p.hashes[i], tier);
}

static void remove_names(model *m, model_holder *h, input *in) {
    unsigned first = next_below(in, NAMES), n = next_below(in, 12), tier = read_tier(in), known = 0;
    PyObject *names = PyTuple_New(n);
    for (unsigned i = 0; i < n; i++) {
        named_block *b = &h->by_engine_hash[(first + i) % NAMES];
        PyTuple_SET_ITEM(names, i, integer((first + i) % NAMES));
        if (m->is_exact && b->stores[tier]) {
            b->stores[tier]--;
            known++;
        }
    }
    long long removed = as_integer(must_call_method(m->index, "remove", 3, integer(h->id), names, integer(tier)));
    CHECK(!m->is_exact || removed == known);
}

static void remove_hashes(model *m, model_holder *h, input *in) {
    prompt p = read_prompt(in, MAX_DEPTH);
    unsigned tier = read_tier(in), known = 0;
    for (size_t i = 0; m->is_exact && i < p.n; i++) {
        named_block *b = own_entry(h, p.hashes[i]);
        if (b && b->stores[tier]) {
            b->stores[tier]--;
            known++;
        }
    }
    long long removed = as_integer(must_call_method(m->index, "remove_hashes", 3, integer(h->id), packed(&p), integer(tier)));
    CHECK(!m->is_exact || removed == known);
}

static void touch(model *m, model_holder *h, input *in) {
    prompt p = read_prompt(in, MAX_DEPTH);
    Py_DECREF(must_call_method(m->index, "touch", 3, integer(h->id), packed(&p), PyFloat_FromDouble(next_byte(in))));
    check_recency(h->recency);
}

/* Changes of a recency list outside of the index, which is then told what was evicted. */
static void change_recency(model *m, model_holder *h, input *in) {
    prompt p = read_prompt(in, MAX_DEPTH);
    PyObject *gone;
    switch (next_below(in, 3)) {
    case 0: gone = must_call_method(h->recency, "resize", 1, integer(1 + next_below(in, 100))); break;
    case 1: gone = must_call_method(h->recency, "add_anonymous", 2, integer(next_below(in, 30)), PyFloat_FromDouble(1.0)); break;
    default:
        Py_DECREF(must_call_method(h->recency, "drop", 2, packed(&p), packed(&p)));
        gone = packed(&p);
    }
    Py_DECREF(must_call_method(m->index, "remove_hashes", 3, integer(h->id), gone, integer(0)));
}

/* Many blocks at once, to fill a small budget. */
static void flood(model *m, model_holder *h, input *in) {
    uint64_t hashes[300], seed = next_byte(in);
    for (unsigned i = 0; i < 300; i++)
        hashes[i] = (seed << 32 | i) * 0x9e3779b97f4a7c15ULL;
    if (m->is_exact || ++m->floods > 8)
        return;
    if (h->recency)
        Py_DECREF(must_call_method(m->index, "touch", 3, integer(h->id), bytes(hashes, sizeof hashes), PyFloat_FromDouble(1.0)));
    else
        Py_DECREF(must_call_method(m->index, "store_hashes", 3, integer(h->id), bytes(hashes, sizeof hashes),
                                   integer(next_below(in, TIERS))));
}

/* ---- What is matched ---- */

static void expected_row(const model *m, const model_holder *h, const prompt *p, long long depth[TIERS]) {
    for (unsigned tier = 0; tier < TIERS; tier++) {
        size_t n = 0;
        for (int held = 1; n < p->n; n++) {
            held = 0;
            for (unsigned nearer = 0; nearer <= tier; nearer++)
                held |= has_block(h, p->hashes[n], nearer);
            if (!held)
                break;
        }
        depth[tier] = (long long)n;
    }
    (void)m;
}

static void check_row(const model *m, const model_holder *h, const prompt *p, PyObject *row) {
    long long depth[TIERS];
    if (h->recency) {
        long long held = as_integer(must_call_method(h->recency, "match", 1, packed(p)));
        for (unsigned tier = 0; tier < TIERS; tier++)
            depth[tier] = held;
    } else if (m->is_exact) {
        expected_row(m, h, p, depth);
    } else {
        return;
    }
    for (unsigned tier = 0; tier < TIERS; tier++)
        CHECK(row ? PyLong_AsLongLong(PyTuple_GET_ITEM(row, 1 + tier)) == depth[tier] : depth[tier] == 0);
}

static void check_match(const model *m, input *in) {
    prompt p = read_prompt(in, MAX_DEPTH);
    PyObject *rows = must_call_method(m->index, "match", 1, packed(&p));
    for (unsigned i = 0; i < HOLDERS; i++) {
        const model_holder *h = &m->holders[i];
        PyObject *found = NULL;
        for (Py_ssize_t k = 0; k < PyList_GET_SIZE(rows); k++)
            if (PyLong_AsLong(PyTuple_GET_ITEM(PyList_GET_ITEM(rows, k), 0)) == h->id)
                found = PyList_GET_ITEM(rows, k);
        if (h->id >= 0)
            check_row(m, h, &p, found);
    }
    Py_DECREF(rows);
}

/* More holders than a match keeps without allocating, which have different numbers of blocks. */
static void check_many_holders(input *in) {
    PyObject *index = must_call(BlockIndex, 1, integer(1 << 24));
    prompt p = read_prompt(in, MAX_DEPTH);
    unsigned holders = 120 + next_below(in, 40), seed = next_byte(in);
    for (unsigned i = 0; i < holders; i++) {
        Py_DECREF(must_call_method(index, "add_holder", 0));
        size_t depth = (i * 7 + seed) % (p.n + 1);
        Py_DECREF(must_call_method(index, "store_hashes", 3, integer(i), bytes(p.hashes, 8 * depth), integer(0)));
    }
    PyObject *rows = must_call_method(index, "match", 1, packed(&p));
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(rows); k++) {
        PyObject *row = PyList_GET_ITEM(rows, k);
        long id = PyLong_AsLong(PyTuple_GET_ITEM(row, 0)), depth = PyLong_AsLong(PyTuple_GET_ITEM(row, 1));
        CHECK(depth && (size_t)depth == ((unsigned)id * 7 + seed) % (p.n + 1));
    }
    Py_DECREF(rows);
    check_index(index);
    Py_DECREF(index);
}

static void wrong_arguments(model *m, input *in) {
    PyObject *result;
    switch (next_below(in, 4)) {
    case 0: result = call_method(m->index, "match", 1, bytes("1234567", 7)); break;
    case 1: result = call_method(m->index, "clear", 1, integer(next_byte(in) + 1000)); break;
    case 2: result = call_method(m->index, "store_hashes", 3, integer(0), bytes("12345678", 8), integer(4)); break;
    default: result = call_method(m->index, "add_holder", 1, integer(1));
    }
    CHECK(!result);
    expect_error(PyExc_ValueError, PyExc_TypeError);
}

static void step(model *m, input *in) {
    unsigned operation = next_below(in, 16);
    model_holder *h = operation < 12 ? choose(m, in, operation >= 8) : NULL;
    switch (operation) {
    case 0: case 1: if (h) store(m, h, in); break;
    case 2: if (h) store_known(m, h, in); break;
    case 3: if (h) store_hashes(m, h, in); break;
    case 4: if (h) remove_names(m, h, in); break;
    case 5: if (h) remove_hashes(m, h, in); break;
    case 6: if (h) flood(m, h, in); break;
    case 7:
        if (h) {
            Py_DECREF(must_call_method(m->index, "clear", 1, integer(h->id)));
            forget(h);
        }
        break;
    case 8: case 9: if (h) touch(m, h, in); break;
    case 10: if (h) change_recency(m, h, in); break;
    case 11: if (h) flood(m, h, in); break;
    case 12: open_or_close(m, in); break;
    case 13: Py_DECREF(must_call_method(m->index, "sweep", 1, integer(next_below(in, 40)))); break;
    case 14: wrong_arguments(m, in); break;
    default: check_match(m, in);
    }
}

void fuzz_one(const uint8_t *data, size_t size) {
    static model m; /* large */
    input in = {data, data + size};
    unsigned first = next_byte(&in), steps = 0;
    if (first == 255) {
        check_many_holders(&in);
        return;
    }
    m.is_exact = first % 3 != 0;
    m.floods = 0;
    m.index = must_call(BlockIndex, 1, integer(m.is_exact ? 1 << 24 : 65536 + 64 * (first / 3)));
    for (unsigned i = 0; i < HOLDERS; i++) {
        forget(&m.holders[i]);
        m.holders[i].id = -1;
        if (first >> i & 1)
            m.holders[i].id = (long)as_integer(must_call_method(m.index, "add_holder", 0));
    }
    while (has_more(&in) && steps++ < 150)
        step(&m, &in);
    check_index(m.index);
    Py_DECREF(must_call_method(m.index, "stats", 0));
    for (unsigned i = 0; i < HOLDERS; i++)
        if (m.holders[i].id >= 0)
            Py_DECREF(must_call_method(m.index, "holdings", 1, integer(m.holders[i].id)));
    Py_DECREF(m.index);
    for (unsigned i = 0; i < HOLDERS; i++)
        Py_CLEAR(m.holders[i].recency);
}
