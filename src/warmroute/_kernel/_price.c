/* What a request would cost on each node: what the node has of its prompt, and the price, for all nodes in one call.
 *
 * The rules:
 * - The state that a price is made of lies in plain structs, which the classes of Python inherit from: they write it, and
 *   nothing is kept twice. Here it is only read, but for the room of a cache, which is noted when a prompt is sent there.
 *   Nodes, their speed and their model's pace are those of _books.h.
 * - A formula is the one in Python, operation by operation: tests/routing/price_reference.py and fleet/node_speed.py for the price,
 *   index/confidence.py and index/reuse.py for what a belief counts.
 *
 * tests/routing/test_price_kernel.py holds both equal.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_books.h"
#include "_match.h"
#include <math.h>
#include <stddef.h>
#include <structmember.h>

/* fleet/node_speed.py */
#define ATTENTION 4e-5
#define STEPS 1.5
/* fleet/arrival_rate.py */
#define KEPT_S 10.0
/* tests/routing/price_reference.py */
#define FULL_POWER 8.0
#define FULL_SCALE 0.1
#define FULL_MARGIN 1.02
#define MOST_FULL 0.999
#define MEMORY_FULL 0.98
#define GROWTH 0.3
#define STREAMED 0.2
#define EVICTED_DEARER 2.5
#define RISK_POWER 4.0
/* index/reuse.py */
#define FIRST_S 0.25
/* index/confidence.py */
#define PRIOR_TOKENS 4096.0
#define HALF_LIFE_S 30.0
/* index/node_cache.py: in the place of a rank, what was routed there */
#define ROUTED -1

static const books_api *books;
static const match_api *matches;

typedef struct {
    PyObject_HEAD
    double predicted, came_true, at_s;
} AccuracyState;

typedef struct {
    Named named; /* its part: an AccuracyState */
    Py_ssize_t block_size, capacity_blocks, free_blocks;
    double oldest_s; /* not a number where nothing is held */
    double heard_s, lag_s;
    char complete, doubted;
} CacheState;

typedef struct {
    PyObject_HEAD
    Py_ssize_t tokens, rank;
    double expected;
} Hit;

/* As in routing/price.py. */
typedef struct {
    double total, wait, prefill, room, contention, distance, adapter, risk, memory, congestion, cached, new, output;
} price;
#define TERMS ((Py_ssize_t)(sizeof(price) / sizeof(double)))

typedef struct {
    PyObject_VAR_HEAD
    PyObject *nodes;
    price of[];
} Prices;

/* What the request pays itself until its first token. */
static always_inline double own_of(const price *p) {
    return p->wait + p->prefill + p->room + p->adapter + p->distance;
}

static int check_tuple(PyObject *given, Py_ssize_t length) {
    if (PyTuple_Check(given) && PyTuple_GET_SIZE(given) == length)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd", length);
    return -1;
}

/* The first so many of a tuple. */
static int as_doubles(PyObject *tuple, Py_ssize_t count, double *const *to) {
    for (Py_ssize_t at = 0; at < count; at++)
        if (as_double(PyTuple_GET_ITEM(tuple, at), to[at]) < 0)
            return -1;
    return 0;
}

/* ---- State ---- */

