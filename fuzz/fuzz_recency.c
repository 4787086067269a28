/* The recency list: equal to a plain list of blocks, for prompts; and sound for any other hashes. */
#include "checks.h"

#define MAX_DEPTH 24
#define MAX_HELD 4096

static PyObject *Recency, *hash_blocks;

void fuzz_setup(void) {
    Recency = kernel("Recency");
    hash_blocks = kernel("hash_blocks");
}

/* ---- The plain list: oldest first ---- */

/* Most of the time would be spent in two of its functions. */
#ifdef __clang__
#define NOT_INSTRUMENTED __attribute__((no_sanitize("address", "undefined")))
#else
#define NOT_INSTRUMENTED __attribute__((no_sanitize("address", "undefined"), optimize("O2")))
#endif

typedef struct {
    uint64_t hash;
    double stamp;
    int is_anonymous;
} block;

typedef struct {
    block held[MAX_HELD];
    size_t n, capacity;
} plain_list;

/* The newest blocks are looked at first. */
NOT_INSTRUMENTED
static long find_block(const plain_list *list, uint64_t hash) {
    const block *held = list->held;
    for (size_t i = list->n; i-- > 0;)
        if (held[i].hash == hash && !held[i].is_anonymous)
            return (long)i;
    return -1;
}

NOT_INSTRUMENTED
static void remove_at(plain_list *list, size_t at) {
    block *held = list->held;
    size_t n = --list->n;
    for (; at < n; at++)
        held[at] = held[at + 1];
}

static void append(plain_list *list, block added) {
    CHECK(list->n < MAX_HELD);
    list->held[list->n++] = added;
}

/* Evicts the oldest, and checks that these bytes are their hashes. */
static void check_evicted(plain_list *list, PyObject *evicted) {
    const char *p = PyBytes_AS_STRING(evicted), *end = p + PyBytes_GET_SIZE(evicted);
    while (list->n > list->capacity) {
        if (!list->held[0].is_anonymous) {
            CHECK(end - p >= 8 && !memcmp(p, &list->held[0].hash, 8));
            p += 8;
        }
        remove_at(list, 0);
    }
    CHECK(p == end);
}

/* ---- Prompts ---- */

typedef struct {
    uint64_t hashes[MAX_DEPTH];
    size_t n;
} prompt;

/* A path in a tree of prompts: each byte of the input chooses one of four branches for four blocks. */
static prompt read_prompt(input *in) {
    prompt p;
    uint32_t tokens[MAX_DEPTH];
    p.n = next_below(in, MAX_DEPTH + 1);
    for (size_t i = 0; i < p.n; i += 4) {
        uint8_t choice = next_byte(in);
        for (size_t k = i; k < p.n && k < i + 4; k++, choice >>= 2)
            tokens[k] = choice & 3;
    }
    PyObject *made = must_call(hash_blocks, 4, integer(1), none(), bytes(tokens, 4 * p.n), integer(1));
    CHECK((size_t)PyBytes_GET_SIZE(made) == 8 * p.n);
    memcpy(p.hashes, PyBytes_AS_STRING(made), 8 * p.n);
    Py_DECREF(made);
    return p;
}

static PyObject *packed(const uint64_t *hashes, size_t n) { return bytes(hashes, 8 * n); }

/* ---- Operations on both ---- */

static void touch(PyObject *recency, plain_list *list, const prompt *p, double stamp) {
    PyObject *changes = must_call_method(recency, "touch", 2, packed(p->hashes, p->n), PyFloat_FromDouble(stamp));
    PyObject *new = PyTuple_GET_ITEM(changes, 0);
    const char *at = PyBytes_AS_STRING(new), *end = at + PyBytes_GET_SIZE(new);
    size_t n = p->n < list->capacity ? p->n : list->capacity;
    for (size_t i = 0; i < n; i++)
        if (find_block(list, p->hashes[i]) < 0) {
            CHECK(end - at >= 8 && !memcmp(at, &p->hashes[i], 8));
            at += 8;
        }
    CHECK(at == end);
    for (size_t i = n; i--;) {
        long known = find_block(list, p->hashes[i]);
        if (known >= 0)
            remove_at(list, (size_t)known);
        append(list, (block){p->hashes[i], stamp, 0});
    }
    check_evicted(list, PyTuple_GET_ITEM(changes, 1));
    Py_DECREF(changes);
}

static void add_anonymous(PyObject *recency, plain_list *list, size_t count, double stamp) {
    PyObject *evicted = must_call_method(recency, "add_anonymous", 2, integer((long long)count), PyFloat_FromDouble(stamp));
    for (size_t i = 0; i < count && i < list->capacity; i++)
        append(list, (block){0, stamp, 1});
    check_evicted(list, evicted);
    Py_DECREF(evicted);
}

static void drop(PyObject *recency, plain_list *list, const prompt *p, unsigned which) {
    uint64_t dropped[MAX_DEPTH];
    size_t n = 0, held = 0;
    for (size_t i = 0; i < p->n; i++)
        if (which >> (i % 8) & 1) {
            long known = find_block(list, p->hashes[i]);
            dropped[n++] = p->hashes[i];
            if (known >= 0) {
                remove_at(list, (size_t)known);
                held++;
            }
        }
    PyObject *count = must_call_method(recency, "drop", 2, packed(p->hashes, p->n), packed(dropped, n));
    CHECK(as_integer(count) == (long long)held);
}

