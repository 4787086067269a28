/* A connection's transport, with the methods of asyncio's that the router uses.
 *
 * The rules:
 * - Bytes that are written while the poller handles events are sent at the end of it, in one system call for each connection.
 *   Otherwise they are sent at once. What the socket does not take waits until it can.
 * - `connection_lost` is never called from within a method of the transport: the poller calls it, after the current events.
 * - A relay passes the chunks of a response to another transport without a call of Python, until something happens that is not
 *   the next piece of a well-formed body: its end, a malformed chunk, the end of the connection. The protocol then gets it.
 * - What the clients of a listener have not read is counted in whole pieces, since a piece stays in memory until all of it is sent.
 *   Of a large piece that is half sent, only the rest is kept.
 */
#include "socket_poller.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "http_chunks.h"

#define PIECES_AT_ONCE 64
#define HIGH_WATER_BYTES 65536
#define LOW_WATER_BYTES 16384
#define LARGE_PIECE_BYTES 16384
#define READ_STEP_BYTES 65536 /* the slowest client is the one that read this much the longest time ago */

/* ---- What clients have not read ---- */

static void count_unread(Transport *t, Py_ssize_t change) {
    if (t->unread)
        t->unread->bytes += change;
}

static void leave_behind(Transport *t) {
    if (!t->behind)
        return;
    *(t->slower ? &t->slower->quicker : &t->unread->slowest) = t->quicker;
    *(t->quicker ? &t->quicker->slower : &t->unread->quickest) = t->slower;
    t->slower = t->quicker = NULL;
    t->behind = 0;
}

/* The client has not read everything, and nothing more can be sent: order the clients by when they last read much. */
static void is_behind(Transport *t, Py_ssize_t sent) {
    UnreadBytes *unread = t->unread;
    t->read_bytes += sent;
    if (t->behind && t->read_bytes < READ_STEP_BYTES)
        return;
    leave_behind(t);
    t->read_bytes = 0;
    t->behind = 1;
    t->slower = unread->quickest;
    *(t->slower ? &t->slower->quicker : &unread->slowest) = t;
    unread->quickest = t;
}

/* Keeps only the rest of a large piece that is half sent. Without memory for that, all of it stays. */
static void shorten_first(Transport *t) {
    PyObject *piece = t->pieces[t->first];
    Py_ssize_t size = PyBytes_GET_SIZE(piece);
    if (size <= LARGE_PIECE_BYTES || t->sent <= size / 2)
        return;
    PyObject *rest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(piece) + t->sent, size - t->sent);
    if (!rest) {
        PyErr_Clear();
        return;
    }
    count_unread(t, -t->sent);
    t->pieces[t->first] = rest;
    t->sent = 0;
    Py_DECREF(piece);
}

/* Lets the listener disconnect clients if they have left too much unread, perhaps this one. */
static void check_unread(Transport *t) {
    UnreadBytes *unread = t->unread;
    if (!unread || unread->bytes <= unread->limit || !unread->on_excess)
        return;
    PyObject *result = PyObject_CallNoArgs(unread->on_excess);
    if (!result)
        PyErr_WriteUnraisable(unread->on_excess);
    Py_XDECREF(result);
}

/* ---- The end of a connection ---- */

static void drop_pieces(Transport *t) {
    leave_behind(t);
    for (Py_ssize_t i = 0; i < t->count; i++) {
        count_unread(t, -PyBytes_GET_SIZE(t->pieces[t->first + i]));
        Py_DECREF(t->pieces[t->first + i]);
    }
    t->first = t->count = t->sent = t->unsent_bytes = 0;
}

static void stop_relay(Transport *t) {
    Py_CLEAR(t->relay_to);
    Py_CLEAR(t->relay_chunks);
    Py_CLEAR(t->relay_keep);
}