static PyMemberDef accuracy_members[] = {
    {"_predicted", T_DOUBLE, offsetof(AccuracyState, predicted), 0, NULL},
    {"_came_true", T_DOUBLE, offsetof(AccuracyState, came_true), 0, NULL},
    {"_at_s", T_DOUBLE, offsetof(AccuracyState, at_s), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject AccuracyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._price.AccuracyState",
    .tp_doc = "What a hit takes from the accuracy of a node's cache.",
    .tp_basicsize = sizeof(AccuracyState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = accuracy_members,
};

static void cache_dealloc(Named *self) {
    PyObject_GC_UnTrack(self);
    named_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef cache_members[] = {
    {"name", T_OBJECT_EX, offsetof(Named, name), 0, NULL},
    {"block_size", T_PYSSIZET, offsetof(CacheState, block_size), 0, NULL},
    {"capacity_blocks", T_PYSSIZET, offsetof(CacheState, capacity_blocks), 0, NULL},
    {"free_blocks", T_PYSSIZET, offsetof(CacheState, free_blocks), 0, NULL},
    {"oldest_s", T_DOUBLE, offsetof(CacheState, oldest_s), 0, NULL},
    {"heard_s", T_DOUBLE, offsetof(CacheState, heard_s), 0, NULL},
    {"lag_s", T_DOUBLE, offsetof(CacheState, lag_s), 0, NULL},
    {"complete", T_BOOL, offsetof(CacheState, complete), 0, NULL},
    {"doubted", T_BOOL, offsetof(CacheState, doubted), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

/* A prompt is sent to the node: BlockIndex.keep, with what that changes here. */
static PyObject *cache_send(CacheState *self, PyObject *const *args, Py_ssize_t count) {
    sending s = {0};
    if (check_count(count, 6) < 0 || check_type(args[0], matches->index) < 0 || as_size(args[4], &s.depth) < 0 ||
        as_double(args[5], &s.latest) < 0 || matches->send(args[0], args + 1, &s) < 0)
        return NULL;
    self->free_blocks = s.free_blocks;
    self->oldest_s = s.oldest_s;
    PyObject *result = PyTuple_New(2);
    if (!result) {
        Py_DECREF(s.new);
        Py_XDECREF(s.uses);
        return NULL;
    }
    PyTuple_SET_ITEM(result, 0, s.new);
    PyTuple_SET_ITEM(result, 1, s.uses ? s.uses : Py_NewRef(Py_None));
    return result;
}

/* Blocks without names come to the node: Recency.push, likewise. */
static PyObject *cache_push(CacheState *self, PyObject *const *args, Py_ssize_t count) {
    sending s = {0};
    if (check_count(count, 4) < 0 || check_type(args[0], matches->index) < 0 || matches->push(args[0], args + 1, &s) < 0)
        return NULL;
    self->free_blocks = s.free_blocks;
    self->oldest_s = s.oldest_s;
    Py_RETURN_NONE;
}

static PyMethodDef cache_methods[] = {{"_send", (PyCFunction)(void (*)(void))cache_send, METH_FASTCALL,
                                       "A prompt is sent there; what is new, and when the rest was used."},
                                      {"_push", (PyCFunction)(void (*)(void))cache_push, METH_FASTCALL,
                                       "So many blocks without names come there."},
                                      {NULL, NULL, 0, NULL}};

static PyGetSetDef cache_properties[] = {{"accuracy", (getter)get_part, (setter)set_part, NULL, &AccuracyType},
                                         {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject CacheType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._price.CacheState",
    .tp_doc = "What hits and prices take from a node's cache.",
    .tp_basicsize = sizeof(CacheState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)named_traverse,
    .tp_clear = (inquiry)named_clear,
    .tp_dealloc = (destructor)cache_dealloc,
    .tp_methods = cache_methods,
    .tp_members = cache_members,
    .tp_getset = cache_properties,
};

/* ---- Hits ---- */

static PyMemberDef hit_members[] = {
    {"tokens", T_PYSSIZET, offsetof(Hit, tokens), READONLY, "As believed."},
    {"expected", T_DOUBLE, offsetof(Hit, expected), READONLY, "What they are worth, by tier and confidence."},
    {"rank", T_PYSSIZET, offsetof(Hit, rank), READONLY, "The data-parallel rank that holds them."},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject HitType;

static Hit *make_hit(Py_ssize_t tokens, double expected, Py_ssize_t rank) {
    Hit *hit = PyObject_New(Hit, &HitType);
    if (hit) {
        hit->tokens = tokens;
        hit->expected = expected;
        hit->rank = rank;
    }
    return hit;
}

static PyObject *hit_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tokens", "expected", "rank", NULL};
    Py_ssize_t tokens, rank;
    double expected;
    (void)type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ndn", names, &tokens, &expected, &rank))
        return NULL;
    return (PyObject *)make_hit(tokens, expected, rank);
}

static PyObject *hit_repr(Hit *hit) {
    PyObject *expected = PyFloat_FromDouble(hit->expected), *text = NULL;
    if (expected)
        text = PyUnicode_FromFormat("Hit(tokens=%zd, expected=%R, rank=%zd)", hit->tokens, expected, hit->rank);
    Py_XDECREF(expected);
    return text;
}

static PyTypeObject HitType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._price.Hit",
    .tp_doc = "Leading tokens of a prompt that a node holds.",
    .tp_basicsize = sizeof(Hit),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = hit_new,
    .tp_repr = (reprfunc)hit_repr,
    .tp_members = hit_members,
};

static double trust(const AccuracyState *a, double now_s) {
    if (a->came_true == a->predicted)
        return 1.0;
    double left = pow(0.5, larger(0.0, now_s - a->at_s) / HALF_LIFE_S);
    return (PRIOR_TOKENS + a->came_true * left) / (PRIOR_TOKENS + a->predicted * left);
}

static double freshness(double age_s, double stale_s, double gone_s) {
    if (age_s <= stale_s)
        return 1.0;
    return gone_s > stale_s ? larger(0.0, (gone_s - age_s) / (gone_s - stale_s)) : 0.0;
}

/* What the rows of one lookup have in common. */
typedef struct {
    PyObject *found, *owners;
    Py_ssize_t size, most, sure;
    int is_sure;
    double now_s, stale_s, gone_s, cpu_worth, disk_worth, remote_worth;
} asked;

/* The place holds so many leading blocks, by tier. */
static int add_hit(const asked *q, PyObject *place, const Py_ssize_t *reached) {
    Py_ssize_t depth[TIERS];
    PyObject *owner = PyDict_GetItemWithError(q->owners, place);
    if (!owner)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_Check(owner) || PyTuple_GET_SIZE(owner) != 2 ||
        !PyObject_TypeCheck(PyTuple_GET_ITEM(owner, 0), &CacheType)) {
        PyErr_SetString(PyExc_TypeError, "expected an owner as (CacheState, rank)");
        return -1;
    }
    const CacheState *cache = (CacheState *)PyTuple_GET_ITEM(owner, 0);
    const AccuracyState *accuracy = (AccuracyState *)cache->named.part;
    Py_ssize_t rank = PyLong_AsSsize_t(PyTuple_GET_ITEM(owner, 1));
    if (rank == -1 && PyErr_Occurred())
        return -1;
    if (cache->block_size != q->size || !accuracy || !cache->named.name)
        return 0;
    if (rank < 0 ? rank == ROUTED && q->is_sure && cache->complete : cache->doubted)
        return 0;
    Py_ssize_t limit = rank < 0 ? q->most : q->sure;
    for (int tier = 0; tier < TIERS; tier++)
        depth[tier] = reached[tier] < limit ? reached[tier] : limit;
    if (depth[3] <= 0)
        return 0;
    double confidence = trust(accuracy, q->now_s), worth = (double)depth[0];
    if (rank >= 0)
        confidence *= freshness(larger(q->now_s - cache->heard_s, cache->lag_s), q->stale_s, q->gone_s);
    if (depth[3] != depth[0])
        worth += q->cpu_worth * (double)(depth[1] - depth[0]) + q->disk_worth * (double)(depth[2] - depth[1]) +
                 q->remote_worth * (double)(depth[3] - depth[2]);
    double expected = worth * (double)q->size * confidence;
    const Hit *known = (Hit *)PyDict_GetItemWithError(q->found, cache->named.name);
    if (!known && PyErr_Occurred())
        return -1;
    if (known && check_type((PyObject *)known, &HitType) < 0)
        return -1;
    if (known && (expected < known->expected || (expected == known->expected && rank <= known->rank)))
        return 0; /* of equals, the rank that told */
    PyObject *hit = (PyObject *)make_hit(depth[3] * q->size, expected, rank);
    int failed = !hit || PyDict_SetItem(q->found, cache->named.name, hit) < 0;
    Py_XDECREF(hit);
    return failed ? -1 : 0;
}

static int read_asked(PyObject *const *args, asked *q) {
    PyObject *owners = args[0], *limits = args[2], *ages_s = args[4], *worth = args[5];
    if (check_type(owners, &PyDict_Type) < 0 || check_tuple(limits, 3) < 0 || check_tuple(ages_s, 2) < 0 ||
        check_tuple(worth, 3) < 0)
        return -1;
    q->owners = owners;
    q->is_sure = PyObject_IsTrue(PyTuple_GET_ITEM(limits, 2));
    if (q->is_sure < 0 || as_size(args[1], &q->size) < 0 || as_size(PyTuple_GET_ITEM(limits, 0), &q->most) < 0 ||
        as_size(PyTuple_GET_ITEM(limits, 1), &q->sure) < 0 || as_double(args[3], &q->now_s) < 0 ||
        as_doubles(ages_s, 2, (double *const[]){&q->stale_s, &q->gone_s}) < 0 ||
        as_doubles(worth, 3, (double *const[]){&q->cpu_worth, &q->disk_worth, &q->remote_worth}) < 0)
        return -1;
    return 0;
}

static int add_row(const asked *q, PyObject *row) {
    Py_ssize_t reached[TIERS];
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 1 + TIERS) {
        PyErr_SetString(PyExc_TypeError, "expected rows as BlockIndex.match gives them");
        return -1;
    }
    for (int tier = 0; tier < TIERS; tier++)
        if (as_size(PyTuple_GET_ITEM(row, 1 + tier), &reached[tier]) < 0)
            return -1;
    return add_hit(q, PyTuple_GET_ITEM(row, 0), reached);
}

static PyObject *add_hits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    asked q;
    (void)module;
    if (check_count(count, 8) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &PyList_Type) < 0 ||
        read_asked(args + 2, &q) < 0)
        return NULL;
    q.found = args[0];
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(args[1]); at++)
        if (add_row(&q, PyList_GET_ITEM(args[1], at)) < 0)
            return NULL;
    Py_RETURN_NONE;
}

