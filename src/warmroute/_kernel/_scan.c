/* What routing needs of a request's JSON body, found in one pass over its bytes, without building the rest: where its fields
 * and its messages lie (the outline), and what they begin with.
 *
 * The rule: an answer is given only where json.loads would give the same one. Whatever is malformed, or well-formed but
 * not worth code here (NaN, UTF-16, escaped key names, very deep nesting, …), is answered with None, and the real parser
 * decides. One liberty is taken: text that is passed over is not checked to be UTF-8.
 *
 * Every function that reads takes where it stands and where the body ends, and returns where it stopped; NULL is unsure.
 * prompt/routing_request.py and prompt/request_body.py say the same in plain Python; tests/prompt/test_body_fields.py and test_request_body.py hold them
 * equal.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_json.h"

#define KEY_CHARACTERS 256
#define MAX_NAME_BYTES 1024 /* of a model's or session's name, as it stands in the body */
#define MAX_FIELD_BYTES 128 /* of a field's name */
#define MAX_PARTS_DEPTH 4   /* an object within a text is gone over once more for each object around it */
#define MAX_BODY_BYTES UINT32_MAX
#define TOKEN_BYTES 4

/* ---- Reading texts, from values that were passed over before and are known to be well-formed ---- */

typedef struct {
    int characters, limit;
    unsigned char *to;
    unsigned char bytes[4 * KEY_CHARACTERS + 16]; /* 16, since they are copied by so many */
} text;

#define TEXT(which, most) (which).characters = 0, (which).limit = (most), (which).to = (which).bytes

static inline size_t length(const text *t) { return t->to - t->bytes; }

static inline uint32_t hex(ptr p) {
    return (uint32_t)hex_value[p[0]] << 12 | hex_value[p[1]] << 8 | hex_value[p[2]] << 4 | hex_value[p[3]];
}

/* In UTF-8; surrogates like any other, as Python's "surrogatepass" does. */
static void add_character(text *t, uint32_t c) {
    t->characters++;
    if (c < 0x80) {
        *t->to++ = c;
    } else if (c < 0x800) {
        *t->to++ = 0xc0 | c >> 6;
        *t->to++ = 0x80 | (c & 63);
    } else if (c < 0x10000) {
        *t->to++ = 0xe0 | c >> 12;
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    } else {
        *t->to++ = 0xf0 | c >> 18;
        *t->to++ = 0x80 | (c >> 12 & 63);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    }
}

static ptr add_escape(text *t, ptr p) {
    static const char names[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    if (p[1] != 'u') {
        const char *found = strchr(names, p[1]);
        add_character(t, found ? meanings[found - names] : p[1]);
        return p + 2;
    }
    uint32_t c = hex(p + 2);
    p += 6;
    if (c >> 10 == 0xd800 >> 10 && p[0] == '\\' && p[1] == 'u') {
        uint32_t low = hex(p + 2);
        if (low >> 10 == 0xdc00 >> 10) {
            c = 0x10000 + ((c & 0x3ff) << 10 | (low & 0x3ff));
            p += 6;
        }
    }
    add_character(t, c);
    return p;
}

/* A character beyond ASCII; json.loads takes encoded surrogates, too. The string's closing quote is no continuation byte,
 * so that none is read behind it. */
static ptr add_wide(text *t, ptr p) {
    int more = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : 1;
    uint32_t c = *p & (0x3f >> more), least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
    if (*p < 0xc2 || *p > 0xf4)
        return NULL;
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return NULL;
        c = c << 6 | (p[i] & 0x3f);
    }
    if (c < least || c > 0x10ffff)
        return NULL;
    add_character(t, c);
    return p + 1 + more;
}

/* From behind the opening quote to behind the closing one, or to where the text is full. */
static ptr add_string(text *t, ptr p, ptr end) {
    while (p && t->characters < t->limit) {
#if defined(__SSE2__)
        while (t->limit - t->characters >= 16 && end - p >= 16) {
            __m128i sixteen = load(p);
            uint64_t found = bits(ends_run(sixteen)) | bits(sixteen);
            int plain = found ? __builtin_ctzll(found) : 16;
            _mm_storeu_si128((__m128i *)t->to, sixteen);
            p += plain;
            t->to += plain;
            t->characters += plain;
            if (found)
                break;
        }
        if (t->characters == t->limit)
            break;
#else
        (void)end;
#endif
        if (*p == '"')
            return p + 1;
        if (*p == '\\')
            p = add_escape(t, p);
        else if (*p >= 0x80)
            p = add_wide(t, p);
        else {
            *t->to++ = *p++;
            t->characters++;
        }
    }
    return p;
}

