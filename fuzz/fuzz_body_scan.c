/* Bodies: where the scan accepts one, json.loads reads the same fields and values; positions lie within the body. */
#include "harness.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* of what utf8.h includes */
#include "utf8.h"

static PyObject *scan_body, *outline_body, *is_text, *prefix_digests, *decode_ms, *bad_body, *loads, *json_error;
static PyObject *engine_fields, *engine_options;
static long token_bytes, digest_bytes;

void fuzz_setup(void) {
    scan_body = kernel("scan_body");
    outline_body = kernel("outline_body");
    is_text = kernel("is_utf8");
    engine_fields = kernel("ENGINE_FIELDS");
    engine_options = kernel("ENGINE_OPTIONS");
    prefix_digests = kernel("prefix_digests");
    decode_ms = kernel("decode_ms");
    bad_body = kernel("BadBody");
    token_bytes = PyLong_AsLong(kernel("TOKEN_BYTES"));
    digest_bytes = PyLong_AsLong(kernel("DIGEST_BYTES"));
    PyObject *json = PyImport_ImportModule("json");
    CHECK(json);
    loads = PyObject_GetAttrString(json, "loads");
    json_error = PyObject_GetAttrString(json, "JSONDecodeError");
    CHECK(loads && json_error);
}

/* What json.loads makes of these bytes. */
static PyObject *parsed(const char *at, Py_ssize_t size) {
    if (size > 3 && !memcmp(at, "\xef\xbb\xbf", 3)) {
        at += 3;
        size -= 3;
    }
    PyObject *text = PyUnicode_DecodeUTF8(at, size, NULL);
    CHECK(text);
    return must_call(loads, 1, text);
}

static void check_fields(PyObject *body, PyObject *outline) {
    PyObject *fields = PyObject_GetAttrString(outline, "fields"), *key, *span;
    PyObject *tree = parsed(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body));
    Py_ssize_t at = 0;
    CHECK(fields && PyDict_Check(fields) && PyDict_Check(tree));
    while (PyDict_Next(fields, &at, &key, &span)) {
        Py_ssize_t start = PyLong_AsSsize_t(PyTuple_GET_ITEM(span, 0)), end = PyLong_AsSsize_t(PyTuple_GET_ITEM(span, 1));
        CHECK(start > 0 && start < end && end < PyBytes_GET_SIZE(body));
        PyObject *value = parsed(PyBytes_AS_STRING(body) + start, end - start), *expected = PyDict_GetItemWithError(tree, key);
        CHECK(value && expected);
        /* NaN differs from itself, so values are compared as text */
        PyObject *one = PyObject_Repr(value), *other = PyObject_Repr(expected);
        CHECK(one && other && PyObject_RichCompareBool(one, other, Py_EQ) == 1);
        Py_DECREF(one);
        Py_DECREF(other);
        Py_DECREF(value);
    }
    PyObject *value;
    at = 0;
    while (PyDict_Next(tree, &at, &key, &value))
        CHECK(!PyUnicode_IS_ASCII(key) || PyUnicode_GET_LENGTH(key) > 128 || PyDict_Contains(fields, key) == 1);
    Py_DECREF(fields);
    Py_DECREF(tree);
}

static void check_messages(PyObject *body, PyObject *outline) {
    PyObject *spans = PyObject_GetAttrString(outline, "message_spans");
    CHECK(spans && PyBytes_GET_SIZE(spans) % 8 == 0);
    uint32_t before = 0;
    for (Py_ssize_t at = 0; at < PyBytes_GET_SIZE(spans); at += 4) {
        uint32_t position;
        memcpy(&position, PyBytes_AS_STRING(spans) + at, 4);
        CHECK(position > before && position < PyBytes_GET_SIZE(body));
        before = position;
    }
    PyObject *digests = must_call(prefix_digests, 2, Py_NewRef(body), Py_NewRef(spans));
    CHECK(PyBytes_GET_SIZE(digests) == PyBytes_GET_SIZE(spans) / 8 * digest_bytes);
    Py_DECREF(digests);
    Py_DECREF(spans);
}

/* A plain message has its role and its text, as json.loads reads them. */
static void check_plain_messages(PyObject *body, PyObject *outline) {
    static const char *const roles[] = {"", "system", "user", "assistant"};
    PyObject *plain = PyObject_GetAttrString(outline, "plain_roles");
    PyObject *tree = parsed(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body));
    CHECK(plain && attribute(outline, "message_count") == PyBytes_GET_SIZE(plain));
    for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(plain); i++) {
        unsigned role = (unsigned char)PyBytes_AS_STRING(plain)[i];
        PyObject *text = must_call_method(outline, "plain_text", 1, integer(i));
        CHECK(role < 4 && !role == (text == Py_None));
        if (role) {
            PyObject *message = PyList_GetItem(PyDict_GetItemString(tree, "messages"), i);
            PyObject *content = PyDict_GetItemString(message, "content");
            if (PyList_Check(content)) {
                CHECK(PyList_GET_SIZE(content) == 1 && PyDict_GET_SIZE(PyList_GET_ITEM(content, 0)) == 2);
                content = PyDict_GetItemString(PyList_GET_ITEM(content, 0), "text");
            }
            CHECK(content && PyObject_RichCompareBool(content, text, Py_EQ) == 1);
            CHECK(!PyUnicode_CompareWithASCIIString(PyDict_GetItemString(message, "role"), roles[role]));
        }
        Py_DECREF(text);
    }
    Py_DECREF(plain);
    Py_DECREF(tree);
}

