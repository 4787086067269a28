/* A buffer that a body is collected in, piece by piece, and that becomes a bytes object without another copy: to copy 32 MB
 * takes 17 ms, most of it for new pages.
 */
#include "kernel.h"

#define LEAST_CAPACITY 65536
#define TRUSTED_BYTES (1 << 20) /* after this many bytes, memory for the announced rest is reserved */

typedef struct {
    PyObject_HEAD
    PyObject *data; /* a bytes object with room for more than `size`; NULL while nothing was added */
    Py_ssize_t size;
} BodyBuffer;

static PyObject *buffer_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    if (PyTuple_GET_SIZE(args) || (named && PyDict_GET_SIZE(named))) {
        PyErr_SetString(PyExc_TypeError, "BodyBuffer takes no arguments");
        return NULL;
    }
    return type->tp_alloc(type, 0);
}

static void buffer_dealloc(BodyBuffer *b) {
    Py_XDECREF(b->data);
    Py_TYPE(b)->tp_free((PyObject *)b);
}

static Py_ssize_t buffer_length(BodyBuffer *b) { return b->size; }

/* Makes room for `needed` bytes. -1 with an exception without memory; the buffer is empty then. */
static int reserve(BodyBuffer *b, Py_ssize_t needed, Py_ssize_t expected) {
    Py_ssize_t capacity = b->data ? PyBytes_GET_SIZE(b->data) : 0;
    if (needed <= capacity)
        return 0;
    capacity = 2 * capacity > LEAST_CAPACITY ? 2 * capacity : LEAST_CAPACITY;
    if (capacity < needed)
        capacity = needed;
    if (expected >= needed && (expected < capacity || b->size >= TRUSTED_BYTES))
        capacity = expected;
    if (!b->data)
        b->data = PyBytes_FromStringAndSize(NULL, capacity);
    else if (_PyBytes_Resize(&b->data, capacity) < 0)
        b->size = 0;
    return b->data ? 0 : -1;
}

static PyObject *buffer_append(BodyBuffer *b, PyObject *const *args, Py_ssize_t n) {
    Py_ssize_t missing;
    if (check_signature(n, 2, 2, "(data: bytes, missing: int)") < 0 || check_type(args[0], &PyBytes_Type) < 0 ||
        as_size(args[1], &missing) < 0)
        return NULL;
    Py_ssize_t len = PyBytes_GET_SIZE(args[0]);
    if (len > PY_SSIZE_T_MAX / 4 - b->size || missing > PY_SSIZE_T_MAX / 4)
        return PyErr_NoMemory();
    if (len) {
        if (reserve(b, b->size + len, b->size + len + (missing > 0 ? missing : 0)) < 0)
            return NULL;
        memcpy(PyBytes_AS_STRING(b->data) + b->size, PyBytes_AS_STRING(args[0]), (size_t)len);
        b->size += len;
    }
    Py_RETURN_NONE;
}

static PyObject *buffer_take(BodyBuffer *b, PyObject *unused) {
    (void)unused;
    PyObject *data = b->data;
    Py_ssize_t size = b->size;
    b->data = NULL;
    b->size = 0;
    if (!data)
        return PyBytes_FromStringAndSize(NULL, 0);
    if (size < PyBytes_GET_SIZE(data))
        _PyBytes_Resize(&data, size);
    return data;
}

static PyMethodDef buffer_methods[] = {
    {"append", FAST(buffer_append), "Add bytes."},
    {"take", (PyCFunction)buffer_take, METH_NOARGS, "Return all bytes, and empty the buffer."},
    NO_METHOD};

static PySequenceMethods buffer_sequence = {.sq_length = (lenfunc)buffer_length};

static PyTypeObject BodyBufferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "BodyBuffer",
    .tp_doc = "Collects a body piece by piece.",
    .tp_basicsize = sizeof(BodyBuffer),
    .tp_new = buffer_new,
    .tp_dealloc = (destructor)buffer_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_as_sequence = &buffer_sequence,
    .tp_methods = buffer_methods,
};

int add_body_buffer(PyObject *module) { return add_type(module, "BodyBuffer", &BodyBufferType); }