static int add_reach(const reach *r, void *asked_for) {
    PyObject *place = PyLong_FromUnsignedLong(r->place);
    Py_ssize_t reached[TIERS];
    for (int tier = 0; tier < TIERS; tier++)
        reached[tier] = (Py_ssize_t)r->depth[tier];
    int failed = !place || add_hit(asked_for, place, reached) < 0;
    Py_XDECREF(place);
    return failed ? -1 : 0;
}

static PyObject *match_hits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    asked q;
    (void)module;
    if (check_count(count, 9) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], matches->index) < 0 ||
        check_type(args[2], &PyBytes_Type) < 0 || read_asked(args + 3, &q) < 0)
        return NULL;
    q.found = args[0];
    if (PyBytes_GET_SIZE(args[2]) % 8) {
        PyErr_SetString(PyExc_ValueError, "hashes must be integers of 64 bits, one beside the other");
        return NULL;
    }
    size_t n = (size_t)PyBytes_GET_SIZE(args[2]) / 8;
    if (matches->match(args[1], (const uint8_t *)PyBytes_AS_STRING(args[2]), n, add_reach, &q) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- Prices ---- */

/* What the nodes of one request have in common. */
typedef struct {
    const double *chances; /* of reuse, by age */
    Py_ssize_t n_chances;
    double now_s, tokens, output, behind;
    const PaceState *pace; /* of the model */
    double quickest_ms, max_saving_ms, locality;
    double due_ms, late_ms; /* until its first token is due, and what it costs to be late */
    int room, memory, congestion;
} request;

static always_inline const NodeState *node_at(PyObject *nodes, Py_ssize_t at) {
    return (NodeState *)PyTuple_GET_ITEM(nodes, at);
}

static always_inline double token_ms(const NodeState *node, const request *q) {
    return speed_of(node)->factor * pace_ms(q->pace, (double)node->context);
}

static always_inline double work(double new, double cached) { return new * (1.0 + ATTENTION * (cached + 0.5 * new)); }

static double chance(const request *q, double age_s) {
    if (age_s <= FIRST_S)
        return q->chances[0];
    double bucket = floor(2.0 * log2(age_s / FIRST_S)) + 1.0;
    return q->chances[bucket < (double)q->n_chances ? (Py_ssize_t)bucket : q->n_chances - 1];
}

static double find_room(const NodeState *node, double capacity, double new, double own_ms, const request *q) {
    double output = q->output, running = (double)node->inflight, need = new + output;
    double used = larger(node->kv_usage * capacity + node->kv_delta, (double)node->kv_new + 0.5 * output * running);
    double drained = larger(used, 1.0) / larger(1.0, output * own_ms);
    double share = smaller(MOST_FULL, (used + need + GROWTH * output * running) / capacity);
    double full = FULL_SCALE * pow(share, FULL_POWER) / (FULL_MARGIN - share);
    return (need * full + larger(0.0, used + need - MEMORY_FULL * capacity)) / drained;
}

/* Arrivals at the node, of late [1/ms]. */
static always_inline double rate(const NodeState *node, const request *q) {
    return node->arrival_rate == 0.0 ? 0.0 : node->arrival_rate * exp((node->arrival_s - q->now_s) / KEPT_S);
}

static double risk(double own, const request *q) {
    if (q->due_ms < 1.0)
        return q->late_ms;
    double power = pow(smaller(own / q->due_ms, 1e6), RISK_POWER);
    return q->late_ms * power / (1.0 + power);
}

static void price_node(price *p, const NodeState *node, const CacheState *cache, double cached, double adapter,
                       const request *q) {
    double ms_per_token = speed_of(node)->ms_per_token, own_ms = token_ms(node, q), new = q->tokens - cached;
    double cost = work(new, cached), need = new + q->output;
    if (cached != 0.0)
        cost = larger(cost, work(q->tokens, 0.0) - q->max_saving_ms / ms_per_token);
    *p = (price){
        .cached = cached, .new = new, .output = q->output, .distance = node->distance_ms, .adapter = adapter};
    p->wait = node->pending_work * ms_per_token;
    p->prefill = (node->inflight + node->other_load ? STEPS * own_ms : 0.0) + cost * ms_per_token;
    p->contention = STREAMED * q->output * (own_ms - q->quickest_ms);
    if (cache) {
        double capacity = (double)(cache->capacity_blocks * cache->block_size);
        if (capacity != 0.0 && q->room)
            p->room = find_room(node, capacity, new, own_ms, q);
        double pushed_out = need - (double)(cache->free_blocks * cache->block_size);
        if (pushed_out > 0.0 && q->memory && !isnan(cache->oldest_s))
            p->memory = smaller(pushed_out, need) * ms_per_token * EVICTED_DEARER * chance(q, q->now_s - cache->oldest_s);
    }
    double there = p->wait + p->prefill + p->room + p->adapter, own = there + p->distance;
    if (q->late_ms != 0.0)
        p->risk = risk(own, q);
    if (q->congestion)
        p->congestion = (p->prefill + p->room + p->adapter + p->memory) * (rate(node, q) * there + q->behind);
    p->total = own + p->contention + p->risk + p->memory + p->congestion;
}

static PyTypeObject PricesType;

/* 0 where these are nodes with a speed, and a cache or None for each. */
static int check(PyObject *nodes, PyObject *caches) {
    Py_ssize_t n = PyTuple_GET_SIZE(nodes);
    if (PyTuple_GET_SIZE(caches) != n) {
        PyErr_SetString(PyExc_ValueError, "expected as many caches as nodes");
        return -1;
    }
    for (Py_ssize_t at = 0; at < n; at++) {
        PyObject *node = PyTuple_GET_ITEM(nodes, at), *cache = PyTuple_GET_ITEM(caches, at);
        if (!PyObject_TypeCheck(node, books->node) || !speed_of((NodeState *)node) || !((Named *)node)->name ||
            !(cache == Py_None || PyObject_TypeCheck(cache, &CacheType))) {
            PyErr_SetString(PyExc_TypeError, "expected nodes with a name and a speed, and caches or None");
            return -1;
        }
    }
    return 0;
}

static Prices *price_all(PyObject *nodes, PyObject *caches, PyObject *hits, const double *adapters, request *q) {
    Py_ssize_t n = PyTuple_GET_SIZE(nodes);
    Prices *prices = (Prices *)PricesType.tp_alloc(&PricesType, n); /* first: it may collect garbage */
    if (!prices)
        return NULL;
    prices->nodes = Py_NewRef(nodes);
    if (check(nodes, caches) < 0) {
        Py_DECREF(prices);
        return NULL;
    }
    q->quickest_ms = INFINITY;
    for (Py_ssize_t at = 0; at < n; at++)
        q->quickest_ms = smaller(q->quickest_ms, token_ms(node_at(nodes, at), q));
    int any = PyDict_GET_SIZE(hits) > 0;
    for (Py_ssize_t at = 0; at < n; at++) {
        const NodeState *node = node_at(nodes, at);
        PyObject *cache = PyTuple_GET_ITEM(caches, at);
        PyObject *hit = any ? PyDict_GetItemWithError(hits, node->named.name) : NULL;
        if (hit ? !Py_IS_TYPE(hit, &HitType) : any && PyErr_Occurred()) {
            if (hit)
                PyErr_SetString(PyExc_TypeError, "expected hits by name");
            Py_DECREF(prices);
            return NULL;
        }
        price_node(&prices->of[at], node, cache == Py_None ? NULL : (CacheState *)cache,
                   hit ? ((Hit *)hit)->expected * q->locality : 0.0, adapters ? adapters[at] : 0.0, q);
    }
    return prices;
}

static int read_request(PyObject *const *args, request *q) {
    PyObject *tokens = args[6], *due = args[7], *pace = args[9], *settings = args[10];
    if (check_tuple(tokens, 2) < 0 || check_tuple(due, 2) < 0 || check_type(pace, books->pace) < 0 ||
        check_tuple(settings, 5) < 0)
        return -1;
    q->pace = (PaceState *)pace;
    if (as_double(args[5], &q->now_s) < 0 || as_double(args[8], &q->behind) < 0 ||
        as_doubles(tokens, 2, (double *const[]){&q->tokens, &q->output}) < 0 ||
        as_doubles(due, 2, (double *const[]){&q->due_ms, &q->late_ms}) < 0 ||
        as_doubles(settings, 2, (double *const[]){&q->max_saving_ms, &q->locality}) < 0)
        return -1;
    q->room = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 2));
    q->memory = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 3));
    q->congestion = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 4));
    return q->room < 0 || q->memory < 0 || q->congestion < 0 ? -1 : 0;
}

