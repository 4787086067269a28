/* Prices: what a request would cost on each node, for all nodes in one call.
 *
 * The rules:
 * - The state of nodes and caches is read here, and never written.
 * - The formulas are those of tests/routing/price_formulas.py, operation by operation, so that prices are equal bit by bit;
 *   tests/routing/test_price_kernel.py compares them.
 */
#include "hits.h"
#include <math.h>

/* The fields of core/decision_record.py, in its order. */
typedef struct {
    double total, wait, prefill, room, contention, distance, adapter, risk, memory, congestion, cached, new, output;
} price;
#define TERMS ((Py_ssize_t)(sizeof(price) / sizeof(double)))

typedef struct {
    PyObject_VAR_HEAD
    PyObject *nodes;
    double prompts; /* of the request */
    price of[];
} Prices;

/* What the request pays itself until its first token. */
static always_inline double own_cost(const price *p) {
    return p->wait + p->prefill + p->room + p->adapter + p->distance;
}

static always_inline const NodeState *node_at(PyObject *nodes, Py_ssize_t at) {
    return (NodeState *)PyTuple_GET_ITEM(nodes, at);
}

/* ---- The price of a node ---- */

/* What the prices of one request have in common. */
typedef struct {
    const uint8_t *chances; /* of reuse, by age: doubles */
    Py_ssize_t n_chances;
    double now_s, tokens, output;
    double prompts; /* that the tokens are divided among */
    double behind; /* requests that wait behind this one, for each node */
    const DecodeSpeedState *decode_speed;
    double fastest_token_ms;   /* on the fastest node */
    double fastest_prefill_ms; /* for a token */
    double max_saving_ms, locality;
    double due_ms, late_ms; /* time until the first token is due, and the penalty for being late */
    int room, memory, congestion; /* whether these terms count */
} request;

/* Time per output token. Small deviations from the model's line are noise, which would keep requests away from a node. */
static always_inline double token_ms_on(const NodeState *node, const request *q) {
    double factor = speed_of(node)->factor;
    factor = factor > 1.0 ? larger(1.0, factor - DECODE_FACTOR_NOISE) : smaller(1.0, factor + DECODE_FACTOR_NOISE);
    return factor * decode_ms(q->decode_speed, (double)node->context_tokens);
}

/* The prefill work of prompts of equal length, in tokens of a short prompt. */
static always_inline double work_of(double new, double cached, double prompts) {
    return new * (1.0 + ATTENTION_WORK * (cached + 0.5 * new) / prompts);
}

/* The chance that a block of this age is used again. */
static double chance_of_reuse(const request *q, double age_s) {
    Py_ssize_t bucket = 0;
    if (!(age_s <= REUSE_FIRST_S)) {
        double exact = floor(2.0 * log2(age_s / REUSE_FIRST_S)) + 1.0;
        bucket = exact < (double)q->n_chances ? (Py_ssize_t)exact : q->n_chances - 1;
    }
    return read_double(q->chances + bucket * (Py_ssize_t)sizeof(double));
}

/* The tokens of KV memory that the request has to wait for, or that running requests lose to it; and the tokens that the
 * node frees in a millisecond. */
static double missing_room(const NodeState *node, double capacity, double new, double token_ms, const request *q,
                           double *drained) {
    double output = q->output, running = (double)node->inflight, need = new + output;
    double usage = node->kv_usage + (1.0 - node->kv_usage) * node->kv_pressure;
    double used = larger(usage * capacity + node->kv_delta, (double)node->kv_new + 0.5 * output * running);
    *drained = larger(used, 1.0) / larger(1.0, output * token_ms);
    double share = smaller(KV_MAX_FULL, (used + need + KV_GROWTH_SHARE * output * running) / capacity);
    double full = KV_FULL_SCALE * pow(share, KV_FULL_POWER) / (KV_FULL_MARGIN - share);
    return need * full + larger(0.0, used + need - KV_USABLE_SHARE * capacity);
}

