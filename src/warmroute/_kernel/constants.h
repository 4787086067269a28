/* Constants that the kernel and Python share. They are defined here and nowhere else: the module exports each of them
 * under its name, Python imports it from `warmroute._kernel`, and `_native.pyi` says what it means.
 */
#ifndef WARMROUTE_CONSTANTS_H
#define WARMROUTE_CONSTANTS_H

#define SHARED_INTEGERS(X)                                                                                                 \
    /* Length of a body whose head does not give one. */                                                                   \
    X(CHUNKED, -1)                                                                                                         \
    X(UNTIL_CLOSE, -2)                                                                                                     \
    /* The most first tokens that wait to be published, or to be learned. */                                                \
    X(MAX_FIRST_TOKENS, 8192)                                                                                              \
    /* Why a head is rejected. */                                                                                          \
    X(MALFORMED_START_LINE, 1)                                                                                             \
    X(BAD_TARGET, 2)                                                                                                       \
    X(UNSUPPORTED_VERSION, 3)                                                                                              \
    X(MALFORMED_FIELD, 4)                                                                                                  \
    X(TOO_MANY_FIELDS, 5)                                                                                                  \
    X(BAD_CONTENT_LENGTH, 6)                                                                                               \
    X(REPEATED_TRANSFER_ENCODING, 7)                                                                                       \
    X(UNSUPPORTED_TRANSFER_ENCODING, 8)                                                                                    \
    X(UNSUPPORTED_EXPECTATION, 9)                                                                                          \
    X(BAD_HOST, 10)                                                                                                        \
    X(LENGTH_AND_TRANSFER_ENCODING, 11)                                                                                    \
    X(TRANSFER_ENCODING_IN_HTTP_1_0, 12)                                                                                   \
    X(TOO_MANY_CONNECTION_OPTIONS, 13)                                                                                     \
    X(REPEATED_FIELD, 14)                                                                                                  \
    X(FIELD_NAMED_IN_CONNECTION, 15)                                                                                       \
    X(AMBIGUOUS_FIELD_NAME, 16)                                                                                            \
    X(UNSUPPORTED_CONTENT_ENCODING, 17)                                                                                    \
    /* Bodies and prompts. */                                                                                              \
    X(MAX_LOOP_BYTES, 262144)                                                                                              \
    X(MAX_LOOKUP_TOKENS, 1048576)                                                                                          \
    X(KEY_CHARACTERS, 256)                                                                                                 \
    X(TOKEN_BYTES, 4)                                                                                                      \
    X(DIGEST_BYTES, 16)                                                                                                    \
    X(MESSAGE_ROLES, 4)                                                                                                    \
    X(USAGE_TAIL_BYTES, 16384)                                                                                             \
    X(FIRST_TOKEN_SEARCH_BYTES, 262144)                                                                                    \
    X(FIRST_TOKEN_EMPTY_CHUNKS, 8)                                                                                         \
    /* The index. */                                                                                                       \
    X(MAX_BLOCK_TOKENS, 65536)                                                                                             \
    X(MIN_BUDGET_BYTES, 65536)                                                                                             \
    X(UNKNOWN_PARENT, -1)                                                                                                  \
    X(EVICTED_PARENT, -2)                                                                                                  \
    X(TIER_GPU, 0)                                                                                                         \
    X(TIER_CPU, 1)                                                                                                         \
    X(TIER_DISK, 2)                                                                                                        \
    X(TIER_REMOTE, 3)                                                                                                      \
    X(ROUTED_RANK, -1)                                                                                                     \
    /* The outcome of a ticket whose time counts. core/messages.py has the others. */                                      \
    X(OUTCOME_OK, 0)                                                                                                       \
    /* Traffic counters. */                                                                                                \
    X(SAMPLED_HITS, 16)                                                                                                    \
    X(EXACT_ESTIMATES, 100)                                                                                                \
    X(SAMPLED_RESPONSES, 8)                                                                                                \
    X(MAX_COUNTED_TOKENS, 1000000000)

