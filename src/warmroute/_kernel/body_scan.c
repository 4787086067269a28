/* What routing needs of a request's JSON body, found in one pass over its bytes: where its fields and messages lie (the
 * outline), the model, the session, and the first characters of the system prompt and of the first user message.
 *
 * The rules:
 * - A result is given only where json.loads would give the same one. For a body that is malformed, or well-formed but too
 *   rare to be worth code here (NaN, UTF-16, escaped names, very deep nesting), the result is None and a real parser
 *   decides. One liberty is taken: text that is only skipped is not checked to be UTF-8.
 * - Functions that read take a position and the end of the body, and return the position after what they read. NULL means
 *   undecided: a real parser has to read this body.
 *
 * prompt/body_fields.py and prompt/request_body.py are the same in plain Python; tests/prompt/test_body_fields.py and
 * test_request_body.py compare them.
 */
#include "body_scan.h"
#include "json_skip.h"

#define MAX_NAME_BYTES 1024 /* of a model's or session's name, as it lies in the body */
#define MAX_FIELD_BYTES 128 /* of a field's name */
#define MAX_PARTS_DEPTH 4   /* each level of content parts is skipped once more for the levels around it */
#define MAX_BODY_BYTES INT32_MAX

/* ---- Decoding text. These read values that were skipped before, and so are known to be well-formed. ---- */

/* Decoded text, in UTF-8, up to a number of characters. */
typedef struct {
    int characters, limit;
    unsigned char *to;
    unsigned char bytes[4 * KEY_CHARACTERS + 16]; /* 16 more, since plain characters are copied 16 at a time */
} text;

#define START(which, most) (which).characters = 0, (which).limit = (most), (which).to = (which).bytes

static inline Py_ssize_t length(const text *t) { return t->to - t->bytes; }

static inline uint32_t hex(ptr p) {
    return (uint32_t)hex_value[p[0]] << 12 | (uint32_t)hex_value[p[1]] << 8 | (uint32_t)hex_value[p[2]] << 4 | hex_value[p[3]];
}

/* A lone surrogate is encoded like any other character, as Python's "surrogatepass" does. */
static void add_character(text *t, uint32_t c) {
    t->characters++;
    if (c < 0x80) {
        *t->to++ = (unsigned char)c;
    } else if (c < 0x800) {
        *t->to++ = (unsigned char)(0xc0 | c >> 6);
        *t->to++ = 0x80 | (c & 63);
    } else if (c < 0x10000) {
        *t->to++ = (unsigned char)(0xe0 | c >> 12);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    } else {
        *t->to++ = (unsigned char)(0xf0 | c >> 18);
        *t->to++ = 0x80 | (c >> 12 & 63);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    }
}