static void add_word(text *t, ptr p, size_t len) {
    for (; len && t->characters < t->limit; len--, t->characters++)
        *t->to++ = *p++;
}

static inline int is_integer(ptr p, ptr behind) {
    for (; p < behind; p++)
        if (*p == '.' || (*p | 32) == 'e')
            return 0;
    return 1;
}

static inline int is_minus_zero(ptr p) { return p[0] == '-' && p[1] == '0'; }

static inline int is(const name *key, const char *other, size_t len) {
    return key->len == len && !memcmp(key->at, other, len);
}

/* An escaped name may be any name. */
static inline int is_escaped(const name *key) { return memchr(key->at, '\\', key->len) != NULL; }

/* Adds a text, a parts list's texts, a batch's first prompt, or token ids. Returns 0 where it is unsure. */
static int add_texts(text *t, ptr p, ptr end, int depth) {
    int more;
    ptr found = NULL, content = NULL;
    name key;
    switch (*p) {
    case '"': return add_string(t, p + 1, end) != NULL;
    case '[':
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more && t->characters < t->limit) {
            ptr item = p;
            if (!(p = pass_value(p, end, 0)))
                return 0;
            switch (*item) {
            case '"': case '[': case '{':
                if (depth == MAX_PARTS_DEPTH || !add_texts(t, item, end, depth + 1))
                    return 0;
                break;
            case 't': add_word(t, (ptr)"True,", 5); break;
            case 'f': add_word(t, (ptr)"False,", 6); break;
            case 'n': break;
            default:
                if (!is_integer(item, p))
                    break;
                if (is_minus_zero(item))
                    return 0;
                add_word(t, item, p - item);
                add_word(t, (ptr)",", 1);
            }
            p = next_item(p, end, ']', 0, &more);
        }
        return p != NULL;
    case '{':
        p = next_member(p + 1, end, 1, &key, &more);
        while (p && more) {
            if (is(&key, "text", 4))
                found = p;
            else if (is(&key, "content", 7))
                content = p;
            else if (is_escaped(&key))
                return 0;
            if ((p = pass_value(p, end, 0)))
                p = next_member(p, end, 0, &key, &more);
        }
        found = found ? found : content;
        return p && (!found || (depth < MAX_PARTS_DEPTH && add_texts(t, found, end, depth + 1)));
    default: return 1;
    }
}

/* ---- The outline ---- */

enum { MODEL, MESSAGES, SYSTEM, INSTRUCTIONS, PROMPT, INPUT, QUERY, TEXT_1, SESSION_ID, CONVERSATION_ID,
       PROMPT_CACHE_KEY, USER, TOOLS, CACHE_SALT, STREAM, PRIORITY, MAX_COMPLETION_TOKENS, MAX_TOKENS, MAX_OUTPUT_TOKENS,
       KNOWN };

static const char *const known_names[KNOWN] = {
    "model", "messages", "system", "instructions", "prompt", "input", "query", "text_1", "session_id", "conversation_id",
    "prompt_cache_key", "user", "tools", "cache_salt", "stream", "priority", "max_completion_tokens", "max_tokens",
    "max_output_tokens"};
static PyObject *names[KNOWN];

/* KNOWN is none of them. */
static int field_of(const name *key) {
#define IF(field, text) if (is(key, text, sizeof text - 1)) return field
    switch (key->len) {
    case 4: IF(USER, "user"); break;
    case 5: IF(MODEL, "model"); IF(TOOLS, "tools"); IF(INPUT, "input"); IF(QUERY, "query"); break;
    case 6: IF(STREAM, "stream"); IF(SYSTEM, "system"); IF(PROMPT, "prompt"); IF(TEXT_1, "text_1"); break;
    case 8: IF(MESSAGES, "messages"); IF(PRIORITY, "priority"); break;
    case 10: IF(MAX_TOKENS, "max_tokens"); IF(CACHE_SALT, "cache_salt"); IF(SESSION_ID, "session_id"); break;
    case 12: IF(INSTRUCTIONS, "instructions"); break;
    case 15: IF(CONVERSATION_ID, "conversation_id"); break;
    case 16: IF(PROMPT_CACHE_KEY, "prompt_cache_key"); break;
    case 17: IF(MAX_OUTPUT_TOKENS, "max_output_tokens"); break;
    case 21: IF(MAX_COMPLETION_TOKENS, "max_completion_tokens"); break;
    }
#undef IF
    return KNOWN;
}

