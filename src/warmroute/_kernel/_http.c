/* HTTP/1.1 heads and chunk framing, read strictly; and what an answer says of its tokens.
 *
 * The rule: a head is taken only if every byte of it is covered by the grammar of RFC 9112, without its obsolete parts.
 * Whatever two parsers might read in two ways (bare CR or LF, folded lines, a space before a colon, two lengths, a length
 * beside a coding) is refused, since that is what request smuggling is made of.
 *
 * tests/edge/reference_http.py (and reference_usage.py) says the same in plain Python; property tests hold the two equal.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <string.h>
#include <strings.h>

#define CHUNKED -1
#define UNTIL_CLOSE -2
#define MAX_DROPPED 16
#define MAX_LENGTH_DIGITS 18
#define MAX_ID_BYTES 200
#define MAX_SIZE_DIGITS 15
#define MAX_LINE_BYTES 4096
#define MAX_TRAILERS 64
#define MAX_FILLED_BYTES 65536
#define USAGE_BYTES 16384
#define MAX_NUMBER_DIGITS 9

/* Why a head is refused; edge/http1.py puts it in words. */
enum { OK, BAD_LINE, BAD_TARGET, BAD_VERSION, BAD_FIELD, TOO_MANY_FIELDS, BAD_LENGTH, CODING_TWICE, BAD_CODING,
       BAD_EXPECT, BAD_HOST, LENGTH_AND_CODING, CODING_IN_1_0, BAD_CONNECTION };

enum { PASS, HOST, LENGTH, CODING, CONNECTION, EXPECT, AUTHORIZATION, REQUEST_ID, FORWARDED_FOR, API_KEY, TYPE, WISH, DROP,
       RETRY_AFTER };

static unsigned char is_token[256], is_text[256];
static PyObject *empty, *post, *get;
static PyObject *BadChunk;

static void fill_tables(void) {
    for (int c = 0; c < 256; c++) {
        is_token[c] = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || (c && strchr("!#$%&'*+-.^_`|~", c));
        is_text[c] = c == '\t' || (c >= 0x20 && c != 0x7f);
    }
}

static inline int same(const char *a, size_t n, const char *lower) {
    return strlen(lower) == n && strncasecmp(a, lower, n) == 0;
}

static int request_field(const char *name, size_t n) {
    switch (n) {
    case 2: return same(name, n, "te") ? DROP : PASS;
    case 4: return same(name, n, "host") ? HOST : PASS;
    case 6: return same(name, n, "expect") ? EXPECT : PASS;
    case 7:
        return same(name, n, "trailer") || same(name, n, "upgrade") ? DROP : same(name, n, "x-queue") ? WISH : PASS;
    case 9: return same(name, n, "x-api-key") ? API_KEY : PASS;
    case 10:
        return same(name, n, "connection")   ? CONNECTION
               : same(name, n, "keep-alive") ? DROP
               : same(name, n, "x-priority") ? WISH
                                             : PASS;
    case 12: return same(name, n, "content-type") ? TYPE : same(name, n, "x-request-id") ? REQUEST_ID : PASS;
    case 13: return same(name, n, "authorization") ? AUTHORIZATION : same(name, n, "x-deadline-ms") ? WISH : PASS;
    case 14: return same(name, n, "content-length") ? LENGTH : PASS;
    case 15: return same(name, n, "x-forwarded-for") ? FORWARDED_FOR : PASS;
    case 16: return same(name, n, "proxy-connection") ? DROP : PASS;
    case 17: return same(name, n, "transfer-encoding") ? CODING : PASS;
    case 18: return same(name, n, "x-deadline-ttft-ms") ? WISH : PASS;
    case 19: return same(name, n, "proxy-authorization") ? DROP : PASS;
    default: return PASS;
    }
}

static int response_field(const char *name, size_t n) {
    switch (n) {
    case 2: return same(name, n, "te") ? DROP : PASS;
    case 7: return same(name, n, "trailer") || same(name, n, "upgrade") ? DROP : PASS;
    case 10: return same(name, n, "connection") ? CONNECTION : same(name, n, "keep-alive") ? DROP : PASS;
    case 11: return same(name, n, "retry-after") ? RETRY_AFTER : PASS;
    case 12: return same(name, n, "content-type") ? TYPE : same(name, n, "x-request-id") ? DROP : PASS;
    case 14: return same(name, n, "content-length") ? LENGTH : PASS;
    case 16: return same(name, n, "proxy-connection") ? DROP : PASS;
    case 17: return same(name, n, "transfer-encoding") ? CODING : PASS;
    case 18: return same(name, n, "proxy-authenticate") ? DROP : PASS;
    default: return PASS;
    }
}

