/* Skipping JSON values without building them.
 *
 * Every skip function takes a position and the end of the text, and returns the position after what it skipped. NULL means
 * that the text is malformed, nested too deeply, or has an integer of too many digits. What is skipped is what json.loads
 * would accept, NaN and Infinity included, except that the UTF-8 of strings is not checked.
 */
#ifndef WARMROUTE_JSON_SKIP_H
#define WARMROUTE_JSON_SKIP_H

#include "kernel.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__SSE2__) && defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2_BUILD
#include <immintrin.h>
#endif

#define MAX_JSON_DEPTH 256     /* json.loads allows nearly 1000, less the caller's own depth */
#define MAX_INTEGER_DIGITS 640 /* the lowest limit that int() can be given */

typedef const unsigned char *ptr;

/* The name of an object's member, without its quotes. */
typedef struct {
    ptr at;
    size_t len;
} name;

static unsigned char is_escape_letter[256], hex_value[256];
#if defined(HAS_AVX2_BUILD)
static int has_avx2;
#endif

/* Fills the tables. Called once, when the module is initialised. */
static void prepare_json_tables(void) {
    memset(hex_value, 0xff, sizeof hex_value);
    for (int i = 0; i < 16; i++)
        hex_value[(unsigned char)"0123456789abcdef"[i]] = hex_value[(unsigned char)"0123456789ABCDEF"[i]] = (unsigned char)i;
    for (const char *c = "\"\\/bfnrt"; *c; c++)
        is_escape_letter[(unsigned char)*c] = 1;
#if defined(HAS_AVX2_BUILD)
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
}

/* Skips an escape; p is at its backslash. */
static inline ptr skip_escape(ptr p, ptr end) {
    if (end - p < 2)
        return NULL;
    if (is_escape_letter[p[1]])
        return p + 2;
    if (p[1] != 'u' || end - p < 6 || (hex_value[p[2]] | hex_value[p[3]] | hex_value[p[4]] | hex_value[p[5]]) > 15)
        return NULL;
    return p + 6;
}

/* A run of plain characters ends at a quote, a backslash or a control character. A quote is 0x22. With bit 1 flipped it is
 * 0x20, right above the control characters, so that one comparison finds both. */
#if defined(__SSE2__)
static inline __m128i load16(ptr p) { return _mm_loadu_si128((const __m128i *)p); }
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

/* Skips to the byte that ends the run, or to the end of the text. */
static inline ptr skip_run(ptr p, ptr end) {
#if defined(__SSE2__)
    for (; end - p >= 16; p += 16) {
        uint64_t found = bits(ends_run(load16(p)));
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

static ptr skip_string_by_runs(ptr p, ptr end) {
    for (;;) {
        p = skip_run(p, end);
        if (p == end || *p < 0x20)
            return NULL;
        if (*p == '"')
            return p + 1;
        if (!(p = skip_escape(p, end)))
            return NULL;
    }
}

/* The processor can't predict a branch for each escape, since every body has them at other places: that took 31 to 36 µs
 * for 128 KB, this takes 8 to 10 µs. 64 bytes are turned into bits, and arithmetic finds which bytes are escaped, as in
 * simdjson: subtracting a row of backslashes from alternating bits shows by the position of the carry whether the row's
 * length is odd. */
#if defined(HAS_AVX2_BUILD)
__attribute__((target("avx2"))) static inline uint64_t bits_of_64(__m256i low, __m256i high) {
    return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}

__attribute__((target("avx2"))) static inline __m256i string_ends_in(__m256i text) {
    __m256i flipped = _mm256_xor_si256(text, _mm256_set1_epi8(0x02));
    return _mm256_cmpeq_epi8(_mm256_min_epu8(flipped, _mm256_set1_epi8(0x20)), flipped);
}

__attribute__((target("avx2"))) static inline __m256i backslashes_in(__m256i text) {
    return _mm256_cmpeq_epi8(text, _mm256_set1_epi8('\\'));
}

/* The characters that may follow a backslash, except u. */
__attribute__((target("avx2"))) static inline __m256i escapes_in(__m256i text) {
    const __m256i by_low_half = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 0, 'b', 0, 't', 0, 'f', 0, 0, 0, 0, 0, '\\', 0, 'n', '/')); /* 1, so that a NUL byte does not match */
    return _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_shuffle_epi8(by_low_half, text), text),
                           _mm256_or_si256(_mm256_cmpeq_epi8(text, _mm256_set1_epi8('"')),
                                           _mm256_cmpeq_epi8(text, _mm256_set1_epi8('r'))));
}

