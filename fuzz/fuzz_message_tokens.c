/* Message tokens: the tokens of a chat are those of its messages, one after the other, and memory stays within the budget. */
#include "checks.h"

#define MAX_MESSAGES 40
#define ROLES 4

static PyObject *outline_body, *MessageTokens, *ChatLayout;

void fuzz_setup(void) {
    outline_body = kernel("outline_body");
    MessageTokens = kernel("MessageTokens");
    ChatLayout = kernel("ChatLayout");
    CHECK(PyLong_AsLong(kernel("MESSAGE_ROLES")) == ROLES);
}

/* ---- Layouts ---- */

typedef struct {
    int64_t separators[ROLES * ROLES * ROLES][2];
    uint32_t first[ROLES], last[ROLES * ROLES]; /* one token each */
} layout;

static PyObject *tokens_of(const uint32_t *tokens, Py_ssize_t n) {
    PyObject *made = PyTuple_New(n);
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SET_ITEM(made, i, bytes(&tokens[i], 4));
    return made;
}

/* Few numbers, so that separators are equal, and sometimes roles that are not covered. */
static PyObject *make_layout(input *in, layout *l) {
    for (int i = 0; i < ROLES * ROLES * ROLES; i++) {
        unsigned choice = next_byte(in);
        l->separators[i][0] = choice > 250 ? -1 : (int64_t)(choice & 3);
        l->separators[i][1] = choice >> 2 & 3;
    }
    for (uint32_t i = 0; i < ROLES * ROLES; i++) {
        l->first[i % ROLES] = 1000 + i % ROLES;
        l->last[i] = 2000 + i;
    }
    PyObject *separators = bytes(l->separators, sizeof l->separators);
    return must_call(ChatLayout, 3, separators, tokens_of(l->first, ROLES), tokens_of(l->last, ROLES * ROLES));
}

/* ---- Chats ---- */

typedef struct {
    unsigned n, roles[MAX_MESSAGES], texts[MAX_MESSAGES];
} chat;

/* Some messages are not plain. */
static PyObject *make_chat(input *in, chat *c) {
    static const char *const roles[ROLES] = {"tool", "system", "user", "assistant"};
    char body[MAX_MESSAGES * 64 + 32], *to = body + sprintf(body, "{\"messages\":[");
    c->n = next_below(in, MAX_MESSAGES);
    for (unsigned i = 0; i < c->n; i++) {
        unsigned choice = next_byte(in);
        c->roles[i] = choice == 0 ? 0 : 1 + choice % 3;
        c->texts[i] = choice >> 3;
        to += sprintf(to, "%s{\"role\":\"%s\",\"content\":\"%u\"}", i ? "," : "", roles[c->roles[i]], c->texts[i]);
    }
    to += sprintf(to, "]}");
    PyObject *outline = must_call(outline_body, 1, bytes(body, (size_t)(to - body)));
    CHECK(outline != Py_None);
    return outline;
}

static unsigned role_at(const chat *c, unsigned n, long i) { return i >= 0 && i < (long)n ? c->roles[i] : 0; }

static const int64_t *separator_before(const layout *l, const chat *c, unsigned n, long i) {
    return l->separators[(role_at(c, n, i - 2) * ROLES + role_at(c, n, i - 1)) * ROLES + role_at(c, n, i)];
}

static int is_covered(const layout *l, const chat *c, unsigned n) {
    for (unsigned i = 0; i < n; i++)
        if (!c->roles[i] || separator_before(l, c, n, i)[0] < 0)
            return 0;
    return n && separator_before(l, c, n, n)[0] >= 0;
}

/* ---- Tokens ---- */

#define MAX_TOKENS 40

/* The tokens of one message: they depend on its text and on the numbers around it. */
static unsigned message_tokens(unsigned text, int64_t start, int64_t end, uint32_t *to) {
    unsigned n = (text * 7 + (unsigned)start) % MAX_TOKENS;
    for (unsigned i = 0; i < n; i++)
        to[i] = text * 1000 + (uint32_t)start * 100 + (uint32_t)end * 10 + i;
    return n;
}