static PyObject *price_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *prices = NULL;
    Py_buffer chances, adapters = {0};
    request q;
    (void)module;
    if (check_count(count, 11) < 0 || check_type(args[0], &PyTuple_Type) < 0 || check_type(args[1], &PyTuple_Type) < 0 ||
        check_type(args[2], &PyDict_Type) < 0 || read_request(args, &q) < 0 ||
        PyObject_GetBuffer(args[3], &chances, PyBUF_SIMPLE) < 0)
        return NULL;
    if (args[4] != Py_None && PyObject_GetBuffer(args[4], &adapters, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&chances);
        return NULL;
    }
    q.chances = chances.buf;
    q.n_chances = chances.len / (Py_ssize_t)sizeof(double);
    if (!q.n_chances || chances.len % (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "expected chances as doubles");
    else if (adapters.obj && adapters.len != PyTuple_GET_SIZE(args[0]) * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "expected a double for each node's adapter");
    else
        prices = (PyObject *)price_all(args[0], args[1], args[2], adapters.buf, &q);
    PyBuffer_Release(&chances);
    if (adapters.obj)
        PyBuffer_Release(&adapters);
    return prices;
}

static int prices_traverse(Prices *self, visitproc visit, void *arg) {
    Py_VISIT(self->nodes);
    return 0;
}

