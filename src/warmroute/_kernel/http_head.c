/* HTTP/1.1 request and response heads, read strictly.
 *
 * The rule: a head is accepted only if every byte of it is covered by the grammar of RFC 9112, without its obsolete parts.
 * Whatever two parsers might read in two ways (a bare CR or LF, a folded line, a space before a colon, two lengths, a length
 * beside a transfer coding, a fragment in the target) is rejected, since request smuggling is made of such differences. So is
 * a request in which a field that the router reads may be another one for the node: it is given twice, named in Connection,
 * or its name has an underscore for a hyphen.
 *
 * A rejected head is returned as the number of the reason (constants.h); edge/http1.py turns it into an error response.
 * tests/edge/reference_http.py is the same in plain Python; property tests compare the two.
 */
#include "http_fields.h"

#define MAX_ID_BYTES 200

/* What is done with a field. */
enum { FORWARD, DROP, HOST, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, EXPECT, AUTHORIZATION, REQUEST_ID, FORWARDED_FOR,
       API_KEY, CONTENT_TYPE, CONTENT_ENCODING, ENGINE_PRIORITY, ROUTING_HEADER, RETRY_AFTER };

static PyObject *empty, *post, *get;

static int kind_in_request(const char *name, size_t n) {
#define IF(word, kind) if (is_word(name, n, word)) return kind
    switch (n) {
    case 2: IF("te", DROP); break;
    case 4: IF("host", HOST); break;
    case 6: IF("expect", EXPECT); break;
    case 7: IF("trailer", DROP); IF("upgrade", DROP); IF("x-queue", ROUTING_HEADER); break;
    case 9: IF("x-api-key", API_KEY); break;
    case 10: IF("connection", CONNECTION); IF("keep-alive", DROP); IF("x-priority", ROUTING_HEADER); break;
    case 12: IF("content-type", CONTENT_TYPE); IF("x-request-id", REQUEST_ID); break;
    case 13: IF("authorization", AUTHORIZATION); IF("x-deadline-ms", ROUTING_HEADER); break;
    case 14: IF("content-length", CONTENT_LENGTH); break;
    case 15: IF("x-forwarded-for", FORWARDED_FOR); IF("x-vllm-priority", ENGINE_PRIORITY); break;
    case 16: IF("proxy-connection", DROP); IF("content-encoding", CONTENT_ENCODING); break;
    case 17: IF("transfer-encoding", TRANSFER_ENCODING); break;
    case 18: IF("x-deadline-ttft-ms", ROUTING_HEADER); break;
    case 19: IF("proxy-authorization", DROP); break;
    case 20: IF("x-data-parallel-rank", DROP); break; /* only the router chooses a rank */
    }
    return FORWARD;
}

#define MAX_KNOWN_NAME_BYTES 20

/* Whether a name with underscores is one of those above for a server that takes an underscore for a hyphen. */
static int imitates_known_name(const char *name, size_t n) {
    char hyphenated[MAX_KNOWN_NAME_BYTES];
    if (n > MAX_KNOWN_NAME_BYTES || !memchr(name, '_', n))
        return 0;
    for (size_t i = 0; i < n; i++)
        hyphenated[i] = name[i] == '_' ? '-' : name[i];
    return kind_in_request(hyphenated, n) != FORWARD;
}

/* Whether Connection names a field that the router reads, so that the node would not see what the router decided by. */
static int hides_known_field(const connection_options *options) {
    for (int i = 0; i < options->count; i++) {
        int kind = kind_in_request(options->option[i], options->option_len[i]);
        if (kind != FORWARD && kind != DROP)
            return 1;
    }
    return 0;
}

static int kind_in_response(const char *name, size_t n) {
    switch (n) {
    case 2: IF("te", DROP); break;
    case 7: IF("trailer", DROP); IF("upgrade", DROP); break;
    case 10: IF("connection", CONNECTION); IF("keep-alive", DROP); break;
    case 11: IF("retry-after", RETRY_AFTER); break;
    case 12: IF("content-type", CONTENT_TYPE); IF("x-request-id", DROP); break;
    case 14: IF("content-length", CONTENT_LENGTH); break;
    case 16: IF("proxy-connection", DROP); IF("content-encoding", CONTENT_ENCODING); break;
    case 17: IF("transfer-encoding", TRANSFER_ENCODING); break;
    case 18: IF("proxy-authenticate", DROP); break;
    }
#undef IF
    return FORWARD;
}