typedef struct {
    uint32_t start, end;
} span;

typedef struct {
    span name, value;
    uint32_t known;
} field;

#define FEW_FIELDS 8
#define FEW_ITEMS 8

typedef struct {
    PyObject_HEAD
    PyObject *body, *places; /* places: the dict of `fields`, made when somebody asks for it */
    field *fields;
    span *items;
    uint32_t n_fields, fields_room, n_items, items_room;
    span known[KNOWN];           /* where the last value of each name lies; no value begins at 0 */
    field few_fields[FEW_FIELDS]; /* most bodies have no more, and need no memory beside the outline's own */
    span few_items[FEW_ITEMS];
} Outline;

/* What the messages begin with. */
typedef struct {
    ptr system_message, user_message; /* where the content of the first of each begins; NULL without content */
    int has_system_message, has_user_message;
    int unsure;
} speakers;

static inline ptr text_of(const Outline *o) { return (ptr)PyBytes_AS_STRING(o->body); }
static inline ptr end_of(const Outline *o) { return text_of(o) + PyBytes_GET_SIZE(o->body); }

/* NULL without one. */
static inline ptr value_of(const Outline *o, int which) {
    return o->known[which].start ? text_of(o) + o->known[which].start : NULL;
}

static inline size_t size_of(const Outline *o, int which) { return o->known[which].end - o->known[which].start; }

/* Twice the room; NULL, with an exception, where memory ran out. */
static void *grown(void *all, void *few, uint32_t *room, size_t size) {
    void *more = all == few ? PyMem_Malloc(2 * (size_t)*room * size) : PyMem_Realloc(all, 2 * (size_t)*room * size);
    if (!more)
        return PyErr_NoMemory();
    if (all == few)
        memcpy(more, few, *room * size);
    *room *= 2;
    return more;
}

static int add_field(Outline *o, const name *key, int which, ptr start, ptr end) {
    span value = {start - text_of(o), end - text_of(o)};
    if (o->n_fields == o->fields_room) {
        field *more = grown(o->fields, o->few_fields, &o->fields_room, sizeof(field));
        if (!more)
            return -1;
        o->fields = more;
    }
    if (which != KNOWN)
        o->known[which] = value;
    o->fields[o->n_fields++] = (field){{key->at - text_of(o), key->at + key->len - text_of(o)}, value, which};
    return 0;
}

static int add_item(Outline *o, ptr start, ptr end) {
    if (o->n_items == o->items_room) {
        span *more = grown(o->items, o->few_items, &o->items_room, sizeof(span));
        if (!more)
            return -1;
        o->items = more;
    }
    o->items[o->n_items++] = (span){start - text_of(o), end - text_of(o)};
    return 0;
}

/* A message of the list; notes its content where its role is looked for. */
static ptr read_message(ptr p, ptr end, speakers *found) {
    int more;
    ptr role = NULL, content = NULL;
    name key;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        if (is(&key, "role", 4))
            role = p;
        else if (is(&key, "content", 7))
            content = p;
        else if (is_escaped(&key))
            found->unsure = 1;
        if ((p = pass_value(p, end, 3)))
            p = next_member(p, end, 0, &key, &more);
    }
    if (!p || !role || *role != '"')
        return p;
    key.at = role + 1;
    key.len = pass_string(role + 1, end) - 1 - key.at;
    if (is(&key, "user", 4)) {
        found->has_user_message = 1;
        found->user_message = content;
    } else if (is(&key, "system", 6) || is(&key, "developer", 9)) {
        if (!found->has_system_message)
            found->system_message = content;
        found->has_system_message = 1;
    } else if (is_escaped(&key))
        found->unsure = 1;
    return p;
}