typedef struct {
    const char *line, *value;
    size_t line_len, name_len, value_len;
} field;

/* Reads the field that begins at *at; moves *at behind it. */
static int next_field(const char **at, const char *end, field *f) {
    const char *p = *at;
    f->line = p;
    while (p < end && is_token[(unsigned char)*p])
        p++;
    f->name_len = p - f->line;
    if (!f->name_len || p == end || *p != ':')
        return BAD_FIELD;
    p++;
    while (p < end && (*p == ' ' || *p == '\t'))
        p++;
    f->value = p;
    while (p < end && is_text[(unsigned char)*p])
        p++;
    if (end - p < 2 || p[0] != '\r' || p[1] != '\n')
        return BAD_FIELD;
    const char *stop = p;
    while (stop > f->value && (stop[-1] == ' ' || stop[-1] == '\t'))
        stop--;
    f->value_len = stop - f->value;
    *at = p + 2;
    f->line_len = *at - f->line;
    return OK;
}

static int read_length(const field *f, long long *length) {
    if (f->value_len == 0 || f->value_len > MAX_LENGTH_DIGITS)
        return BAD_LENGTH;
    long long total = 0;
    for (size_t i = 0; i < f->value_len; i++) {
        char c = f->value[i];
        if (c < '0' || c > '9')
            return BAD_LENGTH;
        total = total * 10 + (c - '0');
    }
    *length = total;
    return OK;
}

typedef struct {
    const char *at[MAX_DROPPED];
    size_t len[MAX_DROPPED];
    int count;
} dropped;

/* Options of a Connection field: close and keep-alive are told, others name fields that go no further. */
static int read_connection(const field *f, int *close, int *keep, dropped *drop) {
    const char *p = f->value, *end = f->value + f->value_len;
    while (p < end) {
        const char *comma = memchr(p, ',', end - p);
        const char *stop = comma ? comma : end;
        while (p < stop && (*p == ' ' || *p == '\t'))
            p++;
        const char *last = stop;
        while (last > p && (last[-1] == ' ' || last[-1] == '\t'))
            last--;
        size_t n = last - p;
        if (same(p, n, "close"))
            *close = 1;
        else if (same(p, n, "keep-alive"))
            *keep = 1;
        else if (n) {
            if (drop->count == MAX_DROPPED)
                return BAD_CONNECTION;
            drop->at[drop->count] = p;
            drop->len[drop->count++] = n;
        }
        p = stop + 1;
    }
    return OK;
}

/* The lines that pass on, without those that a Connection field names. */
static PyObject *without(PyObject *passing, const dropped *drop) {
    const char *p = PyBytes_AS_STRING(passing), *end = p + PyBytes_GET_SIZE(passing);
    PyObject *kept = PyBytes_FromStringAndSize(NULL, end - p);
    if (!kept)
        return NULL;
    char *out = PyBytes_AS_STRING(kept);
    field f;
    while (p < end && next_field(&p, end, &f) == OK) {
        int goes = 0;
        for (int i = 0; i < drop->count; i++)
            goes |= drop->len[i] == f.name_len && strncasecmp(drop->at[i], f.line, f.name_len) == 0;
        if (!goes) {
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
        }
    }
    _PyBytes_Resize(&kept, out - PyBytes_AS_STRING(kept));
    return kept;
}

static PyObject *bytes_of(const char *p, size_t n) { return PyBytes_FromStringAndSize(p, n); }

static PyObject *value_of(const field *f) { return bytes_of(f->value, f->value_len); }

/* Reads (data: bytes, end: int): data[end:end + 4] is the blank line behind the head. */
static int read_args(PyObject *const *args, Py_ssize_t n, Py_ssize_t want, const char **data, const char **end) {
    if (n != want || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected (data: bytes, end: int, …)");
        return -1;
    }
    Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    if (at == -1 && PyErr_Occurred())
        return -1;
    if (at < 0 || at + 4 > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "end is outside of data");
        return -1;
    }
    *data = PyBytes_AS_STRING(args[0]);
    *end = *data + at + 2;
    return 0;
}

/* ---- Requests ---- */

typedef struct {
    PyObject_HEAD
    PyObject *method, *target, *authorization, *api_key, *request_id, *forwarded_for, *content_type, *passing, *fields;
    long long length;
    int minor;
    char keep_alive, expects_continue, chunked, wishes;
} RequestHead;

static void request_head_free(RequestHead *h) {
    Py_XDECREF(h->method);
    Py_XDECREF(h->target);
    Py_XDECREF(h->authorization);
    Py_XDECREF(h->api_key);
    Py_XDECREF(h->request_id);
    Py_XDECREF(h->forwarded_for);
    Py_XDECREF(h->content_type);
    Py_XDECREF(h->passing);
    Py_XDECREF(h->fields);
    Py_TYPE(h)->tp_free((PyObject *)h);
}

