/* Usage: the same numbers are found whether a response is split into chunks or not, and only its end counts. */
#include "harness.h"

static PyObject *read_usage;
static long tail_bytes;

void fuzz_setup(void) {
    read_usage = kernel("read_usage");
    tail_bytes = PyLong_AsLong(kernel("USAGE_TAIL_BYTES"));
}

static PyObject *usage_of(const uint8_t *data, size_t size) {
    PyObject *usage = must_call(read_usage, 1, bytes(data, size));
    if (usage == Py_None)
        return usage;
    CHECK(PyTuple_CheckExact(usage) && PyTuple_GET_SIZE(usage) == 3);
    for (int i = 0; i < 3; i++) {
        PyObject *number = PyTuple_GET_ITEM(usage, i);
        CHECK(number == Py_None || (PyLong_AsLong(number) >= 0 && PyLong_AsLong(number) < 3000000000));
    }
    return usage;
}

static void check_equal(PyObject *usage, PyObject *other) {
    CHECK(PyObject_RichCompareBool(usage, other, Py_EQ) == 1);
    Py_DECREF(other);
}

void fuzz_one(const uint8_t *data, size_t size) {
    PyObject *usage = usage_of(data, size);
    if (size && size <= 8192 && !memchr(data, '\r', size)) {
        /* Chunk boundaries at two positions. */
        static const char boundary[] = "\r\n1f\r\n";
        size_t first = data[0] % (size + 1), second = first + data[size - 1] % (size - first + 1), n = sizeof boundary - 1;
        uint8_t *split = malloc(size + 2 * n);
        CHECK(split);
        memcpy(split, data, first);
        memcpy(split + first, boundary, n);
        memcpy(split + first + n, data + first, second - first);
        memcpy(split + second + n, boundary, n);
        memcpy(split + second + 2 * n, data + second, size - second);
        check_equal(usage, usage_of(split, size + 2 * n));
        free(split);
    }
    if (size <= (size_t)tail_bytes && !memchr(data, '\r', size)) { /* what is before the end does not count */
        uint8_t *longer = malloc((size_t)tail_bytes + 100);
        CHECK(longer);
        memset(longer, '"', (size_t)tail_bytes + 100);
        memset(longer, ' ', (size_t)tail_bytes + 100 - size);
        memcpy(longer, "\"usage\":{\"prompt_tokens\":77}", 28);
        memcpy(longer + tail_bytes + 100 - size, data, size);
        PyObject *other = usage_of(longer, (size_t)tail_bytes + 100);
        if (size <= (size_t)tail_bytes - 28)
            check_equal(usage, other);
        else
            Py_DECREF(other);
        free(longer);
    }
    Py_DECREF(usage);
}
