/* What routing needs of a request's JSON body, found in one pass over its bytes: where its fields and messages lie (the
 * outline), the model, the session, and the first characters of the system prompt and of the first user message.
 *
 * The rules:
 * - What is accepted is UTF-8 text and JSON for json.loads, too, and has the same values there.
 * - What an engine might read in another way is rejected: a field of the router given twice, or of another type than the API
 *   says (an engine may take "5" or true for a number), UTF-16, nesting deeper than MAX_JSON_DEPTH, an integer of more than
 *   MAX_INTEGER_DIGITS digits.
 * - The pass is linear, and keeps no more than MAX_FIELDS fields and MAX_MESSAGES messages. The pass over a large body
 *   releases the interpreter lock: it runs in a thread (edge/arrival.py).
 * - Functions that read take a position and the end of the body, and return the position after what they read. NULL means
 *   that the body is rejected.
 *
 * tests/prompt/reference_body.py is the same in plain Python; test_body_fields.py and test_request_body.py compare the two.
 */
#include "body_scan.h"
#include "json_text.h"
#include "utf8.h"

#define MAX_NAME_BYTES 1024 /* of a model's name or a salt, as it lies in the body */
#define MAX_FIELD_BYTES 128 /* of a field's name */
#define MAX_FIELDS 1000
#define MAX_MESSAGES 250000
#define MAX_PLAIN_BYTES (8 << 20) /* of the text of a plain message: it is decoded in one go, under the interpreter lock */
#define MAX_PARTS_DEPTH 4 /* each level of content parts is skipped once more for the levels around it */
#define MAX_BODY_BYTES INT32_MAX
#define MAX_NUMBER 1000000000000000000LL /* a larger integer counts as this */
#define BOM "\xef\xbb\xbf"

static PyObject *BadBody; /* its arguments: what is wrong, and the name of the field that is wrong, or None */

/* Adds an integer as Python prints it. */
static void add_integer(text *t, ptr p, ptr end) {
    p += p[0] == '-' && p[1] == '0';
    add_ascii(t, p, (size_t)(end - p));
}

static inline int is(const name *key, const char *other, size_t len) {
    return key->len == len && !memcmp(key->at, other, len);
}

/* The name without escapes. One with escapes is decoded into `t`, as far as it can be the name of a known field. */
static inline name plain_name(name key, ptr end, text *t) {
    if (memchr(key.at, '\\', key.len)) {
        START(*t, KEY_CHARACTERS);
        if (add_string(t, key.at, end))
            key = (name){t->bytes, (size_t)length(t)};
    }
    return key;
}

static inline int is_member(const name *key, ptr end, const char *other, size_t len) {
    text decoded;
    if (is(key, other, len))
        return 1;
    if (key->len <= len)
        return 0;
    name plain = plain_name(*key, end, &decoded);
    return is(&plain, other, len);
}

/* Adds the text of a prompt or of a message's content: a string, the texts of content parts, the first prompt of a batch,
 * or token ids. */
static void add_content(text *t, ptr p, ptr end, int depth) {
    int more;
    ptr found = NULL, content = NULL;
    name key;
    switch (*p) {
    case '"': add_string(t, p + 1, end); break;
    case '[':
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more && t->characters < t->limit) {
            ptr item = p;
            if (!(p = skip_value(p, end, 0)))
                break;
            switch (*item) {
            case '"': case '[': case '{':
                if (depth < MAX_PARTS_DEPTH)
                    add_content(t, item, end, depth + 1);
                break;
            case 't': add_ascii(t, (ptr)"True,", 5); break;
            case 'f': add_ascii(t, (ptr)"False,", 6); break;
            case 'n': break;
            default:
                if (!is_integer(item, p))
                    break;
                add_integer(t, item, p);
                add_ascii(t, (ptr)",", 1);
            }
            p = next_item(p, end, ']', 0, &more);
        }
        break;
    case '{':
        p = next_member(p + 1, end, 1, &key, &more);
        while (p && more) {
            if (is_member(&key, end, "text", 4))
                found = p;
            else if (is_member(&key, end, "content", 7))
                content = p;
            if ((p = skip_value(p, end, 0)))
                p = next_member(p, end, 0, &key, &more);
        }
        found = found ? found : content;
        if (found && depth < MAX_PARTS_DEPTH)
            add_content(t, found, end, depth + 1);
        break;
    default: break;
    }
}

