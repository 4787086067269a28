/* The first tokens of all processes in the order of time, from which each process learns the speeds of nodes.
 * core/cluster/shared_speeds.py says why.
 *
 * The rules:
 * - `held` is a binary heap of the first tokens that are not learned yet; `own` has those that are not published yet.
 *   Both hold a reference to their node, and at most MAX_FIRST_TOKENS. What is beyond is dropped.
 * - A record of a message: the number of the node's name in the message and whether the prefill was lone (4 bytes each), then
 *   work, step_ms, sent_s and at_s (8 bytes each). check_first_tokens() comes first.
 */
#include "first_token_order.h"

typedef struct {
    FirstToken *tokens;
    Py_ssize_t count, room;
} Tokens;

typedef struct {
    PyObject_HEAD
    Tokens held, own;
} FirstTokenOrder;

typedef struct {
    uint32_t name, lone;
    double work, step_ms, sent_s, at_s;
} Record;

_Static_assert(sizeof(Record) == 40, "a record has no padding");

/* ---- Lists and the heap ---- */

/* Makes room for one more. Returns 0 where there is none. */
static int make_room(Tokens *list) {
    if (list->count < list->room)
        return 1;
    if (list->count >= MAX_FIRST_TOKENS)
        return 0;
    Py_ssize_t room = list->room ? 2 * list->room : 64;
    FirstToken *tokens = PyMem_Realloc(list->tokens, (size_t)room * sizeof *tokens);
    if (!tokens)
        return 0;
    list->tokens = tokens;
    list->room = room;
    return 1;
}

static int is_before(const FirstToken *a, const FirstToken *b) {
    if (a->at_s != b->at_s)
        return a->at_s < b->at_s;
    if (a->work != b->work)
        return a->work < b->work;
    if (a->step_ms != b->step_ms)
        return a->step_ms < b->step_ms;
    if (a->sent_s != b->sent_s)
        return a->sent_s < b->sent_s;
    return a->lone < b->lone;
}

static void hold(Tokens *heap, const FirstToken *token) {
    if (!make_room(heap))
        return;
    FirstToken *tokens = heap->tokens;
    Py_ssize_t at = heap->count++;
    while (at > 0 && is_before(token, &tokens[(at - 1) / 2])) {
        tokens[at] = tokens[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    tokens[at] = *token;
    Py_INCREF(token->node);
}

/* Removes the earliest one. The caller owns its reference to the node. */
static FirstToken take_earliest(Tokens *heap) {
    FirstToken *tokens = heap->tokens, earliest = tokens[0], last = tokens[--heap->count];
    Py_ssize_t at = 0, child;
    while ((child = 2 * at + 1) < heap->count) {
        if (child + 1 < heap->count && is_before(&tokens[child + 1], &tokens[child]))
            child++;
        if (!is_before(&tokens[child], &last))
            break;
        tokens[at] = tokens[child];
        at = child;
    }
    if (heap->count)
        tokens[at] = last;
    return earliest;
}

static void empty(Tokens *list) {
    while (list->count)
        Py_DECREF(list->tokens[--list->count].node);
}

/* Removes the first ones of a list. */
static void drop_first(Tokens *list, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++)
        Py_DECREF(list->tokens[at].node);
    list->count -= count;
    if (list->count)
        memmove(list->tokens, list->tokens + count, (size_t)list->count * sizeof *list->tokens);
}

void keep_first_token(PyObject *given, const FirstToken *token) {
    FirstTokenOrder *order = (FirstTokenOrder *)given;
    hold(&order->held, token);
    if (make_room(&order->own)) {
        order->own.tokens[order->own.count++] = *token;
        Py_INCREF(token->node);
    }
}

/* ---- Methods ---- */

static PyObject *order_join(FirstTokenOrder *self, PyObject *nodes) {
    Py_ssize_t place = 0;
    PyObject *name, *node;
    if (check_type(nodes, &PyDict_Type) < 0)
        return NULL;
    while (PyDict_Next(nodes, &place, &name, &node)) {
        if (check_type(node, &NodeType) < 0)
            return NULL;
        SpeedState *speed = speed_of((NodeState *)node);
        if (speed && speed->first_tokens != (PyObject *)self)
            Py_XSETREF(speed->first_tokens, Py_NewRef(self));
    }
    Py_RETURN_NONE;
}

static PyObject *order_take(FirstTokenOrder *self, PyObject *unused) {
    (void)unused;
    Tokens *own = &self->own;
    PyObject *names = PyList_New(0);
    Py_ssize_t count = own->count; /* an allocation may let the garbage collector run code that adds more */
    PyObject *data = names ? PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(Record)) : NULL;
    int failed = !data;
    for (Py_ssize_t at = 0; at < count; at++)
        own->tokens[at].node->name_at = -1;
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        const FirstToken *token = &own->tokens[at];
        NodeState *node = token->node;
        Record record = {0, (uint32_t)token->lone, token->work, token->step_ms, token->sent_s, token->at_s};
        if (node->name_at < 0) {
            node->name_at = PyList_GET_SIZE(names);
            failed = !node->named.name || PyList_Append(names, node->named.name) < 0;
        }
        record.name = (uint32_t)node->name_at;
        memcpy(PyBytes_AS_STRING(data) + at * (Py_ssize_t)sizeof record, &record, sizeof record);
    }
    if (failed && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a node has no name");
    PyObject *found = failed ? NULL : PyList_AsTuple(names), *result = found ? PyTuple_Pack(2, found, data) : NULL;
    if (result)
        drop_first(own, count);
    Py_XDECREF(found);
    Py_XDECREF(names);
    Py_XDECREF(data);
    return result;
}

