/* The last bytes of a response, where its usage is read and the last event of a stream is looked for.
 *
 * Pieces are kept as they arrive, without a copy. Only what would exceed the limit is cut off, and copied for that: one read
 * may have 256 KB, and every running response has a tail.
 */
#include "kernel.h"

#define PIECES 8 /* the usage, the [DONE] after it and the end of the last chunk may come apart */

typedef struct {
    PyObject_HEAD
    PyObject *pieces[PIECES]; /* a ring of bytes objects */
    int first, count;
    Py_ssize_t size, limit;
} ResponseTail;

static void drop_first(ResponseTail *t) {
    PyObject *piece = t->pieces[t->first];
    t->size -= PyBytes_GET_SIZE(piece);
    t->first = (t->first + 1) % PIECES;
    t->count--;
    Py_DECREF(piece);
}

/* Takes over the reference. */
static void add_last(ResponseTail *t, PyObject *piece) {
    t->pieces[(t->first + t->count++) % PIECES] = piece;
    t->size += PyBytes_GET_SIZE(piece);
}

/* The last `size` bytes of a piece. */
static PyObject *end_of(PyObject *piece, Py_ssize_t size) {
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(piece) + PyBytes_GET_SIZE(piece) - size, size);
}

static PyObject *tail_keep(ResponseTail *t, PyObject *data) {
    if (check_type(data, &PyBytes_Type) < 0)
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    if (size >= t->limit) {
        PyObject *end = end_of(data, t->limit);
        if (!end)
            return NULL;
        while (t->count)
            drop_first(t);
        add_last(t, end);
        Py_RETURN_NONE;
    }
    if (!size)
        Py_RETURN_NONE;
    if (t->count == PIECES)
        drop_first(t);
    Py_ssize_t excess;
    while ((excess = t->size + size - t->limit) > 0) { /* there is a piece: this one alone does not exceed the limit */
        PyObject **first = &t->pieces[t->first];
        Py_ssize_t left = PyBytes_GET_SIZE(*first) - excess;
        if (left <= 0) {
            drop_first(t);
            continue;
        }
        PyObject *end = end_of(*first, left);
        if (!end)
            return NULL;
        t->size -= excess;
        Py_SETREF(*first, end);
    }
    add_last(t, Py_NewRef(data));
    Py_RETURN_NONE;
}

static PyObject *tail_join(ResponseTail *t, PyObject *unused) {
    (void)unused;
    PyObject *all = PyBytes_FromStringAndSize(NULL, t->size);
    char *to = all ? PyBytes_AS_STRING(all) : NULL;
    for (int i = 0; all && i < t->count; i++) {
        PyObject *piece = t->pieces[(t->first + i) % PIECES];
        memcpy(to, PyBytes_AS_STRING(piece), (size_t)PyBytes_GET_SIZE(piece));
        to += PyBytes_GET_SIZE(piece);
    }
    return all;
}

static PyObject *tail_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"limit_bytes", NULL};
    Py_ssize_t limit;
    if (!PyArg_ParseTupleAndKeywords(args, named, "n", names, &limit))
        return NULL;
    if (limit < 1) {
        PyErr_SetString(PyExc_ValueError, "limit_bytes must be at least 1");
        return NULL;
    }
    ResponseTail *t = (ResponseTail *)type->tp_alloc(type, 0);
    if (t)
        t->limit = limit;
    return (PyObject *)t;
}

static void tail_dealloc(ResponseTail *t) {
    while (t->count)
        drop_first(t);
    Py_TYPE(t)->tp_free((PyObject *)t);
}

static PyMethodDef tail_methods[] = {
    {"keep", (PyCFunction)tail_keep, METH_O, "Add the next piece of the response."},
    {"join", (PyCFunction)tail_join, METH_NOARGS, "Return what is kept."},
    NO_METHOD};

static PyTypeObject ResponseTailType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "ResponseTail",
    .tp_doc = "The last bytes of a response.",
    .tp_basicsize = sizeof(ResponseTail),
    .tp_new = tail_new,
    .tp_dealloc = (destructor)tail_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = tail_methods,
};

int add_response_tail(PyObject *module) { return add_type(module, "ResponseTail", &ResponseTailType); }
