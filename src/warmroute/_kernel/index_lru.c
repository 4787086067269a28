/* LRU holders: holders whose blocks are those of a Recency, all on the GPU. They have no pairs of their own.
 *
 * The rules:
 * - A touch adds a prompt to the recency list and to the index. What the list evicts for it leaves the index, too.
 * - What the budget refuses of a prompt is in neither of the two.
 * - At the budget, the oldest blocks of the list go first.
 */
#include "index_holders.h"

/* Makes the index's keys of up to AHEAD hashes, and prefetches them. Returns their number. */
static always_inline size_t next_keys(const BlockIndex *ix, const uint8_t *hashes, size_t n, uint64_t keys[AHEAD]) {
    size_t few = n < AHEAD ? n : AHEAD;
    for (size_t i = 0; i < few; i++)
        keys[i] = block_key(ix, read64(hashes + 8 * i));
    prefetch_keys(ix, &ix->blocks, keys, few);
    return few;
}

/* As release_block(), for an LRU holder, which has no aliases. Quicker for a block that nobody else has. */
static always_inline int release_on_gpu(BlockIndex *ix, uint64_t key, uint32_t number) {
    position where;
    slot *known = find(&ix->blocks, key, SLOT, &where);
    if (!known)
        return 0;
    if ((known->value & ~MATCHED) != MEMBER(number, ON_GPU))
        return release_slot(ix, known, where, number, ON_GPU);
    erase(ix, &ix->blocks, where, SLOT);
    return 1;
}

uint64_t release_hashes(BlockIndex *ix, uint32_t number, const uint8_t *hashes, size_t n) {
    uint64_t keys[AHEAD], held = 0;
    for (size_t start = 0, few; start < n; start += few) {
        few = next_keys(ix, hashes + 8 * start, n - start, keys);
        for (size_t i = 0; i < few; i++)
            held += (uint64_t)release_on_gpu(ix, keys[i], number);
    }
    return held;
}

size_t evict_from_lru(BlockIndex *ix, uint32_t number, size_t most) {
    uint64_t hashes[AHEAD];
    size_t n = recency_evict_oldest(ix->holders[number].lru, hashes, most < AHEAD ? most : AHEAD);
    release_hashes(ix, number, (const uint8_t *)hashes, n);
    return n;
}

/* ---- Adding a prompt ---- */

/* Holds these blocks up to the first that the budget refuses: blocks after a gap are of no use. Returns their number. */
static size_t hold_hashes(BlockIndex *ix, uint32_t number, const uint8_t *hashes, size_t n) {
    uint64_t keys[AHEAD];
    for (size_t start = 0, few; start < n; start += few) {
        few = next_keys(ix, hashes + 8 * start, n - start, keys);
        for (size_t i = 0; i < few; i++) {
            position where;
            slot *known = find(&ix->blocks, keys[i], SLOT, &where);
            int is_held = known ? hold_slot(ix, known, number, ON_GPU)
                                : insert(ix, &ix->blocks, where, &(slot){keys[i], MEMBER(number, ON_GPU)}, SLOT);
            if (!is_held)
                return start + i;
        }
    }
    return n;
}

#define NEW_BLOCK_BYTES 16 /* of a block that nobody has yet, with the unused part of its page */

/* Bytes that it may take for one more holder to have the block. */
static always_inline uint64_t bytes_for_block(const BlockIndex *ix, uint64_t block, uint32_t number) {
    const slot *known = find_slot(&ix->blocks, block);
    uint32_t two[2], n;
    if (!known)
        return NEW_BLOCK_BYTES;
    if (tiers_of(ix, known->value, number))
        return 0;
    const uint32_t *members = members_of(ix, known->value, two, &n);
    return n == 1 && (members[0] & 15) == ON_GPU ? 0 : set_charge(n + 1) - charge_of(ix, known->value);
}

static uint64_t bytes_for_hashes(const BlockIndex *ix, uint32_t number, const uint8_t *hashes, size_t n) {
    uint64_t bytes = 0, keys[AHEAD];
    for (size_t start = 0, few; start < n; start += few) {
        few = next_keys(ix, hashes + 8 * start, n - start, keys);
        for (size_t i = 0; i < few; i++)
            bytes += bytes_for_block(ix, keys[i], number);
    }
    return bytes;
}

/* Makes room for a prompt before the recency list takes it: what is evicted must not be one of its blocks. A prompt may evict
 * at most half of the budget, and 8 blocks for each of its own. */
static void make_room_for(BlockIndex *ix, uint32_t number, const uint8_t *hashes, size_t n) {
    const Recency *lru = ix->holders[number].lru;
    uint64_t capacity = recency_capacity(lru);
    n = n < capacity ? n : (size_t)capacity;
    if (charged_bytes(ix) + n * set_charge(ix->n_holders) <= ix->soft_bytes)
        return;
    size_t held = recency_match(lru, hashes, n), few = 8 * n;
    uint64_t need = bytes_for_hashes(ix, number, hashes + 8 * held, n - held);
    need = need < ix->soft_bytes / 2 ? need : ix->soft_bytes / 2;
    if (ix->first_retired != NONE && charged_bytes(ix) + need > ix->soft_bytes)
        sweep(ix, few);
    while (few-- && charged_bytes(ix) + need > ix->soft_bytes && evict_one(ix))
        ;
}