/* Requests per millisecond that arrive at the node. */
static always_inline double arrival_rate(const NodeState *node, const request *q) {
    return node->arrival_rate == 0.0 ? 0.0 : node->arrival_rate * exp((node->arrival_s - q->now_s) / ARRIVAL_DECAY_S);
}

static double risk_term(double own, const request *q) {
    if (q->due_ms < 1.0)
        return q->late_ms;
    double power = pow(smaller(own / q->due_ms, 1e6), RISK_POWER);
    return q->late_ms * power / (1.0 + power);
}

/* `reserved_rate`: requests per millisecond that need a longer context window than this one and may go to the node. */
static void price_node(price *p, const NodeState *node, const CacheState *cache, double cached, double adapter_ms,
                       double reserved_rate, const request *q) {
    double ms_per_token = speed_of(node)->ms_per_token, token_ms = token_ms_on(node, q), new = q->tokens - cached;
    double cost = work_of(new, cached, q->prompts), need = new + q->output;
    if (cached != 0.0)
        cost = larger(cost, work_of(q->tokens, 0.0, q->prompts) - q->max_saving_ms / ms_per_token);
    *p = (price){
        .cached = cached, .new = new, .output = q->output, .distance = node->distance_ms, .adapter = adapter_ms};
    p->wait = larger(0.0, node->pending_work) * ms_per_token; /* the sum may have a rounding error */
    p->prefill = (load_of(node) ? FIRST_TOKEN_STEPS * token_ms : 0.0) + cost * ms_per_token;
    double missing = 0.0, drained = 1.0;
    if (cache) {
        double block_size = (double)cache->block_size, capacity = (double)cache->capacity_blocks * block_size;
        if (capacity != 0.0 && q->room) {
            missing = missing_room(node, capacity, new, token_ms, q, &drained);
            p->room = missing / drained;
        }
        double evicted = need - (double)cache->free_blocks * block_size;
        if (evicted > 0.0 && q->memory && !isnan(cache->oldest_s))
            p->memory = smaller(evicted, need) * ms_per_token * EVICTED_WEIGHT *
                        chance_of_reuse(q, q->now_s - cache->oldest_s);
    }
    double stall_ms_per_token = larger(q->fastest_prefill_ms, ms_per_token / PREFILL_SPEED_NOISE);
    p->contention = STREAMED_WEIGHT * q->output * (token_ms - q->fastest_token_ms) +
                    STALLED_WEIGHT * (double)load_of(node) *
                        (smaller(cost + missing, STALLED_MAX_WORK) * stall_ms_per_token);
    if (node->queue_ms != 0.0) /* the engine's queue takes longer than the work that this router sent */
        p->wait = larger(p->wait, node->queue_ms - p->room);
    double on_node = p->wait + p->prefill + p->room + p->adapter, own = on_node + p->distance;
    if (q->late_ms != 0.0)
        p->risk = risk_term(own, q);
    if (q->congestion)
        p->congestion =
            (p->prefill + p->room + p->adapter + p->memory) *
            ((arrival_rate(node, q) + reserved_rate) * on_node + q->behind);
    p->total = own + p->contention + p->risk + p->memory + p->congestion;
}

/* ---- The prices of all nodes ---- */

static PyTypeObject PricesType;

/* Checks that these are nodes with a name and a speed, and a cache or None for each; -1 with an exception where not. */
static int check_nodes(PyObject *nodes, PyObject *caches) {
    Py_ssize_t n = PyTuple_GET_SIZE(nodes);
    if (PyTuple_GET_SIZE(caches) != n) {
        PyErr_SetString(PyExc_ValueError, "there must be as many caches as nodes");
        return -1;
    }
    for (Py_ssize_t at = 0; at < n; at++) {
        PyObject *node = PyTuple_GET_ITEM(nodes, at), *cache = PyTuple_GET_ITEM(caches, at);
        if (!PyObject_TypeCheck(node, &NodeType) || !speed_of((NodeState *)node) || !((Named *)node)->name ||
            !(cache == Py_None || PyObject_TypeCheck(cache, &CacheType))) {
            PyErr_SetString(PyExc_TypeError, "expected nodes with a name and a speed, and caches or None");
            return -1;
        }
    }
    return 0;
}

