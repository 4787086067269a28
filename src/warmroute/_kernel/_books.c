/* The books of nodes: what a request changes in them from its dispatch to its end, and what is learned from its answer.
 *
 * The rules:
 * - A ticket is entered once, and leaves once: whatever it added to its node's books it takes back then.
 * - A formula is the one in Python, operation by operation: fleet/node_speed.py and fleet/decode_speed.py.
 * - Of answers that come at their end nobody sees the first token. Their tickets stand in a row at their node, in the order
 *   in which they came, which is the order in which their prefills are due. The node holds them until that.
 *
 * tests/routing/test_books.py holds it equal to plain Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_books.h"
#include <math.h>
#include <stddef.h>
#include <structmember.h>

/* fleet/node_speed.py */
#define STEPS 1.5
#define STEP_WORK 300.0
#define KEPT_S 15.0
#define LEAST_KEPT 0.7
#define MOST_TIMES 4.0
#define LEAST_TOOK 0.5
#define FACTOR_WEIGHT 0.05
/* fleet/decode_speed.py */
#define PACE_WEIGHT 0.03
#define LEAST_SHARE 0.2
#define MOST_PACES 4.0
/* fleet/arrival_rate.py */
#define ARRIVALS_KEPT_S 10.0
/* fleet/node.py */
#define LATENCY_WEIGHT 0.1
#define OK 0
static const double FIRST_BYTE_BOUNDS_MS[FIRST_BYTE_BUCKETS - 1] = {
    5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0};

/* ---- Speed and pace ---- */

static void saw_first_token(SpeedState *s, double done, double token_ms, double sent_s, double now_s) {
    double since_ms = (now_s - larger(sent_s, s->last_first_s)) * 1000.0;
    double took_ms = larger(since_ms - STEPS * token_ms, LEAST_TOOK * since_ms), thought_ms = done * s->ms_per_token;
    double kept = larger(LEAST_KEPT, exp(smaller(0.0, s->at_s - now_s) / KEPT_S)), weight = done / (done + STEP_WORK);
    s->last_first_s = s->at_s = now_s;
    s->work = s->work * kept + weight * done;
    s->ms = s->ms * kept + weight * smaller(larger(took_ms, 0.0), MOST_TIMES * thought_ms);
    s->ms_per_token = larger(1e-4, s->ms / larger(1.0, s->work));
    s->answers++;
}

/* A token took so long beside so much context, where one takes `usual_ms` on a node like the others. */
static void saw_flow(SpeedState *s, PaceState *p, double token_ms, double usual_ms, double context) {
    s->factor += FACTOR_WEIGHT * (smaller(token_ms / usual_ms, MOST_TIMES * s->factor) - s->factor);
    p->answers++;
    double weight = larger(PACE_WEIGHT, 1.0 / (double)(p->answers + 1));
    double dx = context - p->mean_context;
    double dy = smaller(token_ms / s->factor, MOST_PACES * pace_ms(p, context)) - p->mean_ms;
    p->mean_context += weight * dx;
    p->mean_ms += weight * dy;
    p->xx += PACE_WEIGHT * (dx * dx - p->xx);
    p->xy += PACE_WEIGHT * (dx * dy - p->xy);
    p->slope_ms = larger(p->xy / larger(p->xx, 1.0), 0.0);
    p->least_ms = LEAST_SHARE * p->mean_ms;
}