/* NULL with an exception where memory ran out. */
static ptr read_messages(Outline *o, ptr p, ptr end, speakers *found) {
    int more;
    o->n_items = 0;
    *found = (speakers){.unsure = 0};
    if (*p != '[')
        return pass_value(p, end, 1);
    p = next_item(p + 1, end, ']', 1, &more);
    while (p && more) {
        ptr start = p;
        p = *p == '{' && !found->has_user_message ? read_message(p, end, found) : pass_value(p, end, 2);
        if (!p || add_item(o, start, p) < 0)
            return NULL;
        p = next_item(p, end, ']', 0, &more);
    }
    return p;
}

/* The one pass. 0 where it is unsure, or with an exception where memory ran out. */
static int read_body(Outline *o, speakers *found) {
    int more;
    name key;
    ptr p = text_of(o), end = end_of(o);
    if (!(p = pass_blank(p, end)) || *p != '{')
        return 0;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr start = p;
        int which = field_of(&key);
        if (which == KNOWN && is_escaped(&key))
            return 0;
        p = which == MESSAGES ? read_messages(o, p, end, found) : pass_value(p, end, 1);
        if (!p || add_field(o, &key, which, start, p) < 0)
            return 0;
        p = next_member(p, end, 0, &key, &more);
    }
    return p && !pass_blank(p, end);
}

static void outline_free(Outline *o) {
    if (o->fields != o->few_fields)
        PyMem_Free(o->fields);
    if (o->items != o->few_items)
        PyMem_Free(o->items);
    Py_XDECREF(o->body);
    Py_XDECREF(o->places);
    PyObject_Free(o);
}

static PyTypeObject OutlineType;

/* NULL where it is unsure, or with an exception. */
static Outline *made_of(PyObject *body, speakers *found) {
    if (!PyBytes_Check(body)) {
        PyErr_SetString(PyExc_TypeError, "a body is bytes");
        return NULL;
    }
    if ((size_t)PyBytes_GET_SIZE(body) > MAX_BODY_BYTES)
        return NULL;
    Outline *o = PyObject_New(Outline, &OutlineType);
    if (!o)
        return NULL;
    o->body = Py_NewRef(body);
    o->places = NULL;
    o->fields = o->few_fields;
    o->items = o->few_items;
    o->n_fields = o->n_items = 0;
    o->fields_room = FEW_FIELDS;
    o->items_room = FEW_ITEMS;
    memset(o->known, 0, sizeof o->known);
    *found = (speakers){.unsure = 0};
    if (read_body(o, found))
        return o;
    Py_DECREF(o);
    return NULL;
}

/* ---- What the outline tells ---- */

/* Names beyond ASCII are nobody's here, and are left out. */
static int is_plain(ptr p, size_t len) {
    for (size_t i = 0; i < len; i++)
        if (p[i] >= 0x80)
            return 0;
    return len <= MAX_FIELD_BYTES;
}

static int add_place(const Outline *o, PyObject *places, const field *f) {
    ptr at = text_of(o) + f->name.start;
    size_t len = f->name.end - f->name.start;
    PyObject *text, *where;
    if (f->known != KNOWN)
        text = Py_NewRef(names[f->known]);
    else if (!is_plain(at, len))
        return 0;
    else
        text = PyUnicode_DecodeASCII((const char *)at, len, NULL);
    where = text ? Py_BuildValue("II", f->value.start, f->value.end) : NULL;
    int failed = !where || PyDict_SetItem(places, text, where) < 0;
    Py_XDECREF(text);
    Py_XDECREF(where);
    return failed ? -1 : 0;
}

static PyObject *outline_fields(Outline *o, void *closure) {
    (void)closure;
    if (!o->places) {
        PyObject *places = PyDict_New();
        for (uint32_t i = 0; places && i < o->n_fields; i++)
            if (add_place(o, places, &o->fields[i]) < 0)
                Py_CLEAR(places);
        o->places = places;
    }
    return Py_XNewRef(o->places);
}

static PyObject *outline_spans(Outline *o, void *closure) {
    (void)closure;
    return PyBytes_FromStringAndSize((char *)o->items, o->n_items * sizeof(span));
}

static inline int is_stripped(unsigned char c) {
    return c == ']' || c == '}' || c == '"' || c == ' ' || c == '\r' || c == '\n' || c == '\t';
}