/* Reads (data: bytes, end: int): data[end:end + 4] is the blank line after the head. */
static int read_arguments(PyObject *const *args, const char **data, const char **end) {
    Py_ssize_t at;
    if (check_type(args[0], &PyBytes_Type) < 0 || as_size(args[1], &at) < 0)
        return -1;
    if (at < 0 || at > PyBytes_GET_SIZE(args[0]) - 4) {
        PyErr_SetString(PyExc_ValueError, "end is outside of data");
        return -1;
    }
    *data = PyBytes_AS_STRING(args[0]);
    *end = *data + at + 2;
    return 0;
}

/* Sets an attribute to a new reference; goes to `failed` where that could not be made. */
#define SET(attribute, made)                                                                                               \
    do {                                                                                                                   \
        PyObject *new_value = (made);                                                                                      \
        if (!new_value)                                                                                                    \
            goto failed;                                                                                                   \
        Py_XSETREF(attribute, new_value);                                                                                  \
    } while (0)

/* Rejects the head. */
#define REJECT(number)                                                                                                     \
    do {                                                                                                                   \
        why = (number);                                                                                                    \
        goto rejected;                                                                                                     \
    } while (0)

/* ---- Writing a head ---- */

/* A part of a head that is written. */
typedef struct {
    const char *at;
    Py_ssize_t n;
} piece;

#define TEXT(literal) ((piece){literal, sizeof(literal) - 1})
#define MAX_NUMBER_LINE 48

static always_inline piece bytes_piece(PyObject *bytes) {
    return (piece){PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)};
}

/* A line with a number. `room` holds its text. */
static piece number_line(char room[MAX_NUMBER_LINE], const char *name, long long number) {
    return (piece){room, PyOS_snprintf(room, MAX_NUMBER_LINE, "%s: %lld\r\n", name, number)};
}

static PyObject *join_pieces(const piece *pieces, int count) {
    Py_ssize_t n = 0;
    for (int i = 0; i < count; i++)
        n += pieces[i].n;
    PyObject *made = PyBytes_FromStringAndSize(NULL, n);
    char *to = made ? PyBytes_AS_STRING(made) : NULL;
    for (int i = 0; made && i < count; i++) {
        memcpy(to, pieces[i].at, (size_t)pieces[i].n);
        to += pieces[i].n;
    }
    return made;
}

static int check_bytes(PyObject *const *args, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (check_type(args[i], &PyBytes_Type) < 0)
            return -1;
    return 0;
}

/* ---- Requests ---- */

typedef struct {
    PyObject_HEAD
    PyObject *method, *target, *authorization, *api_key, *request_id, *forwarded_for, *content_type;
    PyObject *forwarded_fields; /* the lines that go to the node */
    PyObject *fields;           /* all lines */
    long long length;
    int minor_version;
    char keep_alive, expects_continue, chunked, has_routing_headers;
} RequestHead;

static void request_head_dealloc(RequestHead *h) {
    Py_XDECREF(h->method);
    Py_XDECREF(h->target);
    Py_XDECREF(h->authorization);
    Py_XDECREF(h->api_key);
    Py_XDECREF(h->request_id);
    Py_XDECREF(h->forwarded_for);
    Py_XDECREF(h->content_type);
    Py_XDECREF(h->forwarded_fields);
    Py_XDECREF(h->fields);
    Py_TYPE(h)->tp_free((PyObject *)h);
}

static PyObject *request_head_get(RequestHead *h, PyObject *name) {
    if (!PyBytes_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "a field's name is bytes");
        return NULL;
    }
    const char *p = PyBytes_AS_STRING(h->fields), *end = p + PyBytes_GET_SIZE(h->fields);
    size_t n = (size_t)PyBytes_GET_SIZE(name);
    field f;
    while (p < end && read_field(&p, end, &f) == ACCEPTED)
        if (f.name_len == n && equal_ignoring_case(f.line, PyBytes_AS_STRING(name), n))
            return value_bytes(&f);
    return Py_NewRef(empty);
}

