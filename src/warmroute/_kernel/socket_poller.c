/* Reads and writes plain sockets with an epoll instance of its own, which the event loop watches as one file.
 *
 * The event loop's own transports take longer: they call Python for each piece of each stream, and write each piece at once.
 * The poller handles all sockets that are ready in one call, then sends what was written meanwhile.
 */
#include "socket_poller.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS_AT_ONCE 256
#define UNSENT_AT_ONCE 16 /* connections whose bytes wait for the events of others */
#define ACCEPTED_AT_ONCE 64

typedef struct {
    PyObject_HEAD
    Poller *poller;
    int fd; /* the caller's; -1 once closed */
    int watched;
    PyObject *socket, *factory, *on_failure;
} ListeningSocket;

static PyTypeObject ListeningSocketType;

int list_add(transport_list *list, Transport *t) {
    if (list->count == list->capacity) {
        Py_ssize_t capacity = list->capacity ? 2 * list->capacity : 64;
        Transport **items = PyMem_Realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items) {
            PyErr_NoMemory();
            return -1;
        }
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = t;
    return 0;
}

void poller_schedule(Poller *p) {
    if (p->handling || p->scheduled || !p->call_soon)
        return;
    PyObject *handle = PyObject_CallOneArg(p->call_soon, p->poll);
    if (handle)
        p->scheduled = 1;
    else
        PyErr_WriteUnraisable((PyObject *)p); /* the event loop is closed */
    Py_XDECREF(handle);
}

static void send_unsent(Poller *p) {
    for (Py_ssize_t i = 0; i < p->unsent.count; i++) { /* flushing may add others */
        Transport *t = p->unsent.items[i];
        t->in_unsent = 0;
        transport_flush(t);
    }
    p->unsent.count = 0;
}

/* Sends what was written, and ends what was closed, until there is nothing left of either. */
static void finish_events(Poller *p) {
    while (p->unsent.count || p->ended.count) {
        send_unsent(p);
        transport_list ended = p->ended;
        p->ended = (transport_list){NULL, 0, 0};
        for (Py_ssize_t i = 0; i < ended.count; i++)
            transport_finish(ended.items[i]);
        PyMem_Free(ended.items);
    }
}

/* ---- Accepting ---- */

static void accept_some(ListeningSocket *l) {
    for (int i = 0; i < ACCEPTED_AT_ONCE && l->fd >= 0 && l->watched; i++) {
        int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                return;
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM || errno == EBADF || errno == EINVAL) {
                PyObject *result = PyObject_CallFunction(l->on_failure, "i", errno);
                if (!result)
                    PyErr_WriteUnraisable(l->on_failure);
                Py_XDECREF(result);
                return;
            }
            continue; /* the client has left already, or the network has failed for it */
        }
        PyObject *protocol = PyObject_CallNoArgs(l->factory);
        PyObject *transport = protocol ? transport_open(l->poller, fd, protocol) : NULL;
        if (!transport) {
            PyErr_WriteUnraisable(l->factory);
            close(fd);
        }
        Py_XDECREF(transport);
        Py_XDECREF(protocol);
    }
}

static int listening_watch(ListeningSocket *l, int watched) {
    if (l->fd < 0 || l->watched == watched)
        return 0;
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = l}};
    if (epoll_ctl(l->poller->epoll, watched ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, l->fd, &event) < 0 && watched) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    l->watched = watched;
    return 0;
}

