/* The first tokens of all processes in the order of time. See first_token_order.c. */
#ifndef WARMROUTE_FIRST_TOKEN_ORDER_H
#define WARMROUTE_FIRST_TOKEN_ORDER_H

#include "accounting.h"

/* What a node's speed is learned from. */
typedef struct {
    double at_s, sent_s, work, step_ms;
    NodeState *node;
    char lone; /* no other prompt waited at that time */
} FirstToken;

extern PyTypeObject FirstTokenOrderType;

/* Keeps a first token of this process until it is published and learned. `order` is a FirstTokenOrder. */
void keep_first_token(PyObject *order, const FirstToken *token);

#endif