/* The head for a node. Host, authorization, length, request id and the client's address come from the router. */
static PyObject *request_head_for_node(RequestHead *h, PyObject *const *args, Py_ssize_t n_args) {
    static const char signature[] = "(host_line, authorization_line, passes_keys, body_bytes, request_id, peer, rank, fields)";
    Py_ssize_t body_bytes, rank = -1;
    if (check_signature(n_args, 8, 8, signature) < 0 || check_bytes(args, 2) < 0 || as_size(args[3], &body_bytes) < 0 ||
        check_bytes(args + 4, 2) < 0 || (args[6] != Py_None && as_size(args[6], &rank) < 0) || check_bytes(args + 7, 1) < 0)
        return NULL;
    int passes_keys = args[2] == Py_True && !PyBytes_GET_SIZE(args[1]), n = 0;
    int has_peer = PyBytes_GET_SIZE(args[5]) > 0, was_forwarded = PyBytes_GET_SIZE(h->forwarded_for) > 0;
    char length_room[MAX_NUMBER_LINE], rank_room[MAX_NUMBER_LINE];
    piece pieces[24]; /* there are at most 23 */
    pieces[n++] = bytes_piece(h->method);
    pieces[n++] = TEXT(" ");
    pieces[n++] = bytes_piece(h->target);
    pieces[n++] = TEXT(" HTTP/1.1\r\n");
    pieces[n++] = bytes_piece(args[0]);
    pieces[n++] = bytes_piece(PyBytes_GET_SIZE(args[7]) ? args[7] : h->forwarded_fields);
    pieces[n++] = bytes_piece(args[1]);
    if (passes_keys && PyBytes_GET_SIZE(h->authorization)) {
        pieces[n++] = TEXT("Authorization: ");
        pieces[n++] = bytes_piece(h->authorization);
        pieces[n++] = TEXT("\r\n");
    }
    if (passes_keys && PyBytes_GET_SIZE(h->api_key)) {
        pieces[n++] = TEXT("X-Api-Key: ");
        pieces[n++] = bytes_piece(h->api_key);
        pieces[n++] = TEXT("\r\n");
    }
    pieces[n++] = number_line(length_room, "Content-Length", body_bytes);
    pieces[n++] = TEXT("X-Request-Id: ");
    pieces[n++] = bytes_piece(args[4]);
    if (has_peer || was_forwarded) {
        pieces[n++] = TEXT("\r\nX-Forwarded-For: ");
        pieces[n++] = bytes_piece(h->forwarded_for);
        pieces[n++] = has_peer && was_forwarded ? TEXT(", ") : TEXT("");
        pieces[n++] = bytes_piece(args[5]);
    }
    pieces[n++] = TEXT("\r\n");
    if (rank >= 0)
        pieces[n++] = number_line(rank_room, "X-Data-Parallel-Rank", rank);
    pieces[n++] = TEXT("\r\n");
    return join_pieces(pieces, n);
}

static PyMemberDef request_head_members[] = {
    {"method", T_OBJECT_EX, offsetof(RequestHead, method), READONLY, NULL},
    {"target", T_OBJECT_EX, offsetof(RequestHead, target), READONLY, NULL},
    {"authorization", T_OBJECT_EX, offsetof(RequestHead, authorization), READONLY, NULL},
    {"api_key", T_OBJECT_EX, offsetof(RequestHead, api_key), READONLY, NULL},
    {"request_id", T_OBJECT_EX, offsetof(RequestHead, request_id), READONLY, NULL},
    {"forwarded_for", T_OBJECT_EX, offsetof(RequestHead, forwarded_for), READONLY, NULL},
    {"content_type", T_OBJECT_EX, offsetof(RequestHead, content_type), READONLY, NULL},
    {"forwarded_fields", T_OBJECT_EX, offsetof(RequestHead, forwarded_fields), READONLY, NULL},
    {"length", T_LONGLONG, offsetof(RequestHead, length), READONLY, NULL},
    {"minor_version", T_INT, offsetof(RequestHead, minor_version), READONLY, NULL},
    {"keep_alive", T_BOOL, offsetof(RequestHead, keep_alive), READONLY, NULL},
    {"expects_continue", T_BOOL, offsetof(RequestHead, expects_continue), READONLY, NULL},
    {"chunked", T_BOOL, offsetof(RequestHead, chunked), READONLY, NULL},
    {"has_routing_headers", T_BOOL, offsetof(RequestHead, has_routing_headers), READONLY, NULL},
    NO_MEMBER};

