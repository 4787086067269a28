/* Matching a prompt: how many leading blocks each holder has.
 *
 * A match walks the prompt's blocks from the first. The active holders are those that have every block so far, in some tier.
 * Each block's holders narrow them down; a holder that drops out of a tier gets its depth there. Blocks with equal holders
 * are the common case and cost one comparison.
 */
#include "index_holders.h"

#define FEW_HOLDERS 128

typedef struct {
    /* The active holders, by rising number. */
    uint32_t *holders; /* as members that have the block on the GPU */
    uint32_t *open;    /* index of its row << 4 | the tiers whose depth still grows */
    uint32_t n;
    /* A row for each holder of the first block. */
    match_row *rows;
    uint32_t n_rows;
    void *allocated; /* where there are more than a few holders */
    uint32_t few[2 * FEW_HOLDERS];
    match_row few_rows[FEW_HOLDERS];
} match;

/* The tiers that a block counts for: the nearest tier it is in, and all farther ones. */
static always_inline uint32_t tiers_covered(uint32_t tiers) {
    uint32_t t = tiers | tiers << 1;
    return (t | t << 2) & 15;
}

/* Whether a block's member is this active holder and has the block on the GPU: then every depth grows. */
static always_inline int is_on_gpu(uint32_t member, uint32_t active) { return !((member ^ active) & ~14u); }

static always_inline void set_depths(match *m, uint32_t row, uint32_t tiers, uint32_t depth) {
    for (uint32_t tier = 0; tier < TIERS; tier++)
        if (tiers & 1u << tier)
            m->rows[row].depth[tier] = depth;
}

static always_inline void end_holder(match *m, uint32_t i, uint32_t depth) {
    set_depths(m, m->open[i] >> 4, m->open[i] & 15, depth);
}

/* Narrows the active holders down to those that have the block at this depth. */
static void narrow(match *m, const uint32_t *members, uint32_t n, uint32_t depth) {
    if (n == m->n) {
        uint32_t differs = 0;
        for (uint32_t i = 0; i < n; i++)
            differs |= (members[i] ^ m->holders[i]) & ~14u;
        if (!differs)
            return;
    }
    int by_search = n / 16 > m->n; /* few active holders among many members */
    uint32_t k = 0, left = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        uint32_t active = m->holders[i], open = m->open[i];
        if (k < n && is_on_gpu(members[k], active)) {
            k++;
        } else {
            if (by_search)
                k += find_member(members + k, n - k, active >> 4);
            else
                while (k < n && members[k] >> 4 < active >> 4)
                    k++;
            uint32_t covered = k < n && members[k] >> 4 == active >> 4 ? tiers_covered(members[k] & 15) : 0;
            uint32_t ended = open & 15 & ~covered;
            if (ended) {
                set_depths(m, open >> 4, ended, depth);
                open &= ~ended;
                if (!(open & 15))
                    continue;
            }
        }
        m->holders[left] = active;
        m->open[left++] = open;
    }
    m->n = left;
}

/* Starts with the holders of the first block. Returns 0 without memory. */
static int start(const BlockIndex *ix, match *m, uint32_t holders) {
    uint32_t two[2], n, live = 0;
    const uint32_t *members = members_of(ix, holders, two, &n);
    uint32_t *memory = m->few;
    m->rows = m->few_rows;
    if (n > FEW_HOLDERS) {
        memory = m->allocated = PyMem_RawMalloc(n * (sizeof(match_row) + 2 * sizeof(uint32_t)));
        if (!memory)
            return 0;
        m->rows = (match_row *)(memory + 2 * (size_t)n);
    }
    m->holders = memory;
    m->open = memory + n;
    for (uint32_t i = 0; i < n; i++) {
        const holder *h = &ix->holders[members[i] >> 4];
        if (h->state != HOLDER_LIVE)
            continue;
        m->holders[live] = (members[i] & ~15u) | ON_GPU;
        m->open[live] = live << 4 | tiers_covered(members[i] & 15);
        m->rows[live] = (match_row){h->id, {0}};
        live++;
    }
    m->n = m->n_rows = live;
    return 1;
}

#define BLOCKS_PER_LRU 4 /* from this many blocks for each active holder on, it is quicker to match in their recency lists */