/* Lets the poller call `connection_lost`. */
static void end(Transport *t) {
    if (t->ended || t->fd < 0)
        return;
    t->ended = t->closing = 1;
    t->reading = 0;
    stop_relay(t);
    if (list_add(&t->poller->ended, t) < 0) { /* without memory: the socket stays open until the poller is closed */
        PyErr_WriteUnraisable((PyObject *)t);
        return;
    }
    poller_schedule(t->poller);
}

static void fail(Transport *t, int number) {
    drop_pieces(t);
    if (!t->error && !t->ended) {
        PyObject *args = Py_BuildValue("(is)", number, strerror(number));
        t->error = args ? PyObject_CallObject(PyExc_OSError, args) : NULL;
        Py_XDECREF(args);
        if (!t->error)
            PyErr_Clear();
    }
    end(t);
}

/* A method of the protocol has raised, which it must not: the connection is in no known state. */
static void protocol_failed(Transport *t) {
    PyErr_WriteUnraisable(t->protocol ? t->protocol : (PyObject *)t);
    drop_pieces(t);
    end(t);
}

static void call_protocol(Transport *t, const char *method) {
    PyObject *result = t->protocol ? PyObject_CallMethod(t->protocol, method, NULL) : NULL;
    if (!result && t->protocol)
        protocol_failed(t);
    Py_XDECREF(result);
}

/* ---- Which events epoll reports ---- */

static void watch(Transport *t, uint32_t events) {
    if (t->fd < 0 || t->events == events)
        return;
    struct epoll_event event = {.events = events, .data = {.ptr = t}};
    int what = !events ? EPOLL_CTL_DEL : t->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    t->events = events;
    if (epoll_ctl(t->poller->epoll, what, t->fd, &event) < 0 && what != EPOLL_CTL_DEL)
        fail(t, errno);
}

static void watch_as_needed(Transport *t) {
    watch(t, (t->reading ? (uint32_t)EPOLLIN : 0) | (t->count && !t->in_unsent ? (uint32_t)EPOLLOUT : 0));
}

/* ---- Writing ---- */

/* Drops the first `bytes` of what waits. */
static void sent(Transport *t, Py_ssize_t bytes) {
    t->unsent_bytes -= bytes;
    while (t->count) {
        PyObject *piece = t->pieces[t->first];
        Py_ssize_t left = PyBytes_GET_SIZE(piece) - t->sent;
        if (bytes < left) {
            t->sent += bytes;
            return;
        }
        bytes -= left;
        t->sent = 0;
        t->count--;
        t->first = t->count ? t->first + 1 : 0;
        count_unread(t, -PyBytes_GET_SIZE(piece));
        Py_DECREF(piece);
    }
}

static ssize_t send_some(Transport *t) {
    PyObject **pieces = t->pieces + t->first;
    if (t->count == 1)
        return send(t->fd, PyBytes_AS_STRING(*pieces) + t->sent, (size_t)(PyBytes_GET_SIZE(*pieces) - t->sent), MSG_NOSIGNAL);
    struct iovec parts[PIECES_AT_ONCE];
    size_t n = 0;
    for (; n < PIECES_AT_ONCE && (Py_ssize_t)n < t->count; n++) {
        Py_ssize_t skip = n ? 0 : t->sent;
        parts[n].iov_base = PyBytes_AS_STRING(pieces[n]) + skip;
        parts[n].iov_len = (size_t)(PyBytes_GET_SIZE(pieces[n]) - skip);
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = n};
    return sendmsg(t->fd, &message, MSG_NOSIGNAL);
}

static void pause_protocol(Transport *t) {
    t->paused_writing = 1;
    call_protocol(t, "pause_writing");
}