/* `adapters_ms`, `reserved_rates`: a double for each node, or NULL. */
static Prices *price_all(PyObject *nodes, PyObject *caches, PyObject *hits, const uint8_t *adapters_ms,
                         const uint8_t *reserved_rates, request *q) {
    Py_ssize_t n = PyTuple_GET_SIZE(nodes);
    Prices *prices = (Prices *)PricesType.tp_alloc(&PricesType, n); /* before the checks, since this may collect garbage */
    if (!prices)
        return NULL;
    prices->nodes = Py_NewRef(nodes);
    prices->prompts = q->prompts;
    if (check_nodes(nodes, caches) < 0)
        goto failed;
    q->fastest_token_ms = q->fastest_prefill_ms = INFINITY;
    for (Py_ssize_t at = 0; at < n; at++) {
        const NodeState *node = node_at(nodes, at);
        q->fastest_token_ms = smaller(q->fastest_token_ms, token_ms_on(node, q));
        q->fastest_prefill_ms = smaller(q->fastest_prefill_ms, speed_of(node)->ms_per_token);
    }
    int has_hits = PyDict_GET_SIZE(hits) > 0;
    for (Py_ssize_t at = 0; at < n; at++) {
        const NodeState *node = node_at(nodes, at);
        PyObject *cache = PyTuple_GET_ITEM(caches, at);
        PyObject *hit = has_hits ? PyDict_GetItemWithError(hits, node->named.name) : NULL;
        if (hit ? check_type(hit, &HitType) < 0 : has_hits && PyErr_Occurred())
            goto failed;
        price_node(&prices->of[at], node, cache == Py_None ? NULL : (CacheState *)cache,
                   hit ? ((Hit *)hit)->expected * q->locality : 0.0,
                   adapters_ms ? read_double(adapters_ms + at * (Py_ssize_t)sizeof(double)) : 0.0,
                   reserved_rates ? read_double(reserved_rates + at * (Py_ssize_t)sizeof(double)) : 0.0, q);
    }
    return prices;
failed:
    Py_DECREF(prices);
    return NULL;
}

/* Reads the arguments of price_nodes() from now_s on. */
static int read_request(PyObject *const *args, request *q) {
    PyObject *tokens = args[1], *due = args[2], *decode_speed = args[4], *settings = args[5];
    if (check_tuple(tokens, 3) < 0 || check_tuple(due, 2) < 0 || check_type(decode_speed, &DecodeSpeedType) < 0 ||
        check_tuple(settings, 5) < 0)
        return -1;
    q->decode_speed = (DecodeSpeedState *)decode_speed;
    if (as_double(args[0], &q->now_s) < 0 || as_double(args[3], &q->behind) < 0 ||
        as_double(PyTuple_GET_ITEM(tokens, 0), &q->tokens) < 0 || as_double(PyTuple_GET_ITEM(tokens, 1), &q->output) < 0 ||
        as_double(PyTuple_GET_ITEM(tokens, 2), &q->prompts) < 0 ||
        as_double(PyTuple_GET_ITEM(due, 0), &q->due_ms) < 0 || as_double(PyTuple_GET_ITEM(due, 1), &q->late_ms) < 0 ||
        as_double(PyTuple_GET_ITEM(settings, 0), &q->max_saving_ms) < 0 ||
        as_double(PyTuple_GET_ITEM(settings, 1), &q->locality) < 0 ||
        (q->room = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 2))) < 0 ||
        (q->memory = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 3))) < 0 ||
        (q->congestion = PyObject_IsTrue(PyTuple_GET_ITEM(settings, 4))) < 0)
        return -1;
    return 0;
}

