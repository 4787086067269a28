/* The accounting of nodes: what a request changes in its node's figures from dispatch to end, and what the router learns
 * from its answer.
 *
 * The rules:
 * - A ticket is opened once and released once. When it is released, it takes back whatever it added to its node's figures.
 * - Each formula is the one in tests/accounting_reference.py, operation by operation, so that results are equal bit by bit.
 *   core/speeds.py and core/speeds.py explain them.
 * - Where an answer is not streamed, nobody sees its first token. Its ticket is in a list of its node, in the order in which
 *   prefills are due, until its prefill is assumed to be done.
 */
#include "accounting.h"
#include "first_token_order.h"
#include <math.h>

/* ---- Speed ---- */

/* What its own first token took, which came `since_ms` after it was sent or after the previous one: without the steps of the
 * batch. */
static double own_prefill_ms(double since_ms, double step_ms) {
    return larger(larger(since_ms - FIRST_TOKEN_STEPS * step_ms, PREFILL_MIN_SHARE * since_ms), 0.0);
}

/* Adds a prefill with `done` tokens of work to the sums, and returns the part of its time that they are charged with. */
static double add_prefill(SpeedState *s, double done, double took_ms, double estimate_ms, double now_s) {
    double charged_ms = smaller(took_ms, SPEED_MAX_FACTOR * estimate_ms);
    if (took_ms <= FIRST_TOKEN_STEPS * s->step_ms) /* it took a whole step, however short it is: a lower estimate is right */
        charged_ms = smaller(larger(estimate_ms, took_ms - s->step_ms), charged_ms);
    double kept = larger(SPEED_MIN_KEPT, exp(smaller(0.0, s->at_s - now_s) / SPEED_DECAY_S));
    double weight = done / (done + STEP_WORK);
    s->work = s->work * kept + weight * done;
    s->ms = s->ms * kept + weight * charged_ms;
    s->at_s = now_s;
    s->learned_ms_per_token = larger(1e-4, s->ms / larger(1.0, s->work));
    if (!s->is_replaced)
        s->ms_per_token = s->learned_ms_per_token;
    s->answers++;
    return charged_ms;
}

/* A prompt with `done` tokens of work, sent at `sent_s`, got its first token now. `step_ms`: one step of the batch. */
static void learn_prefill_speed(SpeedState *s, double done, double step_ms, double sent_s, double now_s) {
    double own_ms = own_prefill_ms((now_s - larger(sent_s, s->last_first_token_s)) * 1000.0, step_ms);
    double ms_per_token = s->is_replaced ? s->learned_ms_per_token : s->ms_per_token, estimate_ms = done * ms_per_token;
    double carried_ms = sent_s < s->last_first_token_s ? s->uncharged_ms : 0.0; /* it waited beside the last one */
    double most_ms = CARRIED_MAX_FACTOR * done * s->carried_ms_per_token;
    if (own_ms + carried_ms > most_ms && own_ms * SPEED_MAX_FACTOR >= estimate_ms)
        carried_ms = 0.0; /* its prefill explains its own time: the node stood still before */
    if (carried_ms == 0.0)
        s->carried_ms_per_token = ms_per_token;
    double took_ms = own_ms + smaller(carried_ms, larger(0.0, most_ms - own_ms));
    s->last_first_token_s = now_s;
    s->uncharged_ms = own_ms + carried_ms - add_prefill(s, done, took_ms, estimate_ms, now_s);
}

static void record_lone_prefill(SpeedState *s, double work, double took_ms);
static void record_long_prefill(SpeedState *s, double work, double took_ms);

#define MAX_REPORTED_PREFILLS 16 /* of one report */

void learn_first_token(SpeedState *s, double done, double step_ms, double sent_s, double now_s, int lone) {
    if (lone && sent_s >= s->last_first_token_s) {
        record_lone_prefill(s, done, (now_s - sent_s) * 1000.0);
        if (done >= LONG_PREFILL_WORK) /* it waited for half a step on average, if the node was decoding */
            record_long_prefill(s, done, larger(0.0, (now_s - sent_s) * 1000.0 - 0.5 * step_ms));
    }
    learn_prefill_speed(s, done, step_ms, sent_s, now_s);
}

static PyObject *speed_learn(SpeedState *s, PyObject *const *args, Py_ssize_t count) {
    double done, step_ms, sent_s, now_s;
    int lone;
    if (check_count(count, 5) < 0 || as_double(args[0], &done) < 0 || as_double(args[1], &step_ms) < 0 ||
        as_double(args[2], &sent_s) < 0 || as_double(args[3], &now_s) < 0 || (lone = PyObject_IsTrue(args[4])) < 0)
        return NULL;
    learn_first_token(s, done, step_ms, sent_s, now_s, lone);
    Py_RETURN_NONE;
}

