/* Traffic counters: tokens, times and saved prefill time of complete responses.
 *
 * The rules:
 * - A response is counted with one call, TrafficRecorder.record, in the counters of its route, its tenant and its node. A
 *   recorder is made once for each combination of them, so that a response costs one dictionary lookup.
 * - Numbers that a node reported are bounded here, too: no sum can overflow or become NaN.
 * - A prompt counts with the tokens that its node reports, where it reports them. More of them than that cannot be cached,
 *   whatever the router expected.
 * - The round-robin estimate looks at no more than 2 * SAMPLED_HITS nodes, however large the fleet is. Of a busy route it
 *   looks at EXACT_ESTIMATES responses a second, and at one of SAMPLED_RESPONSES beyond: that is most of what counting
 *   costs, and an estimate in any case.
 */
#include "hits.h"

#define MAX_TIME_MS 1e9 /* a longer time counts as this */
#define SHORT_REPORT 0.8 /* of the tokens that were expected to be cached: a node that reports fewer for the whole prompt counts
                            differently. Where prompts are matched by their text, the expectation is not exact */

/* ---- Histograms ---- */

typedef struct {
    PyObject_HEAD
    double sum_ms;
    Py_ssize_t counts[TIME_BUCKETS];
} Histogram;

static PyTypeObject HistogramType;

static void observe(Histogram *h, double ms) {
    int low = 0, high = TIME_BUCKETS - 1; /* the first bound that is not below `ms` */
    ms = ms > 0.0 ? smaller(ms, MAX_TIME_MS) : 0.0; /* NaN, too: no sum becomes infinite */
    while (low < high) {
        int middle = (low + high) / 2;
        if (TIME_BOUNDS_MS[middle] < ms)
            low = middle + 1;
        else
            high = middle;
    }
    h->counts[low]++;
    h->sum_ms += ms;
}

static PyObject *histogram_observe(Histogram *h, PyObject *given) {
    double ms;
    if (as_double(given, &ms) < 0)
        return NULL;
    observe(h, ms);
    Py_RETURN_NONE;
}

static PyObject *histogram_counts(Histogram *h, void *unused) {
    (void)unused;
    PyObject *list = PyList_New(TIME_BUCKETS);
    for (Py_ssize_t at = 0; list && at < TIME_BUCKETS; at++) {
        PyObject *number = PyLong_FromSsize_t(h->counts[at]);
        if (number)
            PyList_SET_ITEM(list, at, number);
        else
            Py_CLEAR(list);
    }
    return list;
}

static void add_histogram(Histogram *to, const Histogram *from) {
    to->sum_ms += from->sum_ms;
    for (int bucket = 0; bucket < TIME_BUCKETS; bucket++)
        to->counts[bucket] += from->counts[bucket];
}

static PyMemberDef histogram_members[] = {{"sum_ms", T_DOUBLE, offsetof(Histogram, sum_ms), READONLY, NULL}, NO_MEMBER};

static PyGetSetDef histogram_properties[] = {
    {"counts", (getter)histogram_counts, NULL, "Times by bucket of TIME_BOUNDS_MS.", NULL}, NO_PROPERTY};

static PyMethodDef histogram_methods[] = {
    {"observe", (PyCFunction)histogram_observe, METH_O, "Count a time in milliseconds."}, NO_METHOD};

static PyTypeObject HistogramType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "Histogram",
    .tp_doc = "Times, counted in the buckets of TIME_BOUNDS_MS.",
    .tp_basicsize = sizeof(Histogram),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = histogram_methods,
    .tp_members = histogram_members,
    .tp_getset = histogram_properties,
};