static PyMethodDef request_head_methods[] = {
    {"get", (PyCFunction)request_head_get, METH_O, "Return the first value of a field, or b\"\"."},
    {"for_node", FAST(request_head_for_node), "Return the head to send to a node."},
    NO_METHOD};

static PyTypeObject RequestHeadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "RequestHead",
    .tp_doc = "A client's request head.",
    .tp_basicsize = sizeof(RequestHead),
    .tp_dealloc = (destructor)request_head_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_members = request_head_members,
    .tp_methods = request_head_methods,
};

typedef struct {
    const char *method, *target;
    size_t method_len, target_len;
    int minor_version;
} request_line;

/* Reads the request line at *at, and moves *at past it. */
static int read_request_line(const char **at, const char *end, request_line *line) {
    const char *p = *at;
    line->method = p;
    while (p < end && is_token[(unsigned char)*p])
        p++;
    line->method_len = (size_t)(p - line->method);
    if (!line->method_len || p == end || *p != ' ')
        return MALFORMED_START_LINE;
    line->target = ++p;
    while (p < end && *p > ' ' && *p < 0x7f)
        p++;
    line->target_len = (size_t)(p - line->target);
    const char *fragment = memchr(line->target, '#', line->target_len);
    if (!line->target_len || end - p < 11 || memcmp(p, " HTTP/", 6))
        return MALFORMED_START_LINE;
    if (p[7] != '.' || p[9] != '\r' || p[10] != '\n' || p[6] < '0' || p[6] > '9' || p[8] < '0' || p[8] > '9')
        return MALFORMED_START_LINE;
    if (p[6] != '1' || p[8] > '1')
        return UNSUPPORTED_VERSION;
    line->minor_version = p[8] - '0';
    if (fragment || (line->target[0] != '/' && !(line->target_len == 1 && line->target[0] == '*')))
        return BAD_TARGET;
    *at = p + 11;
    return ACCEPTED;
}

static PyObject *method_of(const request_line *line) {
    if (line->method_len == 4 && !memcmp(line->method, "POST", 4))
        return Py_NewRef(post);
    if (line->method_len == 3 && !memcmp(line->method, "GET", 3))
        return Py_NewRef(get);
    return PyBytes_FromStringAndSize(line->method, (Py_ssize_t)line->method_len);
}

/* The values of several fields of one name, as one list. */
static PyObject *joined(PyObject *before, const field *f) {
    Py_ssize_t len = PyBytes_GET_SIZE(before);
    if (len == 0)
        return value_bytes(f);
    PyObject *both = PyBytes_FromStringAndSize(NULL, len + 2 + (Py_ssize_t)f->value_len);
    if (both) {
        char *out = PyBytes_AS_STRING(both);
        memcpy(out, PyBytes_AS_STRING(before), (size_t)len);
        memcpy(out + len, ", ", 2);
        memcpy(out + len + 2, f->value, f->value_len);
    }
    return both;
}

/* Whether the client's request id can be used: visible ASCII, not too long. */
static int is_usable_id(const field *f) {
    size_t i = 0;
    while (i < f->value_len && f->value[i] > ' ' && f->value[i] < 0x7f)
        i++;
    return i && i == f->value_len && i <= MAX_ID_BYTES;
}

