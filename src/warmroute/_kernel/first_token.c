/* The first token of a streamed response, found by its content.
 *
 * Engines send events before the first token: a chunk with only a role, `response.created`, `message_start`, a comment that
 * keeps the connection alive. The time to those says nothing about the prefill. This searches server-sent events (without
 * chunk framing) for the first one that carries content of the model, or ends the response:
 *
 *   chat         choices[].delta with a member beside `role` that is not empty: content, reasoning, tool_calls, refusal, audio
 *   completions  choices[].text that is not empty; chat and completions: token_ids, or a finish_reason
 *   responses    type `response.*.delta` with a delta that is not empty, and `response.*` events about something done
 *   messages     type `content_block_delta` with a delta that is not empty, and the events that end a block or the message
 *   all          an error, and `[DONE]`
 *
 * The rules:
 * - What the search does not understand counts as the first token: other events, other lines, malformed JSON.
 * - A token may have no text (a part of a character, a special token), and a chunk without text may keep a connection alive.
 *   So FIRST_TOKEN_EMPTY_CHUNKS chunks without role and text count as a token.
 * - The search reads at most FIRST_TOKEN_SEARCH_BYTES. What comes then counts as the first token.
 *
 * tests/edge/reference_first_token.py is the same in plain Python; a property test compares the two.
 */
#include "json_skip.h"

/* What an event says. The larger one counts where an event has several choices. */
enum { NOTHING, EMPTY_CHUNK, TOKEN };

typedef struct {
    PyObject_HEAD
    char *line; /* the beginning of a line whose end has not arrived */
    size_t length, capacity, seen;
    int empty_chunks, found;
} FirstTokenSearch;

static inline int most_of(int one, int other) { return one > other ? one : other; }

static inline int named(const name *key, const char *word) {
    return key->len == strlen(word) && !memcmp(key->at, word, key->len);
}

/* Whether a value that was skipped before is a string, list or object with something in it. */
static int has_content(ptr p, ptr end) {
    if (*p == '"')
        return p[1] != '"';
    return *p == '[' ? *skip_space(p + 1, end) != ']' : *p == '{' && *skip_space(p + 1, end) != '}';
}

/* What a delta says. It is well-formed. A role alone is nothing. */
static int read_delta(ptr p, ptr end) {
    int more, has_role = 0;
    name key;
    if (*p != '{')
        return has_content(p, end) ? TOKEN : EMPTY_CHUNK;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        if (named(&key, "role"))
            has_role = 1;
        else if (!named(&key, "type") && has_content(p, end))
            return TOKEN;
        p = next_member(skip_value(p, end, 0), end, 0, &key, &more);
    }
    return has_role ? NOTHING : EMPTY_CHUNK;
}

/* What an item of `choices` says. It is well-formed. */
static int read_choice(ptr p, ptr end) {
    int more, says = NOTHING;
    name key;
    if (*p != '{')
        return TOKEN;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        if (named(&key, "delta") || named(&key, "text"))
            says = most_of(says, read_delta(p, end));
        else if ((named(&key, "finish_reason") || named(&key, "token_ids")) && has_content(p, end))
            return TOKEN;
        p = next_member(skip_value(p, end, 0), end, 0, &key, &more);
    }
    return says;
}

static int read_choices(ptr p, ptr end) {
    int more, says = NOTHING;
    if (*p != '[')
        return TOKEN;
    p = next_item(p + 1, end, ']', 1, &more);
    while (p && more) {
        says = most_of(says, read_choice(p, end));
        p = next_item(skip_value(p, end, 0), end, ']', 0, &more);
    }
    return says;
}

/* What an event of this type says. `delta`: what its delta says. */
static int read_type(const name *type, int delta) {
    static const char *const before_tokens[] = {"ping", "keepalive", "message_start", "content_block_start"};
    static const char *const not_done[] = {".created", ".queued", ".in_progress", ".added",
                                           ".searching", ".interpreting", ".generating"};
    for (size_t i = 0; i < sizeof before_tokens / sizeof *before_tokens; i++)
        if (named(type, before_tokens[i]))
            return NOTHING;
    if (named(type, "content_block_delta"))
        return delta;
    if (type->len < 9 || memcmp(type->at, "response.", 9))
        return TOKEN;
    ptr dot = memrchr(type->at, '.', type->len);
    name last = {dot, (size_t)(type->at + type->len - dot)};
    for (size_t i = 0; i < sizeof not_done / sizeof *not_done; i++)
        if (named(&last, not_done[i]))
            return NOTHING;
    return named(&last, ".delta") ? delta : TOKEN;
}

