/* The tokens of plain messages, and how a chat is put together from them. message_tokens.c says more. */
#ifndef WARMROUTE_MESSAGE_TOKENS_H
#define WARMROUTE_MESSAGE_TOKENS_H

#include "body_scan.h"

/* The text between two contents, cut in two. Each half has a number; halves with equal numbers are equal. */
typedef struct {
    int64_t end;   /* what belongs to the message before it; -1: the layout does not cover these roles */
    int64_t start; /* what belongs to the message after it; not used at the end of a chat */
} separator;

#define SEPARATORS (MESSAGE_ROLES * MESSAGE_ROLES * MESSAGE_ROLES)

/* What a chat template puts between the contents of messages, by the roles of two messages before the text and of the message
 * after it. Role 0 is none: the start or the end of the chat. */
typedef struct {
    PyObject_HEAD
    separator separators[SEPARATORS];
    PyObject *first[MESSAGE_ROLES];                /* tokens before the first message's, by its role */
    PyObject *last[MESSAGE_ROLES * MESSAGE_ROLES]; /* tokens after the last message's, by the last two roles */
} ChatLayout;

#define NOT_CACHED UINT32_MAX /* as n_tokens: this message can't be tokenized by itself */

typedef struct unit unit;

struct unit {
    digest key;
    unit *next;          /* of the same chain */
    unit *newer, *older; /* by last use */
    uint32_t n_tokens;
    uint32_t tokens[];
};

typedef struct {
    PyObject_HEAD
    unit **chains;
    unit *newest, *oldest;
    uint64_t budget_bytes, bytes; /* bytes: of units and chains */
    uint64_t n_units, n_chains;   /* n_chains: a power of two */
} MessageTokens;

#endif