/* ---- Counters of a tenant or a node ---- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t requests, prompt_tokens, cached_tokens, predicted_tokens, reported_tokens, output_tokens;
} TokenTraffic;

static PyMemberDef token_members[] = {
    {"requests", T_PYSSIZET, offsetof(TokenTraffic, requests), 0, NULL},
    {"prompt_tokens", T_PYSSIZET, offsetof(TokenTraffic, prompt_tokens), 0, NULL},
    {"cached_tokens", T_PYSSIZET, offsetof(TokenTraffic, cached_tokens), 0, NULL},
    {"predicted_tokens", T_PYSSIZET, offsetof(TokenTraffic, predicted_tokens), 0, NULL},
    {"reported_tokens", T_PYSSIZET, offsetof(TokenTraffic, reported_tokens), 0, NULL},
    {"output_tokens", T_PYSSIZET, offsetof(TokenTraffic, output_tokens), 0, NULL},
    NO_MEMBER};

static PyTypeObject TokenTrafficType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "TokenTraffic",
    .tp_doc = "Complete responses and their tokens.",
    .tp_basicsize = sizeof(TokenTraffic),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = token_members,
};

static always_inline void add_tokens(TokenTraffic *to, const TokenTraffic *from) {
    to->requests += from->requests;
    to->prompt_tokens += from->prompt_tokens;
    to->cached_tokens += from->cached_tokens;
    to->predicted_tokens += from->predicted_tokens;
    to->reported_tokens += from->reported_tokens;
    to->output_tokens += from->output_tokens;
}

/* ---- Counters of a route ---- */

enum { TTFT, INTER_TOKEN, QUEUE_WAIT, DURATION, HISTOGRAMS };

typedef struct {
    TokenTraffic tokens;
    double saved_ms, saved_gpu_ms, round_robin_tokens, round_robin_saved_ms, round_robin_saved_gpu_ms;
    double prompt_gpu_ms, hit_shares, hit_share_squares;
    Py_ssize_t counted_prompts, short_reports, sampled_blocks, known_blocks;
    double estimates_s;         /* the second in which `estimates` were made */
    Py_ssize_t estimates;
    uint64_t random;
    Histogram *histograms[HISTOGRAMS];
} RouteTraffic;

static PyTypeObject RouteTrafficType;

static PyObject *route_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    RouteTraffic *self = (RouteTraffic *)PyType_GenericNew(type, args, kwargs);
    for (int which = 0; self && which < HISTOGRAMS; which++)
        if (!(self->histograms[which] = (Histogram *)PyType_GenericNew(&HistogramType, NULL, NULL)))
            Py_CLEAR(self);
    return (PyObject *)self;
}

static void route_dealloc(RouteTraffic *self) {
    for (int which = 0; which < HISTOGRAMS; which++)
        Py_CLEAR(self->histograms[which]);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *route_add(RouteTraffic *to, PyObject *given) {
    if (check_type(given, &RouteTrafficType) < 0)
        return NULL;
    const RouteTraffic *from = (RouteTraffic *)given;
    add_tokens(&to->tokens, &from->tokens);
    to->saved_ms += from->saved_ms;
    to->saved_gpu_ms += from->saved_gpu_ms;
    to->round_robin_tokens += from->round_robin_tokens;
    to->round_robin_saved_ms += from->round_robin_saved_ms;
    to->round_robin_saved_gpu_ms += from->round_robin_saved_gpu_ms;
    to->prompt_gpu_ms += from->prompt_gpu_ms;
    to->hit_shares += from->hit_shares;
    to->hit_share_squares += from->hit_share_squares;
    to->counted_prompts += from->counted_prompts;
    to->short_reports += from->short_reports;
    to->sampled_blocks += from->sampled_blocks;
    to->known_blocks += from->known_blocks;
    for (int which = 0; which < HISTOGRAMS; which++)
        add_histogram(to->histograms[which], from->histograms[which]);
    Py_RETURN_NONE;
}

static PyObject *route_ttft_counts(RouteTraffic *self, void *unused) {
    return histogram_counts(self->histograms[TTFT], unused);
}

static PyMemberDef route_members[] = {
    {"saved_ms", T_DOUBLE, offsetof(RouteTraffic, saved_ms), 0, NULL},
    {"saved_gpu_ms", T_DOUBLE, offsetof(RouteTraffic, saved_gpu_ms), 0, NULL},
    {"round_robin_tokens", T_DOUBLE, offsetof(RouteTraffic, round_robin_tokens), 0, NULL},
    {"round_robin_saved_ms", T_DOUBLE, offsetof(RouteTraffic, round_robin_saved_ms), 0, NULL},
    {"round_robin_saved_gpu_ms", T_DOUBLE, offsetof(RouteTraffic, round_robin_saved_gpu_ms), 0, NULL},
    {"prompt_gpu_ms", T_DOUBLE, offsetof(RouteTraffic, prompt_gpu_ms), 0, NULL},
    {"hit_shares", T_DOUBLE, offsetof(RouteTraffic, hit_shares), 0, NULL},
    {"hit_share_squares", T_DOUBLE, offsetof(RouteTraffic, hit_share_squares), 0, NULL},
    {"counted_prompts", T_PYSSIZET, offsetof(RouteTraffic, counted_prompts), 0, NULL},
    {"short_reports", T_PYSSIZET, offsetof(RouteTraffic, short_reports), 0, NULL},
    {"sampled_blocks", T_PYSSIZET, offsetof(RouteTraffic, sampled_blocks), 0, NULL},
    {"known_blocks", T_PYSSIZET, offsetof(RouteTraffic, known_blocks), 0, NULL},
    {"ttft", T_OBJECT_EX, offsetof(RouteTraffic, histograms[TTFT]), READONLY, NULL},
    {"inter_token", T_OBJECT_EX, offsetof(RouteTraffic, histograms[INTER_TOKEN]), READONLY, NULL},
    {"queue_wait", T_OBJECT_EX, offsetof(RouteTraffic, histograms[QUEUE_WAIT]), READONLY, NULL},
    {"duration", T_OBJECT_EX, offsetof(RouteTraffic, histograms[DURATION]), READONLY, NULL},
    NO_MEMBER};

static PyGetSetDef route_properties[] = {
    {"ttft_counts", (getter)route_ttft_counts, NULL, "The counts of `ttft`.", NULL}, NO_PROPERTY};

static PyMethodDef route_methods[] = {
    {"add", (PyCFunction)route_add, METH_O, "Add the counters of another route to these."}, NO_METHOD};

static PyTypeObject RouteTrafficType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "RouteTraffic",
    .tp_doc = "Complete responses of a route: tokens, times and saved prefill time.",
    .tp_basicsize = sizeof(RouteTraffic),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_base = &TokenTrafficType,
    .tp_new = route_new,
    .tp_dealloc = (destructor)route_dealloc,
    .tp_methods = route_methods,
    .tp_members = route_members,
    .tp_getset = route_properties,
};