#define SHARED_DOUBLES(X)                                                                                                  \
    /* What the speed of a node's prefill is learned with. */                                                              \
    X(ATTENTION_WORK, 4e-5)                                                                                                \
    X(FIRST_TOKEN_STEPS, 1.5)                                                                                              \
    X(STEP_WORK, 300.0)                                                                                                    \
    X(SPEED_DECAY_S, 15.0)                                                                                                 \
    X(SPEED_MIN_KEPT, 0.7)                                                                                                 \
    X(SPEED_MAX_FACTOR, 4.0)                                                                                               \
    X(STEP_MAX_FACTOR, 4.0 )                                                                                               \
    X(CARRIED_MAX_FACTOR, 2.0)                                                                                             \
    X(PREFILL_MIN_SHARE, 0.5)                                                                                              \
    X(DECODE_FACTOR_WEIGHT, 0.05)                                                                                          \
    X(LONG_PREFILL_WORK, 600.0)                                                                                            \
    X(STEP_FALL, 0.1)                                                                                                      \
    X(STEP_RISE, 0.005)                                                                                                    \
    X(LONG_PREFILL_WEIGHT, 0.2)                                                                                            \
    /* What a learned speed is judged by. */                                                                               \
    X(REVIEW_WEIGHT, 0.02)                                                                                                 \
    X(EARLY_STEPS, 0.5)                                                                                                    \
    X(EARLY_MIN_STEPS, 4.0)                                                                                                \
    /* What the decode speed of a model is learned with. */                                                                \
    X(DECODE_WEIGHT, 0.03)                                                                                                 \
    X(DECODE_MIN_SHARE, 0.2)                                                                                               \
    X(DECODE_MAX_FACTOR, 4.0)                                                                                              \
    X(REQUEST_CONTEXT, 500.0)                                                                                              \
    X(DECODE_FACTOR_NOISE, 0.1)                                                                                            \
    X(PREFILL_SPEED_NOISE, 1.3)                                                                                            \
    /* How much of a prompt counts as prefilled before its first token. */                                                 \
    X(PREFILLED_MAX_SHARE, 0.75)                                                                                           \
    X(PREFILL_LATE, 2.0)                                                                                                   \
    /* Averages of a node. */                                                                                              \
    X(ARRIVAL_DECAY_S, 10.0)                                                                                               \
    X(LATENCY_WEIGHT, 0.1)                                                                                                 \
    /* Terms of the price. */                                                                                              \
    X(KV_FULL_POWER, 8.0)                                                                                                  \
    X(KV_FULL_SCALE, 0.1)                                                                                                  \
    X(KV_FULL_MARGIN, 1.02)                                                                                                \
    X(KV_MAX_FULL, 0.999)                                                                                                  \
    X(KV_USABLE_SHARE, 0.98)                                                                                               \
    X(KV_GROWTH_SHARE, 0.3)                                                                                                \
    X(STREAMED_WEIGHT, 0.2)                                                                                                \
    X(STALLED_WEIGHT, 0.2)                                                                                                 \
    X(STALLED_MAX_WORK, 4096.0)                                                                                            \
    X(EVICTED_WEIGHT, 2.5)                                                                                                 \
    X(RISK_POWER, 4.0)                                                                                                     \
    /* Chance of reuse, and confidence in a cache. */                                                                      \
    X(REUSE_FIRST_S, 0.25)                                                                                                 \
    X(ACCURACY_PRIOR_TOKENS, 4096.0)                                                                                       \
    X(ACCURACY_HALF_LIFE_S, 30.0)

#define DEFINE(name, value) name = (value),
enum { SHARED_INTEGERS(DEFINE) };
#undef DEFINE

#define DEFINE(name, value) static const double name __attribute__((unused)) = (value);
SHARED_DOUBLES(DEFINE)
#undef DEFINE

#define TIERS 4
#define MAX_OUTCOMES 16

/* The upper bounds of the TTFT histogram's buckets; the last bucket has none. Exported as a tuple. */
#define TTFT_BUCKETS 14
static const double TTFT_BOUNDS_MS[TTFT_BUCKETS - 1] __attribute__((unused)) = {
    5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0};

/* The same for the histograms of traffic.c: ten bounds for each power of ten. */
#define TIME_BUCKETS 62
static const double TIME_BOUNDS_MS[TIME_BUCKETS - 1] __attribute__((unused)) = {
    1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0,
    10.0, 12.5, 16.0, 20.0, 25.0, 31.5, 40.0, 50.0, 63.0, 80.0,
    100.0, 125.0, 160.0, 200.0, 250.0, 315.0, 400.0, 500.0, 630.0, 800.0,
    1000.0, 1250.0, 1600.0, 2000.0, 2500.0, 3150.0, 4000.0, 5000.0, 6300.0, 8000.0,
    10000.0, 12500.0, 16000.0, 20000.0, 25000.0, 31500.0, 40000.0, 50000.0, 63000.0, 80000.0,
    100000.0, 125000.0, 160000.0, 200000.0, 250000.0, 315000.0, 400000.0, 500000.0, 630000.0, 800000.0,
    1000000.0};

#endif