static ptr add_escape(text *t, ptr p) {
    static const char letters[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    if (p[1] != 'u') {
        const char *found = strchr(letters, p[1]);
        add_character(t, (unsigned char)(found ? meanings[found - letters] : p[1]));
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

/* A character beyond ASCII; json.loads accepts encoded surrogates, too. This can't read past the string: its closing quote
 * is no continuation byte. */
static ptr add_multibyte(text *t, ptr p) {
    int more = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : 1;
    uint32_t c = *p & (0x3fu >> more), least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
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

/* Decodes a string from after its opening quote, to its closing quote or until the text is full. */
static ptr add_string(text *t, ptr p, ptr end) {
    while (p && t->characters < t->limit) {
#if defined(__SSE2__)
        while (t->limit - t->characters >= 16 && end - p >= 16) {
            __m128i sixteen = load16(p);
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
            p = add_multibyte(t, p);
        else {
            *t->to++ = *p++;
            t->characters++;
        }
    }
    return p;
}

static void add_ascii(text *t, ptr p, size_t len) {
    for (; len && t->characters < t->limit; len--, t->characters++)
        *t->to++ = *p++;
}

static inline int is_integer(ptr p, ptr end) {
    for (; p < end; p++)
        if (*p == '.' || (*p | 32) == 'e')
            return 0;
    return 1;
}

static inline int is_minus_zero(ptr p) { return p[0] == '-' && p[1] == '0'; }

static inline int is(const name *key, const char *other, size_t len) {
    return key->len == len && !memcmp(key->at, other, len);
}

/* A name with an escape may be any name. */
static inline int is_escaped(const name *key) { return memchr(key->at, '\\', key->len) != NULL; }

/* Adds the text of a prompt or of a message's content: a string, the texts of content parts, the first prompt of a batch,
 * or token ids. Returns 0 where that is undecided. */
static int add_content(text *t, ptr p, ptr end, int depth) {
    int more;
    ptr found = NULL, content = NULL;
    name key;
    switch (*p) {
    case '"': return add_string(t, p + 1, end) != NULL;
    case '[':
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more && t->characters < t->limit) {
            ptr item = p;
            if (!(p = skip_value(p, end, 0)))
                return 0;
            switch (*item) {
            case '"': case '[': case '{':
                if (depth == MAX_PARTS_DEPTH || !add_content(t, item, end, depth + 1))
                    return 0;
                break;
            case 't': add_ascii(t, (ptr)"True,", 5); break;
            case 'f': add_ascii(t, (ptr)"False,", 6); break;
            case 'n': break;
            default:
                if (!is_integer(item, p))
                    break;
                if (is_minus_zero(item))
                    return 0;
                add_ascii(t, item, (size_t)(p - item));
                add_ascii(t, (ptr)",", 1);
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
            if ((p = skip_value(p, end, 0)))
                p = next_member(p, end, 0, &key, &more);
        }
        found = found ? found : content;
        return p && (!found || (depth < MAX_PARTS_DEPTH && add_content(t, found, end, depth + 1)));
    default: return 1;
    }
}

/* ---- The outline ---- */

static const char *const known_names[KNOWN] = {
    "model", "messages", "system", "instructions", "prompt", "input", "query", "text_1", "session_id", "conversation_id",
    "prompt_cache_key", "user", "cache_salt", "stream", "priority", "max_completion_tokens", "max_tokens",
    "max_output_tokens", "tools", "tool_choice", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation", "padding",
    "kv_transfer_params"};
static PyObject *interned_names[KNOWN];

/* The number of a known field; KNOWN for any other. */
static uint32_t field_number(const name *key) {
#define IF(field, text) if (is(key, text, sizeof text - 1)) return field
    switch (key->len) {
    case 4: IF(USER, "user"); break;
    case 5: IF(MODEL, "model"); IF(TOOLS, "tools"); IF(INPUT, "input"); IF(QUERY, "query"); break;
    case 6: IF(STREAM, "stream"); IF(SYSTEM, "system"); IF(PROMPT, "prompt"); IF(TEXT_1, "text_1"); break;
    case 7: IF(PADDING, "padding"); break;
    case 8: IF(MESSAGES, "messages"); IF(PRIORITY, "priority"); break;
    case 9: IF(DOCUMENTS, "documents"); break;
    case 10: IF(MAX_TOKENS, "max_tokens"); IF(CACHE_SALT, "cache_salt"); IF(SESSION_ID, "session_id");
             IF(TRUNCATION, "truncation"); break;
    case 11: IF(TOOL_CHOICE, "tool_choice"); break;
    case 12: IF(INSTRUCTIONS, "instructions"); break;
    case 13: IF(CHAT_TEMPLATE, "chat_template"); break;
    case 15: IF(CONVERSATION_ID, "conversation_id"); break;
    case 16: IF(PROMPT_CACHE_KEY, "prompt_cache_key"); IF(REASONING_EFFORT, "reasoning_effort"); break;
    case 17: IF(MAX_OUTPUT_TOKENS, "max_output_tokens"); break;
    case 18: IF(ADD_SPECIAL_TOKENS, "add_special_tokens"); IF(KV_TRANSFER_PARAMS, "kv_transfer_params"); break;
    case 20: IF(CHAT_TEMPLATE_KWARGS, "chat_template_kwargs"); break;
    case 21: IF(MAX_COMPLETION_TOKENS, "max_completion_tokens"); IF(ADD_GENERATION_PROMPT, "add_generation_prompt"); break;
    case 22: IF(CONTINUE_FINAL_MESSAGE, "continue_final_message"); IF(TRUNCATE_PROMPT_TOKENS, "truncate_prompt_tokens"); break;
    }
#undef IF
    return KNOWN;
}

/* The content of the first system (or developer) message, and of the first user message. */
typedef struct {
    ptr system_content, user_content; /* NULL where the message has none */
    int has_system_message, has_user_message;
    int undecided;
} first_messages;

static inline ptr end_of(const Outline *o) { return text_of(o) + PyBytes_GET_SIZE(o->body); }

static inline uint32_t offset(const Outline *o, ptr p) { return (uint32_t)(p - text_of(o)); }

/* Where the value of a known field begins; NULL where the body has none. */
static inline ptr value_of(const Outline *o, int which) {
    return o->known[which].start ? text_of(o) + o->known[which].start : NULL;
}

static inline size_t size_of(const Outline *o, int which) { return o->known[which].end - o->known[which].start; }

/* Doubles an array that begins as `few`; NULL with an exception without memory. */
static void *doubled(void *all, void *few, uint32_t *room, size_t size) {
    void *more = all == few ? PyMem_Malloc(2 * (size_t)*room * size) : PyMem_Realloc(all, 2 * (size_t)*room * size);
    if (!more)
        return PyErr_NoMemory();
    if (all == few)
        memcpy(more, few, *room * size);
    *room *= 2;
    return more;
}

static int add_field(Outline *o, const name *key, uint32_t which, ptr start, ptr end) {
    span value = {offset(o, start), offset(o, end)};
    if (o->n_fields == o->fields_room) {
        field *more = doubled(o->fields, o->few_fields, &o->fields_room, sizeof(field));
        if (!more)
            return -1;
        o->fields = more;
    }
    if (which != KNOWN)
        o->known[which] = value;
    o->fields[o->n_fields++] = (field){{offset(o, key->at), offset(o, key->at + key->len)}, value, which};
    return 0;
}

static int add_message(Outline *o, const message *given) {
    if (o->n_messages == o->messages_room) {
        message *more = doubled(o->messages, o->few_messages, &o->messages_room, sizeof(message));
        if (!more)
            return -1;
        o->messages = more;
    }
    o->messages[o->n_messages++] = *given;
    return 0;
}

/* Whether prompt/template_messages.py gives this member of a message to the template, besides role and content. */
static int reaches_template(const name *key) {
    switch (key->len) {
    case 4: return is(key, "name", 4) || is(key, "task", 4);
    case 5: return is(key, "tools", 5);
    case 9: return is(key, "reasoning", 9);
    case 10: return is(key, "tool_calls", 10);
    case 12: return is(key, "tool_call_id", 12);
    case 17: return is(key, "reasoning_content", 17);
    default: return 0;
    }
}

/* The text in a content that is a list of one text part with no other members; NULL for any other list. */
static ptr only_text_part(ptr p, ptr end) {
    int more, is_text = 0;
    ptr text = NULL;
    name key;
    p = next_item(p + 1, end, ']', 1, &more);
    if (!p || !more || *p != '{')
        return NULL;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr value = p;
        if (!(p = skip_value(p, end, 4)))
            return NULL;
        if (is(&key, "type", 4) && !is_text && p - value == 6 && !memcmp(value, "\"text\"", 6))
            is_text = 1;
        else if (is(&key, "text", 4) && !text && *value == '"')
            text = value;
        else
            return NULL;
        p = next_member(p, end, 0, &key, &more);
    }
    p = p ? next_item(p, end, ']', 0, &more) : NULL;
    return p && !more && is_text ? text : NULL;
}

static uint32_t plain_role(const name *role) {
    if (is(role, "user", 4))
        return USER_MESSAGE;
    if (is(role, "assistant", 9))
        return ASSISTANT_MESSAGE;
    return is(role, "system", 6) ? SYSTEM_MESSAGE : NOT_PLAIN;
}

/* Notes the content of the first user message, and of the first system message before it. */
static void note_first(first_messages *found, const name *role, ptr content) {
    if (is(role, "user", 4)) {
        found->has_user_message = 1;
        found->user_content = content;
    } else if (is(role, "system", 6) || is(role, "developer", 9)) {
        if (!found->has_system_message)
            found->system_content = content;
        found->has_system_message = 1;
    } else if (is_escaped(role)) {
        found->undecided = 1;
    }
}

static ptr read_message(const Outline *o, ptr p, ptr end, first_messages *found, message *to) {
    int more, has_escaped_name = 0, is_plain = 1;
    ptr role = NULL, role_end = NULL, content = NULL, content_end = NULL;
    name key;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr value = p;
        if (!(p = skip_value(p, end, 3)))
            return NULL;
        if (is(&key, "role", 4)) {
            is_plain &= !role;
            role = value;
            role_end = p;
        } else if (is(&key, "content", 7)) {
            is_plain &= !content;
            content = value;
            content_end = p;
        } else if (is_escaped(&key)) {
            has_escaped_name = 1;
        } else if (reaches_template(&key) && *value != 'n' && memcmp(value, "[]", 2)) {
            is_plain = 0;
        }
        p = next_member(p, end, 0, &key, &more);
    }
    if (!p)
        return NULL;
    if (!found->has_user_message)
        found->undecided |= has_escaped_name;
    if (!role || *role != '"')
        return p;
    key = (name){role + 1, (size_t)(role_end - 1 - (role + 1))};
    if (!found->has_user_message)
        note_first(found, &key, content);
    if (!is_plain || has_escaped_name || !content)
        return p;
    if (*content == '[' && (content = only_text_part(content, end)))
        content_end = skip_string(content + 1, end);
    if (content && *content == '"') {
        to->role = plain_role(&key);
        to->content = (span){offset(o, content + 1), offset(o, content_end - 1)};
    }
    return p;
}

/* Reads the list of messages. NULL where undecided, or with an exception without memory. */
static ptr read_messages(Outline *o, ptr p, ptr end, first_messages *found) {
    int more;
    o->n_messages = 0;
    *found = (first_messages){.undecided = 0};
    if (*p != '[')
        return skip_value(p, end, 1);
    p = next_item(p + 1, end, ']', 1, &more);
    while (p && more) {
        message made = {.whole = {offset(o, p), 0}, .role = NOT_PLAIN};
        p = *p == '{' ? read_message(o, p, end, found, &made) : skip_value(p, end, 2);
        if (!p)
            return NULL;
        made.whole.end = offset(o, p);
        if (add_message(o, &made) < 0)
            return NULL;
        p = next_item(p, end, ']', 0, &more);
    }
    return p;
}

/* The pass over the body. 0 where undecided, or with an exception without memory. */
static int read_body(Outline *o, first_messages *found) {
    int more;
    name key;
    ptr p = text_of(o), end = end_of(o);
    if (!(p = skip_space(p, end)) || *p != '{')
        return 0;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr start = p;
        uint32_t which = field_number(&key);
        if (which == KNOWN && is_escaped(&key))
            return 0;
        p = which == MESSAGES ? read_messages(o, p, end, found) : skip_value(p, end, 1);
        if (!p || add_field(o, &key, which, start, p) < 0)
            return 0;
        p = next_member(p, end, 0, &key, &more);
    }
    return p && !skip_space(p, end);
}

static void outline_dealloc(Outline *o) {
    if (o->fields != o->few_fields)
        PyMem_Free(o->fields);
    if (o->messages != o->few_messages)
        PyMem_Free(o->messages);
    PyMem_Free(o->message_keys);
    Py_XDECREF(o->keys_layout);
    Py_XDECREF(o->body);
    Py_XDECREF(o->field_spans);
    PyObject_Free(o);
}

/* NULL where undecided, or with an exception. */
static Outline *make_outline(PyObject *body, first_messages *found) {
    if (check_type(body, &PyBytes_Type) < 0)
        return NULL;
    if (PyBytes_GET_SIZE(body) > MAX_BODY_BYTES)
        return NULL;
    Outline *o = PyObject_New(Outline, &OutlineType);
    if (!o)
        return NULL;
    o->body = Py_NewRef(body);
    o->field_spans = NULL;
    o->message_keys = NULL;
    o->keys_layout = NULL;
    o->fields = o->few_fields;
    o->messages = o->few_messages;
    o->n_fields = o->n_messages = o->n_message_keys = 0;
    o->fields_room = FEW_FIELDS;
    o->messages_room = FEW_MESSAGES;
    memset(o->known, 0, sizeof o->known);
    *found = (first_messages){.undecided = 0};
    if (read_body(o, found))
        return o;
    Py_DECREF(o);
    return NULL;
}

/* ---- What Python reads of the outline ---- */

static int is_short_ascii(ptr p, size_t len) {
    for (size_t i = 0; i < len; i++)
        if (p[i] >= 0x80)
            return 0;
    return len <= MAX_FIELD_BYTES;
}

static int add_span(const Outline *o, PyObject *spans, const field *f) {
    ptr at = text_of(o) + f->name.start;
    size_t len = f->name.end - f->name.start;
    PyObject *text, *where;
    if (f->known != KNOWN)
        text = Py_NewRef(interned_names[f->known]);
    else if (!is_short_ascii(at, len))
        return 0;
    else
        text = PyUnicode_DecodeASCII((const char *)at, (Py_ssize_t)len, NULL);
    where = text ? Py_BuildValue("II", f->value.start, f->value.end) : NULL;
    int failed = !where || PyDict_SetItem(spans, text, where) < 0;
    Py_XDECREF(text);
    Py_XDECREF(where);
    return failed ? -1 : 0;
}

static PyObject *outline_fields(Outline *o, void *closure) {
    (void)closure;
    if (!o->field_spans) {
        PyObject *spans = PyDict_New();
        for (uint32_t i = 0; spans && i < o->n_fields; i++)
            if (add_span(o, spans, &o->fields[i]) < 0)
                Py_CLEAR(spans);
        Py_XSETREF(o->field_spans, spans);
    }
    return Py_XNewRef(o->field_spans);
}

static PyObject *outline_message_spans(Outline *o, void *closure) {
    (void)closure;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(o->n_messages * sizeof(span)));
    for (uint32_t i = 0; made && i < o->n_messages; i++)
        memcpy(PyBytes_AS_STRING(made) + i * sizeof(span), &o->messages[i].whole, sizeof(span));
    return made;
}

/* The fields that change how a chat is rendered, in this order, so that equal contexts have equal keys. */
static PyObject *outline_chat_context(Outline *o, PyObject *unused) {
    digest made = {0, 0};
    (void)unused;
    for (int which = TOOLS; which <= ADD_SPECIAL_TOKENS; which++)
        if (value_of(o, which)) {
            uint64_t number = (uint64_t)which;
            made = extend_digest(made, (const uint8_t *)&number, sizeof number);
            made = extend_digest(made, value_of(o, which), size_of(o, which));
        }
    return PyBytes_FromStringAndSize((char *)&made, DIGEST_BYTES);
}

static PyObject *outline_has_cache_salt(Outline *o, void *closure) {
    (void)closure;
    return PyBool_FromLong(value_of(o, CACHE_SALT) != NULL);
}

static PyObject *outline_may_change_tokens(Outline *o, void *closure) {
    (void)closure;
    for (int which = TRUNCATE_PROMPT_TOKENS; which <= KV_TRANSFER_PARAMS; which++)
        if (value_of(o, which))
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* Decodes a string that was skipped before, from after its opening quote to its closing quote. None where it is no UTF-8. */
static PyObject *decoded_string(ptr p, ptr end) {
    text t;
    ptr escape = memchr(p, '\\', (size_t)(end - p));
    PyObject *made;
    if (!escape) {
        made = PyUnicode_DecodeUTF8((const char *)p, end - p, "surrogatepass");
    } else {
        unsigned char *bytes = PyMem_Malloc((size_t)(end - p)); /* an escape is longer than its character */
        if (!bytes)
            return PyErr_NoMemory();
        START(t, 0);
        t.to = bytes;
        while (escape) {
            memcpy(t.to, p, (size_t)(escape - p));
            t.to += escape - p;
            p = add_escape(&t, escape);
            escape = p < end && *p == '\\' ? p : memchr(p, '\\', (size_t)(end - p));
        }
        memcpy(t.to, p, (size_t)(end - p));
        made = PyUnicode_DecodeUTF8((const char *)bytes, t.to + (end - p) - bytes, "surrogatepass");
        PyMem_Free(bytes);
    }
    if (!made && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return made;
}

static PyObject *outline_plain_text(Outline *o, PyObject *number) {
    Py_ssize_t i;
    if (as_size(number, &i) < 0)
        return NULL;
    if (i < 0 || i >= (Py_ssize_t)o->n_messages) {
        PyErr_SetString(PyExc_IndexError, "there is no such message");
        return NULL;
    }
    const message *m = &o->messages[i];
    if (m->role == NOT_PLAIN)
        Py_RETURN_NONE;
    return decoded_string(text_of(o) + m->content.start, text_of(o) + m->content.end);
}

static PyObject *outline_plain_roles(Outline *o, void *closure) {
    (void)closure;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)o->n_messages);
    for (uint32_t i = 0; made && i < o->n_messages; i++)
        PyBytes_AS_STRING(made)[i] = (char)o->messages[i].role;
    return made;
}

static PyObject *outline_message_count(Outline *o, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(o->n_messages);
}

static inline int is_closing(unsigned char c) {
    return c == ']' || c == '}' || c == '"' || c == ' ' || c == '\r' || c == '\n' || c == '\t';
}

/* The JSON text of the fields that make the prompt, one after the other, without what closes the last of them: then a
 * longer conversation begins with the bytes of the shorter one. */
static PyObject *outline_text_as_tokens(Outline *o, PyObject *unused) {
    static const int prompt_fields[] = {SYSTEM, INSTRUCTIONS, TOOLS, PROMPT, INPUT, MESSAGES};
    enum { PIECES = sizeof prompt_fields / sizeof *prompt_fields };
    span pieces[PIECES];
    size_t len = 0;
    (void)unused;
    for (int i = PIECES - 1; i >= 0; i--) {
        span piece = o->known[prompt_fields[i]];
        while (!len && piece.end > piece.start && is_closing(text_of(o)[piece.end - 1]))
            piece.end--;
        len += piece.end - piece.start;
        pieces[i] = piece;
    }
    size_t padded = (len + TOKEN_BYTES - 1) / TOKEN_BYTES * TOKEN_BYTES;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)padded);
    if (!made)
        return NULL;
    char *to = PyBytes_AS_STRING(made);
    for (int i = 0; i < PIECES; i++) {
        memcpy(to, text_of(o) + pieces[i].start, pieces[i].end - pieces[i].start);
        to += pieces[i].end - pieces[i].start;
    }
    memset(to, 0, padded - len);
    return made;
}

