/* The poller, its transports and relays, on pairs of sockets: each byte of the input is an operation of a program or of the
 * other end of a connection, also within calls of the protocols.
 *
 * - What is written to a transport, or relayed to it, arrives in order, and all of it unless the connection was cut off.
 * - What the other end sends arrives in order, at the protocol or at the relay's `keep`; nothing comes after its end.
 * - `connection_lost` is called once, by the poller, and never within a method of a transport. Pauses and resumes alternate.
 */
#include "harness.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_CONNECTIONS 8
#define MAX_BYTES (1 << 18) /* that one connection carries in one direction */
#define STREAM_BYTES 32768
#define MAX_INPUT_BYTES 512

typedef struct {
    uint8_t *data;
    size_t size, room;
} buffer;

typedef struct {
    PyObject_HEAD
    int peer; /* the other end; -1 once closed */
    PyObject *transport, *chunks;
    buffer written, sent; /* to the other end; by the other end */
    size_t arrived, seen, stream_at;
    int unchecked_out, unchecked_in; /* a relay without `keep` passes bytes that the model does not see */
    int dropped;                     /* the connection was cut off: not all bytes arrive */
    int made, lost, at_end, paused, ends_writing, number, relay_to;
} Connection;

static PyObject *SocketPoller, *ChunkReader, *BadChunk;
static PyTypeObject ConnectionType;
static uint8_t stream[STREAM_BYTES], pattern[STREAM_BYTES];

/* of one input */
static input *in;
static PyObject *poller, *listening, *soon;
static Connection *all[MAX_CONNECTIONS];
static int n_all, waiting_peers[MAX_CONNECTIONS], n_waiting, polling, in_method, soon_fails, listener, collected, is_closed;
static struct sockaddr_un address;
static socklen_t address_size;

static void act(int depth);

static void append(buffer *to, const void *data, size_t size) {
    if (!size)
        return;
    if (to->size + size > to->room) {
        to->room = 2 * (to->size + size);
        CHECK((to->data = realloc(to->data, to->room)));
    }
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

/* ---- The protocol ---- */

static int closing(Connection *c) {
    PyObject *is_closing = must_call_method(c->transport, "is_closing", 0);
    int found = is_closing == Py_True;
    Py_DECREF(is_closing);
    return found;
}

/* What happens in a call of a protocol. NULL where it raises. */
static PyObject *called(Connection *c) {
    CHECK(!c->lost && !is_closed);
    if (has_more(in) && next_below(in, 4) == 0)
        act(1);
    if (has_more(in) && next_below(in, 48) == 1) {
        c->dropped = 1;
        PyErr_SetString(PyExc_ValueError, "of the protocol");
        return NULL;
    }
    return none();
}

static PyObject *connection_made(Connection *c, PyObject *transport) {
    CHECK(!c->made && !c->transport);
    c->made = 1;
    c->transport = Py_NewRef(transport);
    return called(c);
}

static void saw(Connection *c, PyObject *data) {
    size_t size = (size_t)PyBytes_GET_SIZE(data);
    CHECK(c->made && !c->lost && !c->at_end && size);
    if (!c->unchecked_in)
        CHECK(c->seen + size <= c->sent.size && !memcmp(c->sent.data + c->seen, PyBytes_AS_STRING(data), size));
    c->seen += size;
}

static PyObject *data_received(Connection *c, PyObject *data) {
    CHECK(polling);
    saw(c, data);
    PyObject *end = call_method(c->chunks, "feed", 1, Py_NewRef(data));
    if (!end || as_integer(end) >= 0) {
        if (!end)
            expect_error(BadChunk, NULL);
        Py_SETREF(c->chunks, must_call(ChunkReader, 0));
    }
    return called(c);
}

/* The relay's: these bytes go to the other transport next. */
static PyObject *keep(Connection *c, PyObject *data) {
    Connection *to = all[c->relay_to];
    CHECK(polling);
    saw(c, data);
    PyObject *result = called(c);
    if (result && !closing(to) && !to->ends_writing)
        append(&to->written, PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data));
    return result;
}

