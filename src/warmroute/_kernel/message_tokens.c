/* The tokens of a chat, put together from the tokens of its messages.
 *
 * The rules:
 * - A chat's text is: separator, content, separator, content, …, separator. A layout says which separator stands between which
 *   roles (prompt/plain_chats.py learns it from the chat template).
 * - Every separator is cut after a special token, where cutting does not change tokens. So the tokens from one cut to the next
 *   depend only on one content and on the halves of two separators. They are a unit.
 * - A unit is found by a digest of the message's bytes in the request, and of the numbers of the two halves. A message
 *   that was seen before, in this chat or in another, is neither decoded nor tokenized again.
 * - Units are bounded in bytes. The least recently used ones are evicted.
 */
#include "message_tokens.h"

#define MIN_CHAINS 64

/* ---- Layouts ---- */

static void layout_dealloc(ChatLayout *l) {
    for (int i = 0; i < MESSAGE_ROLES; i++)
        Py_XDECREF(l->first[i]);
    for (int i = 0; i < MESSAGE_ROLES * MESSAGE_ROLES; i++)
        Py_XDECREF(l->last[i]);
    Py_TYPE(l)->tp_free((PyObject *)l);
}

/* Reads a tuple of n tokens: bytes, 4 for each token. */
static int read_tokens(PyObject *given, PyObject **to, Py_ssize_t n) {
    if (check_tuple(given, n) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(given, i);
        if (check_type(item, &PyBytes_Type) < 0)
            return -1;
        if (PyBytes_GET_SIZE(item) % TOKEN_BYTES) {
            PyErr_SetString(PyExc_ValueError, "tokens must have 4 bytes each");
            return -1;
        }
        to[i] = Py_NewRef(item);
    }
    return 0;
}

static PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"separators", "first", "last", NULL};
    PyObject *separators, *first, *last;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &separators, &first, &last) ||
        check_type(separators, &PyBytes_Type) < 0)
        return NULL;
    ChatLayout *l = (ChatLayout *)type->tp_alloc(type, 0);
    if (!l)
        return NULL;
    if (PyBytes_GET_SIZE(separators) == sizeof l->separators) {
        memcpy(l->separators, PyBytes_AS_STRING(separators), sizeof l->separators);
        if (!read_tokens(first, l->first, MESSAGE_ROLES) && !read_tokens(last, l->last, MESSAGE_ROLES * MESSAGE_ROLES))
            return (PyObject *)l;
    } else {
        PyErr_Format(PyExc_ValueError, "separators must have %zu bytes", sizeof l->separators);
    }
    Py_DECREF(l);
    return NULL;
}

static PyTypeObject ChatLayoutType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "ChatLayout",
    .tp_basicsize = sizeof(ChatLayout),
    .tp_dealloc = (destructor)layout_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "What a chat template puts between the contents of messages.",
    .tp_new = layout_new,
};

/* ---- Units by key and by last use ---- */

static uint64_t bytes_of_unit(uint32_t n_tokens) {
    return malloc_bytes(sizeof(unit) + (n_tokens == NOT_CACHED ? 0 : TOKEN_BYTES * (uint64_t)n_tokens));
}

static always_inline unit **chain_of(const MessageTokens *t, digest key) { return &t->chains[key.low & (t->n_chains - 1)]; }

static unit *find_unit(const MessageTokens *t, digest key) {
    unit *u = *chain_of(t, key);
    while (u && (u->key.low != key.low || u->key.high != key.high))
        u = u->next;
    return u;
}

static void unlink_use(MessageTokens *t, unit *u) {
    *(u->newer ? &u->newer->older : &t->newest) = u->older;
    *(u->older ? &u->older->newer : &t->oldest) = u->newer;
}

static void link_newest(MessageTokens *t, unit *u) {
    u->newer = NULL;
    u->older = t->newest;
    *(t->newest ? &t->newest->newer : &t->oldest) = u;
    t->newest = u;
}

