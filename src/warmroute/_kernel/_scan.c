/* What routing needs of a request's JSON body, found in one pass over its bytes, without building the rest.
 *
 * The rule: an answer is given only where json.loads would give the same one. Whatever is malformed, or well-formed but
 * not worth code here (NaN, UTF-16, escaped key names, very deep nesting, …), is answered with None, and the real parser
 * decides. One liberty is taken: text that is passed over is not checked to be UTF-8.
 *
 * Every function that reads takes where it stands and where the body ends, and returns where it stopped; NULL is unsure.
 * prompt/ask.py says the same in plain Python; tests/prompt/test_ask.py holds the two equal.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__SSE2__) && defined(__x86_64__) && defined(__GNUC__)
#define HAS_BLOCKS
#include <immintrin.h>
#endif

#define KEY_CHARACTERS 256
#define MAX_NAME_BYTES 1024 /* of a model's or session's name, as it stands in the body */
#define MAX_DEPTH 256       /* json.loads goes to nearly 1000, less what the caller's stack holds */
#define MAX_DIGITS 640      /* the least that int() can be limited to */
#define MAX_PARTS_DEPTH 4   /* an object within a text is gone over once more for each object around it */

typedef const unsigned char *ptr;

typedef struct {
    ptr at;
    size_t len;
} name;

static unsigned char is_escape[256], hex_value[256];

static void fill_tables(void) {
    memset(hex_value, 0xff, sizeof hex_value);
    for (int i = 0; i < 16; i++)
        hex_value[(unsigned char)"0123456789abcdef"[i]] = hex_value[(unsigned char)"0123456789ABCDEF"[i]] = i;
    for (const char *c = "\"\\/bfnrt"; *c; c++)
        is_escape[(unsigned char)*c] = 1;
}

/* ---- Passing over values ---- */

/* From a backslash. */
static inline ptr pass_escape(ptr p, ptr end) {
    if (end - p < 2)
        return NULL;
    if (is_escape[p[1]])
        return p + 2;
    if (p[1] != 'u' || end - p < 6 || (hex_value[p[2]] | hex_value[p[3]] | hex_value[p[4]] | hex_value[p[5]]) > 15)
        return NULL;
    return p + 6;
}

/* A string's plain run ends at a quote, a backslash or a control character. A quote is 0x22: with that bit 1 flipped, it
 * stands right above the control characters, and one comparison finds both. */
#if defined(__SSE2__)
static inline __m128i load(ptr p) { return _mm_loadu_si128((const __m128i *)p); }
static inline uint64_t bits(__m128i flags) { return (unsigned)_mm_movemask_epi8(flags); }

static inline __m128i ends_run(__m128i text) {
    __m128i flipped = _mm_xor_si128(text, _mm_set1_epi8(0x02));
    return _mm_or_si128(_mm_cmpeq_epi8(_mm_min_epu8(flipped, _mm_set1_epi8(0x20)), flipped),
                        _mm_cmpeq_epi8(text, _mm_set1_epi8('\\')));
}
#else
#define EACH(byte) (~0ULL / 255 * (byte))

static inline int ends_run(uint64_t text) {
    uint64_t flipped = text ^ EACH(0x02), unlike = text ^ EACH('\\');
    return ((((flipped - EACH(0x21)) & ~flipped) | ((unlike - EACH(1)) & ~unlike)) & EACH(0x80)) != 0;
}
#endif