/* Many prompts of one block, so that slots are freed by the hundred. */
static void touch_many(PyObject *recency, plain_list *list, unsigned first, double stamp) {
    for (unsigned i = 0; i < 160; i++) {
        prompt p = {.hashes = {(uint64_t)(first * 160 + i + 1) * 0x9e3779b97f4a7c15ULL}, .n = 1};
        touch(recency, list, &p, stamp);
    }
}

static void check_match(PyObject *recency, const plain_list *list, const prompt *p) {
    size_t leading = 0;
    while (leading < p->n && find_block(list, p->hashes[leading]) >= 0)
        leading++;
    CHECK(as_integer(must_call_method(recency, "match", 1, packed(p->hashes, p->n))) == (long long)leading);
}

static void check_uses(PyObject *recency, const plain_list *list, const prompt *p, size_t depth, double latest) {
    PyObject *uses = must_call_method(recency, "last_uses", 3, packed(p->hashes, p->n), integer((long long)depth),
                                      PyFloat_FromDouble(latest));
    size_t next = 0;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(uses); k++) {
        size_t first, end;
        double stamp;
        CHECK(PyArg_ParseTuple(PyList_GET_ITEM(uses, k), "nnd", &first, &end, &stamp));
        CHECK(first >= next && first < end && end <= depth && end <= p->n);
        for (; next < end; next++) {
            long known = find_block(list, p->hashes[next]);
            int is_listed = known >= 0 && list->held[known].stamp <= latest;
            CHECK(is_listed == (next >= first) && (!is_listed || list->held[known].stamp == stamp));
        }
    }
    for (; next < depth && next < p->n; next++) {
        long known = find_block(list, p->hashes[next]);
        CHECK(known < 0 || list->held[known].stamp > latest);
    }
    Py_DECREF(uses);
}

static void check_equal(PyObject *recency, const plain_list *list) {
    PyObject *oldest = PyObject_GetAttrString(recency, "oldest");
    CHECK(oldest && PyObject_Length(recency) == (Py_ssize_t)list->n);
    if (list->n)
        CHECK(PyFloat_AsDouble(oldest) == list->held[0].stamp);
    else
        CHECK(oldest == Py_None);
    Py_DECREF(oldest);
    check_recency(recency);
}

static void fuzz_prompts(input *in) {
    static plain_list list; /* large */
    list.n = 0;
    list.capacity = 1 + 5 * next_below(in, 200);
    PyObject *recency = must_call(Recency, 1, integer((long long)list.capacity));
    unsigned steps = 0;
    for (double stamp = 1.0; has_more(in) && steps++ < 200; stamp += next_below(in, 2)) {
        unsigned operation = next_below(in, 8);
        prompt p = read_prompt(in);
        if (operation < 3) {
            touch(recency, &list, &p, stamp);
        } else if (operation == 3) {
            add_anonymous(recency, &list, next_below(in, 40), stamp);
        } else if (operation == 4) {
            drop(recency, &list, &p, next_byte(in));
        } else if (operation == 5) {
            list.capacity = 1 + 5 * next_below(in, 200);
            PyObject *evicted = must_call_method(recency, "resize", 1, integer((long long)list.capacity));
            check_evicted(&list, evicted);
            Py_DECREF(evicted);
        } else if (operation == 6) {
            check_uses(recency, &list, &p, next_below(in, MAX_DEPTH + 2), next_byte(in));
        } else if (next_below(in, 4) == 0) {
            touch_many(recency, &list, next_below(in, 8), stamp);
        } else if (next_below(in, 16) == 0) {
            Py_DECREF(must_call_method(recency, "clear", 0));
            list.n = 0;
        }
        check_match(recency, &list, &p);
        if (steps % 4 == 0 || !has_more(in))
            check_equal(recency, &list);
    }
    Py_DECREF(recency);
}

/* Hashes that are no prompt's: repeated, and in any order. */
static void fuzz_hashes(input *in) {
    PyObject *recency = must_call(Recency, 1, integer(1 + next_below(in, 60)));
    while (has_more(in)) {
        uint64_t hashes[32];
        unsigned operation = next_below(in, 6);
        size_t n = next_below(in, 33), few = next_below(in, 33);
        for (size_t i = 0; i < n; i++)
            hashes[i] = next_byte(in) % 24;
        if (operation < 3)
            Py_DECREF(must_call_method(recency, "touch", 2, packed(hashes, n), PyFloat_FromDouble(next_byte(in))));
        else if (operation == 3)
            Py_DECREF(must_call_method(recency, "drop", 2, packed(hashes, n), packed(hashes, few < n ? few : n)));
        else if (operation == 4)
            Py_DECREF(must_call_method(recency, "add_anonymous", 2, integer((long long)few), PyFloat_FromDouble(1.0)));
        else
            Py_DECREF(must_call_method(recency, "resize", 1, integer(1 + (long long)few * 2)));
        CHECK(as_integer(must_call_method(recency, "match", 1, packed(hashes, n))) <= (long long)n);
        Py_DECREF(must_call_method(recency, "sample", 1, packed(hashes, n)));
        check_recency(recency);
    }
    Py_DECREF(recency);
}

void fuzz_one(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    if (next_below(&in, 4))
        fuzz_prompts(&in);
    else
        fuzz_hashes(&in);
}