void transport_flush(Transport *t) {
    Py_ssize_t before = t->unsent_bytes;
    while (t->count && !t->ended) {
        ssize_t n = send_some(t);
        if (n >= 0)
            sent(t, n);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            break;
        else if (errno != EINTR) {
            fail(t, errno);
            return;
        }
    }
    if (t->ended)
        return;
    if (t->count && t->unread) {
        shorten_first(t);
        is_behind(t, before - t->unsent_bytes);
        check_unread(t);
        if (t->ended)
            return;
    } else {
        leave_behind(t);
    }
    if (!t->count && t->closing) {
        end(t);
        return;
    }
    watch_as_needed(t);
    if (!t->count && t->end_wanted == 1) {
        t->end_wanted = 2;
        shutdown(t->fd, SHUT_WR);
    }
    if (t->ended || t->closing)
        return;
    if (!t->paused_writing && t->unsent_bytes > t->high) {
        pause_protocol(t);
    } else if (t->paused_writing && t->unsent_bytes <= t->low) {
        t->paused_writing = 0;
        call_protocol(t, "resume_writing");
    }
}

/* Takes over the reference. -1 with an exception. */
static int add_piece(Transport *t, PyObject *piece) {
    if (t->first + t->count == t->capacity) {
        if (t->first) {
            memmove(t->pieces, t->pieces + t->first, (size_t)t->count * sizeof *t->pieces);
            t->first = 0;
        } else {
            Py_ssize_t capacity = t->capacity ? 2 * t->capacity : 4;
            PyObject **pieces = PyMem_Realloc(t->pieces, (size_t)capacity * sizeof *pieces);
            if (!pieces) {
                Py_DECREF(piece);
                PyErr_NoMemory();
                return -1;
            }
            t->pieces = pieces;
            t->capacity = capacity;
        }
    }
    t->pieces[t->first + t->count++] = piece;
    t->unsent_bytes += PyBytes_GET_SIZE(piece);
    count_unread(t, PyBytes_GET_SIZE(piece));
    return 0;
}

/* Sends what was added, or lets the poller do so at the end of its events. -1 with an exception. */
static int send_soon(Transport *t) {
    if (t->in_unsent)
        return 0;
    if (t->events & EPOLLOUT) { /* the socket takes nothing now */
        check_unread(t);
        if (!t->ended && !t->paused_writing && t->unsent_bytes > t->high)
            pause_protocol(t);
        return 0;
    }
    if (!t->poller->handling) {
        transport_flush(t);
        return 0;
    }
    if (list_add(&t->poller->unsent, t) < 0)
        return -1;
    t->in_unsent = 1;
    return 0;
}

static int write_piece(Transport *t, PyObject *data) {
    PyObject *piece = PyBytes_CheckExact(data) ? Py_NewRef(data) : PyBytes_FromObject(data);
    if (!piece)
        return -1;
    if (!PyBytes_GET_SIZE(piece)) {
        Py_DECREF(piece);
        return 0;
    }
    return add_piece(t, piece);
}

static PyObject *transport_write(Transport *t, PyObject *data) {
    if (t->closing || t->end_wanted)
        Py_RETURN_NONE;
    if (write_piece(t, data) < 0 || (t->count && send_soon(t) < 0))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *transport_writelines(Transport *t, PyObject *lines) {
    PyObject *all = PySequence_Fast(lines, "writelines takes a sequence of bytes");
    if (!all)
        return NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && !t->closing && !t->end_wanted && i < PySequence_Fast_GET_SIZE(all); i++)
        failed = write_piece(t, PySequence_Fast_GET_ITEM(all, i)) < 0;
    Py_DECREF(all);
    if (failed || (t->count && !t->closing && send_soon(t) < 0))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *transport_write_eof(Transport *t, PyObject *unused) {
    (void)unused;
    if (!t->closing && !t->end_wanted) {
        t->end_wanted = 1;
        if (!t->count)
            transport_flush(t);
    }
    Py_RETURN_NONE;
}

static PyObject *transport_can_write_eof(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    Py_RETURN_TRUE;
}

static PyObject *transport_get_write_buffer_size(Transport *t, PyObject *unused) {
    (void)unused;
    return PyLong_FromSsize_t(t->unsent_bytes);
}

static PyObject *transport_set_write_buffer_limits(Transport *t, PyObject *args, PyObject *named) {
    static char *names[] = {"high", "low", NULL};
    PyObject *high = Py_None, *low = Py_None;
    Py_ssize_t most = HIGH_WATER_BYTES, least;
    if (!PyArg_ParseTupleAndKeywords(args, named, "|OO", names, &high, &low) || (high != Py_None && as_size(high, &most) < 0))
        return NULL;
    least = most / 4;
    if (low != Py_None && as_size(low, &least) < 0)
        return NULL;
    if (least < 0 || most < least) {
        PyErr_SetString(PyExc_ValueError, "high must be at least low, and low at least 0");
        return NULL;
    }
    t->high = most;
    t->low = least;
    Py_RETURN_NONE;
}

/* ---- Reading ---- */

/* Returns whether the bytes passed on to the other connection. */
static int relay(Transport *t, PyObject *data) {
    if (!chunks_continue(t->relay_chunks, PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data)))
        return 0;
    Transport *to = (Transport *)Py_NewRef(t->relay_to); /* `keep` may end the relay */
    PyObject *keep = Py_XNewRef(t->relay_keep), *kept = keep ? PyObject_CallOneArg(keep, data) : NULL;
    if (keep && !kept)
        protocol_failed(t);
    else if (!to->closing && !to->end_wanted && (add_piece(to, Py_NewRef(data)) < 0 || send_soon(to) < 0))
        protocol_failed(t);
    Py_XDECREF(kept);
    Py_XDECREF(keep);
    Py_DECREF(to);
    return 1;
}

