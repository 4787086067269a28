/* Passing over JSON: to the end of a value, without building it.
 *
 * Every function takes where it stands and where the text ends, and returns where it stopped; NULL is unsure. What is
 * passed over is what json.loads would read, but for the UTF-8 of strings, which is not checked; what is well-formed but not
 * worth code here (NaN, very deep nesting, …) is unsure, too.
 */
#ifndef WARMROUTE_JSON_H
#define WARMROUTE_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__SSE2__) && defined(__x86_64__) && defined(__GNUC__)
#define HAS_BLOCKS
#include <immintrin.h>
#endif

#define MAX_DEPTH 256  /* json.loads goes to nearly 1000, less what the caller's stack holds */
#define MAX_DIGITS 640 /* the least that int() can be limited to */

typedef const unsigned char *ptr;

typedef struct {
    ptr at;
    size_t len;
} name;

static unsigned char is_escape[256], hex_value[256];
#if defined(HAS_BLOCKS)
static int has_avx2;
#endif

/* Once, before anything is read. */
static void prepare_json(void) {
    memset(hex_value, 0xff, sizeof hex_value);
    for (int i = 0; i < 16; i++)
        hex_value[(unsigned char)"0123456789abcdef"[i]] = hex_value[(unsigned char)"0123456789ABCDEF"[i]] = i;
    for (const char *c = "\"\\/bfnrt"; *c; c++)
        is_escape[(unsigned char)*c] = 1;
#if defined(HAS_BLOCKS)
    has_avx2 = __builtin_cpu_supports("avx2");
#endif
}

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

#endif
