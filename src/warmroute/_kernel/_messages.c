/* Where the fields of a request's JSON body lie, and the items of one list in it, each with a digest of all up to it.
 *
 * The rule is that of _scan.c: an answer is given only for what json.loads would read, too; whatever is malformed or not
 * worth code here (escaped names, NaN, very deep nesting) is answered with None, and the real parser decides. Text that is
 * passed over is not checked to be UTF-8.
 *
 * A digest is 128 bits, made with keys that are drawn when the process starts: nobody outside can make two beginnings of a
 * conversation meet. It is for finding things again within this process, and for nothing else.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__SSE2__) && defined(__x86_64__) && defined(__GNUC__)
#define HAS_BLOCKS
#include <immintrin.h>
#endif

#define MAX_DEPTH 256
#define MAX_DIGITS 640
#define MAX_NAME_BYTES 128 /* of a field of the body */
#define MAX_BODY_BYTES UINT32_MAX
#define DIGEST_BYTES 16
#define KEYS 12

typedef const unsigned char *ptr;

static unsigned char is_escape[256], is_hex[256];
static uint64_t key[KEYS];

/* ---- Digests ---- */

typedef struct {
    uint64_t low, high;
} digest;

static inline uint64_t read64(ptr p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Two hashes that read the same words in different company, so that what one loses the other keeps. */
static digest digest_of(digest before, ptr p, size_t len) {
    uint64_t a = before.low ^ key[8], b = before.high ^ key[9], c = before.high ^ key[10], d = before.low ^ key[11];
    unsigned char rest[32] = {0};
    size_t left = len;
    for (;;) {
        if (left < 32) {
            memcpy(rest, p, left);
            p = rest;
        }
        uint64_t w0 = read64(p), w1 = read64(p + 8), w2 = read64(p + 16), w3 = read64(p + 24);
        a = fold(a ^ w0 ^ key[0], w1 ^ key[1]) ^ w2;
        b = fold(b ^ w2 ^ key[2], w3 ^ key[3]) ^ w0;
        c = fold(c ^ w0 ^ key[4], w3 ^ key[5]) ^ w1;
        d = fold(d ^ w2 ^ key[6], w1 ^ key[7]) ^ w3;
        if (left < 32)
            break;
        p += 32;
        left -= 32;
    }
    digest made = {fold(a ^ len ^ key[0], b ^ key[3]), fold(c ^ key[5], d ^ len ^ key[6])};
    made.low = fold(made.low ^ key[1], key[4] ^ b);
    made.high = fold(made.high ^ key[2], key[7] ^ d);
    return made;
}

/* ---- Passing over values: where one stands, where the body ends; returns where it stopped, NULL is unsure ---- */

static inline ptr pass_escape(ptr p, ptr end) {
    if (end - p < 2)
        return NULL;
    if (is_escape[p[1]])
        return p + 2;
    if (p[1] != 'u' || end - p < 6 || !(is_hex[p[2]] & is_hex[p[3]] & is_hex[p[4]] & is_hex[p[5]]))
        return NULL;
    return p + 6;
}

/* A string's plain run ends at a quote, a backslash or a control character. A quote is 0x22: with that bit 1 flipped, it
 * stands right above the control characters, and one comparison finds both. */
#if defined(__SSE2__)
static inline unsigned ends_run(ptr p) {
    __m128i text = _mm_loadu_si128((const __m128i *)p), flipped = _mm_xor_si128(text, _mm_set1_epi8(0x02));
    __m128i found = _mm_or_si128(_mm_cmpeq_epi8(_mm_min_epu8(flipped, _mm_set1_epi8(0x20)), flipped),
                                 _mm_cmpeq_epi8(text, _mm_set1_epi8('\\')));
    return _mm_movemask_epi8(found);
}
#endif

/* To the byte that ends the run, or to the body's end. */
static inline ptr pass_run(ptr p, ptr end) {
#if defined(__SSE2__)
    for (; end - p >= 16; p += 16) {
        unsigned found = ends_run(p);
        if (found)
            return p + __builtin_ctz(found);
    }
#endif
    while (p < end && *p >= 0x20 && *p != '"' && *p != '\\')
        p++;
    return p;
}

static ptr pass_by_runs(ptr p, ptr end) {
    for (;;) {
        p = pass_run(p, end);
        if (p == end || *p < 0x20)
            return NULL;
        if (*p == '"')
            return p + 1;
        if (!(p = pass_escape(p, end)))
            return NULL;
    }
}

/* A branch for each escape is dear where no two bodies have them at the same places (_scan.c has the figures, and the
 * same code). Here 64 bytes become bits, and which bytes are escaped is found by arithmetic, as simdjson does it: taken
 * from the bits behind it, a row of backslashes leaves a bit whose place tells whether the row is odd. */
#if defined(HAS_BLOCKS)
static int has_avx2;

__attribute__((target("avx2"))) static inline uint64_t bits_of_64(__m256i low, __m256i high) {
    return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}

__attribute__((target("avx2"))) static inline __m256i stops_in(__m256i text) {
    __m256i flipped = _mm256_xor_si256(text, _mm256_set1_epi8(0x02));
    return _mm256_cmpeq_epi8(_mm256_min_epu8(flipped, _mm256_set1_epi8(0x20)), flipped);
}

__attribute__((target("avx2"))) static inline __m256i backslashes_in(__m256i text) {
    return _mm256_cmpeq_epi8(text, _mm256_set1_epi8('\\'));
}

/* What may stand behind a backslash, without u. */
__attribute__((target("avx2"))) static inline __m256i escapes_in(__m256i text) {
    const __m256i by_low_half = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 0, 'b', 0, 't', 0, 'f', 0, 0, 0, 0, 0, '\\', 0, 'n', '/')); /* the 1 is no match for 0 */
    return _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_shuffle_epi8(by_low_half, text), text),
                           _mm256_or_si256(_mm256_cmpeq_epi8(text, _mm256_set1_epi8('"')),
                                           _mm256_cmpeq_epi8(text, _mm256_set1_epi8('r'))));
}