static void received_end(Transport *t) {
    t->reading = 0;
    t->at_end = 1;
    watch_as_needed(t);
    stop_relay(t);
    PyObject *result = PyObject_CallMethod(t->protocol, "eof_received", NULL);
    int stays = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    if (stays < 0) {
        protocol_failed(t);
    } else if (!stays && !t->closing) {
        t->closing = 1;
        if (!t->count)
            end(t);
    }
}

static void read_some(Transport *t) {
    ssize_t n = recv(t->fd, t->poller->buffer, SOCKET_READ_BYTES, 0);
    if (n < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            fail(t, errno);
        return;
    }
    if (!n) {
        received_end(t);
        return;
    }
    t->last_read_s = t->poller->now_s;
    PyObject *data = PyBytes_FromStringAndSize(t->poller->buffer, n);
    if (!data) {
        protocol_failed(t);
        return;
    }
    if (t->relay_to && relay(t, data)) {
        Py_DECREF(data);
        return;
    }
    stop_relay(t);
    PyObject *result = PyObject_CallOneArg(t->data_received, data);
    Py_DECREF(data);
    if (!result)
        protocol_failed(t);
    Py_XDECREF(result);
}

void transport_ready(Transport *t, uint32_t events) {
    if (t->ended || t->fd < 0)
        return;
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) && t->count)
        transport_flush(t);
    if (t->ended)
        return;
    if (t->reading) {
        if (events & (EPOLLIN | EPOLLERR | EPOLLHUP))
            read_some(t);
    } else if ((events & (EPOLLERR | EPOLLHUP)) && !t->count) {
        watch(t, 0); /* reading is paused: `resume_reading` will report the error */
    }
}

static PyObject *transport_pause_reading(Transport *t, PyObject *unused) {
    (void)unused;
    if (!t->closing && t->reading) {
        t->reading = 0;
        watch_as_needed(t);
    }
    Py_RETURN_NONE;
}

static PyObject *transport_resume_reading(Transport *t, PyObject *unused) {
    (void)unused;
    if (!t->closing && !t->reading && !t->at_end) {
        t->reading = 1;
        watch_as_needed(t);
    }
    Py_RETURN_NONE;
}

static PyObject *transport_relay(Transport *t, PyObject *const *args, Py_ssize_t n) {
    if (check_signature(n, 3, 3, "(to: SocketTransport, chunks: ChunkReader, keep: callable | None)") < 0 ||
        check_type(args[0], &TransportType) < 0 || check_type(args[1], &ChunkReaderType) < 0)
        return NULL;
    stop_relay(t);
    if (t->closing)
        Py_RETURN_NONE;
    t->relay_to = (Transport *)Py_NewRef(args[0]);
    t->relay_chunks = Py_NewRef(args[1]);
    t->relay_keep = args[2] == Py_None ? NULL : Py_NewRef(args[2]);
    Py_RETURN_NONE;
}

