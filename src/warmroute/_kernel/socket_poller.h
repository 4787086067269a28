/* Sockets that the kernel reads and writes itself: the poller, and a connection's transport.
 *
 * socket_poller.c has the poller and listening sockets, socket_transport.c the transports.
 */
#ifndef WARMROUTE_SOCKET_POLLER_H
#define WARMROUTE_SOCKET_POLLER_H

#include "kernel.h"

#define SOCKET_READ_BYTES 262144 /* the most that one read takes */

typedef struct Transport Transport;

typedef struct {
    Transport **items;
    Py_ssize_t count, capacity;
} transport_list;

typedef struct {
    PyObject_HEAD
    int epoll;
    int handling;  /* within `poll`: what is written is sent at its end, at once for each connection */
    int scheduled; /* the event loop will call `poll`, although no socket may be ready */
    double now_s;  /* when the events that are being handled were read */
    PyObject *call_soon, *poll;
    transport_list unsent, ended;
    Transport *open; /* a list; the poller owns a reference to each of its transports until `connection_lost` */
    char *buffer;    /* for the bytes of one read */
} Poller;

/* What clients have not read yet of the responses that were written to them: the memory of whole pieces. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t bytes, limit;
    PyObject *on_excess; /* is called when there is more than the limit */
    Transport *slowest, *quickest; /* the ends of the list of transports whose client has not read everything */
} UnreadBytes;

struct Transport {
    PyObject_HEAD
    Poller *poller;
    Transport *previous, *next; /* in the poller's list */
    int fd;                     /* -1 once closed */
    uint32_t events;            /* what epoll watches; 0 if the socket is not registered */
    int reading, at_end, paused_writing, closing, ended, end_wanted, in_unsent; /* at_end: the other end sends no more */
    PyObject *protocol, *data_received, *error;
    /* what is not sent yet: bytes objects, the first one from `sent` on */
    PyObject **pieces;
    Py_ssize_t first, count, capacity, sent, unsent_bytes;
    Py_ssize_t high, low; /* above the one the protocol is paused, at the other one it is resumed */
    /* for connections of clients */
    UnreadBytes *unread; /* counts the pieces; NULL: nobody does */
    Transport *slower, *quicker;
    int behind;            /* it is in the list of `unread` */
    Py_ssize_t read_bytes; /* what the client has read since it was put at the list's end */
    /* while chunks pass on to another connection without Python */
    Transport *relay_to;
    PyObject *relay_chunks, *relay_keep;
    double last_read_s;
};

extern PyTypeObject TransportType, UnreadBytesType;

/* Create a transport for a connected socket, which it owns from then on, and call the protocol's `connection_made`. NULL with an
 * exception; then the socket is still the caller's. */
PyObject *transport_open(Poller *poller, int fd, PyObject *protocol);
/* Epoll reported these events. */
void transport_ready(Transport *t, uint32_t events);
/* Send what is waiting, as far as the socket takes it. */
void transport_flush(Transport *t);
/* Close the socket and call `connection_lost`. */
void transport_finish(Transport *t);
/* Forget the connection without a call of its protocol. */
void transport_discard(Transport *t);

int list_add(transport_list *list, Transport *t);
/* Let the event loop call `poll` soon, unless it runs now. */
void poller_schedule(Poller *poller);

#endif