static PyObject *outline_stand_in(Outline *o, PyObject *nothing) {
    static const int prompt_fields[] = {SYSTEM, INSTRUCTIONS, TOOLS, PROMPT, INPUT, MESSAGES};
    enum { PIECES = sizeof prompt_fields / sizeof *prompt_fields };
    span pieces[PIECES];
    size_t len = 0;
    (void)nothing;
    for (int i = PIECES - 1; i >= 0; i--) {
        span piece = o->known[prompt_fields[i]];
        while (!len && piece.end > piece.start && is_stripped(text_of(o)[piece.end - 1]))
            piece.end--;
        len += piece.end - piece.start;
        pieces[i] = piece;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, (len + TOKEN_BYTES - 1) / TOKEN_BYTES * TOKEN_BYTES);
    if (!made)
        return NULL;
    char *to = PyBytes_AS_STRING(made);
    for (int i = 0; i < PIECES; i++) {
        memcpy(to, text_of(o) + pieces[i].start, pieces[i].end - pieces[i].start);
        to += pieces[i].end - pieces[i].start;
    }
    memset(to, 0, PyBytes_AS_STRING(made) + PyBytes_GET_SIZE(made) - to);
    return made;
}

/* These return NULL where they are unsure, without an exception, or with one where memory ran out. */

/* A text; nothing where there is none, or something else. */
static PyObject *text_in(const Outline *o, int which) {
    text t;
    ptr p = value_of(o, which);
    TEXT(t, MAX_NAME_BYTES);
    if (p && *p == '"' && (size_of(o, which) > MAX_NAME_BYTES || !add_string(&t, p + 1, end_of(o))))
        return NULL;
    return PyUnicode_DecodeUTF8((char *)t.bytes, length(&t), "surrogatepass");
}

/* The same of a value whose other kinds the real parser has to judge. */
static PyObject *sure_text_in(const Outline *o, int which) {
    ptr p = value_of(o, which);
    return p && (*p == '[' || *p == '{') ? NULL : text_in(o, which);
}

/* 1: a number without fraction. 0: none. -1: unsure. */
static int integer_in(const Outline *o, int which, long long *found) {
    ptr p = value_of(o, which), end = p + size_of(o, which);
    if (!p || *p == 'n' || *p == 't' || *p == 'f')
        return 0;
    int minus = *p == '-';
    long long made = 0;
    p += minus;
    if (end - p > 18 || (minus && *p == '0'))
        return -1;
    for (; p < end; p++) {
        if (*p < '0' || *p > '9')
            return -1;
        made = 10 * made + (*p - '0');
    }
    *found = minus ? -made : made;
    return 1;
}

/* 1: true. 0: something else, or nothing. -1: unsure. */
static int is_true_in(const Outline *o, int which) {
    ptr p = value_of(o, which);
    return p && (*p == '"' || *p == '[' || *p == '{') ? -1 : p && *p == 't';
}

/* `unsaid` stands for max_tokens where the body has none. */
static PyObject *outline_about(Outline *o, PyObject *unsaid) {
    int is_said = 0, streams = is_true_in(o, STREAM);
    long long most = 0, priority = 0;
    if (streams < 0 || integer_in(o, PRIORITY, &priority) < 0)
        Py_RETURN_NONE;
    for (int which = MAX_COMPLETION_TOKENS; which <= MAX_OUTPUT_TOKENS && !is_said; which++)
        if ((is_said = integer_in(o, which, &most)) < 0)
            Py_RETURN_NONE;
    PyObject *model = sure_text_in(o, MODEL), *salt = model ? sure_text_in(o, CACHE_SALT) : NULL, *answer = NULL;
    if (salt) {
        PyObject *tokens = is_said ? PyLong_FromLongLong(most) : Py_NewRef(value_of(o, MAX_TOKENS) ? Py_None : unsaid);
        PyObject *rank = PyLong_FromLongLong(priority);
        if (tokens && rank)
            answer = PyTuple_Pack(5, model, tokens, rank, salt, streams ? Py_True : Py_False);
        Py_XDECREF(tokens);
        Py_XDECREF(rank);
    } else if (!PyErr_Occurred())
        answer = Py_NewRef(Py_None);
    Py_XDECREF(model);
    Py_XDECREF(salt);
    return answer;
}