static PyObject *listening_pause(ListeningSocket *l, PyObject *unused) {
    (void)unused;
    return listening_watch(l, 0) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *listening_resume(ListeningSocket *l, PyObject *unused) {
    (void)unused;
    return listening_watch(l, 1) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *listening_close(ListeningSocket *l, PyObject *unused) {
    (void)unused;
    if (l->poller)
        listening_watch(l, 0);
    l->fd = -1;
    Py_RETURN_NONE;
}

static int listening_traverse(ListeningSocket *l, visitproc visit, void *arg) {
    Py_VISIT(l->poller);
    Py_VISIT(l->socket);
    Py_VISIT(l->factory);
    Py_VISIT(l->on_failure);
    return 0;
}

static int listening_clear(ListeningSocket *l) {
    if (l->poller)
        listening_watch(l, 0);
    l->fd = -1;
    Py_CLEAR(l->socket);
    Py_CLEAR(l->factory);
    Py_CLEAR(l->on_failure);
    Py_CLEAR(l->poller);
    return 0;
}

static void listening_dealloc(ListeningSocket *l) {
    PyObject_GC_UnTrack(l);
    listening_clear(l);
    Py_TYPE(l)->tp_free((PyObject *)l);
}

static PyMethodDef listening_methods[] = {
    {"pause", (PyCFunction)listening_pause, METH_NOARGS, "Accept nothing until `resume`."},
    {"resume", (PyCFunction)listening_resume, METH_NOARGS, "Accept again."},
    {"close", (PyCFunction)listening_close, METH_NOARGS, "Accept nothing any more. The socket stays open."},
    NO_METHOD};

static PyTypeObject ListeningSocketType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "ListeningSocket",
    .tp_doc = "A socket whose connections a SocketPoller accepts.",
    .tp_basicsize = sizeof(ListeningSocket),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)listening_dealloc,
    .tp_traverse = (traverseproc)listening_traverse,
    .tp_clear = (inquiry)listening_clear,
    .tp_methods = listening_methods,
};

/* ---- The poller ---- */

static PyObject *poller_poll(Poller *p, PyObject *unused) {
    (void)unused;
    p->scheduled = 0;
    if (p->handling || p->epoll < 0)
        Py_RETURN_NONE;
    struct epoll_event events[EVENTS_AT_ONCE];
    struct timespec now;
    int n = epoll_wait(p->epoll, events, EVENTS_AT_ONCE, 0);
    clock_gettime(CLOCK_MONOTONIC, &now);
    p->now_s = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    p->handling = 1;
    /* A transport that ends meanwhile stays in memory until `finish_events`; a listening socket may not. */
    for (int i = 0; i < n; i++)
        if (Py_TYPE(events[i].data.ptr) == &ListeningSocketType)
            Py_INCREF(events[i].data.ptr);
    for (int i = 0; i < n; i++) {
        PyObject *ready = events[i].data.ptr;
        if (Py_TYPE(ready) == &ListeningSocketType) {
            accept_some((ListeningSocket *)ready);
            Py_DECREF(ready);
        } else {
            transport_ready((Transport *)ready, events[i].events);
        }
        if (p->unsent.count >= UNSENT_AT_ONCE)
            send_unsent(p);
    }
    finish_events(p);
    p->handling = 0;
    Py_RETURN_NONE;
}

static PyObject *poller_open(Poller *p, PyObject *const *args, Py_ssize_t n) {
    long fd;
    if (check_signature(n, 2, 2, "(fd: int, protocol: object)") < 0 || as_number(args[0], 0, INT32_MAX, &fd, "fd") < 0)
        return NULL;
    if (p->epoll < 0) {
        PyErr_SetString(PyExc_RuntimeError, "the poller is closed");
        return NULL;
    }
    return transport_open(p, (int)fd, args[1]);
}

static PyObject *poller_listen(Poller *p, PyObject *const *args, Py_ssize_t n) {
    if (check_signature(n, 3, 3, "(socket: socket, factory: callable, on_failure: callable)") < 0)
        return NULL;
    int fd = PyObject_AsFileDescriptor(args[0]);
    if (fd < 0)
        return NULL;
    ListeningSocket *l = (ListeningSocket *)ListeningSocketType.tp_alloc(&ListeningSocketType, 0);
    if (!l)
        return NULL;
    l->poller = (Poller *)Py_NewRef(p);
    l->fd = fd;
    l->socket = Py_NewRef(args[0]);
    l->factory = Py_NewRef(args[1]);
    l->on_failure = Py_NewRef(args[2]);
    if (listening_watch(l, 1) < 0) {
        Py_DECREF(l);
        return NULL;
    }
    return (PyObject *)l;
}

