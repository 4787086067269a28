/* The books of a node: plain structs that the classes of Python inherit from. _books.c writes them, as Python does, and
 * _price.c reads them. */
#ifndef WARMROUTE_BOOKS_H
#define WARMROUTE_BOOKS_H

#include <Python.h>

#define always_inline inline __attribute__((always_inline))

typedef struct {
    PyObject_HEAD
    double ms_per_token, factor;
    double work, ms, at_s, last_first_s; /* what the speed of prefill is learned from */
    Py_ssize_t answers;
} SpeedState;

typedef struct {
    PyObject_HEAD
    double least_ms, mean_ms, slope_ms, mean_context; /* the least, and a line through its mean */
    double xx, xy;
    Py_ssize_t answers;
} PaceState;

/* What NodeState and CacheState begin with. */
typedef struct {
    PyObject_HEAD
    PyObject *name, *part;
} Named;

#define OUTCOMES 6
#define FIRST_BYTE_BUCKETS 14

typedef struct TicketState TicketState;

typedef struct {
    Named named; /* its part: a SpeedState */
    double pending_work, kv_usage, kv_delta, distance_ms, arrival_rate, arrival_s;
    Py_ssize_t context, kv_new, inflight, other_load;
    double round_trip_ms, polled_s, last_ticket_s, latency_ms, first_byte_sum_ms;
    Py_ssize_t polls, unstarted;
    Py_ssize_t unseen; /* tickets whose first token nobody sees, and which are expected to be in their prefill; */
    TicketState *first_unseen, *last_unseen; /* held, by when they are due */
    Py_ssize_t outcomes[OUTCOMES], first_byte_counts[FIRST_BYTE_BUCKETS];
} NodeState;

struct TicketState {
    PyObject_HEAD
    NodeState *node;
    PaceState *pace; /* of its model; NULL where its prompt was not looked up */
    TicketState *before, *behind; /* among the unseen */
    double opened_s, first_byte_s;
    double prefill, work; /* what its time was not learned from; what is believed to be left of it */
    double due_s;         /* of an answer that is not streamed: when its prefill should be done */
    double output;
    Py_ssize_t tokens, new, polls;
    char open, streams, unseen;
};

typedef struct {
    PyTypeObject *speed, *pace, *node;
} books_api;

#define BOOKS_MODULE "warmroute._kernel._books"
#define BOOKS_API "books_api"

static always_inline double larger(double a, double b) { return a > b ? a : b; }

static always_inline double smaller(double a, double b) { return a < b ? a : b; }

static always_inline SpeedState *speed_of(const NodeState *node) { return (SpeedState *)node->named.part; }

static always_inline Py_ssize_t load(const NodeState *node) { return node->inflight + node->other_load; }

/* Between two tokens, on a node like the others. */
static always_inline double pace_ms(const PaceState *p, double context) {
    return larger(p->least_ms, p->mean_ms + p->slope_ms * (context - p->mean_context));
}

/* ---- Arguments: taken one by one, since a format that is parsed takes longer than what is done with them ---- */

static always_inline int as_double(PyObject *given, double *to) {
    *to = PyFloat_CheckExact(given) ? PyFloat_AS_DOUBLE(given) : PyFloat_AsDouble(given);
    return *to == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static always_inline int as_size(PyObject *given, Py_ssize_t *to) {
    *to = PyLong_AsSsize_t(given);
    return *to == -1 && PyErr_Occurred() ? -1 : 0;
}

static inline int check_count(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, not %zd", expected, given);
    return -1;
}

static inline int check_type(PyObject *given, PyTypeObject *type) {
    if (PyObject_TypeCheck(given, type))
        return 0;
    PyErr_Format(PyExc_TypeError, "expected a %s", type->tp_name);
    return -1;
}

/* ---- What has a name, and a part of one type for good ---- */

static inline int named_traverse(Named *self, visitproc visit, void *arg) {
    Py_VISIT(self->name);
    Py_VISIT(self->part);
    return 0;
}

static inline int named_clear(Named *self) {
    Py_CLEAR(self->name);
    Py_CLEAR(self->part);
    return 0;
}

/* `type` is what the part has to be. */
static inline PyObject *get_part(Named *self, void *type) {
    if (self->part)
        return Py_NewRef(self->part);
    PyErr_Format(PyExc_AttributeError, "there is no %s yet", ((PyTypeObject *)type)->tp_name);
    return NULL;
}

static inline int set_part(Named *self, PyObject *part, void *type) {
    if (!part || !PyObject_TypeCheck(part, (PyTypeObject *)type)) {
        PyErr_Format(PyExc_TypeError, "expected a %s", ((PyTypeObject *)type)->tp_name);
        return -1;
    }
    Py_XSETREF(self->part, Py_NewRef(part));
    return 0;
}

#endif
