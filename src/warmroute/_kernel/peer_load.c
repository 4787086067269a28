/* The load of nodes across processes: the rows that this process publishes, and those of its peers, counted in the figures of
 * the nodes. core/cluster/peer.py explains the figures, core/cluster/messages.py the message.
 *
 * The rules:
 * - Row i of a message belongs to name i. check_load_rows() comes first: apply_load_rows() relies on its bounds.
 * - Each formula is the one in tests/peer_load_reference.py, operation by operation.
 */
#include "accounting.h"
#include <math.h>

#define MAX_COUNT (1LL << 50)
#define MAX_NUMBER 1e15
/* A node's metrics contained the requests of peers that become known up to this much later: they are not those of others. */
#define REPORTED_S 0.05

/* A row as it is sent: all numbers have 8 bytes. */
typedef struct {
    int64_t inflight;
    double pending_work;
    int64_t context_tokens, kv_new;
    double kv_sum;
    int64_t opened, output_tokens;
    double ms_per_token, speed_factor;
    int64_t answers;
    double prefill_work, prefill_s; /* its oldest prompt without a first token, and when that reached the node, by its clock */
} Row;

_Static_assert(sizeof(Row) == 96, "a row has no padding");

/* What one peer published last about one node, as it is counted in the node's figures. */
typedef struct {
    PyObject_HEAD
    NodeState *node;
    Row row;
} PeerRow;

static PyObject *groups_name, *inflight_name, *output_tokens_name, *record_peer_output_name, *guess_name;

/* ---- Counting ---- */

/* Adds to the requests of the node's models. */
static int add_to_groups(NodeState *node, Py_ssize_t requests) {
    PyObject *groups = PyObject_GetAttr((PyObject *)node, groups_name);
    if (!groups)
        return -1;
    int failed = !PyTuple_Check(groups);
    if (failed)
        PyErr_SetString(PyExc_TypeError, "the groups of a node are not a tuple");
    for (Py_ssize_t at = 0; !failed && at < PyTuple_GET_SIZE(groups); at++) {
        PyObject *group = PyTuple_GET_ITEM(groups, at), *before = PyObject_GetAttr(group, inflight_name), *now = NULL;
        Py_ssize_t count;
        failed = !before || as_size(before, &count) < 0 || !(now = PyLong_FromSsize_t(count + requests)) ||
                 PyObject_SetAttr(group, inflight_name, now) < 0;
        Py_XDECREF(before);
        Py_XDECREF(now);
    }
    Py_DECREF(groups);
    return failed ? -1 : 0;
}

/* Replaces the load that the peer had on the node. The totals stay. */
static int change_load(PeerRow *self, int64_t inflight, double pending_work, int64_t context_tokens, int64_t kv_new) {
    NodeState *node = self->node;
    Row *before = &self->row;
    Py_ssize_t requests = (Py_ssize_t)(inflight - before->inflight);
    Py_ssize_t tokens = (Py_ssize_t)(context_tokens - before->context_tokens), new = (Py_ssize_t)(kv_new - before->kv_new);
    double work = pending_work - before->pending_work;
    node->inflight += requests;
    node->peer_inflight += requests;
    node->peer_pending_work = node->peer_inflight ? node->peer_pending_work + work : 0.0;
    node->pending_work = node->inflight ? larger(0.0, node->pending_work + work) : 0.0;
    node->context_tokens += tokens;
    node->peer_context_tokens += tokens;
    node->kv_new += new;
    node->peer_kv_new += new;
    before->inflight = inflight;
    before->pending_work = pending_work;
    before->context_tokens = context_tokens;
    before->kv_new = kv_new;
    return requests ? add_to_groups(node, requests) : 0;
}

/* Forgets that this peer's prompt is the first one of the peers on the node. */
static void end_peer_prefill(PeerRow *self) {
    NodeState *node = self->node;
    if (node->peer_prefill_of == self) {
        node->peer_prefill_of = NULL;
        node->peer_prefill_work = 0.0;
    }
}

/* Keeps the oldest prompt of all peers that has no first token: the node prefills it now, unless one of this process is
 * older. Another one follows with the next row of its process. */