static PyObject *eof_received(Connection *c, PyObject *unused) {
    (void)unused;
    CHECK(polling && !c->at_end);
    c->at_end = 1;
    PyObject *result = called(c);
    if (!result)
        return NULL;
    Py_DECREF(result);
    return PyBool_FromLong(next_below(in, 2));
}

static PyObject *pause_writing(Connection *c, PyObject *unused) {
    (void)unused;
    CHECK(!c->paused);
    c->paused = 1;
    return called(c);
}

static PyObject *resume_writing(Connection *c, PyObject *unused) {
    (void)unused;
    CHECK(c->paused);
    c->paused = 0;
    return called(c);
}

static PyObject *connection_lost(Connection *c, PyObject *error) {
    CHECK(polling && !in_method && !c->lost);
    c->lost = 1;
    c->dropped |= error != Py_None;
    c->lost = 0;
    PyObject *result = called(c);
    c->lost = 1;
    return result;
}

static void connection_dealloc(Connection *c) {
    Py_XDECREF(c->transport);
    Py_XDECREF(c->chunks);
    free(c->written.data);
    free(c->sent.data);
    PyObject_Free(c);
}

static PyMethodDef connection_methods[] = {
    {"connection_made", (PyCFunction)connection_made, METH_O, NULL},
    {"data_received", (PyCFunction)data_received, METH_O, NULL},
    {"keep", (PyCFunction)keep, METH_O, NULL},
    {"eof_received", (PyCFunction)eof_received, METH_NOARGS, NULL},
    {"pause_writing", (PyCFunction)pause_writing, METH_NOARGS, NULL},
    {"resume_writing", (PyCFunction)resume_writing, METH_NOARGS, NULL},
    {"connection_lost", (PyCFunction)connection_lost, METH_O, NULL},
    {NULL, NULL, 0, NULL}};

static PyTypeObject ConnectionType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "Connection",
    .tp_basicsize = sizeof(Connection),
    .tp_dealloc = (destructor)connection_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = connection_methods,
};

/* ---- Connections ---- */

static Connection *new_connection(int peer) {
    Connection *c = PyObject_New(Connection, &ConnectionType);
    CHECK(c && n_all < MAX_CONNECTIONS);
    memset((char *)c + sizeof(PyObject), 0, sizeof *c - sizeof(PyObject));
    c->peer = peer;
    c->chunks = must_call(ChunkReader, 0);
    c->number = n_all;
    all[n_all++] = c;
    return c;
}

