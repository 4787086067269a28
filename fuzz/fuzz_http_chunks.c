/* Chunks: a message read in one piece and in many small ones gives the same payload, the same end and the same errors; and
 * padding completes a chunk. */
#include "harness.h"

static PyObject *ChunkReader, *BadChunk;

void fuzz_setup(void) {
    ChunkReader = kernel("ChunkReader");
    BadChunk = kernel("BadChunk");
}

/* The end of the message, -1 without one, or -2 for BadChunk. */
static long long feed(PyObject *reader, const uint8_t *data, size_t size, PyObject *pieces) {
    PyObject *end = call_method(reader, "feed", 2, bytes(data, size), Py_NewRef(pieces));
    if (end)
        return as_integer(end);
    expect_error(BadChunk, NULL);
    return -2;
}

/* A message may go on after the padding, and end. */
static void check_padding(PyObject *reader) {
    PyObject *padding = must_call_method(reader, "padding_to_chunk_end", 0), *pieces = PyList_New(0);
    if (padding != Py_None) {
        CHECK(feed(reader, (const uint8_t *)PyBytes_AS_STRING(padding), (size_t)PyBytes_GET_SIZE(padding), pieces) == -1);
        CHECK(feed(reader, (const uint8_t *)"1\r\nx\r\n0\r\n\r\n", 11, pieces) == 11);
    }
    Py_DECREF(pieces);
    Py_DECREF(padding);
}

void fuzz_one(const uint8_t *data, size_t size) {
    unsigned step = size ? 1 + data[0] % 9 : 1;
    PyObject *whole = must_call(ChunkReader, 0), *parts = must_call(ChunkReader, 0), *fresh = must_call(ChunkReader, 0);
    PyObject *whole_pieces = PyList_New(0), *part_pieces = PyList_New(0), *empty = PyBytes_FromString("");
    data += size > 0;
    size -= size > 0;
    long long end = feed(whole, data, size, whole_pieces), part_end = -1;
    size_t at = 0;
    while (at < size && part_end == -1) {
        size_t n = size - at < step ? size - at : step;
        part_end = feed(parts, data + at, n, part_pieces);
        if (part_end >= 0) {
            part_end += (long long)at;
        } else {
            at += n;
            step = 1 + (step * 7 + 3) % 11;
        }
    }
    CHECK(end == part_end && end <= (long long)size);
    PyObject *joined = PyObject_CallMethod(empty, "join", "O", whole_pieces);
    PyObject *part_joined = PyObject_CallMethod(empty, "join", "O", part_pieces);
    CHECK(joined && part_joined);
    if (end != -2) {
        CHECK(PyObject_RichCompareBool(joined, part_joined, Py_EQ) == 1);
        check_padding(whole);
        check_padding(parts);
    } else { /* after an error the reader is as new, and takes a message */
        CHECK(feed(whole, (const uint8_t *)"0\r\n\r\n", 5, whole_pieces) == 5);
    }
    CHECK(as_integer(must_call_method(fresh, "feed", 1, bytes("", 0))) == -1);
    Py_DECREF(joined);
    Py_DECREF(part_joined);
    Py_DECREF(whole);
    Py_DECREF(parts);
    Py_DECREF(fresh);
    Py_DECREF(whole_pieces);
    Py_DECREF(part_pieces);
    Py_DECREF(empty);
}