__attribute__((target("avx2"))) static ptr pass_by_blocks(ptr p, ptr end) {
    const uint64_t odd = 0xaaaaaaaaaaaaaaaaULL;
    uint64_t first_is_escaped = 0;
    for (; end - p >= 64; p += 64) {
        __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 32));
        uint64_t backslashes = bits_of_64(backslashes_in(low), backslashes_in(high));
        uint64_t starts = backslashes & ~first_is_escaped;
        uint64_t rows = ((starts << 1 | odd) - starts) ^ odd;
        uint64_t escaped = rows ^ (backslashes | first_is_escaped);
        uint64_t stops = bits_of_64(stops_in(low), stops_in(high)) & ~escaped;
        uint64_t inside = stops ^ (stops - 1);
        uint64_t unknown = escaped & inside & ~bits_of_64(escapes_in(low), escapes_in(high));
        first_is_escaped = (rows & backslashes) >> 63;
        for (; unknown; unknown &= unknown - 1)
            if (!pass_escape(p + __builtin_ctzll(unknown) - 1, end))
                return NULL;
        if (stops) {
            p += __builtin_ctzll(stops);
            return *p == '"' ? p + 1 : NULL;
        }
    }
    return pass_by_runs(p - first_is_escaped, end);
}
#endif

/* From behind the opening quote to behind the closing one. */
static inline ptr pass_string(ptr p, ptr end) {
#if defined(HAS_BLOCKS)
    if (end - p >= 16) {
        /* most strings are names */
        unsigned found = ends_run(p);
        if (found && p[__builtin_ctz(found)] == '"')
            return p + __builtin_ctz(found) + 1;
        if (has_avx2)
            return pass_by_blocks(p, end);
    }
#endif
    return pass_by_runs(p, end);
}

static inline int is_digit(ptr p, ptr end) { return p < end && *p >= '0' && *p <= '9'; }

static ptr pass_digits(ptr p, ptr end) {
    if (!is_digit(p, end))
        return NULL;
    while (is_digit(p, end))
        p++;
    return p;
}

