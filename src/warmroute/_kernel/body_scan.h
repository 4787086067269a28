/* The outline of a request body: where its fields and messages lie. body_scan.c makes it. */
#ifndef WARMROUTE_BODY_SCAN_H
#define WARMROUTE_BODY_SCAN_H

#include "digest.h"

/* Fields that are read by number. Those from TOOLS to ADD_SPECIAL_TOKENS change how a chat is rendered. Those from
 * TRUNCATE_PROMPT_TOKENS on may change which of its tokens the engine computes. A field up to TOOLS may be given only once. */
enum { MODEL, MESSAGES, SYSTEM, INSTRUCTIONS, PROMPT, INPUT, QUERY, TEXT_1, SESSION_ID, CONVERSATION_ID, PROMPT_CACHE_KEY,
       USER, CACHE_SALT, STREAM, PRIORITY, MAX_COMPLETION_TOKENS, MAX_TOKENS, MAX_OUTPUT_TOKENS, TOOLS, TOOL_CHOICE,
       DOCUMENTS, REASONING_EFFORT, CHAT_TEMPLATE, CHAT_TEMPLATE_KWARGS, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE,
       ADD_SPECIAL_TOKENS, TRUNCATE_PROMPT_TOKENS, TRUNCATION, PADDING, KV_TRANSFER_PARAMS, PROMPT_LOGPROBS, ECHO_PROMPT, KNOWN };

typedef struct {
    uint32_t start, end;
} span;

typedef struct {
    span name, value;
    uint32_t known; /* its number, or KNOWN */
} field;

/* A plain message has one of these roles, one text as its content, and nothing else that reaches the chat template. */
enum { NOT_PLAIN, SYSTEM_MESSAGE, USER_MESSAGE, ASSISTANT_MESSAGE };

typedef struct {
    span whole;
    span content; /* of a plain message: its text, without the quotes */
    uint32_t role;
} message;

#define FEW_FIELDS 8
#define FEW_MESSAGES 8

typedef struct {
    PyObject_HEAD
    PyObject *body, *field_spans; /* field_spans: the dict of `fields`, made on first use */
    field *fields;
    message *messages;
    digest *message_keys;  /* message_tokens.c keeps the keys of messages here; NULL before */
    PyObject *keys_layout; /* the layout with which they were made */
    uint32_t n_message_keys, n_fields, fields_room, n_messages, messages_room;
    const char *problem;          /* why the body is rejected; NULL for the usual reason */
    uint32_t problem_field;       /* the number of the field that is wrong, or KNOWN */
    const char *engine_field;     /* the name of a field that only the router may set, or NULL */
    span known[KNOWN];            /* where the last value of each known field lies; no value begins at 0 */
    field few_fields[FEW_FIELDS]; /* most bodies have no more, and need no other allocation */
    message few_messages[FEW_MESSAGES];
} Outline;

extern PyTypeObject OutlineType;

static inline const unsigned char *text_of(const Outline *o) { return (const unsigned char *)PyBytes_AS_STRING(o->body); }

#endif