/* ---- Recorders ---- */

typedef struct {
    PyObject_HEAD
    RouteTraffic *route;
    TokenTraffic *tenant, *node;
    double gpus;
} TrafficRecorder;

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"route", "tenant", "node", "gpus", NULL};
    PyObject *route, *tenant, *node;
    double gpus;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!d", names, &RouteTrafficType, &route, &TokenTrafficType, &tenant,
                                     &TokenTrafficType, &node, &gpus))
        return NULL;
    TrafficRecorder *self = (TrafficRecorder *)PyType_GenericNew(type, NULL, NULL);
    if (self) {
        self->route = (RouteTraffic *)Py_NewRef(route);
        self->tenant = (TokenTraffic *)Py_NewRef(tenant);
        self->node = (TokenTraffic *)Py_NewRef(node);
        self->gpus = gpus;
    }
    return (PyObject *)self;
}

static void recorder_dealloc(TrafficRecorder *self) {
    Py_CLEAR(self->route);
    Py_CLEAR(self->tenant);
    Py_CLEAR(self->node);
    Py_TYPE(self)->tp_free(self);
}

/* Reads a number of tokens, bounded; -1 for None. */
static int as_tokens(PyObject *given, Py_ssize_t *to) {
    int overflow;
    if (given == Py_None) {
        *to = -1;
        return 0;
    }
    long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (number == -1 && PyErr_Occurred())
        return -1;
    if (overflow)
        number = overflow > 0 ? MAX_COUNTED_TOKENS : 0;
    *to = number < 0 ? 0 : number > MAX_COUNTED_TOKENS ? MAX_COUNTED_TOKENS : (Py_ssize_t)number;
    return 0;
}

/* How many responses this one stands for in the round-robin estimate; 0: it is left out. */
static double estimate_weight(RouteTraffic *route, double now_s) {
    if (!(now_s < route->estimates_s + 1.0) || now_s < route->estimates_s) {
        route->estimates_s = now_s;
        route->estimates = 0;
    }
    route->random = route->random * 6364136223846793005ULL + 1442695040888963407ULL;
    if (route->estimates++ < EXACT_ESTIMATES)
        return 1.0;
    return (route->random >> 33) % SAMPLED_RESPONSES ? 0.0 : (double)SAMPLED_RESPONSES; /* regular traffic has no pattern */
}