static PyObject *order_add(FirstTokenOrder *self, PyObject *const *args, Py_ssize_t count) {
    double offset_s, now_s;
    if (check_count(count, 5) < 0 || check_type(args[0], &PyDict_Type) < 0 || check_type(args[1], &PyTuple_Type) < 0 ||
        check_type(args[2], &PyBytes_Type) < 0 || as_double(args[3], &offset_s) < 0 || as_double(args[4], &now_s) < 0)
        return NULL;
    Py_ssize_t records = PyBytes_GET_SIZE(args[2]) / (Py_ssize_t)sizeof(Record);
    for (Py_ssize_t at = 0; at < records; at++) {
        Record record;
        memcpy(&record, PyBytes_AS_STRING(args[2]) + at * (Py_ssize_t)sizeof record, sizeof record);
        if (record.name >= PyTuple_GET_SIZE(args[1]))
            continue;
        PyObject *node = PyDict_GetItemWithError(args[0], PyTuple_GET_ITEM(args[1], record.name));
        if (!node && PyErr_Occurred())
            return NULL;
        if (!node || !PyObject_TypeCheck(node, &NodeType))
            continue; /* it was removed here, or is not added yet */
        FirstToken token = {.at_s = smaller(now_s, record.at_s + offset_s), .sent_s = record.sent_s + offset_s,
                            .work = record.work, .step_ms = record.step_ms, .node = (NodeState *)node,
                            .lone = record.lone != 0};
        hold(&self->held, &token);
    }
    Py_RETURN_NONE;
}

static PyObject *order_learn(FirstTokenOrder *self, PyObject *given) {
    double until_s;
    if (as_double(given, &until_s) < 0)
        return NULL;
    while (self->held.count && self->held.tokens[0].at_s <= until_s) {
        FirstToken token = take_earliest(&self->held);
        SpeedState *speed = speed_of(token.node);
        if (speed)
            learn_first_token(speed, token.work, token.step_ms, token.sent_s,
                              larger(token.at_s, speed->last_first_token_s), token.lone);
        Py_DECREF(token.node);
    }
    Py_RETURN_NONE;
}

static PyObject *order_clear(FirstTokenOrder *self, PyObject *unused) {
    (void)unused;
    empty(&self->held);
    empty(&self->own);
    Py_RETURN_NONE;
}

static Py_ssize_t order_length(FirstTokenOrder *self) { return self->held.count; }

static int order_traverse(FirstTokenOrder *self, visitproc visit, void *arg) {
    for (Py_ssize_t at = 0; at < self->held.count; at++)
        Py_VISIT(self->held.tokens[at].node);
    for (Py_ssize_t at = 0; at < self->own.count; at++)
        Py_VISIT(self->own.tokens[at].node);
    return 0;
}

static int order_drop(FirstTokenOrder *self) {
    empty(&self->held);
    empty(&self->own);
    return 0;
}

static void order_dealloc(FirstTokenOrder *self) {
    PyObject_GC_UnTrack(self);
    order_drop(self);
    PyMem_Free(self->held.tokens);
    PyMem_Free(self->own.tokens);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *check_first_tokens(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t names;
    (void)module;
    if (check_count(count, 2) < 0 || check_type(args[0], &PyBytes_Type) < 0 || as_size(args[1], &names) < 0)
        return NULL;
    Py_ssize_t bytes = PyBytes_GET_SIZE(args[0]), records = bytes / (Py_ssize_t)sizeof(Record);
    int good = bytes % (Py_ssize_t)sizeof(Record) == 0 && records <= MAX_FIRST_TOKENS;
    for (Py_ssize_t at = 0; good && at < records; at++) {
        Record record;
        memcpy(&record, PyBytes_AS_STRING(args[0]) + at * (Py_ssize_t)sizeof record, sizeof record);
        good = (Py_ssize_t)record.name < names && record.lone <= 1 && record.work >= 0.0 && record.work <= 1e15 &&
               record.step_ms >= 0.0 && record.step_ms <= 1e15 && record.sent_s >= -1e15 && record.at_s <= 1e15 &&
               record.sent_s <= record.at_s;
    }
    return PyBool_FromLong(good);
}

static PyMethodDef order_methods[] = {
    {"join", (PyCFunction)order_join, METH_O, "Let these nodes keep their first tokens here."},
    {"take", (PyCFunction)order_take, METH_NOARGS, "Return the first tokens that are not published yet."},
    {"add", FAST(order_add), "Add a peer's first tokens."},
    {"learn", (PyCFunction)order_learn, METH_O, "Learn from the first tokens up to this time."},
    {"clear", (PyCFunction)order_clear, METH_NOARGS, "Forget all first tokens."},
    NO_METHOD};

static PySequenceMethods order_sequence = {.sq_length = (lenfunc)order_length};

PyTypeObject FirstTokenOrderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "FirstTokenOrder",
    .tp_doc = "The first tokens of all processes in the order of time.",
    .tp_basicsize = sizeof(FirstTokenOrder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)order_traverse,
    .tp_clear = (inquiry)order_drop,
    .tp_dealloc = (destructor)order_dealloc,
    .tp_methods = order_methods,
    .tp_as_sequence = &order_sequence,
};

static PyMethodDef functions[] = {
    {"check_first_tokens", FAST(check_first_tokens), "Return whether the bytes are first tokens within their bounds."},
    NO_METHOD};

int add_first_token_order(PyObject *module) {
    if (add_type(module, "FirstTokenOrder", &FirstTokenOrderType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
