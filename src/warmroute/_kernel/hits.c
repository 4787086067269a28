/* Hits: for each node, how many leading tokens of a prompt its cache holds, and what they are expected to be worth.
 *
 * The rules:
 * - The state of a cache is in a plain struct, which the Python class inherits from and writes. Only its room is written
 *   here, after a prompt was added to its recency list.
 * - The formulas are those of core/node_cache.py, operation by operation; tests/routing/test_hits_kernel.py compares them.
 */
#include "hits.h"
#include "index.h"
#include <math.h>

/* ---- Caches ---- */

static PyMemberDef accuracy_members[] = {
    {"_predicted", T_DOUBLE, offsetof(AccuracyState, predicted), 0, NULL},
    {"_confirmed", T_DOUBLE, offsetof(AccuracyState, confirmed), 0, NULL},
    {"_at_s", T_DOUBLE, offsetof(AccuracyState, at_s), 0, NULL},
    NO_MEMBER};

static PyTypeObject AccuracyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "AccuracyState",
    .tp_doc = "How many predicted cached tokens the engine confirmed.",
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
    {"last_contact_s", T_DOUBLE, offsetof(CacheState, last_contact_s), 0, NULL},
    {"event_lag_s", T_DOUBLE, offsetof(CacheState, event_lag_s), 0, NULL},
    {"complete", T_BOOL, offsetof(CacheState, complete), 0, NULL},
    {"token_mismatch", T_BOOL, offsetof(CacheState, token_mismatch), 0, NULL},
    NO_MEMBER};

static PyObject *cache_touch(CacheState *self, PyObject *const *args, Py_ssize_t count) {
    lru_touch t = {0};
    if (check_count(count, 6) < 0 || check_type(args[0], &BlockIndexType) < 0 || as_size(args[4], &t.depth) < 0 ||
        as_double(args[5], &t.latest) < 0 || index_touch((BlockIndex *)args[0], args + 1, &t) < 0)
        return NULL;
    self->free_blocks = t.free_blocks;
    self->oldest_s = t.oldest_s;
    PyObject *result = PyTuple_New(2);
    if (!result) {
        Py_DECREF(t.new_hashes);
        Py_XDECREF(t.uses);
        return NULL;
    }
    PyTuple_SET_ITEM(result, 0, t.new_hashes);
    PyTuple_SET_ITEM(result, 1, t.uses ? t.uses : Py_NewRef(Py_None));
    return result;
}

static PyObject *cache_add_anonymous(CacheState *self, PyObject *const *args, Py_ssize_t count) {
    lru_touch t = {0};
    if (check_count(count, 4) < 0 || check_type(args[0], &BlockIndexType) < 0 ||
        index_add_anonymous((BlockIndex *)args[0], args + 1, &t) < 0)
        return NULL;
    self->free_blocks = t.free_blocks;
    self->oldest_s = t.oldest_s;
    Py_RETURN_NONE;
}

static PyMethodDef cache_methods[] = {
    {"_touch", FAST(cache_touch), "BlockIndex.touch, with the times of the blocks' last uses before it."},
    {"_add_anonymous", FAST(cache_add_anonymous), "Recency.add_anonymous of the cache's holder."},
    NO_METHOD};

static PyGetSetDef cache_properties[] = {{"accuracy", (getter)get_part, (setter)set_part, NULL, &AccuracyType}, NO_PROPERTY};

PyTypeObject CacheType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "CacheState",
    .tp_doc = "What hits and prices read of a node's cache.",
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
    {"tokens", T_PYSSIZET, offsetof(Hit, tokens), READONLY, "As the index has them."},
    {"expected", T_DOUBLE, offsetof(Hit, expected), READONLY, "The tokens by tier and confidence."},
    {"rank", T_PYSSIZET, offsetof(Hit, rank), READONLY, "The data-parallel rank that holds them."},
    NO_MEMBER};

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

PyTypeObject HitType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "Hit",
    .tp_doc = "Leading tokens of a prompt that a node's cache holds.",
    .tp_basicsize = sizeof(Hit),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = hit_new,
    .tp_repr = (reprfunc)hit_repr,
    .tp_members = hit_members,
};