static PyObject *read_request_head(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const char *data, *end;
    Py_ssize_t max_fields, count = 0;
    int why, hosts = 0;
    unsigned seen = 0; /* a bit for the kind of each field that must not be given twice */
    request_line line;
    connection_options connection;
    field f;
    (void)self;
    if (check_signature(n, 3, 3, "(data: bytes, end: int, max_fields: int)") < 0 || read_arguments(args, &data, &end) < 0 ||
        as_size(args[2], &max_fields) < 0)
        return NULL;
    const char *p = data;
    start_connection(&connection);
    if ((why = read_request_line(&p, end, &line)))
        return PyLong_FromLong(why);

    RequestHead *h = PyObject_New(RequestHead, &RequestHeadType);
    if (!h)
        return NULL;
    h->method = h->target = h->forwarded_fields = h->fields = NULL;
    h->authorization = Py_NewRef(empty);
    h->api_key = Py_NewRef(empty);
    h->request_id = Py_NewRef(empty);
    h->forwarded_for = Py_NewRef(empty);
    h->content_type = Py_NewRef(empty);
    h->length = -1;
    h->minor_version = line.minor_version;
    h->expects_continue = h->chunked = h->has_routing_headers = 0;
    SET(h->method, method_of(&line));
    SET(h->target, PyBytes_FromStringAndSize(line.target, (Py_ssize_t)line.target_len));
    SET(h->fields, PyBytes_FromStringAndSize(p, end - p));
    SET(h->forwarded_fields, PyBytes_FromStringAndSize(NULL, end - p));
    char *out = PyBytes_AS_STRING(h->forwarded_fields);

    while (p < end) {
        if ((why = read_field(&p, end, &f)))
            goto rejected;
        if (++count > max_fields)
            REJECT(TOO_MANY_FIELDS);
        int kind = kind_in_request(f.line, f.name_len);
        switch (kind) {
        case CONTENT_TYPE:
        case ENGINE_PRIORITY:
            if (seen & 1u << kind)
                REJECT(REPEATED_FIELD);
            seen |= 1u << kind;
            if (kind == CONTENT_TYPE)
                SET(h->content_type, value_bytes(&f));
            /* fall through */
        case ROUTING_HEADER:
            h->has_routing_headers |= kind != CONTENT_TYPE;
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
            break;
        case CONTENT_ENCODING:
            if (!is_word(f.value, f.value_len, "identity"))
                REJECT(UNSUPPORTED_CONTENT_ENCODING);
            break;
        case FORWARD:
            if (imitates_known_name(f.line, f.name_len))
                REJECT(AMBIGUOUS_FIELD_NAME);
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
            break;
        case HOST:
            hosts++;
            break;
        case CONTENT_LENGTH:
            if (h->length >= 0)
                REJECT(BAD_CONTENT_LENGTH);
            if ((why = read_content_length(&f, &h->length)))
                goto rejected;
            break;
        case TRANSFER_ENCODING:
            if (h->chunked)
                REJECT(REPEATED_TRANSFER_ENCODING);
            if (!is_word(f.value, f.value_len, "chunked"))
                REJECT(UNSUPPORTED_TRANSFER_ENCODING);
            h->chunked = 1;
            break;
        case CONNECTION:
            if ((why = read_connection(&f, &connection)))
                goto rejected;
            break;
        case EXPECT:
            if (!is_word(f.value, f.value_len, "100-continue"))
                REJECT(UNSUPPORTED_EXPECTATION);
            h->expects_continue = line.minor_version == 1;
            break;
        case AUTHORIZATION:
        case API_KEY:
            if (seen & 1u << kind)
                REJECT(REPEATED_FIELD);
            seen |= 1u << kind;
            SET(*(kind == API_KEY ? &h->api_key : &h->authorization), value_bytes(&f));
            break;
        case REQUEST_ID:
            if (is_usable_id(&f))
                SET(h->request_id, value_bytes(&f));
            break;
        case FORWARDED_FOR:
            SET(h->forwarded_for, joined(h->forwarded_for, &f));
            break;
        default: /* DROP */
            break;
        }
    }
    if (hosts != 1 && (hosts || line.minor_version))
        REJECT(BAD_HOST);
    if (h->chunked && h->length >= 0)
        REJECT(LENGTH_AND_TRANSFER_ENCODING);
    if (h->chunked && !line.minor_version)
        REJECT(TRANSFER_ENCODING_IN_HTTP_1_0);
    if (hides_known_field(&connection))
        REJECT(FIELD_NAMED_IN_CONNECTION);
    if (!h->chunked && h->length < 0)
        h->length = 0;
    h->keep_alive = !connection.close && (line.minor_version || connection.keep_alive);
    if (_PyBytes_Resize(&h->forwarded_fields, out - PyBytes_AS_STRING(h->forwarded_fields)) < 0)
        goto failed;
    if (connection.count)
        SET(h->forwarded_fields, without_named_fields(h->forwarded_fields, &connection));
    return (PyObject *)h;
rejected:
    Py_DECREF(h);
    return PyLong_FromLong(why);
failed:
    Py_DECREF(h);
    return NULL;
}