/* A text that can't be tokenized by itself. */
static int is_unsafe(unsigned text) { return text == 5; }

static void check_joined(const layout *l, const chat *c, unsigned n, PyObject *joined, int with_last) {
    uint32_t expected[MAX_MESSAGES * MAX_TOKENS + 2], *to = expected;
    *to++ = l->first[c->roles[0]];
    for (unsigned i = 0; i < n; i++) {
        CHECK(!is_unsafe(c->texts[i]));
        to += message_tokens(c->texts[i], separator_before(l, c, n, i)[1], separator_before(l, c, n, i + 1)[0], to);
    }
    if (with_last)
        *to++ = l->last[role_at(c, n, (long)n - 2) * ROLES + role_at(c, n, (long)n - 1)];
    CHECK(PyBytes_GET_SIZE(joined) == (to - expected) * 4 && !memcmp(PyBytes_AS_STRING(joined), expected, (size_t)(to - expected) * 4));
}

/* Adds the missing tokens. */
static void add_missing(const layout *l, const chat *c, unsigned n, PyObject *messages, PyObject *outline, PyObject *missing) {
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(missing); k++) {
        unsigned i, size;
        long long start, end;
        uint32_t tokens[MAX_TOKENS];
        CHECK(PyArg_ParseTuple(PyList_GET_ITEM(missing, k), "ILLI", &i, &start, &end, &size));
        CHECK(i < n && start == separator_before(l, c, n, i)[1] && end == separator_before(l, c, n, i + 1)[0] && size);
        unsigned few = message_tokens(c->texts[i], start, end, tokens);
        PyObject *given = is_unsafe(c->texts[i]) ? none() : bytes(tokens, 4 * few);
        Py_DECREF(must_call_method(messages, "add", 3, Py_NewRef(outline), integer(i), given));
    }
}

static void join(const layout *l, const chat *c, unsigned n, PyObject *messages, PyObject *outline, PyObject *kernel_layout,
                 int whole) {
    for (int round = 0; round < 3; round++) {
        PyObject *found = whole ? must_call_method(messages, "join", 2, Py_NewRef(outline), Py_NewRef(kernel_layout))
                                : must_call_method(messages, "join", 3, Py_NewRef(outline), Py_NewRef(kernel_layout), integer(n));
        CHECK(is_covered(l, c, n) || found == Py_None);
        if (PyBytes_Check(found))
            check_joined(l, c, n, found, whole);
        else if (PyList_Check(found))
            add_missing(l, c, n, messages, outline, found);
        else
            CHECK(found == Py_None);
        Py_DECREF(found);
        check_message_tokens(messages);
    }
}

void fuzz_one(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    layout layouts[2];
    PyObject *kernel_layouts[2];
    long budget = 512L << next_below(&in, 8);
    PyObject *messages = must_call(MessageTokens, 1, integer(budget));
    for (int i = 0; i < 2; i++)
        kernel_layouts[i] = make_layout(&in, &layouts[i]);
    for (unsigned steps = 0; has_more(&in) && steps < 60; steps++) {
        chat c;
        unsigned which = next_below(&in, 2);
        PyObject *outline = make_chat(&in, &c);
        join(&layouts[which], &c, c.n, messages, outline, kernel_layouts[which], 1);
        join(&layouts[!which], &c, next_below(&in, c.n + 1), messages, outline, kernel_layouts[!which], 0);
        PyObject *refused = call_method(messages, "add", 3, Py_NewRef(outline), integer(next_byte(&in)), bytes("abc", 3));
        if (!refused)
            expect_error(PyExc_ValueError, NULL);
        Py_XDECREF(refused);
        Py_DECREF(outline);
        CHECK(attribute(messages, "bytes") <= (budget > 8192 ? budget : 8192));
        if (next_byte(&in) == 77)
            Py_DECREF(must_call_method(messages, "clear", 0));
    }
    for (int i = 0; i < 2; i++)
        Py_DECREF(kernel_layouts[i]);
    Py_DECREF(messages);
}