static PyObject *transport_stop_relay(Transport *t, PyObject *unused) {
    (void)unused;
    stop_relay(t);
    Py_RETURN_NONE;
}

/* ---- Closing ---- */

static PyObject *transport_close(Transport *t, PyObject *unused) {
    (void)unused;
    if (!t->closing) {
        t->closing = 1;
        t->reading = 0;
        stop_relay(t);
        if (!t->count)
            end(t);
        else
            watch_as_needed(t);
    }
    Py_RETURN_NONE;
}

static PyObject *transport_abort(Transport *t, PyObject *unused) {
    (void)unused;
    drop_pieces(t);
    end(t);
    Py_RETURN_NONE;
}

static PyObject *transport_is_closing(Transport *t, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(t->closing);
}

static void leave_list(Transport *t) {
    if (t->previous)
        t->previous->next = t->next;
    else if (t->poller->open == t)
        t->poller->open = t->next;
    if (t->next)
        t->next->previous = t->previous;
    t->previous = t->next = NULL;
}

static void close_socket(Transport *t) {
    if (t->fd >= 0) {
        watch(t, 0);
        close(t->fd);
        t->fd = -1;
    }
}

void transport_finish(Transport *t) {
    leave_list(t);
    close_socket(t);
    PyObject *protocol = t->protocol, *error = t->error ? t->error : Py_NewRef(Py_None);
    t->protocol = t->error = NULL;
    Py_CLEAR(t->data_received);
    drop_pieces(t);
    if (protocol) {
        PyObject *result = PyObject_CallMethod(protocol, "connection_lost", "O", error);
        if (!result)
            PyErr_WriteUnraisable(protocol);
        Py_XDECREF(result);
        Py_DECREF(protocol);
    }
    Py_DECREF(error);
    Py_DECREF(t); /* the poller's reference */
}

void transport_discard(Transport *t) {
    leave_list(t);
    close_socket(t);
    t->closing = t->ended = 1;
    t->reading = 0;
    stop_relay(t);
    drop_pieces(t);
    Py_CLEAR(t->protocol);
    Py_CLEAR(t->data_received);
    Py_CLEAR(t->error);
    Py_DECREF(t);
}

/* ---- What a protocol asks for ---- */

static PyObject *address(const struct sockaddr_storage *found) {
    char text[INET6_ADDRSTRLEN];
    if (found->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)found;
        return Py_BuildValue("(si)", inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text), ntohs(v4->sin_port));
    }
    if (found->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)found;
        return Py_BuildValue("(siII)", inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text), ntohs(v6->sin6_port),
                             ntohl(v6->sin6_flowinfo), v6->sin6_scope_id);
    }
    return PyUnicode_FromString("");
}

static PyObject *transport_get_extra_info(Transport *t, PyObject *const *args, Py_ssize_t n) {
    if (check_signature(n, 1, 2, "(name: str, default: object)") < 0 || check_type(args[0], &PyUnicode_Type) < 0)
        return NULL;
    struct sockaddr_storage found;
    socklen_t length = sizeof found;
    if (t->fd >= 0 && PyUnicode_CompareWithASCIIString(args[0], "peername") == 0 &&
        getpeername(t->fd, (struct sockaddr *)&found, &length) == 0)
        return address(&found);
    if (t->fd >= 0 && PyUnicode_CompareWithASCIIString(args[0], "sockname") == 0 &&
        getsockname(t->fd, (struct sockaddr *)&found, &length) == 0)
        return address(&found);
    return Py_NewRef(n == 2 ? args[1] : Py_None);
}