static PyObject *request_head_get(RequestHead *h, PyObject *name) {
    if (!PyBytes_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "a field's name is bytes");
        return NULL;
    }
    const char *p = PyBytes_AS_STRING(h->fields), *end = p + PyBytes_GET_SIZE(h->fields);
    size_t n = PyBytes_GET_SIZE(name);
    field f;
    while (p < end && next_field(&p, end, &f) == OK)
        if (f.name_len == n && strncasecmp(f.line, PyBytes_AS_STRING(name), n) == 0)
            return value_of(&f);
    Py_INCREF(empty);
    return empty;
}

static PyMemberDef request_head_members[] = {
    {"method", T_OBJECT_EX, offsetof(RequestHead, method), READONLY, NULL},
    {"target", T_OBJECT_EX, offsetof(RequestHead, target), READONLY, NULL},
    {"authorization", T_OBJECT_EX, offsetof(RequestHead, authorization), READONLY, NULL},
    {"api_key", T_OBJECT_EX, offsetof(RequestHead, api_key), READONLY, NULL},
    {"request_id", T_OBJECT_EX, offsetof(RequestHead, request_id), READONLY, NULL},
    {"forwarded_for", T_OBJECT_EX, offsetof(RequestHead, forwarded_for), READONLY, NULL},
    {"content_type", T_OBJECT_EX, offsetof(RequestHead, content_type), READONLY, NULL},
    {"passing", T_OBJECT_EX, offsetof(RequestHead, passing), READONLY, NULL},
    {"length", T_LONGLONG, offsetof(RequestHead, length), READONLY, NULL},
    {"minor", T_INT, offsetof(RequestHead, minor), READONLY, NULL},
    {"keep_alive", T_BOOL, offsetof(RequestHead, keep_alive), READONLY, NULL},
    {"expects_continue", T_BOOL, offsetof(RequestHead, expects_continue), READONLY, NULL},
    {"chunked", T_BOOL, offsetof(RequestHead, chunked), READONLY, NULL},
    {"wishes", T_BOOL, offsetof(RequestHead, wishes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef request_head_methods[] = {
    {"get", (PyCFunction)request_head_get, METH_O, "The first value of a field, or nothing."}, {NULL, NULL, 0, NULL}};

static PyTypeObject RequestHeadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._http.RequestHead",
    .tp_basicsize = sizeof(RequestHead),
    .tp_dealloc = (destructor)request_head_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_members = request_head_members,
    .tp_methods = request_head_methods,
};

static int read_request_line(const char **at, const char *end, const char **method, size_t *method_len,
                             const char **target, size_t *target_len, int *minor) {
    const char *p = *at;
    *method = p;
    while (p < end && is_token[(unsigned char)*p])
        p++;
    *method_len = p - *method;
    if (!*method_len || p == end || *p != ' ')
        return BAD_LINE;
    *target = ++p;
    while (p < end && *p > ' ' && *p < 0x7f)
        p++;
    *target_len = p - *target;
    if (!*target_len || end - p < 11 || memcmp(p, " HTTP/", 6))
        return BAD_LINE;
    if (p[7] != '.' || p[9] != '\r' || p[10] != '\n' || p[6] < '0' || p[6] > '9' || p[8] < '0' || p[8] > '9')
        return BAD_LINE;
    if (p[6] != '1' || p[8] > '1')
        return BAD_VERSION;
    *minor = p[8] - '0';
    if ((*target)[0] != '/' && !(*target_len == 1 && (*target)[0] == '*'))
        return BAD_TARGET;
    *at = p + 11;
    return OK;
}

static PyObject *joined(PyObject *old, const field *f) {
    if (PyBytes_GET_SIZE(old) == 0)
        return value_of(f);
    Py_ssize_t before = PyBytes_GET_SIZE(old);
    PyObject *both = PyBytes_FromStringAndSize(NULL, before + 2 + (Py_ssize_t)f->value_len);
    if (both) {
        char *out = PyBytes_AS_STRING(both);
        memcpy(out, PyBytes_AS_STRING(old), before);
        memcpy(out + before, ", ", 2);
        memcpy(out + before + 2, f->value, f->value_len);
    }
    return both;
}

#define SET(slot, made)                                                                                                  \
    do {                                                                                                                 \
        PyObject *new_value = (made);                                                                                    \
        if (!new_value)                                                                                                  \
            goto failed;                                                                                                 \
        Py_XSETREF(slot, new_value);                                                                                     \
    } while (0)

static PyObject *read_request_head(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const char *data, *end, *method, *target;
    size_t method_len, target_len;
    int minor = 0, why, hosts = 0, close = 0, keep = 0;
    dropped drop = {.count = 0};
    (void)self;
    if (read_args(args, n, 3, &data, &end) < 0)
        return NULL;
    Py_ssize_t max_fields = PyLong_AsSsize_t(args[2]);
    if (max_fields == -1 && PyErr_Occurred())
        return NULL;
    const char *p = data;
    if ((why = read_request_line(&p, end, &method, &method_len, &target, &target_len, &minor)))
        return PyLong_FromLong(why);

    RequestHead *h = PyObject_New(RequestHead, &RequestHeadType);
    if (!h)
        return NULL;
    h->method = h->target = h->passing = h->fields = NULL;
    h->authorization = Py_NewRef(empty);
    h->api_key = Py_NewRef(empty);
    h->request_id = Py_NewRef(empty);
    h->forwarded_for = Py_NewRef(empty);
    h->content_type = Py_NewRef(empty);
    h->length = -1;
    h->minor = minor;
    h->expects_continue = h->chunked = h->wishes = 0;
    if (method_len == 4 && !memcmp(method, "POST", 4))
        h->method = Py_NewRef(post);
    else if (method_len == 3 && !memcmp(method, "GET", 3))
        h->method = Py_NewRef(get);
    else
        SET(h->method, bytes_of(method, method_len));
    SET(h->target, bytes_of(target, target_len));
    SET(h->fields, bytes_of(p, end - p));
    SET(h->passing, PyBytes_FromStringAndSize(NULL, end - p));
    char *out = PyBytes_AS_STRING(h->passing);

    Py_ssize_t count = 0;
    field f;
    while (p < end) {
        if ((why = next_field(&p, end, &f)))
            goto refused;
        if (++count > max_fields) {
            why = TOO_MANY_FIELDS;
            goto refused;
        }
        int kind = request_field(f.line, f.name_len);
        switch (kind) {
        case TYPE:
            SET(h->content_type, value_of(&f));
            /* fall through */
        case WISH:
            h->wishes |= kind == WISH;
            /* fall through */
        case PASS:
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
            break;
        case HOST:
            hosts++;
            break;
        case LENGTH:
            if (h->length >= 0) {
                why = BAD_LENGTH;
                goto refused;
            }
            if ((why = read_length(&f, &h->length)))
                goto refused;
            break;
        case CODING:
            if (h->chunked)
                why = CODING_TWICE;
            else if (!same(f.value, f.value_len, "chunked"))
                why = BAD_CODING;
            if (why)
                goto refused;
            h->chunked = 1;
            break;
        case CONNECTION:
            if ((why = read_connection(&f, &close, &keep, &drop)))
                goto refused;
            break;
        case EXPECT:
            if (!same(f.value, f.value_len, "100-continue")) {
                why = BAD_EXPECT;
                goto refused;
            }
            h->expects_continue = minor == 1;
            break;
        case AUTHORIZATION:
            SET(h->authorization, value_of(&f));
            break;
        case API_KEY:
            SET(h->api_key, value_of(&f));
            break;
        case REQUEST_ID: {
            size_t i = 0;
            while (i < f.value_len && f.value[i] > ' ' && f.value[i] < 0x7f)
                i++;
            if (i && i == f.value_len && i <= MAX_ID_BYTES)
                SET(h->request_id, value_of(&f));
            break;
        }
        case FORWARDED_FOR:
            SET(h->forwarded_for, joined(h->forwarded_for, &f));
            break;
        case DROP:
            break;
        }
    }
    if (hosts != 1 && (hosts || minor))
        why = BAD_HOST;
    else if (h->chunked && h->length >= 0)
        why = LENGTH_AND_CODING;
    else if (h->chunked && !minor)
        why = CODING_IN_1_0;
    if (why)
        goto refused;
    if (!h->chunked && h->length < 0)
        h->length = 0;
    h->keep_alive = !close && (minor || keep);
    if (_PyBytes_Resize(&h->passing, out - PyBytes_AS_STRING(h->passing)) < 0)
        goto failed;
    if (drop.count)
        SET(h->passing, without(h->passing, &drop));
    return (PyObject *)h;
refused:
    Py_DECREF(h);
    return PyLong_FromLong(why);
failed:
    Py_DECREF(h);
    return NULL;
}

/* ---- Responses ---- */

typedef struct {
    PyObject_HEAD
    PyObject *status_line, *content_type, *retry_after, *passing;
    long long length;
    int status;
    char keep_alive;
} ResponseHead;

static void response_head_free(ResponseHead *h) {
    Py_XDECREF(h->status_line);
    Py_XDECREF(h->content_type);
    Py_XDECREF(h->retry_after);
    Py_XDECREF(h->passing);
    Py_TYPE(h)->tp_free((PyObject *)h);
}

static PyMemberDef response_head_members[] = {
    {"status_line", T_OBJECT_EX, offsetof(ResponseHead, status_line), READONLY, NULL},
    {"content_type", T_OBJECT_EX, offsetof(ResponseHead, content_type), READONLY, NULL},
    {"retry_after", T_OBJECT_EX, offsetof(ResponseHead, retry_after), READONLY, NULL},
    {"passing", T_OBJECT_EX, offsetof(ResponseHead, passing), READONLY, NULL},
    {"length", T_LONGLONG, offsetof(ResponseHead, length), READONLY, NULL},
    {"status", T_INT, offsetof(ResponseHead, status), READONLY, NULL},
    {"keep_alive", T_BOOL, offsetof(ResponseHead, keep_alive), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject ResponseHeadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._http.ResponseHead",
    .tp_basicsize = sizeof(ResponseHead),
    .tp_dealloc = (destructor)response_head_free,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_members = response_head_members,
};

/* HTTP/1.x, a space, three digits, and perhaps a space and a reason. */
static int read_status_line(const char **at, const char *end, int *minor, int *status) {
    const char *p = *at;
    if (end - p < 14 || memcmp(p, "HTTP/1.", 7) || (p[7] != '0' && p[7] != '1') || p[8] != ' ')
        return BAD_LINE;
    *minor = p[7] - '0';
    if (p[9] < '1' || p[9] > '5' || p[10] < '0' || p[10] > '9' || p[11] < '0' || p[11] > '9')
        return BAD_LINE;
    *status = (p[9] - '0') * 100 + (p[10] - '0') * 10 + (p[11] - '0');
    p += 12;
    if (*p == ' ')
        while (p < end && is_text[(unsigned char)*p])
            p++;
    if (end - p < 2 || p[0] != '\r' || p[1] != '\n')
        return BAD_LINE;
    *at = p + 2;
    return OK;
}

static PyObject *read_response_head(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const char *data, *end;
    int minor = 0, status = 0, why, close = 0, keep = 0;
    dropped drop = {.count = 0};
    (void)self;
    if (read_args(args, n, 2, &data, &end) < 0)
        return NULL;
    const char *p = data;
    if ((why = read_status_line(&p, end, &minor, &status)))
        return PyLong_FromLong(why);

    ResponseHead *h = PyObject_New(ResponseHead, &ResponseHeadType);
    if (!h)
        return NULL;
    h->status_line = h->passing = NULL;
    h->content_type = Py_NewRef(empty);
    h->retry_after = Py_NewRef(empty);
    h->status = status;
    h->length = UNTIL_CLOSE;
    SET(h->status_line, bytes_of(data, p - data));
    PyBytes_AS_STRING(h->status_line)[7] = '1'; /* to the client it is the router that speaks */
    SET(h->passing, PyBytes_FromStringAndSize(NULL, end - p));
    char *out = PyBytes_AS_STRING(h->passing);

    field f;
    while (p < end) {
        if ((why = next_field(&p, end, &f)))
            goto refused;
        switch (response_field(f.line, f.name_len)) {
        case TYPE:
            SET(h->content_type, value_of(&f));
            goto pass;
        case RETRY_AFTER:
            SET(h->retry_after, value_of(&f));
            /* fall through */
        case PASS:
        pass:
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
            break;
        case LENGTH:
            if (h->length != UNTIL_CLOSE)
                why = BAD_LENGTH;
            else
                why = read_length(&f, &h->length);
            if (why)
                goto refused;
            break;
        case CODING:
            if (h->length != UNTIL_CLOSE)
                why = CODING_TWICE;
            else if (!same(f.value, f.value_len, "chunked"))
                why = BAD_CODING;
            if (why)
                goto refused;
            h->length = CHUNKED;
            break;
        case CONNECTION:
            if ((why = read_connection(&f, &close, &keep, &drop)))
                goto refused;
            break;
        case DROP:
            break;
        }
    }
    if (status == 204 || status == 304 || status < 200)
        h->length = 0;
    h->keep_alive = !close && (minor || keep) && h->length != UNTIL_CLOSE;
    if (_PyBytes_Resize(&h->passing, out - PyBytes_AS_STRING(h->passing)) < 0)
        goto failed;
    if (drop.count)
        SET(h->passing, without(h->passing, &drop));
    return (PyObject *)h;
refused:
    Py_DECREF(h);
    return PyLong_FromLong(why);
failed:
    Py_DECREF(h);
    return NULL;
}

/* ---- Chunk frames ---- */

enum { SIZE, SIZE_SPACE, EXTENSION, SIZE_LF, DATA, DATA_CR, DATA_LF, TRAILER, TRAILER_NAME, TRAILER_VALUE, TRAILER_LF, END_LF,
       ENDED };

typedef struct {
    PyObject_HEAD
    unsigned long long left;
    unsigned int line, trailers;
    int state;
} ChunkFrames;

static PyObject *frames_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    return type->tp_alloc(type, 0); /* all zero: SIZE, nothing left */
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static PyObject *bad(ChunkFrames *self, const char *why) {
    (void)self;
    PyErr_SetString(BadChunk, why);
    return NULL;
}

static PyObject *feed_on(ChunkFrames *self, PyObject *const *args, Py_ssize_t n);

/* Takes all of the data or none of it: after BadChunk the frames stand where they stood before. */
static PyObject *frames_feed(ChunkFrames *self, PyObject *const *args, Py_ssize_t n) {
    ChunkFrames before = *self;
    PyObject *end = feed_on(self, args, n);
    if (!end) {
        self->left = before.left;
        self->line = before.line;
        self->trailers = before.trailers;
        self->state = before.state;
    }
    return end;
}

static PyObject *feed_on(ChunkFrames *self, PyObject *const *args, Py_ssize_t n) {
    if (n < 1 || n > 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected (data: bytes, pieces: list | None)");
        return NULL;
    }
    PyObject *pieces = n == 2 && args[1] != Py_None ? args[1] : NULL;
    if (pieces && !PyList_Check(pieces)) {
        PyErr_SetString(PyExc_TypeError, "pieces must be a list");
        return NULL;
    }
    const char *data = PyBytes_AS_STRING(args[0]);
    const char *p = data, *end = data + PyBytes_GET_SIZE(args[0]);
    while (p < end) {
        unsigned char c = *p;
        switch (self->state) {
        case SIZE: {
            int digit = hex_digit(c);
            if (digit >= 0) {
                if (++self->line > MAX_SIZE_DIGITS)
                    return bad(self, "a chunk's size is too long");
                self->left = self->left * 16 + digit;
            } else if (!self->line)
                return bad(self, "a chunk's size is missing");
            else if (c == '\r')
                self->state = SIZE_LF;
            else if (c == ';')
                self->state = EXTENSION;
            else if (c == ' ' || c == '\t')
                self->state = SIZE_SPACE;
            else
                return bad(self, "a chunk's size is malformed");
            p++;
            break;
        }
        case SIZE_SPACE:
            if (c == ';')
                self->state = EXTENSION;
            else if (c != ' ' && c != '\t')
                return bad(self, "a chunk's size is malformed");
            if (++self->line > MAX_LINE_BYTES)
                return bad(self, "a chunk's size line is too long");
            p++;
            break;
        case EXTENSION:
            if (c == '\r')
                self->state = SIZE_LF;
            else if (!is_text[c] || ++self->line > MAX_LINE_BYTES)
                return bad(self, "a chunk's extension is malformed");
            p++;
            break;
        case SIZE_LF:
            if (c != '\n')
                return bad(self, "a chunk's size line does not end in CR LF");
            self->line = 0;
            self->state = self->left ? DATA : TRAILER;
            p++;
            break;
        case DATA: {
            unsigned long long have = end - p;
            if (have > self->left)
                have = self->left;
            if (pieces) {
                PyObject *piece = PyBytes_FromStringAndSize(p, (Py_ssize_t)have);
                if (!piece || PyList_Append(pieces, piece) < 0) {
                    Py_XDECREF(piece);
                    return NULL;
                }
                Py_DECREF(piece);
            }
            p += have;
            self->left -= have;
            if (!self->left)
                self->state = DATA_CR;
            break;
        }
        case DATA_CR:
            if (c != '\r')
                return bad(self, "a chunk is longer than its size");
            self->state = DATA_LF;
            p++;
            break;
        case DATA_LF:
            if (c != '\n')
                return bad(self, "a chunk is longer than its size");
            self->state = SIZE;
            p++;
            break;
        case TRAILER:
            if (c == '\r') {
                self->state = END_LF;
                p++;
                break;
            }
            if (++self->trailers > MAX_TRAILERS)
                return bad(self, "there are too many trailers");
            self->state = TRAILER_NAME;
            self->line = 0;
            break;
        case TRAILER_NAME:
            if (c == ':' && self->line)
                self->state = TRAILER_VALUE;
            else if (!is_token[c])
                return bad(self, "a trailer is malformed");
            if (++self->line > MAX_LINE_BYTES)
                return bad(self, "a trailer is too long");
            p++;
            break;
        case TRAILER_VALUE:
            if (c == '\r')
                self->state = TRAILER_LF;
            else if (!is_text[c] || ++self->line > MAX_LINE_BYTES)
                return bad(self, "a trailer is malformed");
            p++;
            break;
        case TRAILER_LF:
            if (c != '\n')
                return bad(self, "a trailer does not end in CR LF");
            self->state = TRAILER;
            p++;
            break;
        case END_LF:
            if (c != '\n')
                return bad(self, "the last chunk does not end in CR LF");
            self->state = ENDED;
            p++;
            return PyLong_FromSsize_t(p - data);
        default:
            return bad(self, "the message has ended");
        }
    }
    return PyLong_FromLong(-1);
}

static PyObject *frames_rest_of_chunk(ChunkFrames *self, PyObject *unused) {
    (void)unused;
    const char *line_end = "";
    unsigned long long left = self->left;
    if (left > MAX_FILLED_BYTES)
        Py_RETURN_NONE;
    switch (self->state) {
    case SIZE:
        if (!self->line)
            return Py_NewRef(empty);
        if (left)
            line_end = "\r\n";
        else { /* only zeros so far, which would end the message: make it a chunk of one byte */
            line_end = "1\r\n";
            left = 1;
        }
        break;
    case SIZE_SPACE:
        line_end = ";\r\n";
        break;
    case EXTENSION:
        line_end = "\r\n";
        break;
    case SIZE_LF:
        line_end = "\n";
        break;
    case DATA:
        break;
    case DATA_CR:
        return bytes_of("\r\n", 2);
    case DATA_LF:
        return bytes_of("\n", 1);
    default:
        Py_RETURN_NONE;
    }
    if (!left)
        Py_RETURN_NONE;
    size_t ends = strlen(line_end);
    PyObject *rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(ends + left + 2));
    if (rest) {
        char *out = PyBytes_AS_STRING(rest);
        memcpy(out, line_end, ends);
        memset(out + ends, '\n', left);
        memcpy(out + ends + left, "\r\n", 2);
    }
    return rest;
}

static PyMethodDef frames_methods[] = {
    {"feed", (PyCFunction)(void (*)(void))frames_feed, METH_FASTCALL,
     "Takes bytes; returns how many of them belong to the message if it ends in them, else -1."},
    {"rest_of_chunk", (PyCFunction)frames_rest_of_chunk, METH_NOARGS,
     "Blank text that completes the chunk at hand, so that another may follow; None where that can't be."},
    {NULL, NULL, 0, NULL}};

static PyTypeObject ChunkFramesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "warmroute._kernel._http.ChunkFrames",
    .tp_doc = "Follows chunk frames through a stream of bytes.",
    .tp_basicsize = sizeof(ChunkFrames),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = frames_new,
    .tp_methods = frames_methods,
};

/* ---- Usage ---- */

enum { PROMPT, INPUT, CACHED, CACHE_READ, CACHE_CREATED, COMPLETION, OUTPUT, NUMBERS };

static const struct {
    const char *name;
    size_t length;
} numbers[NUMBERS] = {
#define NAMED(text) {text "\"", sizeof(text)}
    NAMED("prompt_tokens"),
    NAMED("input_tokens"),
    NAMED("cached_tokens"),
    NAMED("cache_read_input_tokens"),
    NAMED("cache_creation_input_tokens"),
    NAMED("completion_tokens"),
    NAMED("output_tokens"),
#undef NAMED
};

static const char *last_usage(const char *begin, const char *end) {
    static const char name[] = "\"usage\"";
    const size_t length = sizeof(name) - 1;
    while ((size_t)(end - begin) >= length) {
        const char *quote = memrchr(begin, '"', (size_t)(end - begin) - length + 1);
        if (!quote)
            return NULL;
        if (memcmp(quote, name, length) == 0)
            return quote;
        end = quote + length - 1;
    }
    return NULL;
}

static inline int is_hex(char c) { return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f'); }

/* Past the line ends and the size between two chunks; NULL where they do not stand here. */
static const char *past_seam(const char *at, const char *end) {
    if (end - at < 5 || at[0] != '\r' || at[1] != '\n')
        return NULL;
    const char *digit = at += 2;
    while (at < end && at - digit < 8 && is_hex(*at))
        at++;
    return at > digit && end - at >= 2 && at[0] == '\r' && at[1] == '\n' ? at + 2 : NULL;
}

/* A usage that two chunks share is whole without what stands between them. Returns where the copy ends. */
static char *without_seams(const char *at, const char *end, char *out) {
    while (at < end) {
        const char *past = *at == '\r' ? past_seam(at, end) : NULL;
        if (past)
            at = past;
        else
            *out++ = *at++;
    }
    return out;
}

static const char *past_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || (*at >= '\t' && *at <= '\r')))
        at++;
    return at;
}