/* ---- From matches to hits ---- */

static double trust(const AccuracyState *a, double now_s) {
    if (a->confirmed == a->predicted)
        return 1.0;
    double left = pow(0.5, larger(0.0, now_s - a->at_s) / ACCURACY_HALF_LIFE_S);
    return (ACCURACY_PRIOR_TOKENS + a->confirmed * left) / (ACCURACY_PRIOR_TOKENS + a->predicted * left);
}

static double freshness(double age_s, double stale_s, double gone_s) {
    if (age_s <= stale_s)
        return 1.0;
    return gone_s > stale_s ? larger(0.0, (gone_s - age_s) / (gone_s - stale_s)) : 0.0;
}

/* What the rows of one match have in common. */
typedef struct {
    PyObject *found, *owners;
    Py_ssize_t block_size;
    Py_ssize_t most_blocks, exact_blocks; /* that may count: from any source; from KV events, which need exact tokens */
    int is_exact;                         /* all tokens of the prompt are exact */
    double now_s, stale_s, gone_s, cpu_worth, disk_worth, remote_worth;
} hit_query;

/* Adds the hit of a holder that has these leading blocks, by tier. */
static int add_hit(const hit_query *q, PyObject *holder_id, const Py_ssize_t *matched) {
    Py_ssize_t depth[TIERS];
    PyObject *owner = PyDict_GetItemWithError(q->owners, holder_id);
    if (!owner)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_Check(owner) || PyTuple_GET_SIZE(owner) != 2 ||
        !PyObject_TypeCheck(PyTuple_GET_ITEM(owner, 0), &CacheType)) {
        PyErr_SetString(PyExc_TypeError, "an owner must be (CacheState, rank)");
        return -1;
    }
    const CacheState *cache = (CacheState *)PyTuple_GET_ITEM(owner, 0);
    const AccuracyState *accuracy = (AccuracyState *)cache->named.part;
    Py_ssize_t rank;
    if (as_size(PyTuple_GET_ITEM(owner, 1), &rank) < 0)
        return -1;
    if (cache->block_size != q->block_size || !accuracy || !cache->named.name)
        return 0;
    /* Complete events know better than what was routed; events with other tokens than the router's match nothing. */
    if (rank < 0 ? rank == ROUTED_RANK && q->is_exact && cache->complete : cache->token_mismatch)
        return 0;
    Py_ssize_t limit = rank < 0 ? q->most_blocks : q->exact_blocks;
    for (int tier = 0; tier < TIERS; tier++)
        depth[tier] = matched[tier] < limit ? matched[tier] : limit;
    if (depth[TIER_REMOTE] <= 0)
        return 0;
    double confidence = trust(accuracy, q->now_s), worth = (double)depth[TIER_GPU];
    if (rank >= 0)
        confidence *= freshness(larger(q->now_s - cache->last_contact_s, cache->event_lag_s), q->stale_s, q->gone_s);
    if (depth[TIER_REMOTE] != depth[TIER_GPU])
        worth += q->cpu_worth * (double)(depth[TIER_CPU] - depth[TIER_GPU]) +
                 q->disk_worth * (double)(depth[TIER_DISK] - depth[TIER_CPU]) +
                 q->remote_worth * (double)(depth[TIER_REMOTE] - depth[TIER_DISK]);
    double expected = worth * (double)q->block_size * confidence;
    const Hit *known = (Hit *)PyDict_GetItemWithError(q->found, cache->named.name);
    if (!known && PyErr_Occurred())
        return -1;
    if (known && check_type((PyObject *)known, &HitType) < 0)
        return -1;
    if (known && (expected < known->expected || (expected == known->expected && rank <= known->rank)))
        return 0; /* of equal hits, one that a rank's events report is preferred */
    PyObject *hit = (PyObject *)make_hit(depth[TIER_REMOTE] * q->block_size, expected, rank);
    int failed = !hit || PyDict_SetItem(q->found, cache->named.name, hit) < 0;
    Py_XDECREF(hit);
    return failed ? -1 : 0;
}