/* ---- The ask ---- */

static PyObject *session_of(const Outline *o) {
    text t;
    TEXT(t, MAX_NAME_BYTES);
    for (int which = SESSION_ID; which <= USER && !t.characters; which++) {
        ptr p = value_of(o, which);
        if (!p)
            continue;
        if (*p == '"') {
            if (size_of(o, which) > MAX_NAME_BYTES || !add_string(&t, p + 1, end_of(o)))
                return NULL;
        } else if (*p == '-' || is_digit(p, end_of(o))) {
            if (!is_integer(p, p + size_of(o, which)))
                continue;
            if (is_minus_zero(p))
                return NULL;
            add_word(&t, p, size_of(o, which));
        }
    }
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

/* The beginning of the text in a value; None without one that should be there, nothing in one that has no text. */
static PyObject *beginning_of(int present, ptr p, ptr end) {
    text t;
    if (!present)
        Py_RETURN_NONE;
    TEXT(t, KEY_CHARACTERS);
    if (p && !add_texts(&t, p, end, 0))
        return NULL;
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

static PyObject *system_of(const Outline *o, const speakers *found) {
    for (int which = SYSTEM; which <= INSTRUCTIONS; which++)
        if (value_of(o, which))
            return beginning_of(1, value_of(o, which), end_of(o));
    return beginning_of(found->has_system_message, found->system_message, end_of(o));
}

static PyObject *user_of(const Outline *o, const speakers *found) {
    for (int which = PROMPT; which <= TEXT_1 && !found->has_user_message; which++)
        if (value_of(o, which))
            return beginning_of(1, value_of(o, which), end_of(o));
    return beginning_of(found->has_user_message, found->user_message, end_of(o));
}

static PyObject *scan(PyObject *self, PyObject *body) {
    (void)self;
    speakers found;
    Outline *o = made_of(body, &found);
    PyObject *answer = NULL, *model = NULL, *system = NULL, *user = NULL, *session = NULL;
    if (o && !found.unsure) {
        if ((model = text_in(o, MODEL)) && (system = system_of(o, &found)) && (user = user_of(o, &found)) &&
            (session = session_of(o)))
            answer = PyTuple_Pack(5, model, system, user, session, (PyObject *)o);
    }
    Py_XDECREF(model);
    Py_XDECREF(system);
    Py_XDECREF(user);
    Py_XDECREF(session);
    Py_XDECREF(o);
    return answer || PyErr_Occurred() ? answer : Py_NewRef(Py_None);
}

static PyObject *outline_of(PyObject *self, PyObject *body) {
    (void)self;
    speakers found;
    PyObject *made = (PyObject *)made_of(body, &found);
    return made || PyErr_Occurred() ? made : Py_NewRef(Py_None);
}

/* ---- The module ---- */

static PyGetSetDef outline_getters[] = {
    {"fields", (getter)outline_fields, NULL, "Where the value of each field begins and ends.", NULL},
    {"spans", (getter)outline_spans, NULL, "Where each item of `messages` begins and ends, as uint32.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef outline_methods[] = {
    {"about", (PyCFunction)outline_about, METH_O, "What the body says beside its prompt."},
    {"stand_in", (PyCFunction)outline_stand_in, METH_NOARGS, "The prompt's own bytes, four to a token."},
    {NULL, NULL, 0, NULL}};

static PyTypeObject OutlineType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._scan.Outline",
    .tp_basicsize = sizeof(Outline),
    .tp_dealloc = (destructor)outline_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Where things lie in a JSON body.",
    .tp_getset = outline_getters,
    .tp_methods = outline_methods,
};

static PyMethodDef methods[] = {
    {"scan", scan, METH_O,
     "(model, system prompt's beginning, first user message's beginning, session, outline) of a JSON body."},
    {"outline_of", outline_of, METH_O, "The outline of a JSON body by itself."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scan", "What routing needs of a JSON body.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) {
    prepare_json();
    for (int i = 0; i < KNOWN; i++)
        if (!(names[i] = PyUnicode_InternFromString(known_names[i])))
            return NULL;
    if (PyType_Ready(&OutlineType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Outline", (PyObject *)&OutlineType) < 0)
        Py_CLEAR(made);
    return made;
}