static inline int is_word(char c) {
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_';
}

/* The number that follows a name's closing quote, or -1; and where it ends. */
static long number_after(const char **at, const char *end) {
    const char *c = past_space(*at, end);
    if (c == end || *c != ':')
        return -1;
    const char *digit = c = past_space(c + 1, end);
    long number = 0;
    while (c < end && c - digit < MAX_NUMBER_DIGITS && *c >= '0' && *c <= '9')
        number = 10 * number + (*c++ - '0');
    if (c == digit || (c < end && is_word(*c)))
        return -1;
    *at = c;
    return number;
}

/* Of each number the first that is told; the others stay -1. */
static void read_numbers(const char *at, const char *end, long told[NUMBERS]) {
    while (at < end && (at = memchr(at, '"', (size_t)(end - at)))) {
        at++;
        for (int which = 0; which < NUMBERS; which++) {
            size_t length = numbers[which].length;
            if ((size_t)(end - at) < length || memcmp(at, numbers[which].name, length) != 0)
                continue;
            const char *past = at + length;
            long number = number_after(&past, end);
            if (number >= 0) {
                at = past;
                if (told[which] < 0)
                    told[which] = number;
            }
            break;
        }
    }
}

static PyObject *read_usage(PyObject *self, PyObject *data) {
    char joined[USAGE_BYTES];
    long told[NUMBERS] = {-1, -1, -1, -1, -1, -1, -1};
    (void)self;
    if (!PyBytes_Check(data)) {
        PyErr_SetString(PyExc_TypeError, "expected bytes");
        return NULL;
    }
    const char *begin = PyBytes_AS_STRING(data), *end = begin + PyBytes_GET_SIZE(data);
    if (end - begin > USAGE_BYTES)
        begin = end - USAGE_BYTES;
    const char *at = last_usage(begin, end);
    if (memchr(begin, '\r', (size_t)(end - begin))) {
        end = without_seams(begin, end, joined);
        at = last_usage(joined, end);
    }
    if (!at)
        Py_RETURN_NONE;
    read_numbers(at, end, told);
    long prompt = told[told[PROMPT] >= 0 ? PROMPT : INPUT], cached = told[CACHED];
    if (told[CACHE_READ] >= 0 || told[CACHE_CREATED] >= 0) {
        cached = told[CACHE_READ];
        if (prompt >= 0)
            prompt += (cached > 0 ? cached : 0) + (told[CACHE_CREATED] > 0 ? told[CACHE_CREATED] : 0);
    }
    const long said[3] = {prompt, cached, told[told[COMPLETION] >= 0 ? COMPLETION : OUTPUT]};
    PyObject *usage = PyTuple_New(3);
    for (int which = 0; usage && which < 3; which++) {
        PyObject *number = said[which] < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(said[which]);
        if (number)
            PyTuple_SET_ITEM(usage, which, number);
        else
            Py_CLEAR(usage);
    }
    return usage;
}