/* The prefill of one prompt on its node. It takes at least a step of the engine (core/traffic.py). */
typedef struct {
    double tokens, ms_per_token, step_ms, whole_ms; /* whole_ms: with nothing cached */
} Prefill;

/* The prefill work of a prompt's first tokens (core/speeds.py). */
static always_inline double work_of(double tokens) { return tokens + 0.5 * ATTENTION_WORK * tokens * tokens; }

static Prefill prefill_of(const TicketState *ticket, double tokens) {
    const SpeedState *speed = speed_of(ticket->node);
    Prefill p = {.tokens = tokens, .ms_per_token = long_prefill_ms_per_token(speed)};
    p.step_ms = least_prefill_ms(speed);
    p.whole_ms = larger(p.step_ms, p.ms_per_token * work_of(tokens));
    return p;
}

/* The time that this many cached tokens save. */
static always_inline double saved_by(const Prefill *p, double cached) {
    double left = work_of(p->tokens) - work_of(smaller(cached, p->tokens));
    return p->whole_ms - larger(p->step_ms, p->ms_per_token * left);
}

/* Estimates what a candidate that is chosen at random would have cached: the sum of its expected tokens over all
 * candidates, and of the time that they save. Of many hits it looks at some, which are others each time. `most`: the
 * most tokens that one of them was expected to have. */
static int sum_hits(PyObject *hits, PyObject *candidates, size_t turn, const Prefill *p, double *tokens, double *saved_ms,
                    double *most) {
    PyObject *name, *hit;
    Py_ssize_t at = 0, number = 0, stride = PyDict_GET_SIZE(hits) / SAMPLED_HITS;
    Py_ssize_t offset = stride > 1 ? (Py_ssize_t)(turn % (size_t)stride) : 0;
    *tokens = *saved_ms = 0.0;
    while (PyDict_Next(hits, &at, &name, &hit)) {
        if (stride > 1 && number++ % stride != offset)
            continue;
        if (check_type(hit, &HitType) < 0)
            return -1;
        int counts = PyDict_Contains(candidates, name);
        if (counts < 0)
            return -1;
        if (counts) {
            *most = larger(*most, ((Hit *)hit)->expected);
            *tokens += smaller(((Hit *)hit)->expected, p->tokens);
            *saved_ms += saved_by(p, ((Hit *)hit)->expected);
        }
    }
    if (stride > 1) {
        *tokens *= (double)stride;
        *saved_ms *= (double)stride;
    }
    return 0;
}

static void observe_times(RouteTraffic *route, const TicketState *ticket, double arrived_s, double waited_s, double now_s,
                          int streams, Py_ssize_t output) {
    observe(route->histograms[DURATION], (now_s - arrived_s) * 1000.0);
    observe(route->histograms[QUEUE_WAIT], waited_s * 1000.0);
    if (!streams)
        return;
    observe(route->histograms[TTFT], (ticket->first_token_s - arrived_s) * 1000.0);
    if (output > 1)
        observe(route->histograms[INTER_TOKEN], (now_s - ticket->first_token_s) * 1000.0 / (double)(output - 1));
}