/* The functions below return NULL where undecided, or with an exception without memory. */

/* A string; "" where the field is missing or has another type. */
static PyObject *string_in(const Outline *o, int which) {
    text t;
    ptr p = value_of(o, which);
    START(t, MAX_NAME_BYTES);
    if (p && *p == '"' && (size_of(o, which) > MAX_NAME_BYTES || !add_string(&t, p + 1, end_of(o))))
        return NULL;
    return PyUnicode_DecodeUTF8((char *)t.bytes, length(&t), "surrogatepass");
}

/* The same, but undecided for a list or an object. */
static PyObject *plain_string_in(const Outline *o, int which) {
    ptr p = value_of(o, which);
    return p && (*p == '[' || *p == '{') ? NULL : string_in(o, which);
}

/* 1: an integer. 0: none. -1: undecided. */
static int integer_in(const Outline *o, int which, long long *found) {
    ptr p = value_of(o, which);
    if (!p || *p == 'n' || *p == 't' || *p == 'f')
        return 0;
    ptr end = p + size_of(o, which);
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

/* 1: true. 0: something else, or missing. -1: undecided. */
static int is_true_in(const Outline *o, int which) {
    ptr p = value_of(o, which);
    return p && (*p == '"' || *p == '[' || *p == '{') ? -1 : p && *p == 't';
}

static PyObject *outline_parameters(Outline *o, PyObject *default_max_tokens) {
    int is_given = 0, streams = is_true_in(o, STREAM);
    long long most = 0, priority = 0;
    if (streams < 0 || integer_in(o, PRIORITY, &priority) < 0)
        Py_RETURN_NONE;
    for (int which = MAX_COMPLETION_TOKENS; which <= MAX_OUTPUT_TOKENS && !is_given; which++)
        if ((is_given = integer_in(o, which, &most)) < 0)
            Py_RETURN_NONE;
    PyObject *model = plain_string_in(o, MODEL), *salt = model ? plain_string_in(o, CACHE_SALT) : NULL, *result = NULL;
    if (salt) {
        PyObject *max_tokens = is_given ? PyLong_FromLongLong(most)
                                        : Py_NewRef(value_of(o, MAX_TOKENS) ? Py_None : default_max_tokens);
        PyObject *rank = PyLong_FromLongLong(priority);
        if (max_tokens && rank)
            result = PyTuple_Pack(5, model, max_tokens, rank, salt, streams ? Py_True : Py_False);
        Py_XDECREF(max_tokens);
        Py_XDECREF(rank);
    } else if (!PyErr_Occurred()) {
        result = Py_NewRef(Py_None);
    }
    Py_XDECREF(model);
    Py_XDECREF(salt);
    return result;
}

/* ---- What identifies a conversation ---- */

static PyObject *session_of(const Outline *o) {
    text t;
    START(t, MAX_NAME_BYTES);
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
            add_ascii(&t, p, size_of(o, which));
        }
    }
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