static void remove_unit(MessageTokens *t, unit *u) {
    unit **at = chain_of(t, u->key);
    while (*at != u)
        at = &(*at)->next;
    *at = u->next;
    unlink_use(t, u);
    t->bytes -= bytes_of_unit(u->n_tokens);
    t->n_units--;
    PyMem_RawFree(u);
}

/* Doubles the number of chains. Without memory, they just get longer. */
static void add_chains(MessageTokens *t) {
    uint64_t n = 2 * t->n_chains;
    unit **more = PyMem_RawCalloc(n, sizeof *more);
    if (!more)
        return;
    PyMem_RawFree(t->chains);
    t->bytes += malloc_bytes(n * sizeof *more) - malloc_bytes(t->n_chains * sizeof *more);
    t->chains = more;
    t->n_chains = n;
    for (unit *u = t->newest; u; u = u->older) {
        unit **chain = chain_of(t, u->key);
        u->next = *chain;
        *chain = u;
    }
}

/* Adds a unit that is not there yet. 0 where it is larger than the budget; -1 with an exception without memory. */
static int add_unit(MessageTokens *t, digest key, const uint8_t *tokens, uint32_t n_tokens) {
    uint64_t bytes = bytes_of_unit(n_tokens);
    if (bytes > t->budget_bytes / 2)
        return 0;
    unit *u = PyMem_RawMalloc(bytes);
    if (!u) {
        PyErr_NoMemory();
        return -1;
    }
    u->key = key;
    u->n_tokens = n_tokens;
    if (n_tokens != NOT_CACHED)
        memcpy(u->tokens, tokens, TOKEN_BYTES * (size_t)n_tokens);
    if (t->n_units >= t->n_chains)
        add_chains(t);
    unit **chain = chain_of(t, key);
    u->next = *chain;
    *chain = u;
    link_newest(t, u);
    t->bytes += bytes;
    t->n_units++;
    while (t->bytes > t->budget_bytes && t->oldest != u)
        remove_unit(t, t->oldest);
    return 1;
}

/* ---- A chat ---- */

/* The first messages of a request, as a chat. */
typedef struct {
    Outline *outline;
    const ChatLayout *layout;
    uint32_t n;
} chat;

static always_inline uint32_t role_at(const chat *c, int64_t i) {
    return i >= 0 && i < (int64_t)c->n ? c->outline->messages[i].role : NOT_PLAIN;
}

static always_inline const separator *separator_before(const chat *c, uint32_t i) {
    uint32_t two_before = role_at(c, (int64_t)i - 2), before = role_at(c, (int64_t)i - 1), after = role_at(c, i);
    return &c->layout->separators[(two_before * MESSAGE_ROLES + before) * MESSAGE_ROLES + after];
}

/* Makes the key of each message. 0 where the layout does not cover the chat; -1 with an exception without memory. */
static int make_keys(const chat *c) {
    Outline *o = c->outline;
    if (!c->n)
        return 0;
    for (uint32_t i = 0; i < c->n; i++)
        if (role_at(c, i) == NOT_PLAIN || separator_before(c, i)->end < 0)
            return 0;
    if (separator_before(c, c->n)->end < 0)
        return 0;
    if (o->keys_layout == (PyObject *)c->layout && o->n_message_keys == c->n)
        return 1; /* they are those of the call before */
    digest *keys = PyMem_RawMalloc(c->n * sizeof(digest));
    if (!keys) {
        PyErr_NoMemory();
        return -1;
    }
    PyThreadState *released = PyBytes_GET_SIZE(o->body) > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    for (uint32_t i = 0; i < c->n; i++) {
        span content = o->messages[i].content;
        digest halves = {(uint64_t)separator_before(c, i)->start, (uint64_t)separator_before(c, i + 1)->end};
        keys[i] = extend_digest(halves, text_of(o) + content.start, content.end - content.start);
    }
    if (released)
        PyEval_RestoreThread(released);
    PyMem_RawFree(o->message_keys);
    o->message_keys = keys;
    o->n_message_keys = c->n;
    Py_XSETREF(o->keys_layout, Py_NewRef(c->layout));
    return 1;
}