static void note_peer_prefill(PeerRow *self, const Row *row, double sent_s, double now_s) {
    NodeState *node = self->node;
    double since_s = now_s - larger(0.0, sent_s - row->prefill_s);
    if (node->peer_prefill_of == self) {
        if (row->prefill_work > 0.0 && row->prefill_s == self->row.prefill_s) /* the faster message was more exact */
            since_s = smaller(since_s, node->peer_prefill_s);
        else
            node->prefill_ended_s = larger(node->prefill_ended_s, now_s);
        end_peer_prefill(self);
    }
    if (row->prefill_work > 0.0 && (!node->peer_prefill_of || since_s < node->peer_prefill_s)) {
        node->peer_prefill_of = self;
        node->peer_prefill_work = row->prefill_work;
        node->peer_prefill_s = since_s;
    }
}

static void record_peer_arrivals(NodeState *node, int64_t arrivals, double now_s) {
    double rate = node->arrival_rate * exp(smaller(0.0, node->arrival_s - now_s) / ARRIVAL_DECAY_S);
    node->arrival_rate = rate + (double)arrivals * 0.001 / ARRIVAL_DECAY_S;
    node->arrival_s = now_s;
}

/* Takes the peer's speed of a node that this process has not measured. */
static int guess_speed(SpeedState *speed, const Row *row) {
    PyObject *ms = PyFloat_FromDouble(row->ms_per_token);
    PyObject *done = ms ? PyObject_CallMethodOneArg((PyObject *)speed, guess_name, ms) : NULL;
    Py_XDECREF(ms);
    if (!done)
        return -1;
    Py_DECREF(done);
    speed->factor = row->speed_factor != 0.0 ? row->speed_factor : 1.0;
    return 0;
}