/* Prefills that the engine reports itself: each took `took_ms` on average, with `done` tokens of work. */
static PyObject *speed_learn_reported(SpeedState *s, PyObject *const *args, Py_ssize_t count) {
    double done, took_ms, step_ms, now_s;
    Py_ssize_t prefills;
    if (check_count(count, 5) < 0 || as_size(args[0], &prefills) < 0 || as_double(args[1], &done) < 0 ||
        as_double(args[2], &took_ms) < 0 || as_double(args[3], &step_ms) < 0 || as_double(args[4], &now_s) < 0)
        return NULL;
    if (!(done >= 0.0 && done <= 1e15 && took_ms >= 0.0 && took_ms <= 1e15 && step_ms >= 0.0 && step_ms <= 1e15 && now_s <= 1e15))
        Py_RETURN_NONE;
    took_ms = own_prefill_ms(took_ms, step_ms);
    for (Py_ssize_t at = 0; at < prefills && at < MAX_REPORTED_PREFILLS; at++) {
        double ms_per_token = s->is_replaced ? s->learned_ms_per_token : s->ms_per_token;
        add_prefill(s, done, took_ms, done * ms_per_token, larger(now_s, s->at_s));
    }
    Py_RETURN_NONE;
}

static int speed_traverse(SpeedState *self, visitproc visit, void *arg) {
    Py_VISIT(self->first_tokens);
    return 0;
}

static int speed_clear(SpeedState *self) {
    Py_CLEAR(self->first_tokens);
    return 0;
}

static void speed_dealloc(SpeedState *self) {
    PyObject_GC_UnTrack(self);
    speed_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* A prompt that no other one waited beside got its first token after `took_ms`. */
static void record_lone_prefill(SpeedState *s, double work, double took_ms) {
    double weight = larger(REVIEW_WEIGHT, 1.0 / (double)++s->lone_prefills);
    double dx = work - s->lone_work, dy = took_ms - s->lone_ms;
    if (s->lone_prefills > 1)
        dy = smaller(dy, SPEED_MAX_FACTOR * s->lone_ms);
    s->lone_work += weight * dx;
    s->lone_ms += weight * dy;
    s->lone_xx = (1.0 - weight) * (s->lone_xx + weight * dx * dx);
    s->lone_xy = (1.0 - weight) * (s->lone_xy + weight * dx * dy);
}

/* The same for a prompt whose prefill takes several steps of the batch: its time is that of its tokens. */
static void record_long_prefill(SpeedState *s, double work, double took_ms) {
    double estimate_ms = work * (s->long_prefills ? larger(1e-4, s->long_ms / s->long_work) : s->learned_ms_per_token);
    double weight = larger(LONG_PREFILL_WEIGHT, 1.0 / (double)++s->long_prefills);
    took_ms = smaller(took_ms, SPEED_MAX_FACTOR * estimate_ms);
    s->long_work += weight * (work - s->long_work);
    s->long_ms += weight * (took_ms - s->long_ms);
}

/* An answer's first token came after `ttft_ms`, and each further one took `token_ms`. */
static void record_times(SpeedState *s, double ttft_ms, double token_ms) {
    double weight = larger(REVIEW_WEIGHT, 1.0 / (double)++s->timed_answers);
    s->early_share += weight * ((ttft_ms < EARLY_STEPS * token_ms ? 1.0 : 0.0) - s->early_share);
}

/* An output token took `token_ms` beside this much context, where it takes `usual_ms` on a node like the others. */
static void learn_decode_speed(SpeedState *s, DecodeSpeedState *d, double token_ms, double usual_ms, double context) {
    if (s->step_ms == 0.0)
        s->step_ms = token_ms;
    else /* prefills of other prompts lengthen some responses, and shorten none */
        s->step_ms += (token_ms < s->step_ms ? STEP_FALL : STEP_RISE) * (smaller(token_ms, 2.0 * s->step_ms) - s->step_ms);
    /* While the model's line is new, a deviation from it says nothing about the node. */
    double trust = DECODE_FACTOR_WEIGHT * smaller(1.0, DECODE_WEIGHT * (double)d->answers);
    s->factor += trust * (smaller(token_ms / usual_ms, SPEED_MAX_FACTOR * s->factor) - s->factor);
    d->answers++;
    double weight = larger(DECODE_WEIGHT, 1.0 / (double)(d->answers + 1));
    double dx = context - d->mean_context;
    double dy = smaller(token_ms / s->factor, DECODE_MAX_FACTOR * decode_ms(d, context)) - d->mean_ms;
    d->mean_context += weight * dx;
    d->mean_ms += weight * dy;
    d->xx += DECODE_WEIGHT * (dx * dx - d->xx);
    d->xy += DECODE_WEIGHT * (dx * dy - d->xy);
    d->slope_ms = larger(d->xy / larger(d->xx, 1.0), 0.0);
    d->least_ms = DECODE_MIN_SHARE * d->mean_ms;
}

static PyMemberDef speed_members[] = {
    {"ms_per_token", T_DOUBLE, offsetof(SpeedState, ms_per_token), 0, NULL},
    {"factor", T_DOUBLE, offsetof(SpeedState, factor), 0, NULL},
    {"_work", T_DOUBLE, offsetof(SpeedState, work), 0, NULL},
    {"_ms", T_DOUBLE, offsetof(SpeedState, ms), 0, NULL},
    {"_at_s", T_DOUBLE, offsetof(SpeedState, at_s), 0, NULL},
    {"_last_first_token_s", T_DOUBLE, offsetof(SpeedState, last_first_token_s), 0, NULL},
    {"_uncharged_ms", T_DOUBLE, offsetof(SpeedState, uncharged_ms), 0, NULL},
    {"_carried_ms_per_token", T_DOUBLE, offsetof(SpeedState, carried_ms_per_token), 0, NULL},
    {"learned_ms_per_token", T_DOUBLE, offsetof(SpeedState, learned_ms_per_token), 0, NULL},
    {"is_replaced", T_BOOL, offsetof(SpeedState, is_replaced), 0, NULL},
    {"lone_prefills", T_PYSSIZET, offsetof(SpeedState, lone_prefills), 0, NULL},
    {"lone_work", T_DOUBLE, offsetof(SpeedState, lone_work), 0, NULL},
    {"lone_ms", T_DOUBLE, offsetof(SpeedState, lone_ms), 0, NULL},
    {"lone_xx", T_DOUBLE, offsetof(SpeedState, lone_xx), 0, NULL},
    {"lone_xy", T_DOUBLE, offsetof(SpeedState, lone_xy), 0, NULL},
    {"long_prefills", T_PYSSIZET, offsetof(SpeedState, long_prefills), 0, NULL},
    {"_step_ms", T_DOUBLE, offsetof(SpeedState, step_ms), 0, NULL},
    {"long_work", T_DOUBLE, offsetof(SpeedState, long_work), 0, NULL},
    {"long_ms", T_DOUBLE, offsetof(SpeedState, long_ms), 0, NULL},
    {"timed_answers", T_PYSSIZET, offsetof(SpeedState, timed_answers), 0, NULL},
    {"early_share", T_DOUBLE, offsetof(SpeedState, early_share), 0, NULL},
    {"answers", T_PYSSIZET, offsetof(SpeedState, answers), 0, NULL},
    {"first_tokens", T_OBJECT, offsetof(SpeedState, first_tokens), 0, NULL},
    NO_MEMBER};

static PyMethodDef speed_methods[] = {
    {"learn_reported", FAST(speed_learn_reported), "Learn from prefills that the engine reports: number, work and time of each."},
    {"learn", FAST(speed_learn), "Learn from a first token: a prompt with this much work, sent then, was prefilled now."},
    NO_METHOD};

PyTypeObject SpeedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "SpeedState",
    .tp_doc = "The learned speed of a node.",
    .tp_basicsize = sizeof(SpeedState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)speed_traverse,
    .tp_clear = (inquiry)speed_clear,
    .tp_dealloc = (destructor)speed_dealloc,
    .tp_methods = speed_methods,
    .tp_members = speed_members,
};