static PyObject *missing_messages(const MessageTokens *t, const chat *c) {
    PyObject *made = PyList_New(0);
    for (uint32_t i = 0; made && i < c->n; i++)
        if (!find_unit(t, c->outline->message_keys[i])) {
            span content = c->outline->messages[i].content;
            PyObject *row = Py_BuildValue("ILLI", i, (long long)separator_before(c, i)->start,
                                          (long long)separator_before(c, i + 1)->end, content.end - content.start);
            if (!row || PyList_Append(made, row) < 0)
                Py_CLEAR(made);
            Py_XDECREF(row);
        }
    return made;
}

static char *append(char *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

/* All units are there. Uses them from the last to the first: the start of a chat is the most recent then, since other chats may
 * have the same. */
static PyObject *join_units(MessageTokens *t, const chat *c, unit *const *units, uint64_t n_tokens, int with_last) {
    PyObject *first = c->layout->first[role_at(c, 0)];
    PyObject *last = c->layout->last[role_at(c, (int64_t)c->n - 2) * MESSAGE_ROLES + role_at(c, (int64_t)c->n - 1)];
    size_t first_bytes = (size_t)PyBytes_GET_SIZE(first), last_bytes = with_last ? (size_t)PyBytes_GET_SIZE(last) : 0;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(first_bytes + TOKEN_BYTES * n_tokens + last_bytes));
    if (!made)
        return NULL;
    char *to = append(PyBytes_AS_STRING(made), PyBytes_AS_STRING(first), first_bytes);
    for (uint32_t i = 0; i < c->n; i++)
        to = append(to, units[i]->tokens, TOKEN_BYTES * (size_t)units[i]->n_tokens);
    append(to, PyBytes_AS_STRING(last), last_bytes);
    for (uint32_t i = c->n; i--;)
        if (t->newest != units[i]) {
            unlink_use(t, units[i]);
            link_newest(t, units[i]);
        }
    return made;
}

static PyObject *message_tokens_join(MessageTokens *t, PyObject *const *args, Py_ssize_t n_args) {
    Py_ssize_t count = -1;
    if (check_signature(n_args, 2, 3, "(outline, layout, count=None)") < 0 || check_type(args[0], &OutlineType) < 0 ||
        check_type(args[1], &ChatLayoutType) < 0 || (n_args == 3 && as_size(args[2], &count) < 0))
        return NULL;
    chat c = {(Outline *)args[0], (ChatLayout *)args[1], ((Outline *)args[0])->n_messages};
    if (n_args == 3) {
        if (count < 0 || count > (Py_ssize_t)c.n) {
            PyErr_SetString(PyExc_ValueError, "count must be a number of messages of the request");
            return NULL;
        }
        c.n = (uint32_t)count;
    }
    int covered = make_keys(&c);
    if (covered <= 0)
        return covered ? NULL : Py_NewRef(Py_None);
    unit *few[FEW_MESSAGES * 4], **units = few;
    if (c.n > FEW_MESSAGES * 4 && !(units = PyMem_Malloc(c.n * sizeof *units)))
        return PyErr_NoMemory();
    uint64_t n_tokens = 0;
    uint32_t known = 0;
    PyObject *made = NULL;
    for (uint32_t i = 0; i < c.n && !made; i++)
        if ((units[i] = find_unit(t, c.outline->message_keys[i]))) {
            if (units[i]->n_tokens == NOT_CACHED)
                made = Py_NewRef(Py_None);
            n_tokens += units[i]->n_tokens;
            known++;
        }
    if (!made)
        made = known == c.n ? join_units(t, &c, units, n_tokens, n_args == 2) : missing_messages(t, &c);
    if (units != few)
        PyMem_Free(units);
    return made;
}