/* ---- The outline ---- */

static const char *const known_names[KNOWN] = {
    "model", "messages", "system", "instructions", "prompt", "input", "query", "text_1", "session_id", "conversation_id",
    "prompt_cache_key", "user", "cache_salt", "stream", "priority", "max_completion_tokens", "max_tokens",
    "max_output_tokens", "tools", "tool_choice", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation", "padding",
    "kv_transfer_params", "prompt_logprobs", "echo"};
static PyObject *interned_names[KNOWN];

/* The number of a known field; KNOWN for any other. */
static uint32_t field_number(const name *key) {
#define IF(field, text) if (is(key, text, sizeof text - 1)) return field
    switch (key->len) {
    case 4: IF(USER, "user"); IF(ECHO_PROMPT, "echo"); break;
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
    case 15: IF(CONVERSATION_ID, "conversation_id"); IF(PROMPT_LOGPROBS, "prompt_logprobs"); break;
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

/* ---- Fields that only the router may set ---- */

/* With these, engines exchange KV caches and choose a rank: an engine connects to the address in such a field, and reads the
 * blocks of other requests. vLLM, SGLang and TensorRT-LLM have different ones. */
static const char *const engine_fields[] = {
    "kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"};
/* Fields whose members engines, or programs between the router and them, take for fields or hand to a KV connector. */
static const char *const engine_options[] = {"vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params"};
#define N_ENGINE_FIELDS (sizeof engine_fields / sizeof *engine_fields)
#define N_ENGINE_OPTIONS (sizeof engine_options / sizeof *engine_options)

/* The one of these names that this is, or NULL. Most names differ in their first letter or their length. */
static const char *one_of(const name *key, const char *const *names, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (key->len && *key->at == (unsigned char)*names[i] && is(key, names[i], strlen(names[i])))
            return names[i];
    return NULL;
}

/* The first such field at any depth of a well-formed value, or NULL. One that is null counts as not set. */
static const char *engine_field_in(ptr p, ptr end) {
    text decoded;
    while ((p = memchr(p, '"', (size_t)(end - p)))) {
        name key = {p + 1, 0};
        if (!(p = skip_string(p + 1, end)))
            break;
        key.len = (size_t)(p - 1 - key.at);
        ptr colon = skip_space(p, end), value = colon && *colon == ':' ? skip_space(colon + 1, end) : NULL;
        if (!value)
            continue;
        key = plain_name(key, end, &decoded);
        const char *found = one_of(&key, engine_fields, N_ENGINE_FIELDS);
        if (found && *value != 'n')
            return found;
        p = value;
    }
    return NULL;
}

/* The content of the first system (or developer) message, and of the first user message. */
typedef struct {
    ptr system_content, user_content; /* NULL where the message has none */
    int has_system_message, has_user_message;
} first_messages;

static inline ptr end_of(const Outline *o) { return text_of(o) + PyBytes_GET_SIZE(o->body); }

static inline uint32_t offset(const Outline *o, ptr p) { return (uint32_t)(p - text_of(o)); }

/* Where the value of a known field begins; NULL where the body has none. */
static inline ptr value_of(const Outline *o, int which) {
    return o->known[which].start ? text_of(o) + o->known[which].start : NULL;
}

static inline size_t size_of(const Outline *o, int which) { return o->known[which].end - o->known[which].start; }

/* Notes why the body is rejected, and returns -1. */
static int reject(Outline *o, const char *problem, uint32_t which) {
    o->problem = problem;
    o->problem_field = which;
    return -1;
}

static const char no_memory[] = "";

/* Doubles an array that begins as `few`; NULL without memory. Needs no interpreter lock. */
static void *doubled(void *all, void *few, uint32_t *room, size_t size) {
    void *more = all == few ? PyMem_RawMalloc(2 * (size_t)*room * size) : PyMem_RawRealloc(all, 2 * (size_t)*room * size);
    if (!more)
        return NULL;
    if (all == few)
        memcpy(more, few, *room * size);
    *room *= 2;
    return more;
}

static int add_field(Outline *o, const name *key, uint32_t which, ptr start, ptr end) {
    span value = {offset(o, start), offset(o, end)};
    if (o->n_fields == MAX_FIELDS)
        return reject(o, "it has more than 1,000 fields", KNOWN);
    if (which <= TOOLS && o->known[which].start)
        return reject(o, "must be given only once", which);
    if (o->n_fields == o->fields_room) {
        field *more = doubled(o->fields, o->few_fields, &o->fields_room, sizeof(field));
        if (!more)
            return reject(o, no_memory, KNOWN);
        o->fields = more;
    }
    if (which != KNOWN)
        o->known[which] = value;
    o->fields[o->n_fields++] = (field){{offset(o, key->at), offset(o, key->at + key->len)}, value, which};
    return 0;
}

static int add_message(Outline *o, const message *given) {
    if (o->n_messages == MAX_MESSAGES)
        return reject(o, "must have at most 250,000 items", MESSAGES);
    if (o->n_messages == o->messages_room) {
        message *more = doubled(o->messages, o->few_messages, &o->messages_room, sizeof(message));
        if (!more)
            return reject(o, no_memory, KNOWN);
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

/* What a message consists of, as far as the router reads it. */
typedef struct {
    ptr role, role_end, content, content_end; /* the last ones; NULL where there is none */
    int is_plain;                             /* nothing else reaches the template, as far as its names show */
} members;

static ptr read_members(ptr p, ptr end, members *m) {
    int more;
    name key;
    *m = (members){.is_plain = 1};
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr value = p;
        if (!(p = skip_value(p, end, 3)))
            return NULL;
        if (is_member(&key, end, "role", 4)) {
            m->is_plain &= !m->role;
            m->role = value;
            m->role_end = p;
        } else if (is_member(&key, end, "content", 7)) {
            m->is_plain &= !m->content;
            m->content = value;
            m->content_end = p;
        } else if (memchr(key.at, '\\', key.len) ||
                   (reaches_template(&key) && *value != 'n' && memcmp(value, "[]", 2))) {
            m->is_plain = 0;
        }
        p = next_member(p, end, 0, &key, &more);
    }
    return p;
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
    }
}

static ptr read_message(const Outline *o, ptr p, ptr end, first_messages *found, message *to) {
    members m;
    text decoded;
    if (!(p = read_members(p, end, &m)) || !m.role || *m.role != '"')
        return p;
    name role = plain_name((name){m.role + 1, (size_t)(m.role_end - m.role - 2)}, end, &decoded);
    if (!found->has_user_message)
        note_first(found, &role, m.content);
    if (m.is_plain && m.content && *m.content == '[' && (m.content = only_text_part(m.content, end)))
        m.content_end = skip_string(m.content + 1, end);
    if (m.is_plain && m.content && *m.content == '"' && m.content_end - m.content <= MAX_PLAIN_BYTES) {
        to->role = is(&role, "user", 4)        ? USER_MESSAGE
                   : is(&role, "assistant", 9) ? ASSISTANT_MESSAGE
                   : is(&role, "system", 6)    ? SYSTEM_MESSAGE
                                               : NOT_PLAIN;
        to->content = (span){offset(o, m.content + 1), offset(o, m.content_end - 1)};
    }
    return p;
}

/* Reads the list of messages. */
static ptr read_messages(Outline *o, ptr p, ptr end, first_messages *found) {
    int more;
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

/* The pass over the body. 0 where it is rejected. Needs no interpreter lock. */
static int read_body(Outline *o, first_messages *found) {
    int more;
    name key;
    text decoded;
    ptr p = text_of(o), end = end_of(o);
    if (!is_utf8(p, end)) {
        reject(o, "it is not UTF-8 text", KNOWN);
        return 0;
    }
    if (end - p > 3 && !memcmp(p, BOM, 3))
        p += 3;
    if (!(p = skip_space(p, end)) || *p != '{')
        return 0;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        ptr start = p;
        name plain = key;
        uint32_t which = field_number(&key);
        if (which == KNOWN) {
            plain = plain_name(key, end, &decoded);
            which = plain.at == key.at ? KNOWN : field_number(&plain);
        }
        p = which == MESSAGES ? read_messages(o, p, end, found) : skip_value(p, end, 1);
        if (!p || add_field(o, &key, which, start, p) < 0)
            return 0;
        if ((which == KNOWN || which == KV_TRANSFER_PARAMS) && !o->engine_field && *start != 'n') {
            o->engine_field = one_of(&plain, engine_fields, N_ENGINE_FIELDS);
            if (!o->engine_field && one_of(&plain, engine_options, N_ENGINE_OPTIONS))
                o->engine_field = engine_field_in(start, p);
        }
        p = next_member(p, end, 0, &key, &more);
    }
    return p && !skip_space(p, end);
}

/* The first KEY_CHARACTERS of the system prompt and of the first user message, where there are these. */
typedef struct {
    int has_system, has_user;
    text system, user;
} beginnings;

/* Finds them. Needs no interpreter lock. */
static void read_beginnings(Outline *o, const first_messages *found, beginnings *read) {
    ptr system = found->system_content, user = found->user_content;
    read->has_system = found->has_system_message;
    read->has_user = found->has_user_message;
    for (int which = INSTRUCTIONS; which >= SYSTEM; which--)
        if (value_of(o, which)) {
            system = value_of(o, which);
            read->has_system = 1;
        }
    for (int which = PROMPT; which <= TEXT_1 && !read->has_user; which++)
        if (value_of(o, which)) {
            user = value_of(o, which);
            read->has_user = 1;
        }
    START(read->system, KEY_CHARACTERS);
    START(read->user, KEY_CHARACTERS);
    if (system)
        add_content(&read->system, system, end_of(o), 0);
    if (user)
        add_content(&read->user, user, end_of(o), 0);
}

static void outline_dealloc(Outline *o) {
    if (o->fields != o->few_fields)
        PyMem_RawFree(o->fields);
    if (o->messages != o->few_messages)
        PyMem_RawFree(o->messages);
    PyMem_RawFree(o->message_keys);
    Py_XDECREF(o->keys_layout);
    Py_XDECREF(o->body);
    Py_XDECREF(o->field_spans);
    PyObject_Free(o);
}

/* Sets the exception for a body that is rejected, and returns NULL. `which`: the field that is wrong, or KNOWN. */
static void *bad_body(const char *problem, uint32_t which) {
    PyObject *arguments = Py_BuildValue("(sz)", problem, which == KNOWN ? NULL : known_names[which]);
    if (arguments)
        PyErr_SetObject(BadBody, arguments);
    Py_XDECREF(arguments);
    return NULL;
}

/* NULL with an exception. `read`: where the beginnings of the prompt go, or NULL. */
static Outline *make_outline(PyObject *body, beginnings *read) {
    int accepted;
    first_messages found = {.has_user_message = 0};
    if (check_type(body, &PyBytes_Type) < 0)
        return NULL;
    if (PyBytes_GET_SIZE(body) > MAX_BODY_BYTES)
        return bad_body("it is too large", KNOWN);
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
    o->problem = NULL;
    o->problem_field = KNOWN;
    o->engine_field = NULL;
    memset(o->known, 0, sizeof o->known);
    PyThreadState *released = PyBytes_GET_SIZE(body) > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    accepted = read_body(o, &found);
    if (accepted && read)
        read_beginnings(o, &found, read);
    if (released)
        PyEval_RestoreThread(released);
    if (accepted)
        return o;
    if (o->problem == no_memory)
        PyErr_NoMemory();
    else
        bad_body(o->problem ? o->problem : "it is malformed, or nested deeper than 256 levels", o->problem_field);
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

/* A field's name, without escapes. */
static name name_of(const Outline *o, const field *f, text *decoded) {
    return plain_name((name){text_of(o) + f->name.start, f->name.end - f->name.start}, end_of(o), decoded);
}

static int add_span(const Outline *o, PyObject *spans, const field *f) {
    text decoded;
    PyObject *key, *where;
    if (f->known != KNOWN) {
        key = Py_NewRef(interned_names[f->known]);
    } else {
        name plain = name_of(o, f, &decoded);
        if (!is_short_ascii(plain.at, plain.len))
            return 0;
        key = PyUnicode_DecodeASCII((const char *)plain.at, (Py_ssize_t)plain.len, NULL);
    }
    where = key ? Py_BuildValue("II", f->value.start, f->value.end) : NULL;
    int failed = !where || PyDict_SetItem(spans, key, where) < 0;
    Py_XDECREF(key);
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

static PyObject *outline_has_prompt_options(Outline *o, void *closure) {
    (void)closure;
    for (int which = TRUNCATE_PROMPT_TOKENS; which <= ECHO_PROMPT; which++)
        if (value_of(o, which))
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* Decodes a string that was skipped before, from after its opening quote to its closing quote. */
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
 * longer conversation begins with the bytes of the shorter one. At most `most` bytes, filled up to a multiple of `unit`. */
static PyObject *prompt_text(const Outline *o, size_t most, size_t unit) {
    static const int prompt_fields[] = {SYSTEM, INSTRUCTIONS, TOOLS, PROMPT, INPUT, MESSAGES};
    enum { PIECES = sizeof prompt_fields / sizeof *prompt_fields };
    span pieces[PIECES];
    size_t len = 0;
    for (int i = PIECES - 1; i >= 0; i--) {
        span piece = o->known[prompt_fields[i]];
        while (!len && piece.end > piece.start && is_closing(text_of(o)[piece.end - 1]))
            piece.end--;
        len += piece.end - piece.start;
        pieces[i] = piece;
    }
    len = len < most ? len : most;
    size_t padded = (len + unit - 1) / unit * unit, left = len;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)padded);
    if (!made)
        return NULL;
    char *to = PyBytes_AS_STRING(made);
    for (int i = 0; i < PIECES; i++) {
        size_t size = pieces[i].end - pieces[i].start;
        size = size < left ? size : left;
        memcpy(to, text_of(o) + pieces[i].start, size);
        to += size;
        left -= size;
    }
    memset(to, 0, padded - len);
    return made;
}

static PyObject *outline_text_as_tokens(Outline *o, PyObject *unused) {
    (void)unused;
    return prompt_text(o, (size_t)MAX_LOOKUP_TOKENS * TOKEN_BYTES, TOKEN_BYTES);
}

static PyObject *outline_text_start(Outline *o, PyObject *limit) {
    Py_ssize_t most;
    if (as_size(limit, &most) < 0)
        return NULL;
    return prompt_text(o, most > 0 ? (size_t)most : 0, 1);
}

/* Whether the body has a field with one of these names. */
static PyObject *outline_has_any(Outline *o, PyObject *names) {
    if (check_type(names, &PyTuple_Type) < 0)
        return NULL;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); k++) {
        Py_ssize_t len;
        const char *wanted = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, k), &len);
        if (!wanted)
            return NULL;
        for (uint32_t i = 0; i < o->n_fields; i++) {
            text decoded;
            name found = name_of(o, &o->fields[i], &decoded);
            if (is(&found, wanted, (size_t)len))
                Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
}

/* The functions below return NULL or -1 with an exception where the body is rejected. */

/* A string; "" where the field is missing or null. */
static PyObject *string_in(const Outline *o, int which) {
    text t;
    ptr p = value_of(o, which);
    START(t, MAX_NAME_BYTES);
    if (p && *p != 'n') {
        if (*p != '"')
            return bad_body("must be a string", (uint32_t)which);
        if (size_of(o, which) > MAX_NAME_BYTES)
            return bad_body("must be at most 1,024 bytes long", (uint32_t)which);
        add_string(&t, p + 1, end_of(o));
    }
    return PyUnicode_DecodeUTF8((char *)t.bytes, length(&t), "surrogatepass");
}

/* 1: an integer, also one that is written with zeros after a point. 0: missing or null. */
static int integer_in(const Outline *o, int which, long long *found) {
    ptr p = value_of(o, which);
    if (!p || *p == 'n')
        return 0;
    ptr end = p + size_of(o, which);
    int minus = *p == '-';
    long long made = 0;
    p += minus;
    ptr digits = p;
    for (; is_digit(p, end); p++)
        made = made < MAX_NUMBER / 10 ? 10 * made + (*p - '0') : MAX_NUMBER;
    if (p > digits && p < end && *p == '.')
        while (++p < end && *p == '0')
            ;
    if (p != end || p == digits) {
        bad_body("must be an integer", (uint32_t)which);
        return -1;
    }
    *found = minus ? -made : made;
    return 1;
}

/* 1: true. 0: false, missing or null. */
static int is_true_in(const Outline *o, int which) {
    ptr p = value_of(o, which);
    if (!p || *p == 'n' || *p == 'f')
        return 0;
    if (*p == 't')
        return 1;
    bad_body("must be true or false", (uint32_t)which);
    return -1;
}

/* Arguments: a bit for each of max_completion_tokens, max_tokens and max_output_tokens that this API has, and the limit where
 * max_tokens is not given. */
static PyObject *outline_parameters(Outline *o, PyObject *const *args, Py_ssize_t n) {
    int is_given = 0, streams;
    long limits;
    long long most = 0, priority = 0, number = 0;
    if (check_count(n, 2) < 0 || as_number(args[0], 0, 7, &limits, "the limits") < 0)
        return NULL;
    if ((streams = is_true_in(o, STREAM)) < 0 || integer_in(o, PRIORITY, &priority) < 0)
        return NULL;
    for (int which = MAX_COMPLETION_TOKENS; which <= MAX_OUTPUT_TOKENS; which++) {
        int found = integer_in(o, which, &number);
        if (found < 0)
            return NULL;
        if (found && !is_given && limits >> (which - MAX_COMPLETION_TOKENS) & 1) {
            is_given = 1;
            most = number;
        }
    }
    PyObject *salt = string_in(o, CACHE_SALT), *result = NULL; /* read only to check it */
    if (!salt)
        return NULL;
    Py_DECREF(salt);
    PyObject *max_tokens = is_given ? PyLong_FromLongLong(most) : Py_NewRef(value_of(o, MAX_TOKENS) ? Py_None : args[1]);
    PyObject *rank = PyLong_FromLongLong(priority);
    if (max_tokens && rank)
        result = PyTuple_Pack(3, max_tokens, rank, streams ? Py_True : Py_False);
    Py_XDECREF(max_tokens);
    Py_XDECREF(rank);
    return result;
}

static PyObject *outline_engine_field(Outline *o, void *closure) {
    (void)closure;
    return o->engine_field ? PyUnicode_InternFromString(o->engine_field) : Py_NewRef(Py_None);
}

static PyObject *outline_body_bytes(Outline *o, void *closure) {
    (void)closure;
    return PyLong_FromSsize_t(PyBytes_GET_SIZE(o->body));
}

/* "" also for a salt that `parameters` rejects. */
static PyObject *outline_cache_salt(Outline *o, void *closure) {
    (void)closure;
    PyObject *salt = string_in(o, CACHE_SALT);
    if (!salt && PyErr_ExceptionMatches(BadBody)) {
        PyErr_Clear();
        salt = PyUnicode_FromStringAndSize(NULL, 0);
    }
    return salt;
}

/* ---- What identifies a conversation ---- */

/* The first KEY_CHARACTERS of it. */
static PyObject *session_of(const Outline *o) {
    text t;
    START(t, KEY_CHARACTERS);
    for (int which = SESSION_ID; which <= USER && !t.characters; which++) {
        ptr p = value_of(o, which);
        if (!p)
            continue;
        if (*p == '"') {
            add_string(&t, p + 1, end_of(o));
        } else if ((*p == '-' || is_digit(p, end_of(o))) && is_integer(p, p + size_of(o, which))) {
            add_integer(&t, p, p + size_of(o, which));
        }
    }
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

/* b"" where the prompt has no text there; None where it is not `present`. */
static PyObject *beginning(int present, const text *t) {
    return present ? PyBytes_FromStringAndSize((const char *)t->bytes, length(t)) : Py_NewRef(Py_None);
}

static PyObject *scan_body(PyObject *self, PyObject *body) {
    (void)self;
    beginnings read;
    Outline *o = make_outline(body, &read);
    PyObject *result = NULL, *model = NULL, *system = NULL, *user = NULL, *session = NULL;
    if (o && (model = string_in(o, MODEL)) && (system = beginning(read.has_system, &read.system)) &&
        (user = beginning(read.has_user, &read.user)) && (session = session_of(o)))
        result = PyTuple_Pack(5, model, system, user, session, (PyObject *)o);
    Py_XDECREF(model);
    Py_XDECREF(system);
    Py_XDECREF(user);
    Py_XDECREF(session);
    Py_XDECREF(o);
    return result;
}

static PyObject *outline_body(PyObject *self, PyObject *body) {
    (void)self;
    return (PyObject *)make_outline(body, NULL);
}

/* ---- Text ---- */

/* Whether data[start:end] is UTF-8 text. */
static PyObject *is_utf8_text(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_ssize_t start, stop;
    (void)self;
    if (check_count(n, 3) < 0 || check_type(args[0], &PyBytes_Type) < 0 || as_size(args[1], &start) < 0 ||
        as_size(args[2], &stop) < 0)
        return NULL;
    if (start < 0 || start > stop || stop > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "the span is outside of the data");
        return NULL;
    }
    ptr data = (ptr)PyBytes_AS_STRING(args[0]);
    PyThreadState *released = stop - start > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    int found = is_utf8(data + start, data + stop);
    if (released)
        PyEval_RestoreThread(released);
    return PyBool_FromLong(found);
}

/* ---- The cost of parsing ---- */

#define BYTE_DECODE_NS 2
#define ITEM_DECODE_NS 40
#define MEMBER_DECODE_NS 300
#define LONG_NS 1000000000 /* what takes longer is not counted to its end */

/* How many milliseconds a JSON parser takes for body[start:end], which is well-formed. A parser holds the interpreter lock all
 * that time. */
static PyObject *decode_ms(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_ssize_t start, stop;
    uint64_t ns = 0;
    (void)self;
    if (check_count(n, 3) < 0 || check_type(args[0], &PyBytes_Type) < 0 || as_size(args[1], &start) < 0 ||
        as_size(args[2], &stop) < 0)
        return NULL;
    if (start < 0 || start > stop || stop > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "the span is outside of the body");
        return NULL;
    }
    ptr p = (ptr)PyBytes_AS_STRING(args[0]) + start, end = p + (stop - start);
    PyThreadState *released = stop - start > MAX_LOOP_BYTES ? PyEval_SaveThread() : NULL;
    while (p && p < end && ns < LONG_NS) {
        unsigned char c = *p++;
        if (c == '"')
            p = skip_string(p, end);
        else if (c == ',')
            ns += ITEM_DECODE_NS;
        else if (c == ':' || c == '[' || c == '{')
            ns += MEMBER_DECODE_NS;
    }
    if (released)
        PyEval_RestoreThread(released);
    return PyFloat_FromDouble((double)(ns + BYTE_DECODE_NS * (uint64_t)(stop - start)) / 1e6);
}