static PyObject *recorder_record(TrafficRecorder *self, PyObject *const *args, Py_ssize_t count) {
    double arrived_s, waited_s, now_s;
    int streams;
    TokenTraffic one = {.requests = 1};
    Py_ssize_t prompt, cached, output, predicted;
    if (check_count(count, 11) < 0 || check_type(args[0], &TicketType) < 0 || as_double(args[1], &arrived_s) < 0 ||
        as_double(args[2], &waited_s) < 0 || as_double(args[3], &now_s) < 0 || (streams = PyObject_IsTrue(args[4])) < 0 ||
        as_tokens(args[5], &prompt) < 0 || as_tokens(args[6], &cached) < 0 || as_tokens(args[7], &output) < 0 ||
        as_tokens(args[8], &predicted) < 0)
        return NULL;
    const TicketState *ticket = (TicketState *)args[0];
    if (!ticket->node || !speed_of(ticket->node)) {
        PyErr_SetString(PyExc_ValueError, "the ticket was not opened");
        return NULL;
    }
    RouteTraffic *route = self->route;
    observe_times(route, ticket, arrived_s, waited_s, now_s, streams, output);
    if (output > 0)
        one.output_tokens = output;
    if (prompt < 0 && predicted >= 0) /* the router's own count, where the node reports none */
        prompt = ticket->tokens;
    if (prompt > 0) {
        one.prompt_tokens = prompt;
        double most = (double)predicted; /* tokens that were expected to be cached on one node */
        one.predicted_tokens = predicted < 0 ? 0 : predicted > prompt ? prompt : predicted;
        one.cached_tokens = cached >= 0 ? cached : one.predicted_tokens;
        if (one.cached_tokens > prompt)
            one.cached_tokens = prompt;
        if (cached >= 0)
            one.reported_tokens = one.cached_tokens;
        const Prefill prefill = prefill_of(ticket, (double)prompt);
        double tokens = (double)one.cached_tokens, saved_ms = saved_by(&prefill, tokens), share = tokens / (double)prompt;
        route->saved_ms += saved_ms;
        route->saved_gpu_ms += saved_ms * self->gpus;
        route->prompt_gpu_ms += prefill.whole_ms * self->gpus;
        route->counted_prompts++;
        route->hit_shares += share;
        route->hit_share_squares += share * share;
        if (args[9] == Py_None || predicted < 0) { /* the choice did not depend on caches, as that of round robin */
            route->round_robin_tokens += tokens;
            route->round_robin_saved_ms += saved_ms;
            route->round_robin_saved_gpu_ms += saved_ms * self->gpus;
        } else if (PyDict_Check(args[9]) && PyDict_GET_SIZE(args[9]) && PyDict_Check(args[10]) &&
                   PyDict_GET_SIZE(args[10])) {
            double candidates = (double)PyDict_GET_SIZE(args[10]), weight = estimate_weight(route, now_s);
            if (weight > 0.0) {
                if (sum_hits(args[9], args[10], (size_t)(route->random >> 40), &prefill, &tokens, &saved_ms, &most) < 0)
                    return NULL;
                saved_ms *= weight / candidates;
                route->round_robin_tokens += weight * tokens / candidates;
                route->round_robin_saved_ms += saved_ms;
                route->round_robin_saved_gpu_ms += saved_ms * self->gpus;
            }
        }
        if ((double)prompt < SHORT_REPORT * most)
            route->short_reports++;
    }
    add_tokens(&route->tokens, &one);
    add_tokens(self->tenant, &one);
    add_tokens(self->node, &one);
    Py_RETURN_NONE;
}

static PyMemberDef recorder_members[] = {{"route", T_OBJECT_EX, offsetof(TrafficRecorder, route), READONLY, NULL}, NO_MEMBER};

static PyMethodDef recorder_methods[] = {{"record", FAST(recorder_record), "Count a complete response."}, NO_METHOD};

static PyTypeObject TrafficRecorderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "TrafficRecorder",
    .tp_doc = "Counts the responses to one tenant's requests of one route that one node served.",
    .tp_basicsize = sizeof(TrafficRecorder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = recorder_new,
    .tp_dealloc = (destructor)recorder_dealloc,
    .tp_methods = recorder_methods,
    .tp_members = recorder_members,
};

/* ---- Registration ---- */

static int add_bounds(PyObject *module) {
    PyObject *bounds = PyTuple_New(TIME_BUCKETS - 1);
    for (Py_ssize_t i = 0; bounds && i < TIME_BUCKETS - 1; i++) {
        PyObject *bound = PyFloat_FromDouble(TIME_BOUNDS_MS[i]);
        if (bound)
            PyTuple_SET_ITEM(bounds, i, bound);
        else
            Py_CLEAR(bounds);
    }
    int failed = !bounds || PyModule_AddObjectRef(module, "TIME_BOUNDS_MS", bounds) < 0;
    Py_XDECREF(bounds);
    return failed ? -1 : 0;
}

int add_traffic(PyObject *module) {
    if (add_bounds(module) < 0 || add_type(module, "Histogram", &HistogramType) < 0 ||
        add_type(module, "TokenTraffic", &TokenTrafficType) < 0 || add_type(module, "RouteTraffic", &RouteTrafficType) < 0)
        return -1;
    return add_type(module, "TrafficRecorder", &TrafficRecorderType);
}