/* To the byte that ends the run, or to the body's end. */
static inline ptr pass_run(ptr p, ptr end) {
#if defined(__SSE2__)
    for (; end - p >= 16; p += 16) {
        uint64_t found = bits(ends_run(load(p)));
        if (found)
            return p + __builtin_ctzll(found);
    }
#else
    for (uint64_t text; end - p >= 8; p += 8) {
        memcpy(&text, p, 8);
        if (ends_run(text))
            break;
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

/* A branch for each escape is dear where no two bodies have them at the same places: 31 to 36 µs for 128 KB, against 8 to
 * 10 µs without. Here 64 bytes become bits, and which bytes are escaped is found by arithmetic, as simdjson does it: taken
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
        uint64_t found = bits(ends_run(load(p)));
        if (found && p[__builtin_ctzll(found)] == '"')
            return p + __builtin_ctzll(found) + 1;
        if (has_avx2)
            return pass_by_blocks(p, end);
    }
#endif
    return pass_by_runs(p, end);
}

static inline int is_digit(ptr p, ptr end) { return p < end && *p >= '0' && *p <= '9'; }

static ptr pass_number(ptr p, ptr end) {
    ptr start = p;
    p += *p == '-';
    if (!is_digit(p, end))
        return NULL;
    if (*p == '0')
        p++;
    else
        while (is_digit(p, end))
            p++;
    if (p - start > MAX_DIGITS)
        return NULL;
    if (p < end && *p == '.') {
        if (!is_digit(++p, end))
            return NULL;
        while (is_digit(p, end))
            p++;
    }
    if (p < end && (*p | 32) == 'e') {
        p++;
        p += p < end && (*p == '+' || *p == '-');
        if (!is_digit(p, end))
            return NULL;
        while (is_digit(p, end))
            p++;
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
static inline ptr next_member(ptr p, ptr end, int first, name *key, int *more) {
    p = next_item(p, end, '}', first, more);
    if (!p || !*more)
        return p;
    if (*p != '"')
        return NULL;
    key->at = p + 1;
    if (!(p = pass_string(p + 1, end)))
        return NULL;
    key->len = p - 1 - key->at;
    p = pass_blank(p, end);
    return p && *p == ':' ? pass_blank(p + 1, end) : NULL;
}

static ptr pass_value(ptr p, ptr end, int depth) {
    int more;
    name key;
    switch (*p) {
    case '"': return pass_string(p + 1, end);
    case '{':
        if (depth == MAX_DEPTH)
            return NULL;
        p = next_member(p + 1, end, 1, &key, &more);
        while (p && more)
            if ((p = pass_value(p, end, depth + 1)))
                p = next_member(p, end, 0, &key, &more);
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

/* ---- Reading texts, from values that were passed over before and are known to be well-formed ---- */

typedef struct {
    int characters, limit;
    unsigned char *to;
    unsigned char bytes[4 * KEY_CHARACTERS + 16]; /* 16, since they are copied by so many */
} text;

#define TEXT(which, most) (which).characters = 0, (which).limit = (most), (which).to = (which).bytes

static inline size_t length(const text *t) { return t->to - t->bytes; }

static inline uint32_t hex(ptr p) {
    return (uint32_t)hex_value[p[0]] << 12 | hex_value[p[1]] << 8 | hex_value[p[2]] << 4 | hex_value[p[3]];
}

/* In UTF-8; surrogates like any other, as Python's "surrogatepass" does. */
static void add_character(text *t, uint32_t c) {
    t->characters++;
    if (c < 0x80) {
        *t->to++ = c;
    } else if (c < 0x800) {
        *t->to++ = 0xc0 | c >> 6;
        *t->to++ = 0x80 | (c & 63);
    } else if (c < 0x10000) {
        *t->to++ = 0xe0 | c >> 12;
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    } else {
        *t->to++ = 0xf0 | c >> 18;
        *t->to++ = 0x80 | (c >> 12 & 63);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    }
}

static ptr add_escape(text *t, ptr p) {
    static const char names[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    if (p[1] != 'u') {
        const char *found = strchr(names, p[1]);
        add_character(t, found ? meanings[found - names] : p[1]);
        return p + 2;
    }
    uint32_t c = hex(p + 2);
    p += 6;
    if (c >> 10 == 0xd800 >> 10 && p[0] == '\\' && p[1] == 'u') {
        uint32_t low = hex(p + 2);
        if (low >> 10 == 0xdc00 >> 10) {
            c = 0x10000 + ((c & 0x3ff) << 10 | (low & 0x3ff));
            p += 6;
        }
    }
    add_character(t, c);
    return p;
}

/* A character beyond ASCII; json.loads takes encoded surrogates, too. The string's closing quote is no continuation byte,
 * so that none is read behind it. */
static ptr add_wide(text *t, ptr p) {
    int more = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : 1;
    uint32_t c = *p & (0x3f >> more), least = more == 3 ? 0x10000 : more == 2 ? 0x800 : 0x80;
    if (*p < 0xc2 || *p > 0xf4)
        return NULL;
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return NULL;
        c = c << 6 | (p[i] & 0x3f);
    }
    if (c < least || c > 0x10ffff)
        return NULL;
    add_character(t, c);
    return p + 1 + more;
}

/* From behind the opening quote to behind the closing one, or to where the text is full. */
static ptr add_string(text *t, ptr p, ptr end) {
    while (p && t->characters < t->limit) {
#if defined(__SSE2__)
        while (t->limit - t->characters >= 16 && end - p >= 16) {
            __m128i sixteen = load(p);
            uint64_t found = bits(ends_run(sixteen)) | bits(sixteen);
            int plain = found ? __builtin_ctzll(found) : 16;
            _mm_storeu_si128((__m128i *)t->to, sixteen);
            p += plain;
            t->to += plain;
            t->characters += plain;
            if (found)
                break;
        }
        if (t->characters == t->limit)
            break;
#else
        (void)end;
#endif
        if (*p == '"')
            return p + 1;
        if (*p == '\\')
            p = add_escape(t, p);
        else if (*p >= 0x80)
            p = add_wide(t, p);
        else {
            *t->to++ = *p++;
            t->characters++;
        }
    }
    return p;
}

static void add_word(text *t, ptr p, size_t len) {
    for (; len && t->characters < t->limit; len--, t->characters++)
        *t->to++ = *p++;
}

static inline int is_integer(ptr p, ptr behind) {
    for (; p < behind; p++)
        if (*p == '.' || (*p | 32) == 'e')
            return 0;
    return 1;
}

static inline int is_minus_zero(ptr p) { return p[0] == '-' && p[1] == '0'; }

static inline int is(const name *key, const char *other, size_t len) {
    return key->len == len && !memcmp(key->at, other, len);
}

/* An escaped name may be any name. */
static inline int is_escaped(const name *key) { return memchr(key->at, '\\', key->len) != NULL; }

/* Adds a text, a parts list's texts, a batch's first prompt, or token ids. Returns 0 where it is unsure. */
static int add_texts(text *t, ptr p, ptr end, int depth) {
    int more;
    ptr found = NULL, content = NULL;
    name key;
    switch (*p) {
    case '"': return add_string(t, p + 1, end) != NULL;
    case '[':
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more && t->characters < t->limit) {
            ptr item = p;
            if (!(p = pass_value(p, end, 0)))
                return 0;
            switch (*item) {
            case '"': case '[': case '{':
                if (depth == MAX_PARTS_DEPTH || !add_texts(t, item, end, depth + 1))
                    return 0;
                break;
            case 't': add_word(t, (ptr)"True,", 5); break;
            case 'f': add_word(t, (ptr)"False,", 6); break;
            case 'n': break;
            default:
                if (!is_integer(item, p))
                    break;
                if (is_minus_zero(item))
                    return 0;
                add_word(t, item, p - item);
                add_word(t, (ptr)",", 1);
            }
            p = next_item(p, end, ']', 0, &more);
        }
        return p != NULL;
    case '{':
        p = next_member(p + 1, end, 1, &key, &more);
        while (p && more) {
            if (is(&key, "text", 4))
                found = p;
            else if (is(&key, "content", 7))
                content = p;
            else if (is_escaped(&key))
                return 0;
            if ((p = pass_value(p, end, 0)))
                p = next_member(p, end, 0, &key, &more);
        }
        found = found ? found : content;
        return p && (!found || (depth < MAX_PARTS_DEPTH && add_texts(t, found, end, depth + 1)));
    default: return 1;
    }
}

/* ---- The body ---- */

enum { MODEL, MESSAGES, SYSTEM, INSTRUCTIONS, PROMPT, INPUT, QUERY, TEXT_1, SESSION_ID, CONVERSATION_ID,
       PROMPT_CACHE_KEY, USER, OTHER };

typedef struct {
    ptr field[OTHER];                 /* where the last value of each name begins; NULL without one */
    ptr system_message, user_message; /* where the content of the first of each begins; NULL without content */
    int has_system_message, has_user_message;
} places;

static int field_of(const name *key) {
    switch (key->len) {
    case 4: return is(key, "user", 4) ? USER : OTHER;
    case 5: return is(key, "model", 5) ? MODEL : is(key, "input", 5) ? INPUT : is(key, "query", 5) ? QUERY : OTHER;
    case 6: return is(key, "prompt", 6) ? PROMPT : is(key, "system", 6) ? SYSTEM : is(key, "text_1", 6) ? TEXT_1 : OTHER;
    case 8: return is(key, "messages", 8) ? MESSAGES : OTHER;
    case 10: return is(key, "session_id", 10) ? SESSION_ID : OTHER;
    case 12: return is(key, "instructions", 12) ? INSTRUCTIONS : OTHER;
    case 15: return is(key, "conversation_id", 15) ? CONVERSATION_ID : OTHER;
    case 16: return is(key, "prompt_cache_key", 16) ? PROMPT_CACHE_KEY : OTHER;
    default: return OTHER;
    }
}

/* A message of the list; notes its content where its role is looked for. */
static ptr read_message(ptr p, ptr end, places *found) {
    int more;
    ptr role = NULL, content = NULL;
    name key;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        if (is(&key, "role", 4))
            role = p;
        else if (is(&key, "content", 7))
            content = p;
        else if (is_escaped(&key))
            return NULL;
        if ((p = pass_value(p, end, 3)))
            p = next_member(p, end, 0, &key, &more);
    }
    if (!p || !role || *role != '"')
        return p;
    key.at = role + 1;
    key.len = pass_string(role + 1, end) - 1 - key.at;
    if (is(&key, "user", 4)) {
        found->has_user_message = 1;
        found->user_message = content;
    } else if (is(&key, "system", 6) || is(&key, "developer", 9)) {
        if (!found->has_system_message)
            found->system_message = content;
        found->has_system_message = 1;
    } else if (is_escaped(&key))
        return NULL;
    return p;
}