static PyMemberDef decode_speed_members[] = {
    {"least_ms", T_DOUBLE, offsetof(DecodeSpeedState, least_ms), 0, NULL},
    {"mean_ms", T_DOUBLE, offsetof(DecodeSpeedState, mean_ms), 0, NULL},
    {"slope_ms", T_DOUBLE, offsetof(DecodeSpeedState, slope_ms), 0, NULL},
    {"mean_context", T_DOUBLE, offsetof(DecodeSpeedState, mean_context), 0, NULL},
    {"_xx", T_DOUBLE, offsetof(DecodeSpeedState, xx), 0, NULL},
    {"_xy", T_DOUBLE, offsetof(DecodeSpeedState, xy), 0, NULL},
    {"answers", T_PYSSIZET, offsetof(DecodeSpeedState, answers), 0, NULL},
    NO_MEMBER};

PyTypeObject DecodeSpeedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "DecodeSpeedState",
    .tp_doc = "The learned decode speed of a model.",
    .tp_basicsize = sizeof(DecodeSpeedState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = decode_speed_members,
};

/* ---- Tickets of answers that are not streamed ---- */

static void list_unstreamed(NodeState *node, TicketState *t) {
    t->previous = node->last_unstreamed;
    t->next = NULL;
    *(t->previous ? &t->previous->next : &node->first_unstreamed) = t;
    node->last_unstreamed = t;
    node->unstreamed_prefills++;
    t->is_unstreamed = 1;
    Py_INCREF(t);
}

/* Gives up the list's reference, after which the ticket may be gone. */
static void unlist_unstreamed(NodeState *node, TicketState *t) {
    *(t->previous ? &t->previous->next : &node->first_unstreamed) = t->next;
    *(t->next ? &t->next->previous : &node->last_unstreamed) = t->previous;
    t->previous = t->next = NULL;
    node->unstreamed_prefills--;
    t->is_unstreamed = 0;
    Py_DECREF(t);
}

/* ---- Prefills that have not ended ---- */

static void list_prefill(NodeState *node, TicketState *t) {
    t->earlier = node->last_prefill;
    t->later = NULL;
    *(t->earlier ? &t->earlier->later : &node->first_prefill) = t;
    node->last_prefill = t;
    t->is_prefilling = 1;
}

static void unlist_prefill(NodeState *node, TicketState *t) {
    *(t->earlier ? &t->earlier->later : &node->first_prefill) = t->later;
    *(t->later ? &t->later->earlier : &node->last_prefill) = t->earlier;
    t->earlier = t->later = NULL;
    t->is_prefilling = 0;
}

/* The pending work without what the node should have prefilled of its first prompt since that one's turn came. The estimate
 * may be wrong: a part of the prompt counts as left until its first token comes, and all of it once that is very late. */
double remaining_work(const NodeState *node, double now_s) {
    const TicketState *first = node->first_prefill;
    double pending = larger(0.0, node->pending_work);
    double work = first ? first->pending_work : 0.0, since_s = first ? first->opened_s + node->round_trip_ms / 1000.0 : 0.0;
    if (node->peer_prefill_of && (!first || node->peer_prefill_s < since_s)) {
        work = node->peer_prefill_work;
        since_s = node->peer_prefill_s;
    } else if (!first)
        return pending;
    double done = larger(0.0, now_s - larger(since_s, node->prefill_ended_s)) * 1000.0 / speed_of(node)->ms_per_token;
    if (done > PREFILL_LATE * work)
        return pending;
    return larger(0.0, pending - smaller(done, PREFILLED_MAX_SHARE * work));
}