static int record_peer_output(PyObject *cache, int64_t tokens, PyObject *now) {
    PyObject *count = PyLong_FromLongLong(tokens);
    PyObject *done = count ? PyObject_CallMethodObjArgs(cache, record_peer_output_name, count, now, NULL) : NULL;
    Py_XDECREF(count);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Counts a new row of the peer. Returns 1 where the node has less work than before, -1 with an exception. */
static int apply_row(
    PeerRow *self, const Row *row, PyObject *cache, PyObject *now, double sent_s, double now_s, int64_t min_answers) {
    NodeState *node = self->node;
    SpeedState *speed = speed_of(node);
    Row before = self->row;
    int has_less = row->inflight < before.inflight || row->pending_work < before.pending_work;
    if (change_load(self, row->inflight, row->pending_work, row->context_tokens, row->kv_new) < 0)
        return -1;
    note_peer_prefill(self, row, sent_s, now_s);
    self->row = *row;
    node->kv_delta += row->kv_sum - before.kv_sum;
    if (row->opened > before.opened) {
        record_peer_arrivals(node, row->opened - before.opened, now_s);
        if (now_s - node->polled_s < REPORTED_S) {
            int64_t others = node->other_load - (row->opened - before.opened);
            node->other_load = others > 0 ? (Py_ssize_t)others : 0;
        }
    }
    if (speed && !speed->answers && row->answers >= min_answers && row->ms_per_token > 0.0) {
        Py_INCREF(speed); /* Python code runs */
        int failed = guess_speed(speed, row) < 0;
        Py_DECREF(speed);
        if (failed)
            return -1;
    }
    if (cache && row->output_tokens > before.output_tokens &&
        record_peer_output(cache, row->output_tokens - before.output_tokens, now) < 0)
        return -1;
    return has_less;
}

static PyObject *peer_row_clear(PeerRow *self, PyObject *unused) {
    (void)unused;
    end_peer_prefill(self);
    if (change_load(self, 0, 0.0, 0, 0) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *peer_row_inflight(PeerRow *self, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(self->row.inflight);
}

static void peer_row_dealloc(PeerRow *self) {
    end_peer_prefill(self);
    Py_CLEAR(self->node);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef peer_row_members[] = {{"node", T_OBJECT_EX, offsetof(PeerRow, node), READONLY, NULL}, NO_MEMBER};

static PyGetSetDef peer_row_properties[] = {
    {"inflight", (getter)peer_row_inflight, NULL, "The peer's requests on the node.", NULL}, NO_PROPERTY};

static PyMethodDef peer_row_methods[] = {
    {"clear", (PyCFunction)peer_row_clear, METH_NOARGS, "Count nothing of the peer's load any more."}, NO_METHOD};

static PyTypeObject PeerRowType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "PeerRow",
    .tp_doc = "What one peer published last about one node, as it is counted in the node's figures.",
    .tp_basicsize = sizeof(PeerRow),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)peer_row_dealloc,
    .tp_methods = peer_row_methods,
    .tp_members = peer_row_members,
    .tp_getset = peer_row_properties,
};

/* ---- Messages ---- */

static int is_count(int64_t value) { return value >= 0 && value <= MAX_COUNT; }

static int is_number(double value) { return value >= 0.0 && value <= MAX_NUMBER; }

static int is_row(const Row *row) {
    return is_count(row->inflight) && is_number(row->pending_work) && is_count(row->context_tokens) &&
           is_count(row->kv_new) && row->kv_sum >= -MAX_NUMBER && row->kv_sum <= MAX_NUMBER && is_count(row->opened) &&
           is_count(row->output_tokens) && is_number(row->ms_per_token) && is_number(row->speed_factor) &&
           is_count(row->answers) && is_number(row->prefill_work) && row->prefill_s >= -MAX_NUMBER &&
           row->prefill_s <= MAX_NUMBER;
}

static PyObject *check_load_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t rows;
    (void)module;
    if (check_count(count, 2) < 0 || check_type(args[0], &PyBytes_Type) < 0 || as_size(args[1], &rows) < 0)
        return NULL;
    int good = rows >= 0 && rows <= PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(Row) &&
               PyBytes_GET_SIZE(args[0]) == rows * (Py_ssize_t)sizeof(Row);
    for (Py_ssize_t at = 0; good && at < rows; at++) {
        Row row;
        memcpy(&row, PyBytes_AS_STRING(args[0]) + at * (Py_ssize_t)sizeof row, sizeof row);
        good = is_row(&row);
    }
    return PyBool_FromLong(good);
}

static PyObject *as_node(PyObject *found) {
    return PyObject_TypeCheck(found, &NodeType) ? found : NULL;
}

/* The peer's row of this node; a new one where there is none, or that of a node which had the same name. */
static PeerRow *peer_row(PyObject *rows, PyObject *name, NodeState *node, const Row *row, int from_start) {
    PyObject *known = PyDict_GetItemWithError(rows, name);
    if (known && Py_TYPE(known) == &PeerRowType && ((PeerRow *)known)->node == node)
        return (PeerRow *)known;
    if (!known && PyErr_Occurred())
        return NULL;
    PeerRow *made = PyObject_New(PeerRow, &PeerRowType);
    if (!made)
        return NULL;
    made->node = (NodeState *)Py_NewRef(node);
    made->row = (Row){0};
    if (known || !from_start) { /* else the peer's totals began at 0 while this process listened */
        made->row.kv_sum = row->kv_sum;
        made->row.opened = row->opened;
        made->row.output_tokens = row->output_tokens;
    }
    int failed = PyDict_SetItem(rows, name, (PyObject *)made) < 0;
    Py_DECREF(made);
    return failed ? NULL : made;
}

static PyObject *apply_load_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    double sent_s, now_s;
    int from_start;
    Py_ssize_t min_answers;
    (void)module;
    if (check_count(count, 9) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &PyDict_Type) < 0 ||
        check_type(args[2], &PyDict_Type) < 0 || check_type(args[3], &PyTuple_Type) < 0 ||
        check_type(args[4], &PyBytes_Type) < 0 || as_double(args[5], &now_s) < 0 ||
        (from_start = PyObject_IsTrue(args[6])) < 0 || as_size(args[7], &min_answers) < 0 || as_double(args[8], &sent_s) < 0)
        return NULL;
    PyObject *rows = args[0], *nodes = args[1], *caches = args[2], *names = args[3];
    if (PyBytes_GET_SIZE(args[4]) / (Py_ssize_t)sizeof(Row) < PyTuple_GET_SIZE(names)) {
        PyErr_SetString(PyExc_ValueError, "there are fewer rows than names");
        return NULL;
    }
    PyObject *freed = PyList_New(0);
    for (Py_ssize_t at = 0; freed && at < PyTuple_GET_SIZE(names); at++) {
        PyObject *name = PyTuple_GET_ITEM(names, at), *node = PyDict_GetItemWithError(nodes, name);
        PyObject *cache = NULL;
        PeerRow *known = NULL;
        Row row;
        int has_less = 0;
        if (!node && !PyErr_Occurred())
            continue; /* it was removed here, or is not added yet */
        memcpy(&row, PyBytes_AS_STRING(args[4]) + at * (Py_ssize_t)sizeof row, sizeof row);
        if (node && (node = as_node(node)) && ((cache = PyDict_GetItemWithError(caches, name)) || !PyErr_Occurred()))
            known = peer_row(rows, name, (NodeState *)node, &row, from_start);
        Py_XINCREF(known); /* Python code runs below */
        Py_XINCREF(cache);
        if (!known || (has_less = apply_row(known, &row, cache, args[5], sent_s, now_s, min_answers)) < 0 ||
            (has_less && PyList_Append(freed, (PyObject *)known->node) < 0)) {
            if (!PyErr_Occurred())
                wrong_type(&NodeType);
            Py_CLEAR(freed);
        }
        Py_XDECREF(known);
        Py_XDECREF(cache);
    }
    return freed;
}