static PyObject *transport_count_unread(Transport *t, PyObject *unread) {
    if (check_type(unread, &UnreadBytesType) < 0)
        return NULL;
    if (t->unread || t->count) {
        PyErr_SetString(PyExc_RuntimeError, "a transport is counted once, before its first write");
        return NULL;
    }
    t->unread = (UnreadBytes *)Py_NewRef(unread);
    Py_RETURN_NONE;
}

static PyObject *transport_reset_on_close(Transport *t, PyObject *unused) {
    (void)unused;
    struct linger none = {.l_onoff = 1, .l_linger = 0};
    if (t->fd >= 0)
        setsockopt(t->fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    Py_RETURN_NONE;
}

/* ---- The type ---- */

PyObject *transport_open(Poller *poller, int fd, PyObject *protocol) {
    PyObject *data_received = PyObject_GetAttrString(protocol, "data_received");
    if (!data_received)
        return NULL;
    Transport *t = (Transport *)TransportType.tp_alloc(&TransportType, 0);
    if (!t) {
        Py_DECREF(data_received);
        return NULL;
    }
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails for a unix socket, which needs none */
    t->poller = (Poller *)Py_NewRef(poller);
    t->protocol = Py_NewRef(protocol);
    t->data_received = data_received;
    t->high = HIGH_WATER_BYTES;
    t->low = LOW_WATER_BYTES;
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = t}};
    if (epoll_ctl(poller->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        t->fd = -1;
        t->ended = t->closing = 1;
        Py_DECREF(t);
        return NULL;
    }
    t->fd = fd;
    t->events = EPOLLIN;
    t->reading = 1;
    t->next = poller->open;
    if (t->next)
        t->next->previous = t;
    poller->open = (Transport *)Py_NewRef(t);
    PyObject *result = PyObject_CallMethod(protocol, "connection_made", "O", t);
    if (!result)
        protocol_failed(t);
    Py_XDECREF(result);
    return (PyObject *)t;
}

static int transport_traverse(Transport *t, visitproc visit, void *arg) {
    Py_VISIT(t->poller);
    Py_VISIT(t->unread);
    Py_VISIT(t->protocol);
    Py_VISIT(t->data_received);
    Py_VISIT(t->error);
    Py_VISIT(t->relay_to);
    Py_VISIT(t->relay_keep);
    return 0;
}

static int transport_clear(Transport *t) {
    stop_relay(t);
    Py_CLEAR(t->protocol);
    Py_CLEAR(t->data_received);
    Py_CLEAR(t->error);
    return 0;
}

/* The poller owns a reference to every open transport, so this one is closed, or was never opened. */
static void transport_dealloc(Transport *t) {
    PyObject_GC_UnTrack(t);
    transport_clear(t);
    drop_pieces(t);
    PyMem_Free(t->pieces);
    Py_CLEAR(t->unread);
    Py_CLEAR(t->poller);
    Py_TYPE(t)->tp_free((PyObject *)t);
}

static PyMethodDef transport_methods[] = {
    {"write", (PyCFunction)transport_write, METH_O, "Send bytes."},
    {"writelines", (PyCFunction)transport_writelines, METH_O, "Send several pieces."},
    {"write_eof", (PyCFunction)transport_write_eof, METH_NOARGS, "Close the writing side after what was written."},
    {"can_write_eof", transport_can_write_eof, METH_NOARGS, "Return True."},
    {"get_write_buffer_size", (PyCFunction)transport_get_write_buffer_size, METH_NOARGS, "Return the bytes that are not sent yet."},
    {"set_write_buffer_limits", (PyCFunction)(void (*)(void))transport_set_write_buffer_limits, METH_VARARGS | METH_KEYWORDS,
     "Set when the protocol is paused and resumed."},
    {"pause_reading", (PyCFunction)transport_pause_reading, METH_NOARGS, "Read nothing until `resume_reading`."},
    {"resume_reading", (PyCFunction)transport_resume_reading, METH_NOARGS, "Read again."},
    {"relay", FAST(transport_relay), "Pass the chunks that arrive to another transport, and each to `keep`, without the protocol."},
    {"stop_relay", (PyCFunction)transport_stop_relay, METH_NOARGS, "Pass what arrives to the protocol again."},
    {"close", (PyCFunction)transport_close, METH_NOARGS, "Close the connection after what was written."},
    {"abort", (PyCFunction)transport_abort, METH_NOARGS, "Close the connection now."},
    {"is_closing", (PyCFunction)transport_is_closing, METH_NOARGS, "Return whether the connection is closed or will be."},
    {"get_extra_info", FAST(transport_get_extra_info), "Return `peername` or `sockname`."},
    {"count_unread", (PyCFunction)transport_count_unread, METH_O, "Count what the client has not read."},
    {"reset_on_close", (PyCFunction)transport_reset_on_close, METH_NOARGS, "Close with a TCP reset."},
    NO_METHOD};