/* Its prefill is done, as far as the router knows. */
static void end_prefill(NodeState *node, TicketState *t, double now_s) {
    if (t->is_prefilling) {
        if (t == node->first_prefill) /* the end of another one says nothing about the first one's turn */
            node->prefill_ended_s = now_s;
        unlist_prefill(node, t);
    }
    node->pending_work -= t->pending_work;
    node->changes++;
    t->pending_work = 0.0;
    if (t->is_unstreamed)
        unlist_unstreamed(node, t);
}

static void assume_prefilled(NodeState *node, double now_s) {
    while (node->first_unstreamed && node->first_unstreamed->prefill_due_s <= now_s)
        end_prefill(node, node->first_unstreamed, now_s);
}

/* ---- Nodes ---- */

static int node_traverse(NodeState *self, visitproc visit, void *arg) {
    for (TicketState *t = self->first_unstreamed; t; t = t->next)
        Py_VISIT(t);
    return named_traverse(&self->named, visit, arg);
}

static int node_clear(NodeState *self) {
    while (self->first_unstreamed)
        unlist_unstreamed(self, self->first_unstreamed);
    return named_clear(&self->named);
}

static void node_dealloc(NodeState *self) {
    PyObject_GC_UnTrack(self);
    node_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static void record_arrival(NodeState *node, double now_s) {
    node->arrival_rate =
        node->arrival_rate * exp((node->arrival_s - now_s) / ARRIVAL_DECAY_S) + 0.001 / ARRIVAL_DECAY_S;
    node->arrival_s = node->last_ticket_s = now_s;
}

static void record_latency(NodeState *node, double took_ms) {
    double mean_ms = node->latency_ms;
    node->latency_ms = mean_ms != 0.0 ? mean_ms + (took_ms - mean_ms) * LATENCY_WEIGHT : took_ms;
}

static void record_ttft(NodeState *node, double after_ms) {
    int bucket = 0;
    while (bucket < TTFT_BUCKETS - 1 && TTFT_BOUNDS_MS[bucket] < after_ms)
        bucket++;
    node->ttft_counts[bucket]++;
    node->ttft_sum_ms += after_ms;
}

/* Makes a method of a function that takes a node and a number. */
#define METHOD_OF_NUMBER(name)                                                                                             \
    static PyObject *node_##name(NodeState *node, PyObject *given) {                                                       \
        double number;                                                                                                     \
        if (as_double(given, &number) < 0)                                                                                 \
            return NULL;                                                                                                   \
        name(node, number);                                                                                                \
        Py_RETURN_NONE;                                                                                                    \
    }
METHOD_OF_NUMBER(record_arrival)
METHOD_OF_NUMBER(record_latency)
METHOD_OF_NUMBER(assume_prefilled)

static PyObject *node_remaining_work(NodeState *node, PyObject *given) {
    double now_s;
    if (as_double(given, &now_s) < 0)
        return NULL;
    if (!speed_of(node)) {
        PyErr_SetString(PyExc_ValueError, "the node has no speed");
        return NULL;
    }
    return PyFloat_FromDouble(remaining_work(node, now_s));
}

static PyObject *node_add_context(NodeState *node, PyObject *given) {
    Py_ssize_t tokens;
    if (as_size(given, &tokens) < 0)
        return NULL;
    node->context_tokens += tokens;
    node->changes++;
    Py_RETURN_NONE;
}

