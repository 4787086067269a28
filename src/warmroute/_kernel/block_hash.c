/* Block hashes, and reading tokens and hashes from Python. block_hash.h says what each function does.
 *
 * tests/index/reference_index.py has the same hashes in plain Python; tests/index/test_block_hashes.py compares the two.
 */
#include "block_hash.h"

#define MAX_ENGINE_HASH_BYTES 64

/* ---- Hashing ---- */

/* Does not depend on the block before, so that the processor hashes several blocks at a time. */
static always_inline uint64_t hash_bytes(uint64_t seed, const uint8_t *p, size_t len) {
    uint64_t a = fold_product(seed ^ K[0], len ^ K[1]), b = a ^ K[2];
    for (; len >= 32; p += 32, len -= 32) {
        a = fold_product(read64(p) ^ K[1], read64(p + 8) ^ a);
        b = fold_product(read64(p + 16) ^ K[2], read64(p + 24) ^ b);
    }
    a = fold_product(a ^ K[3], b ^ K[4]);
    for (; len >= 16; p += 16, len -= 16)
        a = fold_product(read64(p) ^ K[1], read64(p + 8) ^ a);
    if (len) {
        uint8_t rest[16] = {0};
        memcpy(rest, p, len);
        a = fold_product(read64(rest) ^ K[5], read64(rest + 8) ^ a);
    }
    return fold_product(a ^ K[6], K[7]);
}

static always_inline uint64_t chain(uint64_t namespace, uint64_t parent, uint64_t block) {
    return fold_product(fold_product(block ^ K[4], parent ^ K[5]) ^ K[6], namespace ^ K[7]);
}

void hash_blocks(uint64_t namespace, uint64_t parent, const uint8_t *token_ids, size_t block_bytes, PyObject *extra, size_t n,
                 uint8_t *out) {
    for (size_t i = 0; i < n; i++) {
        uint64_t block = hash_bytes(K[0], token_ids + i * block_bytes, block_bytes);
        if (extra) {
            PyObject *item = PySequence_Fast_GET_ITEM(extra, (Py_ssize_t)i);
            if (item != Py_None && PyBytes_GET_SIZE(item)) {
                const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(item);
                block = fold_product(block ^ K[2], hash_bytes(K[1], bytes, (size_t)PyBytes_GET_SIZE(item)) ^ K[3]);
            }
        }
        parent = chain(namespace, parent, block);
        memcpy(out + 8 * i, &parent, 8);
    }
}

/* ---- Hashes from Python ---- */

int make_values(values *v, size_t n) {
    v->n = n;
    v->at = n <= FEW_VALUES ? v->few : PyMem_RawMalloc(n * sizeof(uint64_t));
    if (v->at)
        return 0;
    PyErr_NoMemory();
    return -1;
}

void close_values(values *v) {
    if (v->at && v->at != v->few)
        PyMem_RawFree(v->at);
    v->at = NULL;
}

static always_inline int read_integer(PyObject *item, uint64_t *out, const char *what) {
    if (!PyLong_Check(item)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %.80s", what, Py_TYPE(item)->tp_name);
        return -1;
    }
#if PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    /* KV events bring hashes by the thousand. Most of them have three digits, which are read directly. */
    const digit *digits = ((PyLongObject *)item)->ob_digit;
    if (Py_SIZE(item) == 3 && digits[2] < 16) {
        *out = digits[0] | (uint64_t)digits[1] << 30 | (uint64_t)digits[2] << 60;
        return 0;
    }
#endif
    int overflow;
    long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (!overflow) {
        *out = (uint64_t)value;
        return 0;
    }
    if (overflow > 0) {
        *out = PyLong_AsUnsignedLong(item);
        if (!PyErr_Occurred())
            return 0;
        PyErr_Clear();
    }
    PyErr_Format(PyExc_ValueError, "%s does not fit 64 bits", what);
    return -1;
}

int read_int64(PyObject *item, uint64_t *out, const char *what) { return read_integer(item, out, what); }

static always_inline int read_hash(PyObject *item, uint64_t *out) {
    if (PyLong_CheckExact(item))
        return read_integer(item, out, "a hash");
    if (PyBytes_CheckExact(item)) {
        Py_ssize_t n = PyBytes_GET_SIZE(item);
        if (n == 0 || n > MAX_ENGINE_HASH_BYTES) {
            PyErr_Format(PyExc_ValueError, "a hash must have 1 to %d bytes", MAX_ENGINE_HASH_BYTES);
            return -1;
        }
        *out = hash_bytes(K[3], (const uint8_t *)PyBytes_AS_STRING(item), (size_t)n);
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "a hash must be an int or bytes, not %.80s", Py_TYPE(item)->tp_name);
    return -1;
}

int read_engine_hash(PyObject *item, uint64_t *out) { return read_hash(item, out); }