__attribute__((target("avx2"))) static ptr skip_string_by_blocks(ptr p, ptr end) {
    const uint64_t odd = 0xaaaaaaaaaaaaaaaaULL;
    uint64_t first_is_escaped = 0;
    for (; end - p >= 64; p += 64) {
        __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 32));
        uint64_t backslashes = bits_of_64(backslashes_in(low), backslashes_in(high));
        uint64_t starts = backslashes & ~first_is_escaped;
        uint64_t rows = ((starts << 1 | odd) - starts) ^ odd;
        uint64_t escaped = rows ^ (backslashes | first_is_escaped);
        uint64_t stops = bits_of_64(string_ends_in(low), string_ends_in(high)) & ~escaped;
        uint64_t inside = stops ^ (stops - 1);
        uint64_t unknown = escaped & inside & ~bits_of_64(escapes_in(low), escapes_in(high));
        first_is_escaped = (rows & backslashes) >> 63;
        for (; unknown; unknown &= unknown - 1)
            if (!skip_escape(p + __builtin_ctzll(unknown) - 1, end))
                return NULL;
        if (stops) {
            p += __builtin_ctzll(stops);
            return *p == '"' ? p + 1 : NULL;
        }
    }
    return skip_string_by_runs(p - first_is_escaped, end);
}
#endif

/* Skips a string; p is after its opening quote. */
static inline ptr skip_string(ptr p, ptr end) {
#if defined(HAS_AVX2_BUILD)
    if (end - p >= 16) {
        /* Most strings are short names. */
        uint64_t found = bits(ends_run(load16(p)));
        if (found && p[__builtin_ctzll(found)] == '"')
            return p + __builtin_ctzll(found) + 1;
        if (has_avx2)
            return skip_string_by_blocks(p, end);
    }
#endif
    return skip_string_by_runs(p, end);
}

static inline int is_digit(ptr p, ptr end) { return p < end && *p >= '0' && *p <= '9'; }

static ptr skip_number(ptr p, ptr end) {
    ptr start = p;
    p += *p == '-';
    if (!is_digit(p, end))
        return NULL;
    if (*p == '0')
        p++;
    else
        while (is_digit(p, end))
            p++;
    if (p - start > MAX_INTEGER_DIGITS)
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

static inline ptr skip_word(ptr p, ptr end, const char *word, int len) {
    return end - p >= len && !memcmp(p, word, (size_t)len) ? p + len : NULL;
}

/* Skips to the next byte that is no white space; NULL at the end of the text. */
static inline ptr skip_space(ptr p, ptr end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
        p++;
    return p < end ? p : NULL;
}

/* Goes from after a bracket (`first`) or after an item to the next item, or past the closing bracket with *more = 0. */
static inline ptr next_item(ptr p, ptr end, char closing, int first, int *more) {
    if (!(p = skip_space(p, end)))
        return NULL;
    *more = *p != closing;
    if (!*more)
        return p + 1;
    if (first)
        return p;
    return *p == ',' ? skip_space(p + 1, end) : NULL;
}

/* The same in an object: reads the member's name, and goes to its value. */
static inline ptr next_member(ptr p, ptr end, int first, name *key, int *more) {
    p = next_item(p, end, '}', first, more);
    if (!p || !*more)
        return p;
    if (*p != '"')
        return NULL;
    key->at = p + 1;
    if (!(p = skip_string(p + 1, end)))
        return NULL;
    key->len = (size_t)(p - 1 - key->at);
    p = skip_space(p, end);
    return p && *p == ':' ? skip_space(p + 1, end) : NULL;
}

/* Skips any value; p is at its first byte. */
static ptr skip_value(ptr p, ptr end, int depth) {
    int more;
    name key;
    switch (*p) {
    case '"': return skip_string(p + 1, end);
    case '{':
        if (depth == MAX_JSON_DEPTH)
            return NULL;
        p = next_member(p + 1, end, 1, &key, &more);
        while (p && more)
            if ((p = skip_value(p, end, depth + 1)))
                p = next_member(p, end, 0, &key, &more);
        return p;
    case '[':
        if (depth == MAX_JSON_DEPTH)
            return NULL;
        p = next_item(p + 1, end, ']', 1, &more);
        while (p && more)
            if ((p = skip_value(p, end, depth + 1)))
                p = next_item(p, end, ']', 0, &more);
        return p;
    case 't': return skip_word(p, end, "true", 4);
    case 'f': return skip_word(p, end, "false", 5);
    case 'n': return skip_word(p, end, "null", 4);
    case 'N': return skip_word(p, end, "NaN", 3);
    case 'I': return skip_word(p, end, "Infinity", 8);
    case '-':
        if (end - p > 1 && p[1] == 'I')
            return skip_word(p + 1, end, "Infinity", 8);
        /* fall through */
    case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9':
        return skip_number(p, end);
    default: return NULL;
    }
}

#endif