static PyMemberDef speed_members[] = {
    {"ms_per_token", T_DOUBLE, offsetof(SpeedState, ms_per_token), 0, NULL},
    {"factor", T_DOUBLE, offsetof(SpeedState, factor), 0, NULL},
    {"_work", T_DOUBLE, offsetof(SpeedState, work), 0, NULL},
    {"_ms", T_DOUBLE, offsetof(SpeedState, ms), 0, NULL},
    {"_at_s", T_DOUBLE, offsetof(SpeedState, at_s), 0, NULL},
    {"_last_first_s", T_DOUBLE, offsetof(SpeedState, last_first_s), 0, NULL},
    {"answers", T_PYSSIZET, offsetof(SpeedState, answers), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject SpeedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._books.SpeedState",
    .tp_doc = "What is learned of a node's speed.",
    .tp_basicsize = sizeof(SpeedState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = speed_members,
};

static PyMemberDef pace_members[] = {
    {"least_ms", T_DOUBLE, offsetof(PaceState, least_ms), 0, NULL},
    {"mean_ms", T_DOUBLE, offsetof(PaceState, mean_ms), 0, NULL},
    {"slope_ms", T_DOUBLE, offsetof(PaceState, slope_ms), 0, NULL},
    {"mean_context", T_DOUBLE, offsetof(PaceState, mean_context), 0, NULL},
    {"_xx", T_DOUBLE, offsetof(PaceState, xx), 0, NULL},
    {"_xy", T_DOUBLE, offsetof(PaceState, xy), 0, NULL},
    {"answers", T_PYSSIZET, offsetof(PaceState, answers), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject PaceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._books.PaceState",
    .tp_doc = "What is learned of a model's pace.",
    .tp_basicsize = sizeof(PaceState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = pace_members,
};

/* ---- The row of the unseen ---- */

static PyTypeObject TicketType;

static void line_up(NodeState *node, TicketState *t) {
    t->before = node->last_unseen;
    t->behind = NULL;
    *(t->before ? &t->before->behind : &node->first_unseen) = t;
    node->last_unseen = t;
    node->unseen++;
    t->unseen = 1;
    Py_INCREF(t);
}

static void step_out(NodeState *node, TicketState *t) {
    *(t->before ? &t->before->behind : &node->first_unseen) = t->behind;
    *(t->behind ? &t->behind->before : &node->last_unseen) = t->before;
    t->before = t->behind = NULL;
    node->unseen--;
    t->unseen = 0;
    Py_DECREF(t);
}

/* Nothing of its prefill is left, as far as anybody knows. */
static void prefilled(NodeState *node, TicketState *t) {
    node->pending_work -= t->work;
    t->work = 0.0;
    if (t->unseen)
        step_out(node, t);
}

static void expect_prefilled(NodeState *node, double now_s) {
    while (node->first_unseen && node->first_unseen->due_s <= now_s)
        prefilled(node, node->first_unseen);
}

/* ---- Nodes ---- */

static int node_traverse(NodeState *self, visitproc visit, void *arg) {
    for (TicketState *t = self->first_unseen; t; t = t->behind)
        Py_VISIT(t);
    return named_traverse(&self->named, visit, arg);
}

static int node_clear(NodeState *self) {
    while (self->first_unseen)
        step_out(self, self->first_unseen);
    return named_clear(&self->named);
}

static void node_dealloc(NodeState *self) {
    PyObject_GC_UnTrack(self);
    node_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static void saw_arrival(NodeState *node, double now_s) {
    node->arrival_rate = node->arrival_rate * exp((node->arrival_s - now_s) / ARRIVALS_KEPT_S) + 0.001 / ARRIVALS_KEPT_S;
    node->arrival_s = node->last_ticket_s = now_s;
}

static void saw_latency(NodeState *node, double took_ms) {
    double mean_ms = node->latency_ms;
    node->latency_ms = mean_ms != 0.0 ? mean_ms + (took_ms - mean_ms) * LATENCY_WEIGHT : took_ms;
}

static void saw_first_byte(NodeState *node, double after_ms) {
    int bucket = 0;
    while (bucket < FIRST_BYTE_BUCKETS - 1 && FIRST_BYTE_BOUNDS_MS[bucket] < after_ms)
        bucket++;
    node->first_byte_counts[bucket]++;
    node->first_byte_sum_ms += after_ms;
}

/* For each of them: a function of a number, as a method. */
#define TOLD(name)                                                                                                             \
    static PyObject *node_##name(NodeState *node, PyObject *given) {                                                           \
        double number;                                                                                                         \
        if (as_double(given, &number) < 0)                                                                                     \
            return NULL;                                                                                                       \
        name(node, number);                                                                                                    \
        Py_RETURN_NONE;                                                                                                        \
    }
TOLD(saw_arrival)
TOLD(saw_latency)
TOLD(expect_prefilled)

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
    return as_list(node->outcomes, OUTCOMES);
}

static PyObject *node_first_byte_counts(NodeState *node, void *unused) {
    (void)unused;
    return as_list(node->first_byte_counts, FIRST_BYTE_BUCKETS);
}

static PyMemberDef node_members[] = {
    {"name", T_OBJECT_EX, offsetof(Named, name), 0, NULL},
    {"pending_work", T_DOUBLE, offsetof(NodeState, pending_work), 0, NULL},
    {"kv_usage", T_DOUBLE, offsetof(NodeState, kv_usage), 0, NULL},
    {"kv_delta", T_DOUBLE, offsetof(NodeState, kv_delta), 0, NULL},
    {"arrival_rate", T_DOUBLE, offsetof(NodeState, arrival_rate), 0, NULL},
    {"arrival_s", T_DOUBLE, offsetof(NodeState, arrival_s), 0, NULL},
    {"distance_ms", T_DOUBLE, offsetof(NodeState, distance_ms), 0, NULL},
    {"round_trip_ms", T_DOUBLE, offsetof(NodeState, round_trip_ms), 0, NULL},
    {"polled_s", T_DOUBLE, offsetof(NodeState, polled_s), 0, NULL},
    {"last_ticket_s", T_DOUBLE, offsetof(NodeState, last_ticket_s), 0, NULL},
    {"latency_ms", T_DOUBLE, offsetof(NodeState, latency_ms), 0, NULL},
    {"first_byte_sum_ms", T_DOUBLE, offsetof(NodeState, first_byte_sum_ms), READONLY, NULL},
    {"context", T_PYSSIZET, offsetof(NodeState, context), 0, NULL},
    {"kv_new", T_PYSSIZET, offsetof(NodeState, kv_new), 0, NULL},
    {"inflight", T_PYSSIZET, offsetof(NodeState, inflight), 0, NULL},
    {"other_load", T_PYSSIZET, offsetof(NodeState, other_load), 0, NULL},
    {"polls", T_PYSSIZET, offsetof(NodeState, polls), 0, NULL},
    {"unstarted", T_PYSSIZET, offsetof(NodeState, unstarted), 0, NULL},
    {"unseen", T_PYSSIZET, offsetof(NodeState, unseen), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef node_properties[] = {
    {"speed", (getter)get_part, (setter)set_part, NULL, &SpeedType},
    {"outcomes", (getter)node_outcomes, NULL, "Tickets by how they ended.", NULL},
    {"first_byte_counts", (getter)node_first_byte_counts, NULL, "First bytes by how long they took.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef node_methods[] = {
    {"saw_arrival", (PyCFunction)node_saw_arrival, METH_O, "A request was sent there."},
    {"saw_latency", (PyCFunction)node_saw_latency, METH_O, "An answer took so many milliseconds."},
    {"expect_prefilled", (PyCFunction)node_expect_prefilled, METH_O, "Told now and then, where there are unseen ones."},
    {NULL, NULL, 0, NULL}};

static PyTypeObject NodeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._books.NodeState",
    .tp_doc = "What a price takes from a node, and its books.",
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
    Py_VISIT(self->pace);
    return 0;
}

static int ticket_clear(TicketState *self) {
    Py_CLEAR(self->node);
    Py_CLEAR(self->pace);
    return 0;
}

static void ticket_dealloc(TicketState *self) {
    PyObject_GC_UnTrack(self);
    ticket_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* The node of a ticket that was entered; NULL with an error where it was not. */
static always_inline NodeState *entered(const TicketState *t) {
    if (t->node)
        return t->node;
    PyErr_SetString(PyExc_ValueError, "the ticket is in no books");
    return NULL;
}

static void enter_prompt(TicketState *t, NodeState *node, double now_s) {
    node->pending_work += t->prefill;
    node->kv_delta += (double)t->new;
    node->kv_new += t->new;
    node->context += t->tokens;
    if (t->streams)
        return;
    expect_prefilled(node, now_s);
    t->due_s = now_s + (node->pending_work * speed_of(node)->ms_per_token + node->round_trip_ms) / 1000.0;
    line_up(node, t);
}

static PyObject *ticket_enter(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double now_s, prefill = 0.0;
    Py_ssize_t tokens = 0, new = 0;
    int read = count != 2, streams = 0;
    if ((read && check_count(count, 7) < 0) || check_type(args[0], &NodeType) < 0 || as_double(args[1], &now_s) < 0)
        return NULL;
    if (read && (check_type(args[2], &PaceType) < 0 || (streams = PyObject_IsTrue(args[3])) < 0 ||
                 as_size(args[4], &tokens) < 0 || as_size(args[5], &new) < 0 || as_double(args[6], &prefill) < 0))
        return NULL;
    NodeState *node = (NodeState *)args[0];
    if (t->node || !speed_of(node)) {
        PyErr_SetString(PyExc_ValueError, t->node ? "a ticket is entered once" : "the node has no speed yet");
        return NULL;
    }
    t->node = (NodeState *)Py_NewRef(node);
    t->opened_s = now_s;
    t->open = 1;
    t->polls = node->polls;
    node->inflight++;
    node->unstarted++;
    saw_arrival(node, now_s);
    if (read) {
        t->pace = (PaceState *)Py_NewRef(args[2]);
        t->streams = (char)streams;
        t->tokens = tokens;
        t->new = new;
        t->prefill = t->work = prefill;
        enter_prompt(t, node, now_s);
    }
    Py_RETURN_NONE;
}

/* Its first token came: what its prefill took is learned from. */
static void learn_prefill(TicketState *t, NodeState *node, double now_s) {
    SpeedState *speed = speed_of(node);
    double step_ms = load(node) > 1 ? pace_ms(t->pace, (double)node->context) * speed->factor : 0.0;
    double there_s = t->opened_s + node->round_trip_ms / 1000.0; /* the way is not the node's work */
    if (there_s >= now_s)                                        /* then it can't be as far as that */
        there_s = t->opened_s;
    saw_first_token(speed, t->prefill, step_ms, there_s, now_s);
}

static PyObject *ticket_first_byte(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double now_s;
    int served = 1;
    NodeState *node = entered(t);
    if (!node || (count != 1 && check_count(count, 2) < 0) || as_double(args[0], &now_s) < 0 ||
        (count == 2 && (served = PyObject_IsTrue(args[1])) < 0))
        return NULL;
    if (t->first_byte_s == 0.0 && t->polls == node->polls)
        node->unstarted--;
    t->first_byte_s = now_s;
    saw_first_byte(node, (now_s - t->opened_s) * 1000.0);
    if (!t->pace)
        Py_RETURN_NONE;
    prefilled(node, t);
    /* An answer that comes at its end bounds the prefill: it took no longer. */
    if (served && (t->streams || (now_s - t->opened_s) * 1000.0 < t->prefill * speed_of(node)->ms_per_token)) {
        learn_prefill(t, node, now_s);
        t->prefill = 0.0;
    }
    Py_RETURN_NONE;
}

/* All that is seen of it is when it ended. Of the whole time that part is learned from which took longer. */
static void learn_whole(TicketState *t, NodeState *node, double steps, double now_s) {
    SpeedState *speed = speed_of(node);
    double context = (double)node->context, usual_ms = pace_ms(t->pace, context);
    double flowed_ms = steps * usual_ms * speed->factor;
    if (flowed_ms > t->prefill * speed->ms_per_token && now_s > t->due_s)
        saw_flow(speed, t->pace, (now_s - t->due_s) * 1000.0 / steps, usual_ms, context);
    else if (t->prefill != 0.0)
        learn_prefill(t, node, larger(t->opened_s, now_s - flowed_ms / 1000.0));
}

static PyObject *ticket_learn(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    double output = 0.0, now_s;
    NodeState *node = entered(t);
    if (!node || check_count(count, 2) < 0 || (args[0] != Py_None && as_double(args[0], &output) < 0) ||
        as_double(args[1], &now_s) < 0)
        return NULL;
    if (args[0] != Py_None)
        t->output = output;
    if (t->first_byte_s == 0.0 || !t->pace)
        Py_RETURN_NONE;
    double steps = larger(output - 1.0, 0.0), context = (double)node->context;
    if (!t->streams)
        learn_whole(t, node, steps, now_s);
    else if (steps > 0.0)
        saw_flow(speed_of(node), t->pace, (now_s - t->first_byte_s) * 1000.0 / steps, pace_ms(t->pace, context), context);
    Py_RETURN_NONE;
}

static void leave_prompt(TicketState *t, NodeState *node) {
    if (t->first_byte_s == 0.0)
        prefilled(node, t);
    node->kv_delta -= (double)t->new;
    if (node->polled_s > t->opened_s) /* the poll has seen something of its answer, too */
        node->kv_delta -= t->output;
    node->kv_new -= t->new;
    node->context -= t->tokens;
}

static PyObject *ticket_leave(TicketState *t, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t outcome;
    double now_s;
    NodeState *node = entered(t);
    if (!node || check_count(count, 2) < 0 || as_size(args[0], &outcome) < 0 || as_double(args[1], &now_s) < 0)
        return NULL;
    if (outcome < 0 || outcome >= OUTCOMES) {
        PyErr_SetString(PyExc_ValueError, "there is no such outcome");
        return NULL;
    }
    if (!t->open)
        Py_RETURN_FALSE;
    if (t->pace)
        leave_prompt(t, node);
    t->open = 0;
    if (!--node->inflight)
        node->pending_work = 0.0; /* what sums of fractions leave behind */
    if (t->first_byte_s == 0.0 && t->polls == node->polls)
        node->unstarted--;
    node->outcomes[outcome]++;
    if (outcome == OK)
        saw_latency(node, (now_s - t->opened_s) * 1000.0);
    Py_RETURN_TRUE;
}

static PyMemberDef ticket_members[] = {
    {"node", T_OBJECT_EX, offsetof(TicketState, node), READONLY, NULL},
    {"opened_s", T_DOUBLE, offsetof(TicketState, opened_s), READONLY, NULL},
    {"first_byte_s", T_DOUBLE, offsetof(TicketState, first_byte_s), READONLY, NULL},
    {"tokens", T_PYSSIZET, offsetof(TicketState, tokens), READONLY, NULL},
    {"_open", T_BOOL, offsetof(TicketState, open), READONLY, NULL},
    {"_new", T_PYSSIZET, offsetof(TicketState, new), READONLY, NULL},
    {"_work", T_DOUBLE, offsetof(TicketState, work), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef ticket_methods[] = {
    {"enter", FAST(ticket_enter), "Enters it in a node's books, and the work of its prompt where that was looked up."},
    {"first_byte", FAST(ticket_first_byte), "The node has begun its answer; not `served`: with a refusal."},
    {"learn", FAST(ticket_learn), "Its answer has ended, with so many tokens."},
    {"leave", FAST(ticket_leave), "Takes it out of the books; False where that was done."},
    {NULL, NULL, 0, NULL}};

static PyTypeObject TicketType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._books.TicketState",
    .tp_doc = "What a request has in the books of a node.",
    .tp_basicsize = sizeof(TicketState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)ticket_traverse,
    .tp_clear = (inquiry)ticket_clear,
    .tp_dealloc = (destructor)ticket_dealloc,
    .tp_methods = ticket_methods,
    .tp_members = ticket_members,
};

/* ---- The module ---- */

static books_api for_prices = {&SpeedType, &PaceType, &NodeType};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_books", "The books of nodes.", -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__books(void) {
    static const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {{"SpeedState", &SpeedType}, {"PaceState", &PaceType}, {"NodeState", &NodeType}, {"TicketState", &TicketType}};
    PyObject *m = PyModule_Create(&module);
    for (size_t i = 0; m && i < sizeof(types) / sizeof(*types); i++)
        if (PyType_Ready(types[i].type) < 0 || PyModule_AddObjectRef(m, types[i].name, (PyObject *)types[i].type) < 0)
            Py_CLEAR(m);
    PyObject *api = m ? PyCapsule_New(&for_prices, BOOKS_API, NULL) : NULL;
    if (m && (!api || PyModule_AddObjectRef(m, BOOKS_API, api) < 0))
        Py_CLEAR(m);
    Py_XDECREF(api);
    return m;
}