/* ---- Registration ---- */

static PyGetSetDef outline_properties[] = {
    {"fields", (getter)outline_fields, NULL, "Where the value of each field begins and ends.", NULL},
    {"cache_salt", (getter)outline_cache_salt, NULL, "The field cache_salt.", NULL},
    {"engine_field", (getter)outline_engine_field, NULL, "The name of a field that only the router may set, or None.", NULL},
    {"body_bytes", (getter)outline_body_bytes, NULL, "The size of the body.", NULL},
    {"has_prompt_options", (getter)outline_has_prompt_options, NULL,
     "Whether a field may change which tokens of a rendered chat the engine computes.", NULL},
    {"plain_roles", (getter)outline_plain_roles, NULL, "The role of each plain message; 0 for any other.", NULL},
    {"message_count", (getter)outline_message_count, NULL, "How many items `messages` has.", NULL},
    {"message_spans", (getter)outline_message_spans, NULL, "Where each item of `messages` begins and ends, as uint32.", NULL},
    NO_PROPERTY};

static PyMethodDef outline_methods[] = {
    {"parameters", FAST(outline_parameters), "Return (max_tokens, priority, stream)."},
    {"chat_context", (PyCFunction)outline_chat_context, METH_NOARGS,
     "Return a digest of the fields that change how a chat is rendered."},
    {"plain_text", (PyCFunction)outline_plain_text, METH_O,
     "Return the text of a message that consists of a role and a text, or None."},
    {"text_as_tokens", (PyCFunction)outline_text_as_tokens, METH_NOARGS,
     "Return the prompt's own bytes, TOKEN_BYTES to a token."},
    {"text_start", (PyCFunction)outline_text_start, METH_O, "Return the first bytes of the prompt's JSON text."},
    {"has_any", (PyCFunction)outline_has_any, METH_O, "Return whether the body has a field with one of these names."},
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
     "Return (model, start of the system prompt, start of the first user message, session, outline)."},
    {"outline_body", outline_body, METH_O, "Return the outline of a JSON body."},
    {"is_utf8", FAST(is_utf8_text), "Return whether a part of bytes is UTF-8 text."},
    {"decode_ms", FAST(decode_ms), "Return how long a JSON parser takes for a part of a body."},
    NO_METHOD};

