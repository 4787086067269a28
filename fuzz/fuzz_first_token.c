/* The first token: it is found at the same byte whether a stream arrives in one piece or in many, and stays found. */
#include "harness.h"

static PyObject *FirstTokenSearch;

void fuzz_setup(void) { FirstTokenSearch = kernel("FirstTokenSearch"); }

static int feed(PyObject *search, const uint8_t *data, size_t size) {
    PyObject *found = must_call_method(search, "feed", 1, bytes(data, size));
    CHECK(found == Py_True || found == Py_False);
    Py_DECREF(found);
    return found == Py_True;
}

void fuzz_one(const uint8_t *data, size_t size) {
    unsigned step = size ? 1 + data[0] % 13 : 1;
    data += size > 0;
    size -= size > 0;
    PyObject *parts = must_call(FirstTokenSearch, 0), *bytewise = must_call(FirstTokenSearch, 0);
    size_t found_at = size + 1, read = 0;
    for (size_t at = 0; at < size; at++)
        if (feed(bytewise, data + at, 1) && found_at > size)
            found_at = at + 1;
    while (read < size) {
        size_t n = size - read < step ? size - read : step;
        read += n;
        CHECK(feed(parts, data + read - n, n) == (read >= found_at));
        step = 1 + (step * 7 + 3) % 29;
    }
    PyObject *whole = must_call(FirstTokenSearch, 0);
    CHECK(feed(whole, data, size) == (found_at <= size));
    CHECK(feed(whole, (const uint8_t *)": ping\n", 7) >= (found_at <= size)); /* found once, found for good */
    /* An event with content ends every search, whatever came before it on lines of its own. */
    CHECK(feed(whole, (const uint8_t *)"\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n", 48));
    Py_DECREF(whole);
    Py_DECREF(parts);
    Py_DECREF(bytewise);
}