static ptr pass_number(ptr p, ptr end) {
    ptr start = p;
    p += *p == '-';
    if (p < end && *p == '0')
        p++;
    else if (!(p = pass_digits(p, end)))
        return NULL;
    if (p - start > MAX_DIGITS)
        return NULL;
    if (p < end && *p == '.' && !(p = pass_digits(p + 1, end)))
        return NULL;
    if (p < end && (*p | 32) == 'e') {
        p++;
        p += p < end && (*p == '+' || *p == '-');
        p = pass_digits(p, end);
    }
    return p;
}

static inline ptr pass_word(ptr p, ptr end, const char *word, int len) {
    return end - p >= len && !memcmp(p, word, len) ? p + len : NULL;
}

/* To the next byte that is no white space; NULL where none is left. */
static inline ptr pass_blank(ptr p, ptr end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
        p++;
    return p < end ? p : NULL;
}

/* From behind a bracket or the last item to the next item, or to behind the closing bracket, where *more becomes 0. */
static inline ptr next_item(ptr p, ptr end, char closing, int first, int *more) {
    if (!(p = pass_blank(p, end)))
        return NULL;
    *more = *p != closing;
    if (!*more)
        return p + 1;
    if (first)
        return p;
    return *p == ',' ? pass_blank(p + 1, end) : NULL;
}

/* The same in an object: to the member's value. */
static inline ptr next_member(ptr p, ptr end, int first, ptr *name, Py_ssize_t *len, int *more) {
    p = next_item(p, end, '}', first, more);
    if (!p || !*more)
        return p;
    if (*p != '"')
        return NULL;
    *name = p + 1;
    if (!(p = pass_string(p + 1, end)))
        return NULL;
    *len = p - 1 - *name;
    p = pass_blank(p, end);
    return p && *p == ':' ? pass_blank(p + 1, end) : NULL;
}

static ptr pass_value(ptr p, ptr end, int depth) {
    int more;
    ptr name;
    Py_ssize_t len;
    switch (*p) {
    case '"': return pass_string(p + 1, end);
    case '{':
        if (depth == MAX_DEPTH)
            return NULL;
        p = next_member(p + 1, end, 1, &name, &len, &more);
        while (p && more)
            if ((p = pass_value(p, end, depth + 1)))
                p = next_member(p, end, 0, &name, &len, &more);
        return p;
    case '[':
        if (depth == MAX_DEPTH)
            return NULL;
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more)
            if ((p = pass_value(p, end, depth + 1)))
                p = next_item(p, end, ']', 0, &more);
        return p;
    case 't': return pass_word(p, end, "true", 4);
    case 'f': return pass_word(p, end, "false", 5);
    case 'n': return pass_word(p, end, "null", 4);
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return pass_number(p, end);
    default: return NULL;
    }
}

/* ---- The outline ---- */

typedef struct {
    uint32_t start, end;
} span;

typedef struct {
    span *spans;
    digest *digests;
    Py_ssize_t count, room;
} items;

static int add_item(items *found, ptr body, ptr start, ptr end) {
    if (found->count == found->room) {
        Py_ssize_t room = found->room ? 2 * found->room : 64;
        span *spans = PyMem_Realloc(found->spans, room * sizeof(span));
        if (spans)
            found->spans = spans;
        digest *digests = PyMem_Realloc(found->digests, room * sizeof(digest));
        if (digests)
            found->digests = digests;
        if (!spans || !digests)
            return -1;
        found->room = room;
    }
    digest before = found->count ? found->digests[found->count - 1] : (digest){0, 0};
    found->spans[found->count] = (span){start - body, end - body};
    found->digests[found->count++] = digest_of(before, start, end - start);
    return 0;
}

/* A list; anything else is passed over. *broke is set where memory ran out. */
static ptr read_list(ptr p, ptr end, ptr body, items *found, int *broke) {
    int more;
    found->count = 0;
    if (*p != '[')
        return pass_value(p, end, 1);
    p = next_item(p + 1, end, ']', 1, &more);
    while (p && more) {
        ptr start = p;
        if (!(p = pass_value(p, end, 2)))
            return NULL;
        if (add_item(found, body, start, p) < 0) {
            *broke = 1;
            return NULL;
        }
        p = next_item(p, end, ']', 0, &more);
    }
    return p;
}