Py_ssize_t open_integers(PyObject *from, Py_buffer *view, Py_ssize_t size, Py_ssize_t other_size, const char *what) {
    if (PyObject_GetBuffer(from, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return -1;
    const char *format = view->format ? view->format : view->itemsize == 1 ? "B" : "?";
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    int integers = strlen(format) == 1 && strchr("bBchHiIlLqQnN", *format) != NULL;
    if (integers && view->itemsize == 1 && view->len % size == 0)
        return view->len / size;
    if (integers && (view->itemsize == size || view->itemsize == other_size))
        return view->len / view->itemsize;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "%s must be integers of %zd bits", what, 8 * size);
    return -1;
}

int open_hashes(PyObject *from, values *out) {
    out->at = NULL;
    if (PyList_CheckExact(from) || PyTuple_CheckExact(from)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(from);
        if (make_values(out, (size_t)n) < 0)
            return -1;
        PyObject **items = PySequence_Fast_ITEMS(from);
        for (Py_ssize_t i = 0; i < n; i++)
            if (read_hash(items[i], &out->at[i]) < 0) {
                close_values(out);
                return -1;
            }
        return 0;
    }
    Py_buffer view;
    Py_ssize_t n = open_integers(from, &view, 8, 8, "hashes");
    if (n < 0)
        return -1;
    int failed = make_values(out, (size_t)n);
    if (!failed && n)
        memcpy(out->at, view.buf, (size_t)n * 8);
    PyBuffer_Release(&view);
    return failed;
}

/* ---- Tokens from Python ---- */

void close_tokens(tokens *t) {
    if (t->has_view)
        PyBuffer_Release(&t->view);
    PyMem_RawFree(t->copy);
}

static int bad_token(void) {
    PyErr_SetString(PyExc_ValueError, "a token id must be 0 to 4294967295");
    return -1;
}

static int make_copy(tokens *out, size_t n) {
    out->n = n;
    out->copy = PyMem_RawMalloc(n * 4 + 1);
    out->at = (const uint8_t *)out->copy;
    if (out->copy)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int tokens_from_sequence(PyObject *from, tokens *out) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(from);
    if (make_copy(out, (size_t)n) < 0)
        return -1;
    PyObject **items = PySequence_Fast_ITEMS(from);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyLong_Check(items[i])) {
            PyErr_Format(PyExc_TypeError, "a token id must be an int, not %.80s", Py_TYPE(items[i])->tp_name);
            return -1;
        }
        long value = PyLong_AsLong(items[i]);
        if (value < 0 || value > UINT32_MAX) {
            PyErr_Clear(); /* an overflow */
            return bad_token();
        }
        out->copy[i] = (uint32_t)value;
    }
    return 0;
}

static int tokens_from_buffer(PyObject *from, tokens *out) {
    Py_ssize_t n = open_integers(from, &out->view, 4, 8, "token_ids");
    if (n < 0)
        return -1;
    out->has_view = 1;
    out->n = (size_t)n;
    out->at = out->view.buf;
    uint64_t high = 0;
    if (out->view.itemsize == 8) {
        const uint8_t *wide = out->view.buf;
        if (make_copy(out, (size_t)n) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < n; i++) {
            uint64_t value = read64(wide + 8 * i);
            high |= value >> 32;
            out->copy[i] = (uint32_t)value;
        }
    } else if (out->view.itemsize == 4 && strpbrk(out->view.format, "il")) {
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t value;
            memcpy(&value, out->at + 4 * i, 4);
            high |= value < 0;
        }
    }
    return high ? bad_token() : 0;
}

int open_tokens(PyObject *from, tokens *out) {
    *out = (tokens){0};
    int is_sequence = PyList_CheckExact(from) || PyTuple_CheckExact(from);
    int failed = is_sequence ? tokens_from_sequence(from, out) : tokens_from_buffer(from, out);
    if (failed)
        close_tokens(out);
    return failed;
}

int check_extra(PyObject *extra, size_t n) {
    if (!extra)
        return 0;
    if (!PyList_CheckExact(extra) && !PyTuple_CheckExact(extra)) {
        PyErr_SetString(PyExc_TypeError, "extra must be a list or a tuple");
        return -1;
    }
    if ((size_t)PySequence_Fast_GET_SIZE(extra) < n) {
        PyErr_SetString(PyExc_ValueError, "extra must have an entry for each block");
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(extra, (Py_ssize_t)i);
        if (item != Py_None && !PyBytes_CheckExact(item)) {
            PyErr_SetString(PyExc_TypeError, "an entry of extra must be bytes or None");
            return -1;
        }
    }
    return 0;
}

/* ---- Functions for Python ---- */

static PyObject *hash_blocks_of(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    uint64_t namespace, parent;
    long block_size;
    tokens ids;
    (void)self;
    if (check_signature(n_args, 4, 5, "(namespace, parent, token_ids, block_size, extra=None)") < 0 ||
        read_int64(args[0], &namespace, "namespace") < 0)
        return NULL;
    parent = namespace;
    if ((args[1] != Py_None && read_int64(args[1], &parent, "parent") < 0) ||
        as_number(args[3], 1, MAX_BLOCK_TOKENS, &block_size, "block_size") < 0 || open_tokens(args[2], &ids) < 0)
        return NULL;
    PyObject *extra = n_args == 5 && args[4] != Py_None ? args[4] : NULL, *hashes = NULL;
    size_t n = ids.n / (size_t)block_size;
    if (!check_extra(extra, n) && (hashes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * 8))))
        hash_blocks(namespace, parent, ids.at, 4 * (size_t)block_size, extra, n, (uint8_t *)PyBytes_AS_STRING(hashes));
    close_tokens(&ids);
    return hashes;
}

static PyObject *engine_hash(PyObject *self, PyObject *item) {
    uint64_t hash;
    (void)self;
    return read_engine_hash(item, &hash) < 0 ? NULL : PyLong_FromUnsignedLongLong(hash);
}

static PyMethodDef functions[] = {
    {"hash_blocks", FAST(hash_blocks_of), "Return the hashes of the full blocks of token_ids, 8 bytes each."},
    {"engine_hash", engine_hash, METH_O, "Return an engine's hash as an unsigned 64-bit integer."},
    NO_METHOD};

int add_block_hashes(PyObject *module) { return PyModule_AddFunctions(module, functions); }