static ptr read_messages(ptr p, ptr end, places *found) {
    int more;
    found->has_system_message = found->has_user_message = 0;
    if (*p != '[')
        return pass_value(p, end, 1);
    p = next_item(p + 1, end, ']', 1, &more);
    while (p && more) {
        p = *p == '{' && !found->has_user_message ? read_message(p, end, found) : pass_value(p, end, 2);
        if (p)
            p = next_item(p, end, ']', 0, &more);
    }
    return p;
}

static int read_body(ptr p, ptr end, places *found) {
    int more;
    name key;
    if (!(p = pass_blank(p, end)) || *p != '{')
        return 0;
    p = next_member(p + 1, end, 1, &key, &more);
    while (p && more) {
        int field = field_of(&key);
        if (field != OTHER)
            found->field[field] = p;
        else if (is_escaped(&key))
            return 0;
        p = field == MESSAGES ? read_messages(p, end, found) : pass_value(p, end, 1);
        if (p)
            p = next_member(p, end, 0, &key, &more);
    }
    return p && !pass_blank(p, end);
}

/* ---- The answer ---- */

/* These return NULL where they are unsure, without an exception, or with one where memory ran out. */

static PyObject *model_of(const places *found, ptr end) {
    text t;
    ptr p = found->field[MODEL];
    TEXT(t, MAX_NAME_BYTES);
    if (p && *p == '"' && (pass_string(p + 1, end) - p > MAX_NAME_BYTES || !add_string(&t, p + 1, end)))
        return NULL;
    return PyUnicode_DecodeUTF8((char *)t.bytes, length(&t), "surrogatepass");
}