/* Removes the blocks from the recency list that the budget refused, and makes room for the next store. */
static void undo_refused(BlockIndex *ix, uint32_t number, PyObject *prompt, const uint8_t *refused, size_t n) {
    ix->refused += n;
    recency_untouch(ix->holders[number].lru, (const uint8_t *)PyBytes_AS_STRING(prompt), (size_t)PyBytes_GET_SIZE(prompt) / 8,
                    refused, n);
    release_hashes(ix, number, refused, n); /* where a hash is repeated */
    for (size_t few = 8 * n; few-- && charged_bytes(ix) > ix->soft_bytes && evict_one(ix);)
        ;
}

/* Brings the index up to date with the recency list after a touch. `changes`: (new hashes, evicted hashes). Releases and holds in
 * turns: then the pages, which a long prompt would empty and fill, keep their size. */
static void apply_touch(BlockIndex *ix, uint32_t number, PyObject *prompt, PyObject *changes) {
    PyObject *new = PyTuple_GET_ITEM(changes, 0), *old = PyTuple_GET_ITEM(changes, 1);
    const uint8_t *hashes = (const uint8_t *)PyBytes_AS_STRING(new), *evicted = (const uint8_t *)PyBytes_AS_STRING(old);
    size_t n = (size_t)PyBytes_GET_SIZE(new) / 8, n_evicted = (size_t)PyBytes_GET_SIZE(old) / 8, held = 0, few;
    for (size_t released = 0; released < n_evicted; released += few) {
        few = n_evicted - released < AHEAD ? n_evicted - released : AHEAD;
        release_hashes(ix, number, evicted + 8 * released, few);
        size_t more = n - held < AHEAD ? n - held : AHEAD;
        if (hold_hashes(ix, number, hashes + 8 * held, more) == more) {
            held += more;
            continue;
        }
        release_hashes(ix, number, evicted + 8 * (released + few), n_evicted - released - few);
        break;
    }
    held += hold_hashes(ix, number, hashes + 8 * held, n - held);
    if (held < n)
        undo_refused(ix, number, prompt, hashes + 8 * held, n - held);
}

static Recency *read_lru(const BlockIndex *ix, PyObject *given, uint32_t *number) {
    if (read_holder(ix, given, number) < 0)
        return NULL;
    Recency *lru = ix->holders[*number].lru;
    if (!lru)
        PyErr_SetString(PyExc_ValueError, "the holder has no recency list");
    return lru;
}

int index_touch(BlockIndex *ix, PyObject *const *args, lru_touch *t) {
    uint32_t number;
    double stamp;
    if (recency_read_stamp(args[2], &stamp) < 0 || check_type(args[1], &PyBytes_Type) < 0)
        return -1;
    if (PyBytes_GET_SIZE(args[1]) % 8) {
        PyErr_SetString(PyExc_ValueError, "hashes must be 64-bit integers");
        return -1;
    }
    Recency *lru = read_lru(ix, args[0], &number);
    if (!lru)
        return -1;
    make_room_for(ix, number, (const uint8_t *)PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]) / 8);
    Py_INCREF(lru);
    earlier_uses before = {t->depth, t->latest, NULL};
    PyObject *changes = recency_touch(lru, args[1], stamp, &before);
    int failed = !changes || read_holder(ix, args[0], &number) < 0; /* a finalizer may have removed the holder */
    if (!failed) {
        if (ix->holders[number].lru == lru)
            apply_touch(ix, number, args[1], changes);
        if (ix->first_retired != NONE)
            sweep(ix, 16 + 2 * ((size_t)PyBytes_GET_SIZE(PyTuple_GET_ITEM(changes, 0)) / 8));
        t->new_hashes = Py_NewRef(PyTuple_GET_ITEM(changes, 0));
        t->uses = before.uses;
        recency_room(lru, &t->free_blocks, &t->oldest_s);
    } else {
        Py_XDECREF(before.uses);
    }
    Py_XDECREF(changes);
    Py_DECREF(lru);
    return failed ? -1 : 0;
}

int index_add_anonymous(BlockIndex *ix, PyObject *const *args, lru_touch *t) {
    uint32_t number;
    uint64_t count;
    double stamp;
    if (recency_read_count(args[1], &count) < 0 || recency_read_stamp(args[2], &stamp) < 0)
        return -1;
    Recency *lru = read_lru(ix, args[0], &number);
    PyObject *evicted = lru ? recency_add_anonymous(lru, count, stamp) : NULL;
    if (!evicted)
        return -1;
    release_hashes(ix, number, (const uint8_t *)PyBytes_AS_STRING(evicted), (size_t)PyBytes_GET_SIZE(evicted) / 8);
    recency_room(lru, &t->free_blocks, &t->oldest_s);
    Py_DECREF(evicted);
    return 0;
}