/* Reads (owners, block_size, limits, now_s, ages_s, worth). */
static int read_query(PyObject *const *args, hit_query *q) {
    PyObject *owners = args[0], *limits = args[2], *ages_s = args[4], *worth = args[5];
    if (check_type(owners, &PyDict_Type) < 0 || check_tuple(limits, 3) < 0 || check_tuple(ages_s, 2) < 0 ||
        check_tuple(worth, 3) < 0)
        return -1;
    q->owners = owners;
    if (as_size(args[1], &q->block_size) < 0 || as_size(PyTuple_GET_ITEM(limits, 0), &q->most_blocks) < 0 ||
        as_size(PyTuple_GET_ITEM(limits, 1), &q->exact_blocks) < 0 ||
        (q->is_exact = PyObject_IsTrue(PyTuple_GET_ITEM(limits, 2))) < 0 || as_double(args[3], &q->now_s) < 0 ||
        as_double(PyTuple_GET_ITEM(ages_s, 0), &q->stale_s) < 0 || as_double(PyTuple_GET_ITEM(ages_s, 1), &q->gone_s) < 0 ||
        as_double(PyTuple_GET_ITEM(worth, 0), &q->cpu_worth) < 0 ||
        as_double(PyTuple_GET_ITEM(worth, 1), &q->disk_worth) < 0 ||
        as_double(PyTuple_GET_ITEM(worth, 2), &q->remote_worth) < 0)
        return -1;
    return 0;
}

static int add_tuple(const hit_query *q, PyObject *row) {
    Py_ssize_t matched[TIERS];
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 1 + TIERS) {
        PyErr_SetString(PyExc_TypeError, "a row must be one of BlockIndex.match");
        return -1;
    }
    for (int tier = 0; tier < TIERS; tier++)
        if (as_size(PyTuple_GET_ITEM(row, 1 + tier), &matched[tier]) < 0)
            return -1;
    return add_hit(q, PyTuple_GET_ITEM(row, 0), matched);
}

static PyObject *hits_of_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    hit_query q;
    (void)module;
    if (check_count(count, 8) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &PyList_Type) < 0 ||
        read_query(args + 2, &q) < 0)
        return NULL;
    q.found = args[0];
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(args[1]); at++)
        if (add_tuple(&q, PyList_GET_ITEM(args[1], at)) < 0)
            return NULL;
    Py_RETURN_NONE;
}

static int add_match(const match_row *row, void *query) {
    PyObject *holder_id = PyLong_FromUnsignedLong(row->holder);
    Py_ssize_t matched[TIERS];
    for (int tier = 0; tier < TIERS; tier++)
        matched[tier] = (Py_ssize_t)row->depth[tier];
    int failed = !holder_id || add_hit(query, holder_id, matched) < 0;
    Py_XDECREF(holder_id);
    return failed ? -1 : 0;
}

static PyObject *hits_of_match(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    hit_query q;
    (void)module;
    if (check_count(count, 9) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &BlockIndexType) < 0 ||
        check_type(args[2], &PyBytes_Type) < 0 || read_query(args + 3, &q) < 0)
        return NULL;
    q.found = args[0];
    if (PyBytes_GET_SIZE(args[2]) % 8) {
        PyErr_SetString(PyExc_ValueError, "hashes must be 64-bit integers");
        return NULL;
    }
    size_t n = (size_t)PyBytes_GET_SIZE(args[2]) / 8;
    if (index_match((BlockIndex *)args[1], (const uint8_t *)PyBytes_AS_STRING(args[2]), n, add_match, &q) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"add_hits", FAST(hits_of_rows), "Add a hit for each node that has a row of BlockIndex.match."},
    {"match_hits", FAST(hits_of_match), "Match a prompt in the index, and add a hit for each node that holds its beginning."},
    NO_METHOD};

int add_hits(PyObject *module) {
    if (add_type(module, "AccuracyState", &AccuracyType) < 0 || add_type(module, "CacheState", &CacheType) < 0 ||
        add_type(module, "Hit", &HitType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