static PyObject *message_tokens_add(MessageTokens *t, PyObject *const *args, Py_ssize_t n_args) {
    Py_ssize_t i;
    if (check_signature(n_args, 3, 3, "(outline, message, tokens)") < 0 || check_type(args[0], &OutlineType) < 0 ||
        as_size(args[1], &i) < 0)
        return NULL;
    const Outline *o = (Outline *)args[0];
    if (i < 0 || i >= (Py_ssize_t)o->n_message_keys) {
        PyErr_SetString(PyExc_ValueError, "join() did not name this message");
        return NULL;
    }
    uint32_t n_tokens = NOT_CACHED;
    const uint8_t *tokens = NULL;
    if (args[2] != Py_None) {
        if (check_type(args[2], &PyBytes_Type) < 0)
            return NULL;
        if (PyBytes_GET_SIZE(args[2]) % TOKEN_BYTES || PyBytes_GET_SIZE(args[2]) / TOKEN_BYTES >= NOT_CACHED) {
            PyErr_SetString(PyExc_ValueError, "tokens must have 4 bytes each");
            return NULL;
        }
        n_tokens = (uint32_t)(PyBytes_GET_SIZE(args[2]) / TOKEN_BYTES);
        tokens = (const uint8_t *)PyBytes_AS_STRING(args[2]);
    }
    int added = find_unit(t, o->message_keys[i]) ? 1 : add_unit(t, o->message_keys[i], tokens, n_tokens);
    return added < 0 ? NULL : PyBool_FromLong(added);
}

static PyObject *message_tokens_clear(MessageTokens *t, PyObject *unused) {
    (void)unused;
    while (t->oldest)
        remove_unit(t, t->oldest);
    Py_RETURN_NONE;
}

/* ---- The type ---- */

static PyObject *message_tokens_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"budget_bytes", NULL};
    Py_ssize_t budget;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &budget))
        return NULL;
    if (budget < 0) {
        PyErr_SetString(PyExc_ValueError, "budget_bytes must not be negative");
        return NULL;
    }
    MessageTokens *t = (MessageTokens *)type->tp_alloc(type, 0);
    if (!t)
        return NULL;
    t->budget_bytes = (uint64_t)budget;
    t->n_chains = MIN_CHAINS;
    t->bytes = malloc_bytes(MIN_CHAINS * sizeof *t->chains);
    if (!(t->chains = PyMem_RawCalloc(MIN_CHAINS, sizeof *t->chains))) {
        Py_DECREF(t);
        return PyErr_NoMemory();
    }
    return (PyObject *)t;
}

static void message_tokens_dealloc(MessageTokens *t) {
    while (t->oldest)
        remove_unit(t, t->oldest);
    PyMem_RawFree(t->chains);
    Py_TYPE(t)->tp_free((PyObject *)t);
}

static Py_ssize_t message_tokens_len(MessageTokens *t) { return (Py_ssize_t)t->n_units; }

static PyObject *message_tokens_bytes(MessageTokens *t, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(t->bytes);
}

static PySequenceMethods message_tokens_sequence = {.sq_length = (lenfunc)message_tokens_len};

static PyGetSetDef message_tokens_properties[] = {
    {"bytes", (getter)message_tokens_bytes, NULL, "Memory allocated.", NULL}, NO_PROPERTY};

static PyMethodDef message_tokens_methods[] = {
    {"join", FAST(message_tokens_join), "Return the chat's tokens; or the messages whose tokens are missing; or None."},
    {"add", FAST(message_tokens_add), "Add the tokens of a message that join() named; return whether they are kept."},
    {"clear", (PyCFunction)message_tokens_clear, METH_NOARGS, "Forget everything."},
    NO_METHOD};

static PyTypeObject MessageTokensType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "MessageTokens",
    .tp_basicsize = sizeof(MessageTokens),
    .tp_dealloc = (destructor)message_tokens_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The tokens of messages, by their bytes in requests, within a budget of bytes.",
    .tp_new = message_tokens_new,
    .tp_as_sequence = &message_tokens_sequence,
    .tp_getset = message_tokens_properties,
    .tp_methods = message_tokens_methods,
};

int add_message_tokens(PyObject *module) {
    if (add_type(module, "ChatLayout", &ChatLayoutType) < 0)
        return -1;
    return add_type(module, "MessageTokens", &MessageTokensType);
}