static void few_bytes_at_once(int fd) {
    int size = 4096;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

static void open_connection(void) {
    int pair[2];
    if (n_all + n_waiting == MAX_CONNECTIONS)
        return;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    few_bytes_at_once(pair[0]);
    Connection *c = new_connection(pair[1]);
    PyObject *transport = call_method(poller, "open", 2, integer(pair[0]), Py_NewRef(c));
    CHECK(transport && transport == c->transport);
    Py_DECREF(transport);
}

/* Makes the protocol of an accepted connection: those that connected first are accepted first. */
static PyObject *factory(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    CHECK(polling && n_waiting);
    int peer = waiting_peers[0];
    memmove(waiting_peers, waiting_peers + 1, (size_t)--n_waiting * sizeof *waiting_peers);
    if (has_more(in) && next_below(in, 16) == 0) { /* what it returns is no protocol */
        close(peer);
        return integer(1);
    }
    return Py_NewRef(new_connection(peer));
}

static PyObject *accept_failed(PyObject *self, PyObject *number) {
    (void)self;
    CHECK(PyLong_AsLong(number) == EINVAL);
    return none();
}

static PyObject *call_soon(PyObject *self, PyObject *callback) {
    (void)self;
    CHECK(PyCallable_Check(callback));
    if (soon_fails) {
        PyErr_SetString(PyExc_RuntimeError, "the event loop is closed");
        return NULL;
    }
    return none();
}

static PyMethodDef functions[] = {{"factory", factory, METH_NOARGS, NULL},
                                  {"accept_failed", accept_failed, METH_O, NULL},
                                  {"call_soon", call_soon, METH_O, NULL},
                                  {NULL, NULL, 0, NULL}};

static void listen_once(void) {
    if (listener >= 0)
        return;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    address_size = sizeof(sa_family_t); /* the system chooses an abstract name */
    CHECK((listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) >= 0);
    CHECK(!bind(listener, (struct sockaddr *)&address, address_size));
    address_size = sizeof address;
    CHECK(!getsockname(listener, (struct sockaddr *)&address, &address_size) && !listen(listener, MAX_CONNECTIONS));
    PyObject *made = PyCFunction_New(&functions[0], NULL), *failed = PyCFunction_New(&functions[1], NULL);
    listening = must_call_method(poller, "listen", 3, integer(listener), made, failed);
}

static void connect_once(void) {
    if (listener < 0 || n_all + n_waiting == MAX_CONNECTIONS)
        return;
    int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(peer >= 0);
    if (connect(peer, (struct sockaddr *)&address, address_size))
        close(peer); /* the listener was shut down */
    else
        waiting_peers[n_waiting++] = peer;
}

/* ---- Operations ---- */

static Connection *some(void) {
    Connection *c = n_all ? all[next_below(in, (unsigned)n_all)] : NULL;
    return c && c->transport ? c : NULL;
}

/* Calls a method of a transport that must succeed. */
static void method(Connection *c, const char *name, unsigned n, PyObject *one) {
    PyObject *transport = Py_NewRef(c->transport);
    in_method++;
    Py_DECREF(n ? must_call_method(transport, name, 1, one) : must_call_method(transport, name, 0));
    in_method--;
    Py_DECREF(transport);
}

static PyObject *some_bytes(Connection *c, size_t size) {
    return bytes(pattern + (c->written.size * 7 + size) % (STREAM_BYTES - size), size);
}

static void write_some(Connection *c, int how) {
    size_t size = how == 2 ? 9000 : next_byte(in);
    if (c->written.size > MAX_BYTES)
        return;
    PyObject *data = some_bytes(c, size);
    int counts = !closing(c) && !c->ends_writing;
    if (counts)
        append(&c->written, PyBytes_AS_STRING(data), size);
    if (how == 1) {
        PyObject *lines = PyList_New(0), *empty = bytes("", 0), *rest = some_bytes(c, size / 2);
        CHECK(!PyList_Append(lines, data) && !PyList_Append(lines, empty) && !PyList_Append(lines, rest));
        if (counts)
            append(&c->written, PyBytes_AS_STRING(rest), size / 2);
        method(c, "writelines", 1, lines);
        Py_DECREF(data);
        Py_DECREF(empty);
        Py_DECREF(rest);
    } else if (how == 3) {
        PyObject *copy = PyByteArray_FromObject(data);
        Py_DECREF(data);
        method(c, "write", 1, copy);
    } else {
        method(c, "write", 1, data);
    }
}

static void wrong_call(Connection *c) {
    static const char *const names[] = {"writelines", "relay", "get_extra_info", "set_write_buffer_limits"};
    PyObject *result = call_method(c->transport, names[next_below(in, 4)], 1, integer(-5));
    CHECK(!result);
    expect_error(PyExc_TypeError, PyExc_ValueError);
}

static void relay(Connection *from) {
    Connection *to = some();
    if (!to)
        return;
    unsigned how = next_below(in, 4);
    PyObject *kept = how ? PyObject_GetAttrString((PyObject *)from, "keep") : none();
    if (!how)
        from->unchecked_in = to->unchecked_out = 1;
    if (closing(from)) {
        Py_DECREF(kept);
        kept = none();
    }
    from->relay_to = to->number;
    in_method++;
    Py_DECREF(must_call_method(from->transport, "relay", 3, Py_NewRef(to->transport), Py_NewRef(from->chunks), kept));
    in_method--;
}

/* An operation of the program. */
static void act(int depth) {
    unsigned what = next_below(in, 18);
    Connection *c = some();
    if (what == 0 && depth == 0)
        open_connection();
    if (!c || is_closed)
        return;
    switch (what) {
    case 1: case 2: case 3: case 4: write_some(c, (int)what - 1); break;
    case 5: method(c, "close", 0, NULL); break;
    case 6:
        c->dropped = 1;
        method(c, "abort", 0, NULL);
        break;
    case 7:
        c->ends_writing |= !closing(c);
        method(c, "write_eof", 0, NULL);
        break;
    case 8: method(c, "pause_reading", 0, NULL); break;
    case 9: method(c, "resume_reading", 0, NULL); break;
    case 10: method(c, "set_write_buffer_limits", 1, integer(16L * next_byte(in))); break;
    case 11: case 12: relay(c); break;
    case 13: method(c, "stop_relay", 0, NULL); break;
    case 14: {
        CHECK(as_integer(must_call_method(c->transport, "get_write_buffer_size", 0)) <= (long long)c->written.size || c->unchecked_out);
        method(c, "get_extra_info", 1, PyUnicode_FromString(next_below(in, 2) ? "peername" : "sockname"));
        break;
    }
    case 15: method(c, "reset_on_close", 0, NULL); break;
    case 16: wrong_call(c); break;
    default:
        if (polling) { /* what handles events is not called within itself, and not closed */
            Py_DECREF(must_call_method(poller, "poll", 0));
            CHECK(!call_method(poller, "close", 0));
            expect_error(PyExc_RuntimeError, NULL);
        } else {
            soon_fails = (int)next_below(in, 2);
        }
    }
}

static void poll_once(void) {
    polling = 1;
    Py_DECREF(must_call_method(poller, "poll", 0));
    polling = 0;
}

static void peer_sends(Connection *c, const uint8_t *data, size_t size) {
    ssize_t n = c->peer >= 0 && c->sent.size < MAX_BYTES ? send(c->peer, data, size, MSG_NOSIGNAL) : -1;
    if (n > 0)
        append(&c->sent, data, (size_t)n);
}

static void peer_reads(Connection *c, size_t most) {
    uint8_t data[16384];
    ssize_t n = c->peer >= 0 ? recv(c->peer, data, most < sizeof data ? most : sizeof data, 0) : 0;
    if (n <= 0)
        return;
    if (!c->unchecked_out)
        CHECK(c->arrived + (size_t)n <= c->written.size && !memcmp(c->written.data + c->arrived, data, (size_t)n));
    c->arrived += (size_t)n;
}

static void close_peer(Connection *c) {
    if (c->peer >= 0)
        close(c->peer);
    c->peer = -1;
    c->dropped = 1;
}

/* An operation of another end, or of the event loop. */
static void act_outside(void) {
    unsigned what = next_below(in, 14);
    Connection *c = n_all ? all[next_below(in, (unsigned)n_all)] : NULL;
    switch (what) {
    case 0: case 1: poll_once(); return;
    case 2: listen_once(); return;
    case 3: connect_once(); return;
    case 4:
        if (listening && listener >= 0) {
            static const char *const names[] = {"pause", "resume", "close", "resume"};
            Py_DECREF(must_call_method(listening, names[next_below(in, 4)], 0));
            if (next_below(in, 8) == 0)
                shutdown(listener, SHUT_RDWR);
        }
        return;
    case 5:
        if (next_below(in, 16) == 0 && !collected++)
            PyGC_Collect();
        return;
    default: break;
    }
    if (!c)
        return;
    switch (what) {
    case 6: case 7: case 8: { /* chunks, in pieces of any size */
        size_t size = 1 + (size_t)next_byte(in) * (next_below(in, 4) ? 1 : 40);
        size = size < STREAM_BYTES - c->stream_at ? size : STREAM_BYTES - c->stream_at;
        size_t before = c->sent.size;
        peer_sends(c, stream + c->stream_at, size);
        c->stream_at = (c->stream_at + c->sent.size - before) % STREAM_BYTES;
        break;
    }
    case 9: { /* the rest of the input, or the end of a message */
        size_t size = (size_t)(in->end - in->at) < 24 ? (size_t)(in->end - in->at) : 24;
        if (next_below(in, 2))
            peer_sends(c, (const uint8_t *)"0\r\n\r\n", 5);
        else
            peer_sends(c, in->at, size ? size - 1 : 0);
        break;
    }
    case 10: case 11: peer_reads(c, 1 + 64u * next_byte(in)); break;
    case 12:
        if (c->peer >= 0)
            shutdown(c->peer, SHUT_WR);
        break;
    default: close_peer(c);
    }
}

/* ---- One input ---- */

void fuzz_setup(void) {
    SocketPoller = kernel("SocketPoller");
    ChunkReader = kernel("ChunkReader");
    BadChunk = kernel("BadChunk");
    CHECK(!PyType_Ready(&ConnectionType));
    /* what is reported as unraisable is raised on purpose */
    CHECK(!PySys_SetObject("unraisablehook", PyDict_GetItemString(PyEval_GetBuiltins(), "id")));
    for (size_t i = 0; i < STREAM_BYTES; i++)
        pattern[i] = (uint8_t)(i * 31 + i / 251);
    size_t at = 0;
    for (unsigned size = 1; at + 4096 < STREAM_BYTES; size = size * 5 % 997 + 1) {
        at += (size_t)sprintf((char *)stream + at, "%s%x%s\r\n", size % 3 ? "" : "000", size, size % 7 ? "" : ";a=b");
        memset(stream + at, 'd', size);
        at += size;
        memcpy(stream + at, "\r\n", 2);
        at += 2;
    }
    unsigned last = STREAM_BYTES - (unsigned)at - 8; /* so that the stream can begin again */
    sprintf((char *)stream + at, "%04x\r\n", last);
    memset(stream + at + 6, 'e', last);
    memcpy(stream + STREAM_BYTES - 2, "\r\n", 2);
}

/* Lets all that can arrive arrive. */
static void settle(void) {
    for (size_t before = 1, after = 0; before != after;) {
        before = after;
        for (int i = 0; i < 4; i++)
            poll_once();
        after = 0;
        for (int i = 0; i < n_all; i++) {
            for (int k = 0; k < 4; k++)
                peer_reads(all[i], 16384);
            after += all[i]->arrived + all[i]->seen + 1000003 * (size_t)(all[i]->lost + all[i]->at_end);
        }
        after += 1;
    }
}

void fuzz_one(const uint8_t *data, size_t size) {
    input given = {data, data + (size < MAX_INPUT_BYTES ? size : MAX_INPUT_BYTES)};
    in = &given;
    n_all = n_waiting = polling = in_method = soon_fails = collected = is_closed = 0;
    listener = -1;
    listening = NULL;
    soon = PyCFunction_New(&functions[2], NULL);
    poller = must_call(SocketPoller, 1, soon);
    open_connection();
    open_connection();
    while (has_more(in)) {
        if (next_below(in, 2))
            act(0);
        else
            act_outside();
    }
    settle();
    for (int i = 0; i < n_all; i++) {
        Connection *c = all[i];
        if (!c->transport)
            continue;
        CHECK(as_integer(must_call_method(c->transport, "get_write_buffer_size", 0)) == 0 || (!c->lost && c->dropped));
        if (!c->dropped && !c->unchecked_out)
            CHECK(c->arrived == c->written.size);
        CHECK(closing(c) || !c->lost);
    }
    if (listening)
        Py_DECREF(must_call_method(listening, "close", 0));
    polling = 1; /* it ends what was closed */
    Py_DECREF(must_call_method(poller, "close", 0));
    polling = 0;
    is_closed = 1;
    for (int i = 0; i < n_all; i++)
        if (all[i]->transport) {
            CHECK(closing(all[i]));
            method(all[i], "write", 1, bytes("late", 4));
            method(all[i], "resume_reading", 0, NULL);
            method(all[i], "close", 0, NULL);
            Py_CLEAR(all[i]->transport);
        }
    Py_XDECREF(listening);
    Py_DECREF(poller);
    for (int i = 0; i < n_all; i++) {
        if (all[i]->peer >= 0)
            close(all[i]->peer);
        Py_DECREF(all[i]);
    }
    for (int i = 0; i < n_waiting; i++)
        close(waiting_peers[i]);
    if (listener >= 0)
        close(listener);
}
