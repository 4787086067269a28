/* Decoding the text of JSON strings, up to a number of characters. */
#ifndef WARMROUTE_JSON_TEXT_H
#define WARMROUTE_JSON_TEXT_H

#include "json_skip.h"

/* ---- Decoding text. These read values that were skipped before, and so are known to be well-formed, in UTF-8. ---- */

/* Decoded text, in UTF-8, up to a number of characters. */
typedef struct {
    int characters, limit;
    unsigned char *to;
    unsigned char bytes[4 * KEY_CHARACTERS + 16]; /* 16 more, since plain characters are copied 16 at a time */
} text;

#define START(which, most) (which).characters = 0, (which).limit = (most), (which).to = (which).bytes

static inline Py_ssize_t length(const text *t) { return t->to - t->bytes; }

static inline uint32_t hex(ptr p) {
    return (uint32_t)hex_value[p[0]] << 12 | (uint32_t)hex_value[p[1]] << 8 | (uint32_t)hex_value[p[2]] << 4 | hex_value[p[3]];
}

/* A lone surrogate is encoded like any other character, as Python's "surrogatepass" does. */
static void add_character(text *t, uint32_t c) {
    t->characters++;
    if (c < 0x80) {
        *t->to++ = (unsigned char)c;
    } else if (c < 0x800) {
        *t->to++ = (unsigned char)(0xc0 | c >> 6);
        *t->to++ = 0x80 | (c & 63);
    } else if (c < 0x10000) {
        *t->to++ = (unsigned char)(0xe0 | c >> 12);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    } else {
        *t->to++ = (unsigned char)(0xf0 | c >> 18);
        *t->to++ = 0x80 | (c >> 12 & 63);
        *t->to++ = 0x80 | (c >> 6 & 63);
        *t->to++ = 0x80 | (c & 63);
    }
}

static ptr add_escape(text *t, ptr p) {
    static const char letters[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    if (p[1] != 'u') {
        const char *found = strchr(letters, p[1]);
        add_character(t, (unsigned char)(found ? meanings[found - letters] : p[1]));
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

/* A character beyond ASCII. */
static ptr add_multibyte(text *t, ptr p) {
    for (int bytes = *p >= 0xf0 ? 4 : *p >= 0xe0 ? 3 : 2; bytes; bytes--)
        *t->to++ = *p++;
    t->characters++;
    return p;
}

/* Decodes a string from after its opening quote, to its closing quote or until the text is full. */
static ptr add_string(text *t, ptr p, ptr end) {
    while (t->characters < t->limit) {
#if defined(__SSE2__)
        while (t->limit - t->characters >= 16 && end - p >= 16) {
            __m128i sixteen = load16(p);
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
            p = add_multibyte(t, p);
        else {
            *t->to++ = *p++;
            t->characters++;
        }
    }
    return p;
}

static void add_ascii(text *t, ptr p, size_t len) {
    for (; len && t->characters < t->limit; len--, t->characters++)
        *t->to++ = *p++;
}

/* Whether a number is an integer; NaN and Infinity are not. */
static inline int is_integer(ptr p, ptr end) {
    if (end[-1] > '9')
        return 0;
    for (; p < end; p++)
        if (*p == '.' || (*p | 32) == 'e')
            return 0;
    return 1;
}

#endif