/* What the JSON object of an event says; p is at its brace. */
static int read_event(ptr p, ptr end) {
    int more, says = NOTHING, has_choices = 0, delta = EMPTY_CHUNK;
    name key, type = {NULL, 0};
    if (!skip_value(p, end, 0)) /* malformed, or too deep */
        return TOKEN;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr past = skip_value(p, end, 0);
        if (named(&key, "choices")) {
            has_choices = 1;
            says = most_of(says, read_choices(p, end));
        } else if (named(&key, "type") && *p == '"') {
            type = (name){p + 1, (size_t)(past - p - 2)};
        } else if (named(&key, "delta")) {
            delta = read_delta(p, end);
        } else if (named(&key, "error") && *p != 'n') {
            return TOKEN;
        }
        p = next_member(past, end, 0, &key, &more);
    }
    return has_choices ? says : type.at ? read_type(&type, delta) : TOKEN;
}

/* What a line of the stream says. */
static int read_line(const char *line, size_t n) {
    static const char *const other_fields[] = {"event", "id", "retry"};
    ptr p = (ptr)line, end = p + n, colon = memchr(p, ':', n);
    name field = {p, colon ? (size_t)(colon - p) : n};
    if (!field.len) /* a blank line, or a comment */
        return NOTHING;
    for (size_t i = 0; i < sizeof other_fields / sizeof *other_fields; i++)
        if (named(&field, other_fields[i]))
            return NOTHING;
    if (!named(&field, "data"))
        return TOKEN;
    p = colon ? skip_space(colon + 1, end) : NULL;
    return !p ? NOTHING : *p == '{' ? read_event(p, end) : TOKEN;
}

/* A line ends with CR, LF or both; the LF after a CR makes a blank line more, which says nothing.
   *lf is the next LF, or end if there is none: it is searched once, not again for each CR before it. */
static const char *line_end(const char *p, const char *end, const char **lf) {
    if (!*lf || *lf < p) {
        const char *found = memchr(p, '\n', (size_t)(end - p));
        *lf = found ? found : end;
    }
    const char *cr = memchr(p, '\r', (size_t)(*lf - p));
    return cr ? cr : *lf < end ? *lf : NULL;
}

/* Adds to the line whose end has not arrived. */
static int keep(FirstTokenSearch *s, const char *p, size_t n) {
    if (s->length + n > s->capacity) {
        size_t capacity = 2 * (s->length + n);
        char *line = PyMem_Realloc(s->line, capacity);
        if (!line) {
            PyErr_NoMemory();
            return -1;
        }
        s->line = line;
        s->capacity = capacity;
    }
    memcpy(s->line + s->length, p, n);
    s->length += n;
    return 0;
}

/* Returns whether the first token is in the bytes up to here; -1 with an exception. */
static int search(FirstTokenSearch *s, const char *p, const char *end) {
    s->seen += (size_t)(end - p);
    const char *lf = NULL;
    for (const char *stop; p < end && (stop = line_end(p, end, &lf)); p = stop + 1) {
        int says;
        if (s->length) {
            if (keep(s, p, (size_t)(stop - p)) < 0)
                return -1;
            says = read_line(s->line, s->length);
            s->length = 0;
        } else {
            says = read_line(p, (size_t)(stop - p));
        }
        if (says == TOKEN || (says == EMPTY_CHUNK && ++s->empty_chunks >= FIRST_TOKEN_EMPTY_CHUNKS))
            return 1;
    }
    if (s->seen > FIRST_TOKEN_SEARCH_BYTES)
        return 1;
    return p < end ? keep(s, p, (size_t)(end - p)) : 0;
}

static void free_line(FirstTokenSearch *s) {
    PyMem_Free(s->line);
    s->line = NULL;
    s->length = s->capacity = 0;
}

static PyObject *search_feed(FirstTokenSearch *s, PyObject *data) {
    if (check_type(data, &PyBytes_Type) < 0)
        return NULL;
    if (!s->found) {
        const char *p = PyBytes_AS_STRING(data);
        int found = search(s, p, p + PyBytes_GET_SIZE(data));
        if (found < 0)
            return NULL;
        if (found) {
            s->found = 1;
            free_line(s);
        }
    }
    return PyBool_FromLong(s->found);
}

static void search_dealloc(FirstTokenSearch *s) {
    free_line(s);
    Py_TYPE(s)->tp_free((PyObject *)s);
}

static PyMethodDef search_methods[] = {
    {"feed", (PyCFunction)search_feed, METH_O, "Search the next bytes of the stream; return whether it had its first token."},
    NO_METHOD};

static PyTypeObject FirstTokenSearchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "FirstTokenSearch",
    .tp_doc = "Searches server-sent events for the first token.",
    .tp_basicsize = sizeof(FirstTokenSearch),
    .tp_dealloc = (destructor)search_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = search_methods,
};

int add_first_token(PyObject *module) {
    prepare_json_tables();
    return add_type(module, "FirstTokenSearch", &FirstTokenSearchType);
}