/* ---- Publishing ---- */

static int has_news(const NodeState *node, int full) {
    return node->changes != node->published_changes || (full && node->inflight != node->peer_inflight);
}

static int fill_row(Row *row, NodeState *node, PyObject *cache) {
    const SpeedState *speed = speed_of(node);
    const TicketState *first = node->first_prefill;
    Py_ssize_t inflight = node->inflight - node->peer_inflight, opened = inflight, output_tokens = 0;
    if (cache) {
        PyObject *found = PyObject_GetAttr(cache, output_tokens_name);
        int failed = !found || as_size(found, &output_tokens) < 0;
        Py_XDECREF(found);
        if (failed)
            return -1;
    }
    for (int at = 0; at < MAX_OUTCOMES; at++)
        opened += node->outcomes[at];
    node->published_changes = node->changes;
    node->published_work = own_pending_work(node);
    *row = (Row){
        .inflight = inflight, .pending_work = node->published_work,
        .context_tokens = node->context_tokens - node->peer_context_tokens, .kv_new = node->kv_new - node->peer_kv_new,
        .kv_sum = node->kv_sum, .opened = opened, .output_tokens = output_tokens,
        .ms_per_token = speed ? speed->learned_ms_per_token : 0.0, .speed_factor = speed ? speed->factor : 1.0,
        .answers = speed ? speed->answers : 0, .prefill_work = first ? larger(0.0, first->pending_work) : 0.0,
        .prefill_s = first ? first->opened_s + node->round_trip_ms / 1000.0 : 0.0};
    return 0;
}

static PyObject *pack_load_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t most, place = 0, rows = 0, at = 0;
    int full;
    PyObject *name, *node;
    (void)module;
    if (check_count(count, 4) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &PyDict_Type) < 0 ||
        (full = PyObject_IsTrue(args[2])) < 0 || as_size(args[3], &most) < 0)
        return NULL;
    while (PyDict_Next(args[0], &place, &name, &node)) {
        if (check_type(node, &NodeType) < 0)
            return NULL;
        if (rows < most && has_news((NodeState *)node, full))
            rows++;
    }
    PyObject *names = PyTuple_New(rows), *data = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)sizeof(Row));
    int failed = !names || !data;
    place = 0;
    while (!failed && at < rows && PyDict_Next(args[0], &place, &name, &node)) {
        Row row;
        if (!has_news((NodeState *)node, full))
            continue;
        PyObject *cache = PyDict_GetItemWithError(args[1], name);
        failed = (!cache && PyErr_Occurred()) || fill_row(&row, (NodeState *)node, cache) < 0;
        if (!failed) {
            memcpy(PyBytes_AS_STRING(data) + at * (Py_ssize_t)sizeof row, &row, sizeof row);
            PyTuple_SET_ITEM(names, at++, Py_NewRef(name));
        }
    }
    if (!failed && at < rows) {
        PyErr_SetString(PyExc_RuntimeError, "the nodes changed while their rows were packed");
        failed = 1;
    }
    PyObject *result = failed ? NULL : PyTuple_Pack(2, names, data);
    Py_XDECREF(names);
    Py_XDECREF(data);
    return result;
}

static PyMethodDef functions[] = {
    {"check_load_rows", FAST(check_load_rows), "Return whether the bytes are this many rows within their bounds."},
    {"apply_load_rows", FAST(apply_load_rows), "Count a peer's rows; return the nodes that have less work than before."},
    {"pack_load_rows", FAST(pack_load_rows), "Return names and rows of the nodes whose figures have changed."},
    NO_METHOD};

int add_peer_load(PyObject *module) {
    groups_name = PyUnicode_InternFromString("groups");
    inflight_name = PyUnicode_InternFromString("inflight");
    output_tokens_name = PyUnicode_InternFromString("output_tokens");
    record_peer_output_name = PyUnicode_InternFromString("record_peer_output");
    guess_name = PyUnicode_InternFromString("guess");
    if (!groups_name || !inflight_name || !output_tokens_name || !record_peer_output_name || !guess_name)
        return -1;
    return add_type(module, "PeerRow", &PeerRowType) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}