/* Checks that a buffer has a double for each node; -1 with an exception where not. */
static int check_doubles(const Py_buffer *buffer, Py_ssize_t nodes) {
    if (!buffer->obj || buffer->len == nodes * (Py_ssize_t)sizeof(double))
        return 0;
    PyErr_SetString(PyExc_ValueError, "adapter_ms and reserved_rates must have a double for each node");
    return -1;
}

static PyObject *price_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    const Py_ssize_t size = sizeof(double);
    PyObject *prices = NULL;
    Py_buffer chances = {0}, adapters = {0}, reserved = {0};
    request q;
    (void)module;
    if (check_count(count, 12) < 0 || check_type(args[0], &PyTuple_Type) < 0 || check_type(args[1], &PyTuple_Type) < 0 ||
        check_type(args[2], &PyDict_Type) < 0 || read_request(args + 6, &q) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[3], &chances, PyBUF_SIMPLE) < 0 ||
        (args[4] != Py_None && PyObject_GetBuffer(args[4], &adapters, PyBUF_SIMPLE) < 0) ||
        (args[5] != Py_None && PyObject_GetBuffer(args[5], &reserved, PyBUF_SIMPLE) < 0))
        goto done;
    q.chances = chances.buf;
    q.n_chances = chances.len / size;
    Py_ssize_t nodes = PyTuple_GET_SIZE(args[0]);
    if (!q.n_chances || chances.len % size)
        PyErr_SetString(PyExc_ValueError, "chances must be a buffer of doubles");
    else if (check_doubles(&adapters, nodes) == 0 && check_doubles(&reserved, nodes) == 0)
        prices = (PyObject *)price_all(args[0], args[1], args[2], adapters.obj ? adapters.buf : NULL,
                                       reserved.obj ? reserved.buf : NULL, &q);
done:
    PyBuffer_Release(&chances); /* does nothing where there is no buffer */
    PyBuffer_Release(&adapters);
    PyBuffer_Release(&reserved);
    return prices;
}

/* ---- Choosing by price ---- */

static double mean_load(const Prices *self) {
    Py_ssize_t sum = 0, n = Py_SIZE(self);
    for (Py_ssize_t at = 0; at < n; at++)
        sum += load_of(node_at(self->nodes, at));
    return n ? (double)sum / (double)n : 0.0;
}

/* Whether a node has more than `factor` × the mean number of requests, and `more` beyond that. */
static int is_crowded(const Prices *self, Py_ssize_t at, double factor, double more) {
    return (double)load_of(node_at(self->nodes, at)) > factor * mean_load(self) + more;
}