/* ---- The module ---- */

static PyMethodDef methods[] = {
    {"read_request_head", (PyCFunction)(void (*)(void))read_request_head, METH_FASTCALL,
     "The head of data[:end + 4], or the number of the reason why it is refused."},
    {"read_response_head", (PyCFunction)(void (*)(void))read_response_head, METH_FASTCALL,
     "The head of data[:end + 4], or the number of the reason why it is refused."},
    {"read_usage", read_usage, METH_O, "Tokens of the prompt, those of them that were cached, and tokens of the answer."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_http", "HTTP/1.1 heads and chunk framing.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__http(void) {
    fill_tables();
    empty = PyBytes_FromStringAndSize("", 0);
    post = PyBytes_FromString("POST");
    get = PyBytes_FromString("GET");
    BadChunk = PyErr_NewExceptionWithDoc("warmroute._kernel._http.BadChunk",
                                         "The framing is broken: where a chunk should begin or end, it does not.", NULL, NULL);
    if (!empty || !post || !get || !BadChunk || PyType_Ready(&RequestHeadType) < 0 || PyType_Ready(&ResponseHeadType) < 0 ||
        PyType_Ready(&ChunkFramesType) < 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    if (!m)
        return NULL;
    if (PyModule_AddObjectRef(m, "RequestHead", (PyObject *)&RequestHeadType) < 0 ||
        PyModule_AddObjectRef(m, "ResponseHead", (PyObject *)&ResponseHeadType) < 0 ||
        PyModule_AddObjectRef(m, "ChunkFrames", (PyObject *)&ChunkFramesType) < 0 ||
        PyModule_AddObjectRef(m, "BadChunk", BadChunk) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
