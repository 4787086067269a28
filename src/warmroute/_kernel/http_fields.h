/* HTTP header fields: the characters that RFC 9112 allows, and reading one field line. Used for heads and for trailers. */
#ifndef WARMROUTE_HTTP_FIELDS_H
#define WARMROUTE_HTTP_FIELDS_H

#include "kernel.h"

enum { ACCEPTED = 0 }; /* any other result is one of the reasons in constants.h */

/* By byte: whether it may be in a token (a field's name), and in text (a field's value). */
extern const unsigned char is_token[256], is_text[256];

/* Whether two ASCII strings of this length are equal but for case. Unlike strncasecmp, it does not depend on the locale:
 * where LC_CTYPE is Turkish, that finds `TRANSFER-ENCODING` and `transfer-encoding` different. */
static always_inline int equal_ignoring_case(const char *a, const char *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char x = (unsigned char)a[i], y = (unsigned char)b[i];
        x |= (unsigned char)((unsigned char)(x - 'A') < 26 ? 32 : 0);
        y |= (unsigned char)((unsigned char)(y - 'A') < 26 ? 32 : 0);
        if (x != y)
            return 0;
    }
    return 1;
}

/* Whether n bytes of a field's name or value are this lowercase word, of letters, digits and hyphens. `| 32` turns no other
 * byte that a field may have into one of these. */
static always_inline int is_word(const char *a, size_t n, const char *lowercase) {
    if (strlen(lowercase) != n)
        return 0;
    for (size_t i = 0; i < n; i++)
        if ((a[i] | 32) != lowercase[i])
            return 0;
    return 1;
}

/* One field line. Its name begins the line. */
typedef struct {
    const char *line, *value;
    size_t line_len, name_len, value_len;
} field;

/* Reads the field that begins at *at, and moves *at past it. Returns ACCEPTED or MALFORMED_FIELD. */
static inline int read_field(const char **at, const char *end, field *f) {
    const char *p = *at;
    f->line = p;
    while (p < end && is_token[(unsigned char)*p])
        p++;
    f->name_len = (size_t)(p - f->line);
    if (!f->name_len || p == end || *p != ':')
        return MALFORMED_FIELD;
    p++;
    while (p < end && (*p == ' ' || *p == '\t'))
        p++;
    f->value = p;
    while (p < end && is_text[(unsigned char)*p])
        p++;
    if (end - p < 2 || p[0] != '\r' || p[1] != '\n')
        return MALFORMED_FIELD;
    const char *stop = p;
    while (stop > f->value && (stop[-1] == ' ' || stop[-1] == '\t'))
        stop--;
    f->value_len = (size_t)(stop - f->value);
    *at = p + 2;
    f->line_len = (size_t)(*at - f->line);
    return ACCEPTED;
}

#define MAX_OPTIONS 16

/* What a message's Connection fields say. */
typedef struct {
    int close, keep_alive;
    int count; /* other options: names of fields that must not be forwarded */
    const char *option[MAX_OPTIONS];
    size_t option_len[MAX_OPTIONS];
} connection_options;

/* Options without any Connection field; the arrays are left as they are. */
static always_inline void start_connection(connection_options *options) {
    options->close = options->keep_alive = options->count = 0;
}

/* Adds the options of one Connection field. Returns ACCEPTED or TOO_MANY_CONNECTION_OPTIONS. */
int read_connection(const field *f, connection_options *options);

/* The field lines without those that a Connection field names, as bytes; NULL with an exception without memory. */
PyObject *without_named_fields(PyObject *lines, const connection_options *options);

/* Reads a Content-Length. Returns ACCEPTED or BAD_CONTENT_LENGTH. */
int read_content_length(const field *f, long long *length);

static inline PyObject *value_bytes(const field *f) { return PyBytes_FromStringAndSize(f->value, (Py_ssize_t)f->value_len); }

#endif