/* ---- Responses ---- */

typedef struct {
    PyObject_HEAD
    PyObject *status_line, *content_type, *retry_after, *forwarded_fields;
    long long length;
    int status;
    char keep_alive, encoded;
} ResponseHead;

static void response_head_dealloc(ResponseHead *h) {
    Py_XDECREF(h->status_line);
    Py_XDECREF(h->content_type);
    Py_XDECREF(h->retry_after);
    Py_XDECREF(h->forwarded_fields);
    Py_TYPE(h)->tp_free((PyObject *)h);
}

/* The head for the client, with the first bytes of the body. `fields` are those to forward. */
static PyObject *response_head_for_client(ResponseHead *h, PyObject *const *args, Py_ssize_t n_args) {
    if (check_signature(n_args, 5, 5, "(fields, accepts_chunked, request_id, more_lines, body)") < 0 ||
        check_bytes(args, 1) < 0 || check_bytes(args + 2, 3) < 0)
        return NULL;
    char length_room[MAX_NUMBER_LINE];
    piece framing = TEXT("");
    if (h->length >= 0 && h->status != 204)
        framing = number_line(length_room, "Content-Length", h->length);
    else if (h->length == CHUNKED && args[1] == Py_True)
        framing = TEXT("Transfer-Encoding: chunked\r\n");
    const piece pieces[] = {bytes_piece(h->status_line), bytes_piece(args[0]), framing,
                            TEXT("X-Request-Id: "),      bytes_piece(args[2]), TEXT("\r\n"),
                            bytes_piece(args[3]),        TEXT("\r\n"),         bytes_piece(args[4])};
    return join_pieces(pieces, sizeof pieces / sizeof *pieces);
}

static PyMemberDef response_head_members[] = {
    {"status_line", T_OBJECT_EX, offsetof(ResponseHead, status_line), READONLY, NULL},
    {"content_type", T_OBJECT_EX, offsetof(ResponseHead, content_type), READONLY, NULL},
    {"retry_after", T_OBJECT_EX, offsetof(ResponseHead, retry_after), READONLY, NULL},
    {"forwarded_fields", T_OBJECT_EX, offsetof(ResponseHead, forwarded_fields), READONLY, NULL},
    {"length", T_LONGLONG, offsetof(ResponseHead, length), READONLY, NULL},
    {"status", T_INT, offsetof(ResponseHead, status), READONLY, NULL},
    {"keep_alive", T_BOOL, offsetof(ResponseHead, keep_alive), READONLY, NULL},
    {"encoded", T_BOOL, offsetof(ResponseHead, encoded), READONLY, NULL},
    NO_MEMBER};

static PyMethodDef response_head_methods[] = {
    {"for_client", FAST(response_head_for_client), "Return the head to send to a client, with the start of the body."},
    NO_METHOD};

static PyTypeObject ResponseHeadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "ResponseHead",
    .tp_doc = "A node's response head.",
    .tp_basicsize = sizeof(ResponseHead),
    .tp_dealloc = (destructor)response_head_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_members = response_head_members,
    .tp_methods = response_head_methods,
};

/* Reads the status line at *at, and moves *at past it: HTTP/1.x, a space, three digits, and perhaps a space and a reason. */
static int read_status_line(const char **at, const char *end, int *minor_version, int *status) {
    const char *p = *at;
    if (end - p < 14 || memcmp(p, "HTTP/1.", 7) || (p[7] != '0' && p[7] != '1') || p[8] != ' ')
        return MALFORMED_START_LINE;
    *minor_version = p[7] - '0';
    if (p[9] < '1' || p[9] > '5' || p[10] < '0' || p[10] > '9' || p[11] < '0' || p[11] > '9')
        return MALFORMED_START_LINE;
    *status = (p[9] - '0') * 100 + (p[10] - '0') * 10 + (p[11] - '0');
    p += 12;
    if (*p == ' ')
        while (p < end && is_text[(unsigned char)*p])
            p++;
    if (end - p < 2 || p[0] != '\r' || p[1] != '\n')
        return MALFORMED_START_LINE;
    *at = p + 2;
    return ACCEPTED;
}

