/* Request and response heads: what is accepted, is accepted again after forwarding, and has no field that must stay here. */
#include "harness.h"

static PyObject *read_request_head, *read_response_head;

void fuzz_setup(void) {
    read_request_head = kernel("read_request_head");
    read_response_head = kernel("read_response_head");
}

static const uint8_t *find_blank_line(const uint8_t *data, size_t size) { return memmem(data, size, "\r\n\r\n", 4); }

/* Whether a field's name is this one, which is in lower case. */
static int is_name(const char *at, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (!name[i] || (at[i] | 32) != name[i])
            return 0;
    return !name[n];
}

/* Every line of the forwarded fields is `name: value CR LF`, without other control characters, and none of these names. */
static void check_fields(PyObject *head, const char *const *stay_here) {
    PyObject *fields = PyObject_GetAttrString(head, "forwarded_fields");
    CHECK(fields && PyBytes_Check(fields));
    const char *p = PyBytes_AS_STRING(fields), *end = p + PyBytes_GET_SIZE(fields);
    while (p < end) {
        const char *line = p, *colon = NULL;
        for (; p < end && *p != '\r'; p++) {
            CHECK(*p == '\t' || (unsigned char)*p >= 0x20);
            colon = !colon && *p == ':' ? p : colon;
        }
        CHECK(end - p >= 2 && p[1] == '\n' && colon && colon > line);
        for (const char *const *name = stay_here; *name; name++)
            CHECK(!is_name(line, (size_t)(colon - line), *name));
        p += 2;
    }
    Py_DECREF(fields);
}

/* Reads a head that is made of a first line and forwarded fields. */
static PyObject *read_again(PyObject *reader, const char *first, PyObject *head, PyObject *max_fields) {
    PyObject *fields = PyObject_GetAttrString(head, "forwarded_fields"), *text = PyBytes_FromString(first);
    PyBytes_Concat(&text, fields);
    CHECK(text);
    Py_ssize_t end = PyBytes_GET_SIZE(text) - 2;
    PyObject *blank = PyBytes_FromString("\r\n");
    PyBytes_ConcatAndDel(&text, blank);
    PyObject *again = max_fields ? must_call(reader, 3, text, integer(end), max_fields) : must_call(reader, 2, text, integer(end));
    CHECK(!PyLong_Check(again));
    PyObject *same = PyObject_GetAttrString(again, "forwarded_fields");
    CHECK(same && PyObject_RichCompareBool(fields, same, Py_EQ) == 1);
    Py_DECREF(same);
    Py_DECREF(fields);
    return again;
}

/* The router would accept what it sends itself. */
static void check_written(PyObject *reader, PyObject *text, PyObject *max_fields) {
    CHECK(PyBytes_Check(text) && PyBytes_GET_SIZE(text) > 4);
    PyObject *end = integer(PyBytes_GET_SIZE(text) - 4);
    PyObject *again = max_fields ? must_call(reader, 3, text, end, max_fields) : must_call(reader, 2, text, end);
    CHECK(!PyLong_Check(again));
    Py_DECREF(again);
}

static void check_request(PyObject *head) {
    static const char *const stay_here[] = {"connection", "host", "content-length", "transfer-encoding", "te", "trailer",
                                            "upgrade", "keep-alive", "proxy-connection", "proxy-authorization", "expect",
                                            "x-api-key", "authorization", "x-request-id", "x-forwarded-for",
                                            "x-data-parallel-rank", "content-encoding", NULL};
    long length = attribute(head, "length");
    CHECK(attribute(head, "chunked") ? length == -1 : length >= 0);
    check_fields(head, stay_here);
    Py_DECREF(read_again(read_request_head, "GET / HTTP/1.1\r\nHost: a\r\n", head, integer(1000000)));
    Py_DECREF(must_call_method(head, "get", 1, PyBytes_FromString("host")));
    Py_DECREF(must_call_method(head, "get", 1, PyBytes_FromString("no-such-field")));
    PyObject *for_node = must_call_method(head, "for_node", 8, PyBytes_FromString("Host: b\r\n"), PyBytes_FromString(""),
                                          Py_NewRef(Py_True), integer(3), PyBytes_FromString("id"),
                                          PyBytes_FromString("1.2.3.4"), integer(2), PyBytes_FromString("X-A: 1\r\n"));
    check_written(read_request_head, for_node, integer(1000000));
}

static void check_response(PyObject *head) {
    static const char *const stay_here[] = {"connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade",
                                            "keep-alive", "proxy-connection", "proxy-authenticate", "x-request-id", NULL};
    CHECK(attribute(head, "length") >= -2 && attribute(head, "status") >= 100 && attribute(head, "status") <= 599);
    CHECK(attribute(head, "length") != -2 || !attribute(head, "keep_alive"));
    check_fields(head, stay_here);
    Py_DECREF(read_again(read_response_head, "HTTP/1.1 200 OK\r\n", head, NULL));
    PyObject *fields = PyObject_GetAttrString(head, "forwarded_fields");
    PyObject *for_client = must_call_method(head, "for_client", 5, fields, Py_NewRef(Py_True), PyBytes_FromString("id"),
                                            PyBytes_FromString("X-A: 1\r\n"), PyBytes_FromString(""));
    check_written(read_response_head, for_client, NULL);
}

static void check_result(PyObject *result, void (*check)(PyObject *)) {
    if (PyLong_Check(result))
        CHECK(PyLong_AsLong(result) >= 1 && PyLong_AsLong(result) <= 17);
    else
        check(result);
    Py_DECREF(result);
}

void fuzz_one(const uint8_t *data, size_t size) {
    const uint8_t *blank = find_blank_line(data, size);
    PyObject *text = bytes(data, size);
    Py_ssize_t end = blank ? blank - data : PyBytes_GET_SIZE(text);
    if (!blank)
        PyBytes_ConcatAndDel(&text, PyBytes_FromString("\r\n\r\n"));
    CHECK(text);
    long max_fields = size ? data[size - 1] : 0;
    check_result(must_call(read_request_head, 3, Py_NewRef(text), integer(end), integer(max_fields)), check_request);
    check_result(must_call(read_response_head, 2, Py_NewRef(text), integer(end)), check_response);
    PyObject *outside = call(read_response_head, 2, text, integer(end + 5 + (Py_ssize_t)size));
    CHECK(!outside);
    expect_error(PyExc_ValueError, NULL);
}
