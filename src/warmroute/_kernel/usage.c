/* Token counts in the end of a response: OpenAI's usage (chat, completions, responses) and Anthropic's.
 *
 * The last bytes of a response are searched for the last "usage", as they arrived: JSON or server-sent events, chunk
 * framing included. Quotes within a JSON string are escaped, so no text that a model writes can be mistaken for a usage.
 * tests/edge/reference_usage.py is the same in plain Python; a property test compares the two.
 */
#include "kernel.h"

#define MAX_NUMBER_DIGITS 9

enum { PROMPT, INPUT, CACHED, CACHE_READ, CACHE_CREATED, COMPLETION, OUTPUT, NUMBERS };

static const struct {
    const char *name; /* with its closing quote */
    size_t length;
} names[NUMBERS] = {
#define NAME(text) {text "\"", sizeof(text)}
    NAME("prompt_tokens"),
    NAME("input_tokens"),
    NAME("cached_tokens"),
    NAME("cache_read_input_tokens"),
    NAME("cache_creation_input_tokens"),
    NAME("completion_tokens"),
    NAME("output_tokens"),
#undef NAME
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

/* Past the end of one chunk and the size line of the next; NULL where `at` is not at a chunk's end. */
static const char *past_chunk_boundary(const char *at, const char *end) {
    if (end - at < 5 || at[0] != '\r' || at[1] != '\n')
        return NULL;
    const char *digit = at += 2;
    while (at < end && at - digit < 8 && is_hex(*at))
        at++;
    return at > digit && end - at >= 2 && at[0] == '\r' && at[1] == '\n' ? at + 2 : NULL;
}

/* Copies the bytes without chunk boundaries, since a usage may lie in two chunks. Returns where the copy ends. */
static char *without_chunk_boundaries(const char *at, const char *end, char *out) {
    while (at < end) {
        const char *past = *at == '\r' ? past_chunk_boundary(at, end) : NULL;
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

static inline int is_word_character(char c) {
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_';
}

/* The number after a name's closing quote, with *at moved past it; or -1. */
static long number_after(const char **at, const char *end) {
    const char *c = past_space(*at, end);
    if (c == end || *c != ':')
        return -1;
    const char *digit = c = past_space(c + 1, end);
    long number = 0;
    while (c < end && c - digit < MAX_NUMBER_DIGITS && *c >= '0' && *c <= '9')
        number = 10 * number + (*c++ - '0');
    if (c == digit || (c < end && is_word_character(*c)))
        return -1;
    *at = c;
    return number;
}

/* Reads the first number of each name; the others stay -1. */
static void read_numbers(const char *at, const char *end, long found[NUMBERS]) {
    while (at < end && (at = memchr(at, '"', (size_t)(end - at)))) {
        at++;
        for (int which = 0; which < NUMBERS; which++) {
            size_t length = names[which].length;
            if ((size_t)(end - at) < length || memcmp(at, names[which].name, length) != 0)
                continue;
            const char *past = at + length;
            long number = number_after(&past, end);
            if (number >= 0) {
                at = past;
                if (found[which] < 0)
                    found[which] = number;
            }
            break;
        }
    }
}

static PyObject *read_usage(PyObject *self, PyObject *data) {
    char joined[USAGE_TAIL_BYTES];
    long found[NUMBERS] = {-1, -1, -1, -1, -1, -1, -1};
    (void)self;
    if (check_type(data, &PyBytes_Type) < 0)
        return NULL;
    const char *begin = PyBytes_AS_STRING(data), *end = begin + PyBytes_GET_SIZE(data);
    if (end - begin > USAGE_TAIL_BYTES)
        begin = end - USAGE_TAIL_BYTES;
    const char *at;
    if (memchr(begin, '\r', (size_t)(end - begin))) {
        end = without_chunk_boundaries(begin, end, joined);
        begin = joined;
    }
    if (!(at = last_usage(begin, end)))
        Py_RETURN_NONE;
    read_numbers(at, end, found);
    long prompt = found[found[PROMPT] >= 0 ? PROMPT : INPUT], cached = found[CACHED];
    if (found[CACHE_READ] >= 0 || found[CACHE_CREATED] >= 0) { /* Anthropic: input_tokens are those not cached */
        cached = found[CACHE_READ];
        if (prompt >= 0)
            prompt += (cached > 0 ? cached : 0) + (found[CACHE_CREATED] > 0 ? found[CACHE_CREATED] : 0);
    }
    const long counts[3] = {prompt, cached, found[found[COMPLETION] >= 0 ? COMPLETION : OUTPUT]};
    PyObject *usage = PyTuple_New(3);
    for (int which = 0; usage && which < 3; which++) {
        PyObject *number = counts[which] < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(counts[which]);
        if (number)
            PyTuple_SET_ITEM(usage, which, number);
        else
            Py_CLEAR(usage);
    }
    return usage;
}

static PyMethodDef functions[] = {
    {"read_usage", read_usage, METH_O, "Return (prompt tokens, cached tokens, output tokens) from a response's last bytes."},
    NO_METHOD};

int add_usage(PyObject *module) { return PyModule_AddFunctions(module, functions); }