/* The first KEY_CHARACTERS of the text in a value. None where it is not `present`; b"" where it has no text. */
static PyObject *beginning_of(int present, ptr p, ptr end) {
    text t;
    if (!present)
        Py_RETURN_NONE;
    START(t, KEY_CHARACTERS);
    if (p && !add_content(&t, p, end, 0))
        return NULL;
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

static PyObject *system_of(const Outline *o, const first_messages *found) {
    for (int which = SYSTEM; which <= INSTRUCTIONS; which++)
        if (value_of(o, which))
            return beginning_of(1, value_of(o, which), end_of(o));
    return beginning_of(found->has_system_message, found->system_content, end_of(o));
}

static PyObject *user_of(const Outline *o, const first_messages *found) {
    for (int which = PROMPT; which <= TEXT_1 && !found->has_user_message; which++)
        if (value_of(o, which))
            return beginning_of(1, value_of(o, which), end_of(o));
    return beginning_of(found->has_user_message, found->user_content, end_of(o));
}

static PyObject *scan_body(PyObject *self, PyObject *body) {
    (void)self;
    first_messages found;
    Outline *o = make_outline(body, &found);
    PyObject *result = NULL, *model = NULL, *system = NULL, *user = NULL, *session = NULL;
    if (o && !found.undecided) {
        if ((model = string_in(o, MODEL)) && (system = system_of(o, &found)) && (user = user_of(o, &found)) &&
            (session = session_of(o)))
            result = PyTuple_Pack(5, model, system, user, session, (PyObject *)o);
    }
    Py_XDECREF(model);
    Py_XDECREF(system);
    Py_XDECREF(user);
    Py_XDECREF(session);
    Py_XDECREF(o);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

static PyObject *outline_body(PyObject *self, PyObject *body) {
    (void)self;
    first_messages found;
    PyObject *made = (PyObject *)make_outline(body, &found);
    return made || PyErr_Occurred() ? made : Py_NewRef(Py_None);
}

/* ---- Registration ---- */

static PyGetSetDef outline_properties[] = {
    {"fields", (getter)outline_fields, NULL, "Where the value of each field begins and ends.", NULL},
    {"has_cache_salt", (getter)outline_has_cache_salt, NULL, "Whether there is a field `cache_salt`.", NULL},
    {"may_change_tokens", (getter)outline_may_change_tokens, NULL,
     "Whether a field may change the tokens of a rendered chat.", NULL},
    {"plain_roles", (getter)outline_plain_roles, NULL, "The role of each plain message; 0 for any other.", NULL},
    {"message_count", (getter)outline_message_count, NULL, "How many items `messages` has.", NULL},
    {"message_spans", (getter)outline_message_spans, NULL, "Where each item of `messages` begins and ends, as uint32.", NULL},
    NO_PROPERTY};

static PyMethodDef outline_methods[] = {
    {"parameters", (PyCFunction)outline_parameters, METH_O,
     "Return (model, max_tokens, priority, cache_salt, stream), or None if a real parser has to read them."},
    {"chat_context", (PyCFunction)outline_chat_context, METH_NOARGS,
     "Return a digest of the fields that change how a chat is rendered."},
    {"plain_text", (PyCFunction)outline_plain_text, METH_O,
     "Return the text of a message that consists of a role and a text, or None."},
    {"text_as_tokens", (PyCFunction)outline_text_as_tokens, METH_NOARGS,
     "Return the prompt's own bytes, TOKEN_BYTES to a token."},
    NO_METHOD};

PyTypeObject OutlineType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "Outline",
    .tp_basicsize = sizeof(Outline),
    .tp_dealloc = (destructor)outline_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Where the fields and messages of a JSON body lie.",
    .tp_getset = outline_properties,
    .tp_methods = outline_methods,
};

static PyMethodDef functions[] = {
    {"scan_body", scan_body, METH_O,
     "Return (model, start of the system prompt, start of the first user message, session, outline), or None."},
    {"outline_body", outline_body, METH_O, "Return the outline of a JSON body, or None."},
    NO_METHOD};

int add_body_scan(PyObject *module) {
    prepare_json_tables();
    for (int i = 0; i < KNOWN; i++)
        if (!interned_names[i] && !(interned_names[i] = PyUnicode_InternFromString(known_names[i])))
            return -1;
    if (add_type(module, "Outline", &OutlineType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
