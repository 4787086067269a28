/* HTTP header fields. http_fields.h says what each function does. */
#include "http_fields.h"

#define MAX_LENGTH_DIGITS 18

/* Digits, letters and !#$%&'*+-.^_`|~ */
const unsigned char is_token[256] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0,
    0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
};

/* A tab, visible characters and spaces, and bytes beyond ASCII. */
const unsigned char is_text[256] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
};

int read_connection(const field *f, connection_options *options) {
    const char *p = f->value, *end = f->value + f->value_len;
    while (p < end) {
        const char *comma = memchr(p, ',', (size_t)(end - p));
        const char *stop = comma ? comma : end, *last = stop;
        while (p < stop && (*p == ' ' || *p == '\t'))
            p++;
        while (last > p && (last[-1] == ' ' || last[-1] == '\t'))
            last--;
        size_t n = (size_t)(last - p);
        if (is_word(p, n, "close")) {
            options->close = 1;
        } else if (is_word(p, n, "keep-alive")) {
            options->keep_alive = 1;
        } else if (n) {
            if (options->count == MAX_OPTIONS)
                return TOO_MANY_CONNECTION_OPTIONS;
            options->option[options->count] = p;
            options->option_len[options->count++] = n;
        }
        p = comma ? comma + 1 : end;
    }
    return ACCEPTED;
}

static int is_named(const field *f, const connection_options *options) {
    for (int i = 0; i < options->count; i++)
        if (options->option_len[i] == f->name_len && equal_ignoring_case(options->option[i], f->line, f->name_len))
            return 1;
    return 0;
}

PyObject *without_named_fields(PyObject *lines, const connection_options *options) {
    const char *p = PyBytes_AS_STRING(lines), *end = p + PyBytes_GET_SIZE(lines);
    PyObject *kept = PyBytes_FromStringAndSize(NULL, end - p);
    if (!kept)
        return NULL;
    char *out = PyBytes_AS_STRING(kept);
    field f;
    while (p < end && read_field(&p, end, &f) == ACCEPTED)
        if (!is_named(&f, options)) {
            memcpy(out, f.line, f.line_len);
            out += f.line_len;
        }
    _PyBytes_Resize(&kept, out - PyBytes_AS_STRING(kept));
    return kept;
}

int read_content_length(const field *f, long long *length) {
    if (f->value_len == 0 || f->value_len > MAX_LENGTH_DIGITS)
        return BAD_CONTENT_LENGTH;
    long long total = 0;
    for (size_t i = 0; i < f->value_len; i++) {
        char c = f->value[i];
        if (c < '0' || c > '9')
            return BAD_CONTENT_LENGTH;
        total = total * 10 + (c - '0');
    }
    *length = total;
    return ACCEPTED;
}