/* Whether a value sets a field that only the router may set: itself where it is the body, at any depth in an option. */
static int sets_engine_field(PyObject *value, int is_body) {
    Py_ssize_t at = 0;
    PyObject *key, *member;
    if (PyList_Check(value) && !is_body)
        for (; at < PyList_GET_SIZE(value); at++)
            if (sets_engine_field(PyList_GET_ITEM(value, at), 0))
                return 1;
    if (PyDict_Check(value))
        while (PyDict_Next(value, &at, &key, &member))
            if ((member != Py_None && PySequence_Contains(engine_fields, key)) ||
                ((!is_body || PySequence_Contains(engine_options, key)) && sets_engine_field(member, 0)))
                return 1;
    return 0;
}

/* A field that only the router may set is found. Of fields given twice, json.loads has the last one, and the scan any. */
static void check_engine_field(PyObject *body, PyObject *outline) {
    PyObject *found = PyObject_GetAttrString(outline, "engine_field");
    PyObject *tree = parsed(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body));
    CHECK(found && (found == Py_None || PySequence_Contains(engine_fields, found) == 1));
    CHECK(found != Py_None || !sets_engine_field(tree, 1));
    Py_DECREF(found);
    Py_DECREF(tree);
}

static void check_outline(PyObject *body, PyObject *outline) {
    check_engine_field(body, outline);
    check_fields(body, outline);
    check_messages(body, outline);
    check_plain_messages(body, outline);
    PyObject *context = must_call_method(outline, "chat_context", 0);
    CHECK(PyBytes_GET_SIZE(context) == digest_bytes);
    Py_DECREF(context);
    PyObject *tokens = must_call_method(outline, "text_as_tokens", 0);
    CHECK(PyBytes_GET_SIZE(tokens) % token_bytes == 0 && PyBytes_GET_SIZE(tokens) < PyBytes_GET_SIZE(body) + token_bytes);
    Py_DECREF(tokens);
    PyObject *parameters = call_method(outline, "parameters", 2, integer(7), none());
    if (parameters)
        CHECK(PyTuple_GET_SIZE(parameters) == 3);
    else
        expect_error(bad_body, NULL);
    Py_XDECREF(parameters);
    PyObject *cost = must_call(decode_ms, 3, Py_NewRef(body), integer(0), integer(PyBytes_GET_SIZE(body)));
    CHECK(PyFloat_AsDouble(cost) > 0);
    Py_DECREF(cost);
    PyObject *salt = PyObject_GetAttrString(outline, "cache_salt");
    CHECK(salt && PyUnicode_Check(salt));
    Py_DECREF(salt);
}

/* NULL where the body is rejected. */
static PyObject *accepted(PyObject *read, PyObject *body) {
    PyObject *result = call(read, 1, Py_NewRef(body));
    if (!result)
        expect_error(bad_body, NULL);
    return result;
}

/* Both ways to check text agree with Python's decoder. The words are those of processors without AVX2. */
static void check_text(PyObject *body, size_t skipped) {
    Py_ssize_t size = PyBytes_GET_SIZE(body), start = (Py_ssize_t)skipped < size ? (Py_ssize_t)skipped : size;
    const char *at = PyBytes_AS_STRING(body);
    PyObject *text = PyUnicode_DecodeUTF8(at + start, size - start, NULL), *found;
    if (!text)
        expect_error(PyExc_UnicodeDecodeError, NULL);
    found = must_call(is_text, 3, Py_NewRef(body), integer(start), integer(size));
    CHECK((found == Py_True) == !!text && is_utf8_by_words((ptr)at + start, (ptr)at + size) == !!text);
    Py_DECREF(found);
    Py_XDECREF(text);
}

void fuzz_one(const uint8_t *data, size_t size) {
    PyObject *body = bytes(data, size), *outline = accepted(outline_body, body), *scanned = accepted(scan_body, body);
    check_text(body, 0);
    check_text(body, size ? data[0] % 70 : 0);
    if (outline)
        check_outline(body, outline);
    if (scanned) {
        CHECK(outline && PyTuple_GET_SIZE(scanned) == 5);
        PyObject *model = PyTuple_GET_ITEM(scanned, 0), *tree = parsed(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body));
        PyObject *expected = PyDict_GetItemString(tree, "model");
        if (expected && expected != Py_None)
            CHECK(PyUnicode_Check(expected) && PyObject_RichCompareBool(model, expected, Py_EQ) == 1);
        else
            CHECK(PyUnicode_GET_LENGTH(model) == 0);
        for (int i = 1; i <= 3; i++)
            CHECK(PyTuple_GET_ITEM(scanned, i) == Py_None || PyBytes_GET_SIZE(PyTuple_GET_ITEM(scanned, i)) <= 1024);
        Py_DECREF(tree);
    }
    Py_XDECREF(scanned);
    Py_XDECREF(outline);
    Py_DECREF(body);
}
