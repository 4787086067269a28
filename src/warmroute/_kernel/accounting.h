/* What the router knows of a node: plain structs that the Python classes inherit from. accounting.c and Python write them,
 * price.c reads them. */
#ifndef WARMROUTE_ACCOUNTING_H
#define WARMROUTE_ACCOUNTING_H

#include "kernel.h"

/* core/speeds.py inherits from it. */
typedef struct {
    PyObject_HEAD
    double ms_per_token;                            /* of prefill, as prices use it */
    double factor;                                  /* decode time relative to other nodes of the model */
    double work, ms, at_s, last_first_token_s;      /* the sums that ms_per_token is learned from */
    double uncharged_ms;                            /* what the last first token took beyond what its prompt explains */
    double carried_ms_per_token;                    /* the estimate before the first token that left it */
    double learned_ms_per_token;                    /* ms_per_token, unless that is replaced */
    double long_work, long_ms;                      /* moving means of lone prefills that take several steps */
    double step_ms;                                 /* a decode step that no prefill interrupts; 0: unknown */
    /* What core/speeds.py judges it by. */
    double lone_work, lone_ms, lone_xx, lone_xy;    /* moving means and covariances of lone prefills */
    double early_share;                             /* of answers whose first token came sooner than a step allows */
    Py_ssize_t answers, lone_prefills, timed_answers, long_prefills;
    char is_replaced;                               /* ms_per_token is the peers' */
    PyObject *first_tokens;                         /* the FirstTokenOrder that keeps them until they are learned; NULL: each at once */
} SpeedState;

/* core/speeds.py inherits from it: time per output token as a line over the context, with a lower bound. */
typedef struct {
    PyObject_HEAD
    double least_ms, mean_ms, slope_ms, mean_context;
    double xx, xy; /* moving sums of the regression */
    Py_ssize_t answers;
} DecodeSpeedState;

/* What NodeState and CacheState begin with: a name, and a part of one type. */
typedef struct {
    PyObject_HEAD
    PyObject *name, *part;
} Named;

typedef struct TicketState TicketState;

/* core/node.py inherits from it, and says what each attribute means. */
typedef struct {
    Named named; /* its part: a SpeedState */
    double pending_work, kv_usage, kv_delta, kv_pressure, queue_ms, distance_ms, arrival_rate, arrival_s;
    Py_ssize_t context_tokens, kv_new, inflight, other_load;
    double round_trip_ms, polled_s, last_ticket_s, latency_ms, ttft_sum_ms;
    double streamed_ttft_ms, streamed_work, streamed_steps_ms; /* sums over streamed responses with a known prompt */
    Py_ssize_t polls, unstarted;
    double kv_sum;        /* the sum of all changes of kv_delta: polls do not reset it */
    Py_ssize_t changes;   /* how often tickets changed these figures */
    /* Tickets of answers that are not streamed, whose prefill is not due yet: a list in the order they are due, which holds
     * a reference to each. */
    Py_ssize_t unstreamed_prefills;
    Py_ssize_t unstreamed; /* open tickets of answers that are not streamed */
    TicketState *first_unstreamed, *last_unstreamed;
    /* Tickets whose prefill has not ended, in the order they were opened: a list without references. */
    TicketState *first_prefill, *last_prefill;
    double prefill_ended_s; /* when the first of them last ended */
    Py_ssize_t outcomes[MAX_OUTCOMES], ttft_counts[TTFT_BUCKETS];
    /* The part of the figures above that is the peers', and what this process has published of its own (peer_load.c). */
    Py_ssize_t peer_inflight, peer_context_tokens, peer_kv_new;
    double peer_pending_work, published_work;
    /* The oldest prompt of the peers without a first token: its work, when it reached the node, and whose it is. */
    double peer_prefill_work, peer_prefill_s;
    const void *peer_prefill_of;
    Py_ssize_t published_changes; /* `changes` at that time */
    Py_ssize_t name_at;           /* index of its name in the message that is being packed */
} NodeState;

/* core/node.py inherits from it. */
struct TicketState {
    PyObject_HEAD
    NodeState *node;
    DecodeSpeedState *decode_speed;  /* of its model; NULL where its prompt was not looked up */
    TicketState *previous, *next;    /* among the node's unstreamed tickets */
    TicketState *earlier, *later;    /* among the node's tickets whose prefill has not ended */
    double opened_s, first_token_s;
    double unlearned_work;           /* its prefill's work, until the node's speed is learned from it */
    double pending_work;             /* its prefill's work that is believed to be left */
    double prefill_due_s;            /* where the answer is not streamed: when its prefill should be done */
    double output_tokens;
    double work_ahead, steps_ms;     /* at its dispatch: the work until its first token, and the time beside that */
    double hidden_prefill_ms;        /* where it may have hidden hits: the time until its first token, to learn from later */
    double expected_ttft_ms;         /* from these and the node's speed; 0 where its prompt was not looked up */
    Py_ssize_t tokens, new_tokens, polls;
    char is_open, streams, is_unstreamed, is_prefilling;
    char was_alone;                  /* no other prompt was pending when it was sent */
    char has_hidden_hits;            /* the node may have more of its prompt than its work says */
};

extern PyTypeObject SpeedType, DecodeSpeedType, NodeType, TicketType;

static always_inline SpeedState *speed_of(const NodeState *node) { return (SpeedState *)node->named.part; }

static always_inline Py_ssize_t load_of(const NodeState *node) { return node->inflight + node->other_load; }

/* This process's part of the prefill work. */
static always_inline double own_pending_work(const NodeState *node) {
    return node->inflight != node->peer_inflight ? larger(0.0, node->pending_work - node->peer_pending_work) : 0.0;
}

/* What the router learns from a first token. `lone`: no other prompt waited at that time. */
void learn_first_token(SpeedState *speed, double done, double step_ms, double sent_s, double now_s, int lone);

/* The pending work that should be left by now. */
double remaining_work(const NodeState *node, double now_s);

/* Time per output token beside this much context, on a node like the others. */
static always_inline double decode_ms(const DecodeSpeedState *d, double context) {
    return larger(d->least_ms, d->mean_ms + d->slope_ms * (context - d->mean_context));
}

/* Time of a prefill with this much work, apart from the step that the engine takes in any case. While most of each prompt
 * is cached, ms_per_token is mostly that step. */
static always_inline double long_prefill_ms_per_token(const SpeedState *s) {
    return s->long_prefills && !s->is_replaced ? s->long_ms / s->long_work : s->ms_per_token;
}

/* The least time of a prefill: one step of the engine. */
static always_inline double least_prefill_ms(const SpeedState *s) {
    return smaller(s->step_ms, STEP_WORK * long_prefill_ms_per_token(s));
}

/* ---- A name and a part ---- */

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

/* Getter and setter of the part. `type` is the type that it has to have. */
static inline PyObject *get_part(Named *self, void *type) {
    if (self->part)
        return Py_NewRef(self->part);
    PyErr_Format(PyExc_AttributeError, "the %s is not set", ((PyTypeObject *)type)->tp_name);
    return NULL;
}

static inline int set_part(Named *self, PyObject *part, void *type) {
    if (!part) {
        PyErr_SetString(PyExc_TypeError, "this attribute can't be deleted");
        return -1;
    }
    if (check_type(part, type) < 0)
        return -1;
    Py_XSETREF(self->part, Py_NewRef(part));
    return 0;
}

#endif
