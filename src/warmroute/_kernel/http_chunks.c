/* The chunked transfer coding, followed strictly through a stream of bytes that arrives in any pieces.
 *
 * The rules:
 * - As for heads (http_head.c): what is not covered by the grammar of RFC 9112 is an error, and every line has a limit.
 * - A call takes all of its bytes or none of them: after BadChunk the reader is in the state it was in before.
 */
#include "http_chunks.h"
#include "http_fields.h"

#define MAX_SIZE_DIGITS 15
#define MAX_LINE_BYTES 4096
#define MAX_TRAILERS 64
#define MAX_PADDING_BYTES 65536

static PyObject *BadChunk;

enum { SIZE, SIZE_SPACE, EXTENSION, SIZE_LF, DATA, DATA_CR, DATA_LF, TRAILER, TRAILER_NAME, TRAILER_VALUE, TRAILER_LF, END_LF,
       ENDED };

typedef struct {
    unsigned long long left;     /* bytes of the chunk that are still to come; the size as far as it is read */
    unsigned int line, trailers; /* bytes of the line that counts; trailers so far */
    int state;
} chunk_state;

typedef struct {
    PyObject_HEAD
    chunk_state at;
} ChunkReader;

static int hex_digit(unsigned char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int add_piece(PyObject *pieces, const char *p, size_t n) {
    PyObject *piece = PyBytes_FromStringAndSize(p, (Py_ssize_t)n);
    int failed = !piece || PyList_Append(pieces, piece) < 0;
    Py_XDECREF(piece);
    return failed ? -1 : 0;
}

/* Follows the bytes from p to end. Returns the position past the message's end, or `end` where it goes on; NULL with an
 * exception. `pieces`: a list for the payload, or NULL. */
static const char *follow(chunk_state *s, const char *p, const char *end, PyObject *pieces) {
    const char *why;
    while (p < end) {
        unsigned char c = (unsigned char)*p;
        switch (s->state) {
        case SIZE: {
            int digit = hex_digit(c);
            why = "a chunk's size is malformed";
            if (digit >= 0) {
                if (++s->line > MAX_SIZE_DIGITS) {
                    why = "a chunk's size is too long";
                    goto bad;
                }
                s->left = s->left * 16 + (unsigned)digit;
            } else if (!s->line) {
                why = "a chunk's size is missing";
                goto bad;
            } else if (c == '\r') {
                s->state = SIZE_LF;
            } else if (c == ';') {
                s->state = EXTENSION;
            } else if (c == ' ' || c == '\t') {
                s->state = SIZE_SPACE;
            } else {
                goto bad;
            }
            break;
        }
        case SIZE_SPACE:
            why = "a chunk's size is malformed";
            if (c == ';')
                s->state = EXTENSION;
            else if (c != ' ' && c != '\t')
                goto bad;
            why = "a chunk's size line is too long";
            if (++s->line > MAX_LINE_BYTES)
                goto bad;
            break;
        case EXTENSION:
            why = "a chunk's extension is malformed";
            if (c == '\r')
                s->state = SIZE_LF;
            else if (!is_text[c] || ++s->line > MAX_LINE_BYTES)
                goto bad;
            break;
        case SIZE_LF:
            why = "a chunk's size line does not end in CR LF";
            if (c != '\n')
                goto bad;
            s->line = 0;
            s->state = s->left ? DATA : TRAILER;
            break;
        case DATA: {
            size_t have = (size_t)(end - p);
            if (have > s->left)
                have = (size_t)s->left;
            if (pieces && add_piece(pieces, p, have) < 0)
                return NULL;
            p += have;
            s->left -= have;
            if (!s->left)
                s->state = DATA_CR;
            continue;
        }
        case DATA_CR:
            why = "a chunk is longer than its size";
            if (c != '\r')
                goto bad;
            s->state = DATA_LF;
            break;
        case DATA_LF:
            why = "a chunk is longer than its size";
            if (c != '\n')
                goto bad;
            s->state = SIZE;
            break;
        case TRAILER:
            if (c == '\r') {
                s->state = END_LF;
                break;
            }
            why = "there are too many trailers";
            if (++s->trailers > MAX_TRAILERS)
                goto bad;
            s->state = TRAILER_NAME;
            s->line = 0;
            continue;
        case TRAILER_NAME:
            why = "a trailer is malformed";
            if (c == ':' && s->line)
                s->state = TRAILER_VALUE;
            else if (!is_token[c])
                goto bad;
            why = "a trailer is too long";
            if (++s->line > MAX_LINE_BYTES)
                goto bad;
            break;
        case TRAILER_VALUE:
            why = "a trailer is malformed";
            if (c == '\r')
                s->state = TRAILER_LF;
            else if (!is_text[c] || ++s->line > MAX_LINE_BYTES)
                goto bad;
            break;
        case TRAILER_LF:
            why = "a trailer does not end in CR LF";
            if (c != '\n')
                goto bad;
            s->state = TRAILER;
            break;
        case END_LF:
            why = "the last chunk does not end in CR LF";
            if (c != '\n')
                goto bad;
            s->state = ENDED;
            return p + 1;
        default:
            why = "the message has ended";
            goto bad;
        }
        p++;
    }
    return end;
bad:
    PyErr_SetString(BadChunk, why);
    return NULL;
}

static PyObject *reader_feed(ChunkReader *self, PyObject *const *args, Py_ssize_t n) {
    if (check_signature(n, 1, 2, "(data: bytes, pieces: list | None)") < 0 || check_type(args[0], &PyBytes_Type) < 0)
        return NULL;
    PyObject *pieces = n == 2 && args[1] != Py_None ? args[1] : NULL;
    if (pieces && check_type(pieces, &PyList_Type) < 0)
        return NULL;
    const char *data = PyBytes_AS_STRING(args[0]);
    chunk_state after = self->at;
    const char *end = follow(&after, data, data + PyBytes_GET_SIZE(args[0]), pieces);
    if (!end)
        return NULL;
    self->at = after;
    return PyLong_FromSsize_t(after.state == ENDED && end > data ? end - data : -1);
}

int chunks_continue(PyObject *reader, const char *data, size_t bytes) {
    ChunkReader *self = (ChunkReader *)reader;
    chunk_state after = self->at;
    if (!follow(&after, data, data + bytes, NULL)) {
        PyErr_Clear();
        return 0;
    }
    if (after.state == ENDED)
        return 0;
    self->at = after;
    return 1;
}

static PyObject *reader_padding_to_chunk_end(ChunkReader *self, PyObject *unused) {
    const char *line_end = "";
    unsigned long long left = self->at.left;
    (void)unused;
    if (left > MAX_PADDING_BYTES)
        Py_RETURN_NONE;
    switch (self->at.state) {
    case SIZE:
        if (!self->at.line)
            return PyBytes_FromStringAndSize("", 0);
        line_end = "\r\n";
        if (!left) { /* only zeros so far, which would end the message: make it a chunk of one byte */
            if (self->at.line == MAX_SIZE_DIGITS)
                Py_RETURN_NONE;
            line_end = "1\r\n";
            left = 1;
        }
        break;
    case SIZE_SPACE:
        if (self->at.line == MAX_LINE_BYTES)
            Py_RETURN_NONE;
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
        return PyBytes_FromStringAndSize("\r\n", 2);
    case DATA_LF:
        return PyBytes_FromStringAndSize("\n", 1);
    default:
        Py_RETURN_NONE;
    }
    if (!left)
        Py_RETURN_NONE;
    size_t ends = strlen(line_end), blanks = (size_t)left;
    PyObject *padding = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(ends + blanks + 2));
    if (padding) {
        char *out = PyBytes_AS_STRING(padding);
        memcpy(out, line_end, ends);
        memset(out + ends, '\n', blanks);
        memcpy(out + ends + blanks, "\r\n", 2);
    }
    return padding;
}

static PyMethodDef reader_methods[] = {
    {"feed", FAST(reader_feed), "Follow bytes; return how many of them belong to the message if it ends in them, else -1."},
    {"padding_to_chunk_end", (PyCFunction)reader_padding_to_chunk_end, METH_NOARGS,
     "Return blank bytes that complete the current chunk, so that another may follow; None if there are none."},
    NO_METHOD};

PyTypeObject ChunkReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "ChunkReader",
    .tp_doc = "Follows the chunks of one message.",
    .tp_basicsize = sizeof(ChunkReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew, /* all zero: at the first chunk's size */
    .tp_methods = reader_methods,
};

int add_http_chunks(PyObject *module) {
    if (!BadChunk)
        BadChunk = PyErr_NewExceptionWithDoc(MODULE "BadChunk", "The chunk framing is malformed.", NULL, NULL);
    if (!BadChunk || PyModule_AddObjectRef(module, "BadChunk", BadChunk) < 0)
        return -1;
    return add_type(module, "ChunkReader", &ChunkReaderType);
}