static int add_names(PyObject *module, const char *constant, const char *const *names, size_t n) {
    PyObject *all = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; all && i < n; i++) {
        PyObject *one = PyUnicode_InternFromString(names[i]);
        if (one)
            PyTuple_SET_ITEM(all, (Py_ssize_t)i, one);
        else
            Py_CLEAR(all);
    }
    int failed = !all || PyModule_AddObjectRef(module, constant, all) < 0;
    Py_XDECREF(all);
    return failed ? -1 : 0;
}

int add_body_scan(PyObject *module) {
    prepare_json_tables();
    if (add_names(module, "ENGINE_FIELDS", engine_fields, N_ENGINE_FIELDS) < 0 ||
        add_names(module, "ENGINE_OPTIONS", engine_options, N_ENGINE_OPTIONS) < 0)
        return -1;
    for (int i = 0; i < KNOWN; i++)
        if (!interned_names[i] && !(interned_names[i] = PyUnicode_InternFromString(known_names[i])))
            return -1;
    if (!BadBody)
        BadBody = PyErr_NewExceptionWithDoc(MODULE "BadBody", "The body is rejected.", PyExc_ValueError, NULL);
    if (!BadBody || PyModule_AddObjectRef(module, "BadBody", BadBody) < 0 || add_type(module, "Outline", &OutlineType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