static PyObject *read_response_head(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const char *data, *end;
    int minor_version = 0, status = 0, why;
    connection_options connection;
    field f;
    (void)self;
    if (check_signature(n, 2, 2, "(data: bytes, end: int)") < 0 || read_arguments(args, &data, &end) < 0)
        return NULL;
    const char *p = data;
    start_connection(&connection);
    if ((why = read_status_line(&p, end, &minor_version, &status)))
        return PyLong_FromLong(why);

    ResponseHead *h = PyObject_New(ResponseHead, &ResponseHeadType);
    if (!h)
        return NULL;
    h->status_line = h->forwarded_fields = NULL;
    h->content_type = Py_NewRef(empty);
    h->retry_after = Py_NewRef(empty);
    h->status = status;
    h->encoded = 0;
    h->length = UNTIL_CLOSE;
    SET(h->status_line, PyBytes_FromStringAndSize(data, p - data));
    PyBytes_AS_STRING(h->status_line)[7] = '1'; /* the client gets the router's version, not the node's */
    SET(h->forwarded_fields, PyBytes_FromStringAndSize(NULL, end - p));
    char *out = PyBytes_AS_STRING(h->forwarded_fields);

    while (p < end) {
        if ((why = read_field(&p, end, &f)))
            goto rejected;
        int kind = kind_in_response(f.line, f.name_len);
        switch (kind) {
        case CONTENT_TYPE:
        case RETRY_AFTER:
            SET(*(kind == CONTENT_TYPE ? &h->content_type : &h->retry_after), value_bytes(&f));
            /* fall through */
        case CONTENT_ENCODING:
            h->encoded |= kind == CONTENT_ENCODING && !is_word(f.value, f.value_len, "identity");
            /* fall through */
        case FORWARD:
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
            break;
        case CONTENT_LENGTH:
            if (h->length != UNTIL_CLOSE)
                REJECT(BAD_CONTENT_LENGTH);
            if ((why = read_content_length(&f, &h->length)))
                goto rejected;
            break;
        case TRANSFER_ENCODING:
            if (h->length != UNTIL_CLOSE)
                REJECT(REPEATED_TRANSFER_ENCODING);
            if (!is_word(f.value, f.value_len, "chunked"))
                REJECT(UNSUPPORTED_TRANSFER_ENCODING);
            h->length = CHUNKED;
            break;
        case CONNECTION:
            if ((why = read_connection(&f, &connection)))
                goto rejected;
            break;
        default: /* DROP */
            break;
        }
    }
    if (status == 204 || status == 304 || status < 200)
        h->length = 0;
    h->keep_alive = !connection.close && (minor_version || connection.keep_alive) && h->length != UNTIL_CLOSE;
    if (_PyBytes_Resize(&h->forwarded_fields, out - PyBytes_AS_STRING(h->forwarded_fields)) < 0)
        goto failed;
    if (connection.count)
        SET(h->forwarded_fields, without_named_fields(h->forwarded_fields, &connection));
    return (PyObject *)h;
rejected:
    Py_DECREF(h);
    return PyLong_FromLong(why);
failed:
    Py_DECREF(h);
    return NULL;
}

/* ---- Registration ---- */

static PyMethodDef functions[] = {
    {"read_request_head", FAST(read_request_head), "Return the head in data[:end + 4], or why it is rejected."},
    {"read_response_head", FAST(read_response_head), "Return the head in data[:end + 4], or why it is rejected."},
    NO_METHOD};

int add_http_heads(PyObject *module) {
    if (!empty) {
        empty = PyBytes_FromStringAndSize("", 0);
        post = PyBytes_FromString("POST");
        get = PyBytes_FromString("GET");
    }
    if (!empty || !post || !get || add_type(module, "RequestHead", &RequestHeadType) < 0 ||
        add_type(module, "ResponseHead", &ResponseHeadType) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