static PyObject *as_list(const Py_ssize_t *numbers, Py_ssize_t n) {
    PyObject *list = PyList_New(n);
    for (Py_ssize_t at = 0; list && at < n; at++) {
        PyObject *number = PyLong_FromSsize_t(numbers[at]);
        if (number)
            PyList_SET_ITEM(list, at, number);
        else
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *node_outcomes(NodeState *node, void *unused) {
    (void)unused;
    return as_list(node->outcomes, MAX_OUTCOMES);
}

static PyObject *node_ttft_counts(NodeState *node, void *unused) {
    (void)unused;
    return as_list(node->ttft_counts, TTFT_BUCKETS);
}

static PyObject *node_own_pending_work(NodeState *node, void *unused) {
    (void)unused;
    return PyFloat_FromDouble(own_pending_work(node));
}

static PyMemberDef node_members[] = {
    {"name", T_OBJECT_EX, offsetof(Named, name), 0, NULL},
    {"pending_work", T_DOUBLE, offsetof(NodeState, pending_work), 0, NULL},
    {"kv_usage", T_DOUBLE, offsetof(NodeState, kv_usage), 0, NULL},
    {"kv_delta", T_DOUBLE, offsetof(NodeState, kv_delta), 0, NULL},
    {"kv_pressure", T_DOUBLE, offsetof(NodeState, kv_pressure), 0, NULL},
    {"queue_ms", T_DOUBLE, offsetof(NodeState, queue_ms), 0, NULL},
    {"arrival_rate", T_DOUBLE, offsetof(NodeState, arrival_rate), 0, NULL},
    {"arrival_s", T_DOUBLE, offsetof(NodeState, arrival_s), 0, NULL},
    {"distance_ms", T_DOUBLE, offsetof(NodeState, distance_ms), 0, NULL},
    {"round_trip_ms", T_DOUBLE, offsetof(NodeState, round_trip_ms), 0, NULL},
    {"polled_s", T_DOUBLE, offsetof(NodeState, polled_s), 0, NULL},
    {"last_ticket_s", T_DOUBLE, offsetof(NodeState, last_ticket_s), 0, NULL},
    {"latency_ms", T_DOUBLE, offsetof(NodeState, latency_ms), 0, NULL},
    {"ttft_sum_ms", T_DOUBLE, offsetof(NodeState, ttft_sum_ms), READONLY, NULL},
    {"streamed_ttft_ms", T_DOUBLE, offsetof(NodeState, streamed_ttft_ms), READONLY, NULL},
    {"streamed_work", T_DOUBLE, offsetof(NodeState, streamed_work), READONLY, NULL},
    {"streamed_steps_ms", T_DOUBLE, offsetof(NodeState, streamed_steps_ms), READONLY, NULL},
    {"context_tokens", T_PYSSIZET, offsetof(NodeState, context_tokens), 0, NULL},
    {"kv_new", T_PYSSIZET, offsetof(NodeState, kv_new), 0, NULL},
    {"inflight", T_PYSSIZET, offsetof(NodeState, inflight), 0, NULL},
    {"other_load", T_PYSSIZET, offsetof(NodeState, other_load), 0, NULL},
    {"polls", T_PYSSIZET, offsetof(NodeState, polls), 0, NULL},
    {"unstarted", T_PYSSIZET, offsetof(NodeState, unstarted), 0, NULL},
    {"kv_sum", T_DOUBLE, offsetof(NodeState, kv_sum), READONLY, NULL},
    {"changes", T_PYSSIZET, offsetof(NodeState, changes), READONLY, NULL},
    {"unstreamed_prefills", T_PYSSIZET, offsetof(NodeState, unstreamed_prefills), READONLY, NULL},
    {"unstreamed", T_PYSSIZET, offsetof(NodeState, unstreamed), READONLY, NULL},
    {"peer_inflight", T_PYSSIZET, offsetof(NodeState, peer_inflight), READONLY, NULL},
    {"peer_context_tokens", T_PYSSIZET, offsetof(NodeState, peer_context_tokens), READONLY, NULL},
    {"peer_kv_new", T_PYSSIZET, offsetof(NodeState, peer_kv_new), READONLY, NULL},
    {"peer_pending_work", T_DOUBLE, offsetof(NodeState, peer_pending_work), READONLY, NULL},
    {"published_work", T_DOUBLE, offsetof(NodeState, published_work), 0, NULL},
    {"published_changes", T_PYSSIZET, offsetof(NodeState, published_changes), 0, NULL},
    NO_MEMBER};

static PyGetSetDef node_properties[] = {
    {"speed", (getter)get_part, (setter)set_part, NULL, &SpeedType},
    {"own_pending_work", (getter)node_own_pending_work, NULL, "This process's part of the prefill work.", NULL},
    {"outcomes", (getter)node_outcomes, NULL, "Released tickets by outcome.", NULL},
    {"ttft_counts", (getter)node_ttft_counts, NULL, "First tokens by bucket of TTFT_BOUNDS_MS.", NULL},
    NO_PROPERTY};

static PyMethodDef node_methods[] = {
    {"record_arrival", (PyCFunction)node_record_arrival, METH_O, "Count a request that is sent to the node now."},
    {"record_latency", (PyCFunction)node_record_latency, METH_O, "Add a response's latency to the moving average."},
    {"add_context", (PyCFunction)node_add_context, METH_O, "Add to the context tokens, or take some away."},
    {"assume_prefilled", (PyCFunction)node_assume_prefilled, METH_O, "End the unstreamed prefills that are due by now."},
    {"remaining_work", (PyCFunction)node_remaining_work, METH_O, "Return the pending work that should be left by now."},
    NO_METHOD};

PyTypeObject NodeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "NodeState",
    .tp_doc = "A node's figures, as tickets change them and prices read them.",
    .tp_basicsize = sizeof(NodeState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)node_traverse,
    .tp_clear = (inquiry)node_clear,
    .tp_dealloc = (destructor)node_dealloc,
    .tp_methods = node_methods,
    .tp_members = node_members,
    .tp_getset = node_properties,
};

/* ---- Tickets ---- */

static int ticket_traverse(TicketState *self, visitproc visit, void *arg) {
    Py_VISIT(self->node);
    Py_VISIT(self->decode_speed);
    return 0;
}

static int ticket_clear(TicketState *self) {
    if (self->is_prefilling)
        unlist_prefill(self->node, self);
    Py_CLEAR(self->node);
    Py_CLEAR(self->decode_speed);
    return 0;
}

static void ticket_dealloc(TicketState *self) {
    PyObject_GC_UnTrack(self);
    ticket_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* The node of a ticket that was opened; NULL with an exception where it was not. */
static always_inline NodeState *node_of(const TicketState *t) {
    if (t->node)
        return t->node;
    PyErr_SetString(PyExc_ValueError, "the ticket is not open");
    return NULL;
}

static void change_kv(NodeState *node, double tokens) {
    node->kv_delta += tokens;
    node->kv_sum += tokens;
}

static void add_prompt(TicketState *t, NodeState *node, double now_s) {
    t->was_alone = node->pending_work < 1.0;
    if (t->unlearned_work > 0.0) /* else the node only decodes */
        list_prefill(node, t);
    node->pending_work += t->unlearned_work;
    change_kv(node, (double)t->new_tokens);
    node->kv_new += t->new_tokens;
    if (t->streams)
        return;
    assume_prefilled(node, now_s);
    const TicketState *ahead = t->is_prefilling ? t->earlier : node->last_prefill;
    double arrives_s = now_s + node->round_trip_ms / 1000.0, ms_per_token = speed_of(node)->ms_per_token;
    if (ahead && ahead->is_unstreamed && node->peer_pending_work < 1.0)
        t->prefill_due_s = larger(arrives_s, ahead->prefill_due_s) + t->unlearned_work * ms_per_token / 1000.0;
    else
        t->prefill_due_s = arrives_s + remaining_work(node, now_s) * ms_per_token / 1000.0;
    /* Work ahead may have ended early: then those before it are due earlier, too. */
    t->prefill_due_s = smaller(t->prefill_due_s, arrives_s + larger(0.0, node->pending_work) * ms_per_token / 1000.0);
    for (TicketState *one = node->last_unstreamed; one && one->prefill_due_s > t->prefill_due_s; one = one->previous)
        one->prefill_due_s = t->prefill_due_s;
    list_unstreamed(node, t);
}

/* What has to happen on the node until its first token. */
static void expect_first_token(TicketState *t, const NodeState *node, double now_s) {
    const SpeedState *speed = speed_of(node);
    double queue_work = node->queue_ms / speed->ms_per_token + t->unlearned_work;
    double steps_ms = speed->step_ms; /* an idle node's first step */
    if (load_of(node) > 1)
        steps_ms = FIRST_TOKEN_STEPS * decode_ms(t->decode_speed, (double)node->context_tokens) * speed->factor;
    t->work_ahead = larger(remaining_work(node, now_s), queue_work);
    t->steps_ms = steps_ms + node->round_trip_ms;
    t->expected_ttft_ms = t->work_ahead * speed->ms_per_token + t->steps_ms;
}

static PyObject *ticket_open(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double now_s, work = 0.0;
    Py_ssize_t tokens = 0, new_tokens = 0;
    int has_prompt = count != 2, streams = 0;
    if ((has_prompt && check_count(count, 7) < 0) || check_type(args[0], &NodeType) < 0 || as_double(args[1], &now_s) < 0)
        return NULL;
    if (has_prompt && (check_type(args[2], &DecodeSpeedType) < 0 || (streams = PyObject_IsTrue(args[3])) < 0 ||
                       as_size(args[4], &tokens) < 0 || as_size(args[5], &new_tokens) < 0 || as_double(args[6], &work) < 0))
        return NULL;
    NodeState *node = (NodeState *)args[0];
    if (t->node || !speed_of(node)) {
        PyErr_SetString(PyExc_ValueError, t->node ? "the ticket is open already" : "the node has no speed");
        return NULL;
    }
    t->node = (NodeState *)Py_NewRef(node);
    t->opened_s = now_s;
    t->is_open = 1;
    t->polls = node->polls;
    node->inflight++;
    node->unstarted++;
    node->changes++;
    record_arrival(node, now_s);
    node->context_tokens += tokens + (Py_ssize_t)REQUEST_CONTEXT;
    if (has_prompt) {
        t->decode_speed = (DecodeSpeedState *)Py_NewRef(args[2]);
        t->streams = (char)streams;
        node->unstreamed += !streams;
        t->tokens = tokens;
        t->new_tokens = new_tokens;
        t->unlearned_work = t->pending_work = work;
        add_prompt(t, node, now_s);
        expect_first_token(t, node, now_s);
    }
    Py_RETURN_NONE;
}

/* Whether no other prompt waits that could have delayed its first token, which came now: the engine has served it for half of
 * the time before the next one came. */
static int is_alone(const TicketState *t, const NodeState *node, double now_s) {
    const TicketState *next = node->first_prefill;
    if (node->pending_work < 1.0)
        return 1;
    return node->peer_pending_work < 1.0 && next && next->opened_s - t->opened_s >= 0.5 * (now_s - t->opened_s);
}

/* When it reached the node: the network's time is not the node's. */
static double arrived_s(const TicketState *t, const NodeState *node, double now_s) {
    double at_s = t->opened_s + node->round_trip_ms / 1000.0;
    return at_s < now_s ? at_s : t->opened_s; /* else the round trip is shorter than configured */
}

/* The time of one step of the batch that its prompt waited beside. */
static double waited_step_ms(const TicketState *t, const NodeState *node) {
    SpeedState *speed = speed_of(node);
    double step_ms = load_of(node) > 1 ? decode_ms(t->decode_speed, (double)node->context_tokens) * speed->factor : 0.0;
    if (speed->step_ms > 0.0) /* short answers that stop for a prefill seem to have long steps */
        step_ms = smaller(step_ms, STEP_MAX_FACTOR * speed->step_ms);
    return step_ms;
}

/* Whether several processes learn the speed, all in the order of time. */
static int learns_in_order(const SpeedState *speed) {
    return speed->first_tokens && Py_TYPE(speed->first_tokens) == &FirstTokenOrderType;
}

/* Learns from the time to its first token, which came now. */
static void learn_prefill(TicketState *t, NodeState *node, double now_s) {
    SpeedState *speed = speed_of(node);
    double step_ms = waited_step_ms(t, node), sent_s = arrived_s(t, node, now_s);
    int lone = t->streams && t->was_alone && is_alone(t, node, now_s);
    if (!learns_in_order(speed)) {
        learn_first_token(speed, t->unlearned_work, step_ms, sent_s, now_s, lone);
        return;
    }
    FirstToken token = {.at_s = now_s, .sent_s = sent_s, .work = t->unlearned_work, .step_ms = step_ms, .node = node,
                        .lone = (char)lone};
    keep_first_token(speed->first_tokens, &token);
}

/* The node may have had more of the prompt than its work says, so its first token, which came now, says nothing about the
 * node's speed until the engine reports what it had. The time until then is no other prompt's. */
static void keep_hidden_prefill(TicketState *t, NodeState *node, double now_s) {
    SpeedState *speed = speed_of(node);
    if (learns_in_order(speed)) /* what is reported later comes too late */
        return;
    double since_ms = (now_s - larger(arrived_s(t, node, now_s), speed->last_first_token_s)) * 1000.0;
    t->hidden_prefill_ms = own_prefill_ms(since_ms, waited_step_ms(t, node));
    speed->last_first_token_s = larger(now_s, speed->last_first_token_s);
    speed->uncharged_ms = 0.0;
}

static PyObject *ticket_first_token(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double now_s;
    int served = 1;
    NodeState *node = node_of(t);
    if (!node || (count != 1 && check_count(count, 2) < 0) || as_double(args[0], &now_s) < 0 ||
        (count == 2 && (served = PyObject_IsTrue(args[1])) < 0))
        return NULL;
    if (t->first_token_s == 0.0 && t->polls == node->polls)
        node->unstarted--;
    t->first_token_s = now_s;
    record_ttft(node, (now_s - t->opened_s) * 1000.0);
    if (!t->decode_speed)
        Py_RETURN_NONE;
    end_prefill(node, t, now_s);
    if (t->has_hidden_hits) {
        if (served && t->streams)
            keep_hidden_prefill(t, node, now_s);
        Py_RETURN_NONE;
    }
    if (served && t->streams) {
        node->streamed_ttft_ms += (now_s - t->opened_s) * 1000.0;
        node->streamed_work += t->work_ahead;
        node->streamed_steps_ms += t->steps_ms;
    }
    /* An answer that is not streamed is an upper bound of its prefill's time. */
    if (served && (t->streams || (now_s - t->opened_s) * 1000.0 < t->unlearned_work * speed_of(node)->ms_per_token)) {
        learn_prefill(t, node, now_s);
        t->unlearned_work = 0.0;
    }
    Py_RETURN_NONE;
}

/* Only the end of the answer was seen. Learns about the part that took most of the time: the prefill or the decode. */
static void learn_from_end(TicketState *t, NodeState *node, double steps, double now_s) {
    SpeedState *speed = speed_of(node);
    double context = (double)node->context_tokens, usual_ms = decode_ms(t->decode_speed, context);
    double expected_decode_ms = steps * usual_ms * speed->factor;
    if (expected_decode_ms > t->unlearned_work * speed->ms_per_token && now_s > t->prefill_due_s)
        learn_decode_speed(speed, t->decode_speed, (now_s - t->prefill_due_s) * 1000.0 / steps, usual_ms, context);
    else if (t->unlearned_work != 0.0)
        learn_prefill(t, node, larger(t->opened_s, now_s - expected_decode_ms / 1000.0));
}

static PyObject *ticket_record_answer(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double output_tokens = 0.0, now_s;
    NodeState *node = node_of(t);
    if (!node || check_count(count, 2) < 0 || (args[0] != Py_None && as_double(args[0], &output_tokens) < 0) ||
        as_double(args[1], &now_s) < 0)
        return NULL;
    if (args[0] != Py_None)
        t->output_tokens = output_tokens;
    if (t->first_token_s == 0.0 || !t->decode_speed)
        Py_RETURN_NONE;
    double steps = larger(output_tokens - 1.0, 0.0), context = (double)node->context_tokens;
    if (!t->streams) {
        if (!t->has_hidden_hits)
            learn_from_end(t, node, steps, now_s);
    } else if (steps > 0.0 && now_s > t->first_token_s) { /* else its tokens were not visible before its end */
        SpeedState *speed = speed_of(node);
        double token_ms = (now_s - t->first_token_s) * 1000.0 / steps;
        if (steps >= EARLY_MIN_STEPS)
            record_times(speed, (t->first_token_s - t->opened_s) * 1000.0, token_ms);
        if (!speed->is_replaced) /* else a part of that time may be its prefill */
            learn_decode_speed(speed, t->decode_speed, token_ms, decode_ms(t->decode_speed, context), context);
    }
    Py_RETURN_NONE;
}

static PyObject *ticket_reveal_hits(TicketState *t, PyObject *given) {
    double work;
    NodeState *node = node_of(t);
    if (!node || as_double(given, &work) < 0)
        return NULL;
    if (!t->has_hidden_hits || !t->decode_speed || t->first_token_s == 0.0 || !(work >= 0.0 && work <= 1e15))
        Py_RETURN_NONE;
    SpeedState *speed = speed_of(node);
    t->has_hidden_hits = 0;
    if (!t->streams) { /* the end of the answer says the rest */
        t->prefill_due_s -= larger(0.0, t->unlearned_work - work) * speed->ms_per_token / 1000.0;
        t->prefill_due_s = larger(t->opened_s, t->prefill_due_s);
        t->unlearned_work = work;
    } else if (t->hidden_prefill_ms > 0.0) {
        double ms_per_token = speed->is_replaced ? speed->learned_ms_per_token : speed->ms_per_token;
        add_prefill(speed, work, t->hidden_prefill_ms, work * ms_per_token, larger(t->first_token_s, speed->at_s));
        t->unlearned_work = 0.0;
    }
    Py_RETURN_NONE;
}

static void remove_prompt(TicketState *t, NodeState *node, double now_s) {
    if (t->first_token_s == 0.0)
        end_prefill(node, t, now_s);
    change_kv(node, -(double)t->new_tokens);
    if (node->polled_s > t->opened_s) /* the last poll counted some of its answer, too */
        change_kv(node, -t->output_tokens);
    node->kv_new -= t->new_tokens;
}

static PyObject *ticket_release(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t outcome;
    double now_s;
    NodeState *node = node_of(t);
    if (!node || check_count(count, 2) < 0 || as_size(args[0], &outcome) < 0 || as_double(args[1], &now_s) < 0)
        return NULL;
    if (outcome < 0 || outcome >= MAX_OUTCOMES) {
        PyErr_SetString(PyExc_ValueError, "there is no such outcome");
        return NULL;
    }
    if (!t->is_open)
        Py_RETURN_FALSE;
    if (t->decode_speed) {
        remove_prompt(t, node, now_s);
        node->unstreamed -= !t->streams;
    }
    node->context_tokens -= t->tokens + (Py_ssize_t)REQUEST_CONTEXT;
    t->is_open = 0;
    node->changes++;
    if (!--node->inflight)
        node->pending_work = 0.0; /* removes the rounding errors of the sum */
    if (t->first_token_s == 0.0 && t->polls == node->polls)
        node->unstarted--;
    node->outcomes[outcome]++;
    if (outcome == OUTCOME_OK)
        record_latency(node, (now_s - t->opened_s) * 1000.0);
    Py_RETURN_TRUE;
}

static PyMemberDef ticket_members[] = {
    {"node", T_OBJECT_EX, offsetof(TicketState, node), READONLY, NULL},
    {"opened_s", T_DOUBLE, offsetof(TicketState, opened_s), READONLY, NULL},
    {"first_token_s", T_DOUBLE, offsetof(TicketState, first_token_s), READONLY, NULL},
    {"expected_ttft_ms", T_DOUBLE, offsetof(TicketState, expected_ttft_ms), READONLY, NULL},
    {"tokens", T_PYSSIZET, offsetof(TicketState, tokens), READONLY, NULL},
    {"has_hidden_hits", T_BOOL, offsetof(TicketState, has_hidden_hits), 0, NULL},
    {"_is_open", T_BOOL, offsetof(TicketState, is_open), READONLY, NULL},
    {"_new_tokens", T_PYSSIZET, offsetof(TicketState, new_tokens), READONLY, NULL},
    {"_pending_work", T_DOUBLE, offsetof(TicketState, pending_work), READONLY, NULL},
    NO_MEMBER};

static PyMethodDef ticket_methods[] = {
    {"open", FAST(ticket_open), "Add the ticket to a node's figures, with its prompt's work if the prompt was looked up."},
    {"first_token", FAST(ticket_first_token), "Record the first token; served=False: the response is an error."},
    {"reveal_hits", (PyCFunction)ticket_reveal_hits, METH_O, "Learn from a prompt with hidden hits, whose work was this."},
    {"record_answer", FAST(ticket_record_answer), "Learn from a response that has ended."},
    {"release", FAST(ticket_release), "Remove the ticket from its node's figures; return False if that was done before."},
    NO_METHOD};

PyTypeObject TicketType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "TicketState",
    .tp_doc = "One request in the accounting of one node.",
    .tp_basicsize = sizeof(TicketState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)ticket_traverse,
    .tp_clear = (inquiry)ticket_clear,
    .tp_dealloc = (destructor)ticket_dealloc,
    .tp_methods = ticket_methods,
    .tp_members = ticket_members,
};

/* ---- Registration ---- */

static int add_ttft_bounds(PyObject *module) {
    PyObject *bounds = PyTuple_New(TTFT_BUCKETS - 1);
    for (Py_ssize_t i = 0; bounds && i < TTFT_BUCKETS - 1; i++) {
        PyObject *bound = PyFloat_FromDouble(TTFT_BOUNDS_MS[i]);
        if (bound)
            PyTuple_SET_ITEM(bounds, i, bound);
        else
            Py_CLEAR(bounds);
    }
    int failed = !bounds || PyModule_AddObjectRef(module, "TTFT_BOUNDS_MS", bounds) < 0;
    Py_XDECREF(bounds);
    return failed ? -1 : 0;
}

int add_accounting(PyObject *module) {
    if (add_ttft_bounds(module) < 0 || add_type(module, "SpeedState", &SpeedType) < 0 ||
        add_type(module, "DecodeSpeedState", &DecodeSpeedType) < 0 || add_type(module, "NodeState", &NodeType) < 0)
        return -1;
    return add_type(module, "TicketState", &TicketType);
}