static PyMemberDef transport_members[] = {
    {"last_read_s", T_DOUBLE, offsetof(Transport, last_read_s), READONLY, "When bytes last arrived, on the monotonic clock; or 0."},
    NO_MEMBER};

PyTypeObject TransportType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "SocketTransport",
    .tp_doc = "A connection that a SocketPoller reads and writes.",
    .tp_basicsize = sizeof(Transport),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)transport_dealloc,
    .tp_traverse = (traverseproc)transport_traverse,
    .tp_clear = (inquiry)transport_clear,
    .tp_methods = transport_methods,
    .tp_members = transport_members,
};

/* ---- UnreadBytes ---- */

static PyObject *unread_slowest(UnreadBytes *u, PyObject *unused) {
    (void)unused;
    PyObject *protocol = u->slowest ? u->slowest->protocol : NULL;
    return Py_NewRef(protocol ? protocol : Py_None);
}

static PyObject *unread_add(UnreadBytes *u, PyObject *change) {
    Py_ssize_t bytes;
    if (as_size(change, &bytes) < 0)
        return NULL;
    u->bytes += bytes;
    Py_RETURN_NONE;
}

static PyObject *unread_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"limit", "on_excess", NULL};
    Py_ssize_t limit;
    PyObject *on_excess;
    if (!PyArg_ParseTupleAndKeywords(args, named, "nO", names, &limit, &on_excess))
        return NULL;
    UnreadBytes *u = (UnreadBytes *)type->tp_alloc(type, 0);
    if (u) {
        u->limit = limit;
        u->on_excess = Py_NewRef(on_excess);
    }
    return (PyObject *)u;
}

static int unread_traverse(UnreadBytes *u, visitproc visit, void *arg) {
    Py_VISIT(u->on_excess);
    return 0;
}

static int unread_clear(UnreadBytes *u) {
    Py_CLEAR(u->on_excess);
    return 0;
}

/* Every transport in the list owns a reference, so the list is empty. */
static void unread_dealloc(UnreadBytes *u) {
    PyObject_GC_UnTrack(u);
    unread_clear(u);
    Py_TYPE(u)->tp_free((PyObject *)u);
}

static PyMethodDef unread_methods[] = {
    {"slowest", (PyCFunction)unread_slowest, METH_NOARGS, "Return the protocol whose client has read least recently."},
    {"add", (PyCFunction)unread_add, METH_O, "Count bytes that others hold."},
    NO_METHOD};

static PyMemberDef unread_members[] = {
    {"bytes", T_PYSSIZET, offsetof(UnreadBytes, bytes), READONLY, "What clients have not read."},
    {"limit", T_PYSSIZET, offsetof(UnreadBytes, limit), 0, "With more than this, `on_excess` is called."},
    NO_MEMBER};

PyTypeObject UnreadBytesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "UnreadBytes",
    .tp_doc = "What the clients of a listener have not read.",
    .tp_basicsize = sizeof(UnreadBytes),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = unread_new,
    .tp_dealloc = (destructor)unread_dealloc,
    .tp_traverse = (traverseproc)unread_traverse,
    .tp_clear = (inquiry)unread_clear,
    .tp_methods = unread_methods,
    .tp_members = unread_members,
};