static PyObject *poller_fileno(Poller *p, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(p->epoll);
}

static void close_all(Poller *p) {
    while (p->open)
        transport_discard(p->open);
    p->unsent.count = p->ended.count = 0; /* after what finalizers of the discarded may have added */
    if (p->epoll >= 0)
        close(p->epoll);
    p->epoll = -1;
}

static PyObject *poller_close(Poller *p, PyObject *unused) {
    (void)unused;
    if (p->handling) {
        PyErr_SetString(PyExc_RuntimeError, "a poller cannot be closed by what it calls");
        return NULL;
    }
    p->handling = 1; /* protocols that are released may close their transports */
    finish_events(p);
    close_all(p);
    p->handling = 0;
    Py_CLEAR(p->call_soon);
    Py_CLEAR(p->poll);
    Py_RETURN_NONE;
}

static PyObject *poller_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *call_soon;
    static char *names[] = {"call_soon", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, "O", names, &call_soon))
        return NULL;
    Poller *p = (Poller *)type->tp_alloc(type, 0);
    if (!p)
        return NULL;
    p->epoll = epoll_create1(EPOLL_CLOEXEC);
    p->buffer = PyMem_Malloc(SOCKET_READ_BYTES);
    p->call_soon = Py_NewRef(call_soon);
    p->poll = PyObject_GetAttrString((PyObject *)p, "poll");
    if (p->epoll < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    else if (!p->buffer)
        PyErr_NoMemory();
    if (PyErr_Occurred() || !p->poll) {
        Py_DECREF(p);
        return NULL;
    }
    return (PyObject *)p;
}

static int poller_traverse(Poller *p, visitproc visit, void *arg) {
    Py_VISIT(p->call_soon);
    Py_VISIT(p->poll);
    for (Transport *t = p->open; t; t = t->next)
        Py_VISIT(t);
    return 0;
}

static int poller_clear(Poller *p) {
    Py_CLEAR(p->call_soon);
    Py_CLEAR(p->poll);
    close_all(p);
    return 0;
}

static void poller_dealloc(Poller *p) {
    PyObject_GC_UnTrack(p);
    poller_clear(p);
    PyMem_Free(p->buffer);
    PyMem_Free(p->unsent.items);
    PyMem_Free(p->ended.items);
    Py_TYPE(p)->tp_free((PyObject *)p);
}

static PyMethodDef poller_methods[] = {
    {"poll", (PyCFunction)poller_poll, METH_NOARGS, "Handle the sockets that are ready."},
    {"open", FAST(poller_open), "Serve a connected socket; return its transport."},
    {"listen", FAST(poller_listen), "Accept the connections of a listening socket."},
    {"fileno", (PyCFunction)poller_fileno, METH_NOARGS, "Return the file that is readable while a socket is ready."},
    {"close", (PyCFunction)poller_close, METH_NOARGS, "Close all connections, without a call of their protocols."},
    NO_METHOD};

static PyTypeObject PollerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "SocketPoller",
    .tp_doc = "Reads and writes plain sockets.",
    .tp_basicsize = sizeof(Poller),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = poller_new,
    .tp_dealloc = (destructor)poller_dealloc,
    .tp_traverse = (traverseproc)poller_traverse,
    .tp_clear = (inquiry)poller_clear,
    .tp_methods = poller_methods,
};

int add_socket_poller(PyObject *module) {
    if (add_type(module, "ListeningSocket", &ListeningSocketType) < 0 || add_type(module, "SocketTransport", &TransportType) < 0 ||
        add_type(module, "UnreadBytes", &UnreadBytesType) < 0)
        return -1;
    return add_type(module, "SocketPoller", &PollerType);
}