static int add_field(PyObject *fields, ptr name, Py_ssize_t len, Py_ssize_t start, Py_ssize_t end) {
    PyObject *text = PyUnicode_DecodeASCII((const char *)name, len, NULL);
    PyObject *where = text ? Py_BuildValue("nn", start, end) : NULL;
    int failed = !where || PyDict_SetItem(fields, text, where) < 0;
    Py_XDECREF(text);
    Py_XDECREF(where);
    return failed ? -1 : 0;
}

/* Names beyond ASCII are nobody's here, and are left out; an escaped one may be any name. */
static int is_plain(ptr name, Py_ssize_t len) {
    for (Py_ssize_t i = 0; i < len; i++)
        if (name[i] >= 0x80)
            return 0;
    return len <= MAX_NAME_BYTES;
}

/* 1: read. 0: unsure. -1: an exception is set. */
static int read_body(ptr body, ptr end, const char *list, Py_ssize_t list_len, PyObject *fields, items *found) {
    int more, broke = 0;
    ptr name, p = pass_blank(body, end);
    Py_ssize_t len;
    if (!p || *p != '{')
        return 0;
    p = next_member(p + 1, end, 1, &name, &len, &more);
    while (p && more) {
        ptr start = p;
        if (memchr(name, '\\', len))
            return 0;
        int is_list = len == list_len && !memcmp(name, list, len);
        p = is_list ? read_list(p, end, body, found, &broke) : pass_value(p, end, 1);
        if (broke) {
            PyErr_NoMemory();
            return -1;
        }
        if (!p)
            return 0;
        if (is_plain(name, len) && add_field(fields, name, len, start - body, p - body) < 0)
            return -1;
        p = next_member(p, end, 0, &name, &len, &more);
    }
    return p && !pass_blank(p, end);
}

static PyObject *outline(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 2 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected (body: bytes, name of a list: bytes)");
        return NULL;
    }
    ptr body = (ptr)PyBytes_AS_STRING(args[0]);
    if ((size_t)PyBytes_GET_SIZE(args[0]) > MAX_BODY_BYTES)
        Py_RETURN_NONE;
    PyObject *fields = PyDict_New();
    if (!fields)
        return NULL;
    items found = {NULL, NULL, 0, 0};
    PyObject *answer = NULL;
    int read = read_body(body, body + PyBytes_GET_SIZE(args[0]), PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1]),
                         fields, &found);
    if (read == 1)
        answer = Py_BuildValue("Oy#y#", fields, found.count ? (char *)found.spans : "", found.count * (Py_ssize_t)sizeof(span),
                               found.count ? (char *)found.digests : "", found.count * (Py_ssize_t)sizeof(digest));
    else if (read == 0)
        answer = Py_NewRef(Py_None);
    Py_DECREF(fields);
    PyMem_Free(found.spans);
    PyMem_Free(found.digests);
    return answer;
}

static PyObject *digest_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected (bytes, start, end)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "not within the bytes");
        return NULL;
    }
    digest made = digest_of((digest){0, 0}, (ptr)PyBytes_AS_STRING(args[0]) + start, end - start);
    return PyBytes_FromStringAndSize((char *)&made, DIGEST_BYTES);
}

static PyMethodDef methods[] = {
    {"outline", (PyCFunction)(void (*)(void))outline, METH_FASTCALL,
     "(where each field lies, where each item of the list lies, digests of the list up to each item) of a JSON body."},
    {"digest", (PyCFunction)(void (*)(void))digest_bytes, METH_FASTCALL, "Digest of some bytes, within this process."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_messages", "Outlines of JSON bodies.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__messages(void) {
    for (const char *c = "\"\\/bfnrt"; *c; c++)
        is_escape[(unsigned char)*c] = 1;
    for (const char *c = "0123456789abcdefABCDEF"; *c; c++)
        is_hex[(unsigned char)*c] = 1;
#if defined(HAS_BLOCKS)
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
    if (getrandom(key, sizeof key, 0) != (ssize_t)sizeof key)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyModule_Create(&module);
}