static PyObject *session_of(const places *found, ptr end) {
    text t;
    TEXT(t, MAX_NAME_BYTES);
    for (int field = SESSION_ID; field <= USER && !t.characters; field++) {
        ptr p = found->field[field];
        if (!p)
            continue;
        if (*p == '"') {
            if (pass_string(p + 1, end) - p > MAX_NAME_BYTES || !add_string(&t, p + 1, end))
                return NULL;
        } else if (*p == '-' || is_digit(p, end)) {
            ptr behind = pass_number(p, end);
            if (!is_integer(p, behind))
                continue;
            if (is_minus_zero(p))
                return NULL;
            add_word(&t, p, behind - p);
        }
    }
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

/* The beginning of the text in a value; None without one that should be there, nothing in one that has no text. */
static PyObject *beginning_of(int present, ptr p, ptr end) {
    text t;
    if (!present)
        Py_RETURN_NONE;
    TEXT(t, KEY_CHARACTERS);
    if (p && !add_texts(&t, p, end, 0))
        return NULL;
    return PyBytes_FromStringAndSize((char *)t.bytes, length(&t));
}

static PyObject *system_of(const places *found, ptr end) {
    for (int field = SYSTEM; field <= INSTRUCTIONS; field++)
        if (found->field[field])
            return beginning_of(1, found->field[field], end);
    return beginning_of(found->has_system_message, found->system_message, end);
}

static PyObject *user_of(const places *found, ptr end) {
    for (int field = PROMPT; field <= TEXT_1 && !found->has_user_message; field++)
        if (found->field[field])
            return beginning_of(1, found->field[field], end);
    return beginning_of(found->has_user_message, found->user_message, end);
}

static PyObject *scan(PyObject *self, PyObject *body) {
    (void)self;
    if (!PyBytes_Check(body)) {
        PyErr_SetString(PyExc_TypeError, "a body is bytes");
        return NULL;
    }
    ptr p = (ptr)PyBytes_AS_STRING(body), end = p + PyBytes_GET_SIZE(body);
    places found = {.has_system_message = 0};
    if (!read_body(p, end, &found))
        Py_RETURN_NONE;
    PyObject *(*const readers[])(const places *, ptr) = {model_of, system_of, user_of, session_of};
    PyObject *answer = PyTuple_New(4);
    for (int i = 0; answer && i < 4; i++) {
        PyObject *made = readers[i](&found, end);
        if (!made) {
            Py_DECREF(answer);
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
        PyTuple_SET_ITEM(answer, i, made);
    }
    return answer;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_O, "(model, system prompt's beginning, first user message's beginning, session) of a JSON body."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scan", "What routing needs of a JSON body.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) {
    fill_tables();
#if defined(HAS_BLOCKS)
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
    return PyModule_Create(&module);
}