static int prices_clear(Prices *self) {
    Py_CLEAR(self->nodes);
    return 0;
}

static void prices_dealloc(Prices *self) {
    PyObject_GC_UnTrack(self);
    prices_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static Py_ssize_t prices_len(PyObject *self) { return Py_SIZE(self); }

static PyObject *prices_item(Prices *self, Py_ssize_t at) {
    if (at < 0 || at >= Py_SIZE(self)) {
        PyErr_SetString(PyExc_IndexError, "there is no such node");
        return NULL;
    }
    PyObject *terms = PyTuple_New(TERMS);
    for (Py_ssize_t term = 0; terms && term < TERMS; term++) {
        PyObject *number = PyFloat_FromDouble(((const double *)&self->of[at])[term]);
        if (number)
            PyTuple_SET_ITEM(terms, term, number);
        else
            Py_CLEAR(terms);
    }
    return terms;
}

static int append(PyObject *list, Py_ssize_t at) {
    PyObject *number = PyLong_FromSsize_t(at);
    int failed = !number || PyList_Append(list, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *prices_cheapest(Prices *self, PyObject *given) {
    double times = PyFloat_AsDouble(given), least = INFINITY;
    if (times == -1.0 && PyErr_Occurred())
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        least = smaller(self->of[at].total, least);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t at = 0; list && at < Py_SIZE(self); at++)
        if (self->of[at].total <= least * times && append(list, at) < 0)
            Py_CLEAR(list);
    for (Py_ssize_t at = 0; list && isinf(least) && at < Py_SIZE(self); at++) /* none has a price: any will do */
        if (!(self->of[at].total <= least * times) && append(list, at) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *prices_lightest(Prices *self, PyObject *given) {
    if (!PyList_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of numbers");
        return NULL;
    }
    Py_ssize_t least = PY_SSIZE_T_MAX;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t k = 0; list && k < PyList_GET_SIZE(given); k++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyList_GET_ITEM(given, k));
        if (at < 0 || at >= Py_SIZE(self)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "there is no such node");
            Py_CLEAR(list);
            break;
        }
        Py_ssize_t there = load(node_at(self->nodes, at));
        if (there < least) {
            least = there;
            if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL) < 0)
                Py_CLEAR(list);
        }
        if (list && there == least && append(list, at) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *prices_cheapest_within(Prices *self, PyObject *given) {
    double most_own = PyFloat_AsDouble(given);
    Py_ssize_t best = -1;
    if (most_own == -1.0 && PyErr_Occurred())
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        if (own_of(&self->of[at]) <= most_own && (best < 0 || self->of[at].total < self->of[best].total))
            best = at;
    return PyLong_FromSsize_t(best);
}

static double mean_load(const Prices *self) {
    Py_ssize_t sum = 0, n = Py_SIZE(self);
    for (Py_ssize_t at = 0; at < n; at++)
        sum += load(node_at(self->nodes, at));
    return n ? (double)sum / (double)n : 0.0;
}

static PyObject *prices_mean_load(Prices *self, void *unused) {
    (void)unused;
    return PyFloat_FromDouble(mean_load(self));
}

/* Whether a node has more than so many times the mean of requests, and so many more. */
static int is_crowded(const Prices *self, Py_ssize_t at, double times, double more) {
    return (double)load(node_at(self->nodes, at)) > times * mean_load(self) + more;
}

static PyObject *prices_beyond_doubt(Prices *self, PyObject *const *args, Py_ssize_t count) {
    double times, crowded, more, least = INFINITY;
    Py_ssize_t best = -1;
    if (check_count(count, 3) < 0 || as_double(args[0], &times) < 0 || as_double(args[1], &crowded) < 0 ||
        as_double(args[2], &more) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        if (self->of[at].total < least) {
            least = self->of[at].total;
            best = at;
        }
    for (Py_ssize_t at = 0; best >= 0 && at < Py_SIZE(self); at++)
        if (at != best && self->of[at].total <= least * times)
            best = -1;
    if (best >= 0 && self->of[best].cached != 0.0 && is_crowded(self, best, crowded, more))
        best = -1;
    return PyLong_FromSsize_t(best);
}

static PyObject *prices_second_home(Prices *self, PyObject *const *args, Py_ssize_t count) {
    double crowded, more, extra_ms;
    Py_ssize_t best = -1, home;
    if (check_count(count, 4) < 0 || as_size(args[0], &home) < 0 || as_double(args[1], &crowded) < 0 ||
        as_double(args[2], &more) < 0 || as_double(args[3], &extra_ms) < 0)
        return NULL;
    if (home < 0 || home >= Py_SIZE(self)) {
        PyErr_SetString(PyExc_IndexError, "there is no such node");
        return NULL;
    }
    const price *h = &self->of[home];
    if (h->cached == 0.0 || !is_crowded(self, home, crowded, more))
        return PyLong_FromSsize_t(home);
    double warm = work(h->new, h->cached), most_load = mean_load(self), most_own = own_of(h) + extra_ms;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++) {
        const price *p = &self->of[at];
        const NodeState *node = node_at(self->nodes, at);
        double own = own_of(p), invested = (work(p->new, p->cached) - warm) * speed_of(node)->ms_per_token;
        if ((double)load(node) <= most_load && own <= most_own && own - invested <= own_of(h) &&
            (best < 0 || p->total < self->of[best].total))
            best = at;
    }
    return PyLong_FromSsize_t(best < 0 ? home : best);
}

static PyMethodDef prices_methods[] = {
    {"cheapest", (PyCFunction)prices_cheapest, METH_O, "Numbers of those within so many times the least price."},
    {"lightest", (PyCFunction)prices_lightest, METH_O, "Of these numbers, those of the nodes with the least load."},
    {"cheapest_within", (PyCFunction)prices_cheapest_within, METH_O,
     "Number of the cheapest with at most this own cost; or -1."},
    {"second_home", (PyCFunction)(void (*)(void))prices_second_home, METH_FASTCALL,
     "Number of the node that takes what crowds this one, where one would be as good a home; or its own."},
    {"beyond_doubt", (PyCFunction)(void (*)(void))prices_beyond_doubt, METH_FASTCALL,
     "Number of the cheapest, where none costs about the same and it is not crowded by what it has; or -1."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef prices_properties[] = {{"mean_load", (getter)prices_mean_load, NULL, "Requests on a node.", NULL},
                                          {NULL, NULL, NULL, NULL, NULL}};

static PySequenceMethods prices_as_sequence = {.sq_length = prices_len, .sq_item = (ssizeargfunc)prices_item};

static PyTypeObject PricesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._price.Prices",
    .tp_doc = "Of each node, as routing.price.Price has them.",
    .tp_basicsize = sizeof(Prices),
    .tp_itemsize = sizeof(price),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_traverse = (traverseproc)prices_traverse,
    .tp_clear = (inquiry)prices_clear,
    .tp_dealloc = (destructor)prices_dealloc,
    .tp_as_sequence = &prices_as_sequence,
    .tp_methods = prices_methods,
    .tp_getset = prices_properties,
};

/* ---- The module ---- */

static PyMethodDef functions[] = {
    {"add_hits", (PyCFunction)(void (*)(void))add_hits, METH_FASTCALL, "What matched, as a hit for each node."},
    {"match_hits", (PyCFunction)(void (*)(void))match_hits, METH_FASTCALL, "What an index finds, as a hit for each node."},
    {"price_nodes", (PyCFunction)(void (*)(void))price_nodes, METH_FASTCALL, "What a request costs on each of these nodes."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_price", "Hits and prices of all nodes at once.", -1,
                                    functions, NULL, NULL, NULL, NULL};

/* What another module offers to this one. */
static const void *given_by(const char *name, const char *api) {
    PyObject *other = PyImport_ImportModule(name), *capsule = other ? PyObject_GetAttrString(other, api) : NULL;
    const void *given = capsule ? PyCapsule_GetPointer(capsule, api) : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF(other);
    return given;
}

PyMODINIT_FUNC PyInit__price(void) {
    static const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {{"AccuracyState", &AccuracyType}, {"CacheState", &CacheType}, {"Hit", &HitType}, {"Prices", &PricesType}};
    if (!(books = given_by(BOOKS_MODULE, BOOKS_API)) || !(matches = given_by(MATCH_MODULE, MATCH_API)))
        return NULL;
    PyObject *m = PyModule_Create(&module);
    for (size_t i = 0; m && i < sizeof(types) / sizeof(*types); i++)
        if (PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(m, types[i].name, (PyObject *)types[i].type) < 0)
            Py_CLEAR(m);
    return m;
}