static int append(PyObject *list, Py_ssize_t at) {
    PyObject *number = PyLong_FromSsize_t(at);
    int failed = !number || PyList_Append(list, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *prices_cheapest(Prices *self, PyObject *given) {
    double factor, least = INFINITY;
    if (as_double(given, &factor) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        least = smaller(self->of[at].total, least);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t at = 0; list && at < Py_SIZE(self); at++)
        if (self->of[at].total <= least * factor && append(list, at) < 0)
            Py_CLEAR(list);
    for (Py_ssize_t at = 0; list && isinf(least) && at < Py_SIZE(self); at++) /* no finite price: all are equally cheap */
        if (!(self->of[at].total <= least * factor) && append(list, at) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *prices_least_loaded(Prices *self, PyObject *given) {
    if (check_type(given, &PyList_Type) < 0)
        return NULL;
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
        Py_ssize_t load = load_of(node_at(self->nodes, at));
        if (load < least) {
            least = load;
            if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL) < 0)
                Py_CLEAR(list);
        }
        if (list && load == least && append(list, at) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *prices_least_work_left(Prices *self, PyObject *const *args, Py_ssize_t count) {
    double now_s, least = INFINITY;
    Py_ssize_t best = -1;
    if (check_count(count, 2) < 0 || check_type(args[0], &PyList_Type) < 0 || as_double(args[1], &now_s) < 0)
        return NULL;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(args[0]); k++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyList_GET_ITEM(args[0], k));
        if (at < 0 || at >= Py_SIZE(self)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "there is no such node");
            return NULL;
        }
        const NodeState *node = node_at(self->nodes, at);
        double left = remaining_work(node, now_s);
        if (best < 0 || left < least ||
            (left == least && node->last_ticket_s > node_at(self->nodes, best)->last_ticket_s)) {
            best = at;
            least = left;
        }
    }
    return PyLong_FromSsize_t(best);
}

static PyObject *prices_cheapest_within(Prices *self, PyObject *given) {
    double most_own;
    Py_ssize_t best = -1;
    if (as_double(given, &most_own) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        if (own_cost(&self->of[at]) <= most_own && (best < 0 || self->of[at].total < self->of[best].total))
            best = at;
    return PyLong_FromSsize_t(best);
}

static PyObject *prices_clear_winner(Prices *self, PyObject *const *args, Py_ssize_t count) {
    double factor, crowded, more, least = INFINITY;
    Py_ssize_t best = -1;
    if (check_count(count, 3) < 0 || as_double(args[0], &factor) < 0 || as_double(args[1], &crowded) < 0 ||
        as_double(args[2], &more) < 0)
        return NULL;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++)
        if (self->of[at].total < least) {
            least = self->of[at].total;
            best = at;
        }
    for (Py_ssize_t at = 0; best >= 0 && at < Py_SIZE(self); at++)
        if (at != best && self->of[at].total <= least * factor)
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
    double prompts = self->prompts, work_at_home = work_of(h->new, h->cached, prompts);
    double most_load = mean_load(self), most_own = own_cost(h) + extra_ms;
    for (Py_ssize_t at = 0; at < Py_SIZE(self); at++) {
        const price *p = &self->of[at];
        const NodeState *node = node_at(self->nodes, at);
        double extra_work = work_of(p->new, p->cached, prompts) - work_at_home;
        double own = own_cost(p), copy_ms = extra_work * speed_of(node)->ms_per_token;
        if ((double)load_of(node) <= most_load && own <= most_own && own - copy_ms <= own_cost(h) &&
            (best < 0 || p->total < self->of[best].total))
            best = at;
    }
    return PyLong_FromSsize_t(best < 0 ? home : best);
}

/* ---- The Python type ---- */

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

static PyObject *prices_mean_load(Prices *self, void *unused) {
    (void)unused;
    return PyFloat_FromDouble(mean_load(self));
}

static PyMethodDef prices_methods[] = {
    {"cheapest", (PyCFunction)prices_cheapest, METH_O, "Return the nodes within a factor of the least price."},
    {"least_loaded", (PyCFunction)prices_least_loaded, METH_O, "Return those of these nodes that have the least load."},
    {"least_work_left", FAST(prices_least_work_left),
     "Return the one of these nodes with the least prefill work left, of equal ones that with the newest request."},
    {"cheapest_within", (PyCFunction)prices_cheapest_within, METH_O,
     "Return the cheapest node whose own cost is at most this; -1 if there is none."},
    {"second_home", FAST(prices_second_home), "Return the node to copy a crowded node's prefix to, or the node itself."},
    {"clear_winner", FAST(prices_clear_winner), "Return the cheapest node if the choice is clear, else -1."},
    NO_METHOD};

static PyGetSetDef prices_properties[] = {
    {"mean_load", (getter)prices_mean_load, NULL, "The mean number of requests on a node.", NULL}, NO_PROPERTY};

static PySequenceMethods prices_as_sequence = {.sq_length = prices_len, .sq_item = (ssizeargfunc)prices_item};

static PyTypeObject PricesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "Prices",
    .tp_doc = "The price of each node.",
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

static PyMethodDef functions[] = {
    {"price_nodes", FAST(price_nodes), "Return what a request costs on each of these nodes."}, NO_METHOD};

int add_prices(PyObject *module) {
    return add_type(module, "Prices", &PricesType) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