/* Where all active holders are LRU holders: matches the prompt in each recency list, piece by piece. Else returns 0. */
static int match_lru_holders(const BlockIndex *ix, match *m, const uint8_t *hashes, size_t n) {
    if (n < BLOCKS_PER_LRU * (size_t)m->n)
        return 0;
    for (uint32_t i = 0; i < m->n; i++)
        if (!ix->holders[m->holders[i] >> 4].lru)
            return 0;
    for (uint32_t i = 0; i < m->n; i++)
        end_holder(m, i, (uint32_t)recency_match(ix->holders[m->holders[i] >> 4].lru, hashes, n));
    m->n = 0;
    return 1;
}

/* Walks the blocks up to the first that no active holder has. Returns 0 without memory. */
static int match_blocks(BlockIndex *ix, match *m, const uint8_t *hashes, size_t n) {
    uint32_t last = 0, depth = 0;
    uint64_t keys[AHEAD];
    m->allocated = NULL;
    m->n_rows = m->n = 0;
    size_t batch = 2; /* many prompts match nowhere, so the first batches are small */
    for (size_t first = 0; first < n; first += batch, batch = batch < AHEAD ? batch * 4 : batch) {
        batch = batch > AHEAD ? AHEAD : batch;
        size_t end = n - first < batch ? n : first + batch;
        for (size_t i = first; i < end; i++)
            keys[i - first] = block_key(ix, read64(hashes + 8 * i));
        prefetch_keys(ix, &ix->blocks, keys, end - first);
        for (size_t i = first; i < end; i++) {
            slot *block = find_slot(&ix->blocks, keys[i - first]);
            if (!block)
                goto end;
            uint32_t holders = block->value & ~MATCHED;
            if (i == 0) {
                if (!start(ix, m, holders))
                    return 0;
                if (match_lru_holders(ix, m, hashes, n))
                    return 1;
            } else if (holders != last) {
                uint32_t two[2], n_members;
                const uint32_t *members = members_of(ix, holders, two, &n_members);
                narrow(m, members, n_members, depth);
            }
            if (!m->n)
                goto end;
            if (!(block->value & MATCHED))
                block->value |= MATCHED;
            last = holders;
            depth++;
        }
    }
end:
    for (uint32_t i = 0; i < m->n; i++)
        end_holder(m, i, depth);
    return 1;
}

/* (holder, depth, depth, depth, depth); equal depths share one int. */
static PyObject *row_tuple(const match_row *r) {
    PyObject *t = PyTuple_New(1 + TIERS), *number = PyLong_FromUnsignedLong(r->holder);
    if (!t || !number) {
        Py_XDECREF(number);
        goto fail;
    }
    PyTuple_SET_ITEM(t, 0, number);
    for (int tier = 0; tier < TIERS; tier++) {
        if (tier && r->depth[tier] == r->depth[tier - 1])
            number = Py_NewRef(PyTuple_GET_ITEM(t, tier));
        else if (!(number = PyLong_FromUnsignedLong(r->depth[tier])))
            goto fail;
        PyTuple_SET_ITEM(t, 1 + tier, number);
    }
    return t;
fail:
    Py_XDECREF(t);
    return NULL;
}

PyObject *index_match_rows(BlockIndex *ix, const uint8_t *hashes, size_t n) {
    match m; /* too large to be cleared each time */
    if (!match_blocks(ix, &m, hashes, n))
        return PyErr_NoMemory();
    PyObject *list = PyList_New(m.n_rows);
    for (uint32_t i = 0; list && i < m.n_rows; i++) {
        PyObject *row = row_tuple(&m.rows[i]);
        if (row)
            PyList_SET_ITEM(list, i, row);
        else
            Py_CLEAR(list);
    }
    PyMem_RawFree(m.allocated);
    return list;
}

int index_match(BlockIndex *ix, const uint8_t *hashes, size_t n, int (*each)(const match_row *, void *), void *with) {
    match m;
    if (!match_blocks(ix, &m, hashes, n)) {
        PyErr_NoMemory();
        return -1;
    }
    int failed = 0;
    for (uint32_t i = 0; i < m.n_rows && !failed; i++)
        failed = each(&m.rows[i], with) < 0;
    PyMem_RawFree(m.allocated);
    return failed ? -1 : 0;
}
