/* BlockIndex, the Python type of the block index: reads arguments, opens and closes holders, reports. index.h has the rules.
 *
 * A call whose arguments are wrong raises TypeError or ValueError, and changes nothing.
 */
#include "index_holders.h"
#include <sys/random.h>

#define SWEPT_AT_ONCE 4096 /* pairs, when a holder is cleared or removed; the rest is swept by later calls */

/* ---- Arguments ---- */

int read_holder(const BlockIndex *ix, PyObject *from, uint32_t *number) {
    long id = PyLong_AsLong(from);
    if (id == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (id >= 0 && id < ix->n_ids && ix->ids[id].number != NONE) {
        *number = ix->ids[id].number;
        return 0;
    }
    PyErr_SetString(PyExc_ValueError, "there is no such holder");
    return -1;
}

static int read_holder_and_tier(const BlockIndex *ix, PyObject *id, PyObject *given, uint32_t *number, uint32_t *tier) {
    long t;
    if (read_holder(ix, id, number) < 0 || as_number(given, 0, TIERS - 1, &t, "tier") < 0)
        return -1;
    *tier = (uint32_t)t;
    return 0;
}

/* The same for a store, which LRU holders don't take. */
static int read_storing_holder(const BlockIndex *ix, PyObject *id, PyObject *given, uint32_t *number, uint32_t *tier) {
    if (read_holder_and_tier(ix, id, given, number, tier) < 0)
        return -1;
    if (!ix->holders[*number].lru)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a holder with a recency list takes blocks by touch() only");
    return -1;
}

static PyObject *as_int(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

/* ---- Creating and freeing ---- */

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"budget_bytes", NULL};
    unsigned long long budget;
    PyObject *given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &given))
        return NULL;
    budget = PyLong_AsUnsignedLongLong(given);
    if (budget == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    if (budget < MIN_BUDGET_BYTES || budget > 1ULL << 46) {
        PyErr_Format(PyExc_ValueError, "budget_bytes must be at least %d", MIN_BUDGET_BYTES);
        return NULL;
    }
    BlockIndex *ix = (BlockIndex *)type->tp_alloc(type, 0); /* all zero */
    if (!ix)
        return NULL;
    if (getrandom(&ix->secret, 8, 0) != 8 || getrandom(&ix->random, 8, 0) != 8) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(ix);
        return NULL;
    }
    ix->random |= 1;
    ix->budget_bytes = budget;
    ix->soft_bytes = budget - (budget / 64 > 8192 ? budget / 64 : 8192);
    ix->set_numbers.of_sets = 1;
    ix->free_set = ix->free_holder = ix->free_id = ix->first_retired = NONE;
    ix->last_transition.from = NONE;
    ix->table_bytes = malloc_bytes(sizeof(BlockIndex));
    return (PyObject *)ix;
}

static void index_dealloc(BlockIndex *ix) {
    for (uint32_t i = 0; i < ix->n_holders; i++) {
        free_table(ix, &ix->holders[i].pairs, PAIR);
        if (ix->holders[i].lru)
            recency_detach(ix->holders[i].lru);
        Py_XDECREF(ix->holders[i].lru);
    }
    free_table(ix, &ix->blocks, SLOT);
    free_table(ix, &ix->set_numbers, SLOT);
    free_table(ix, &ix->aliases, SLOT);
    for (uint32_t i = 0; i < ix->n_sets; i++)
        if (!((uintptr_t)ix->sets[i] & 1))
            PyMem_RawFree(ix->sets[i]);
    PyMem_RawFree(ix->sets);
    PyMem_RawFree(ix->scratch);
    PyMem_RawFree(ix->holders);
    PyMem_RawFree(ix->ids);
    Py_TYPE(ix)->tp_free(ix);
}

/* ---- Holders. They are few: their memory counts as used, but the budget does not refuse it. ---- */

/* Grows an array of holders or ids by a quarter; NULL without memory. */
static void *grown(BlockIndex *ix, void *at, uint32_t *room, size_t size) {
    uint32_t more = *room + *room / 4 + 16;
    void *moved = PyMem_RawRealloc(at, more * size);
    if (!moved)
        return NULL;
    ix->table_bytes += malloc_bytes(more * size) - malloc_bytes(*room * size);
    *room = more;
    return moved;
}

/* Gives an id a fresh holder. Returns -1, without an exception, where there is no number left or no memory. */
static int start_holder(BlockIndex *ix, uint32_t id) {
    if (ix->free_holder == NONE && ix->n_holders == MAX_HOLDERS)
        sweep(ix, UINT64_MAX);
    uint32_t number = ix->free_holder;
    if (number != NONE) {
        ix->free_holder = ix->holders[number].next;
    } else {
        if (ix->n_holders == MAX_HOLDERS)
            return -1;
        if (ix->n_holders == ix->holder_room) {
            void *holders = grown(ix, ix->holders, &ix->holder_room, sizeof(holder));
            if (!holders)
                return -1;
            ix->holders = holders;
        }
        number = ix->n_holders++;
    }
    ix->holders[number] = (holder){.id = id, .state = HOLDER_LIVE};
    ix->ids[id].number = number;
    return 0;
}

/* Gives a recency list back to its owner, empty. The holder keeps what the list held, to be swept. */
static void detach_lru(BlockIndex *ix, uint32_t number) {
    Recency *lru = ix->holders[number].lru, *moved = recency_move(lru);
    if (!moved) {
        PyErr_Clear();
        while (evict_from_lru(ix, number, AHEAD))
            ;
    }
    ix->holders[number].lru = moved;
    recency_detach(lru);
    Py_DECREF(lru);
}

/* Leaves a holder's pairs to be swept. */
static void retire_holder(BlockIndex *ix, uint32_t number) {
    holder *h = &ix->holders[number];
    if (h->lru)
        detach_lru(ix, number);
    h->state = HOLDER_RETIRED;
    h->next = ix->first_retired;
    ix->first_retired = number;
    ix->pairs -= h->pairs.count;
    ix->retired_pairs += count_of(h);
}

static void free_id(BlockIndex *ix, uint32_t id) {
    ix->ids[id] = (holder_id){NONE, ix->free_id};
    ix->free_id = id;
}

static PyObject *add_holder(BlockIndex *ix, Recency *lru) {
    if (ix->free_id == NONE) {
        if (ix->n_ids == ix->id_room) {
            void *ids = grown(ix, ix->ids, &ix->id_room, sizeof(holder_id));
            if (!ids)
                return PyErr_NoMemory();
            ix->ids = ids;
        }
        free_id(ix, ix->n_ids++);
    }
    uint32_t id = ix->free_id, next = ix->ids[id].next;
    PyObject *result = PyLong_FromUnsignedLong(id);
    if (!result)
        return NULL;
    if (start_holder(ix, id) < 0) {
        Py_DECREF(result);
        PyErr_Format(PyExc_OverflowError, "at most %d holders", MAX_HOLDERS);
        return NULL;
    }
    ix->free_id = next;
    ix->holders[ix->ids[id].number].lru = (Recency *)Py_XNewRef((PyObject *)lru);
    return result;
}

static PyObject *index_add_holder(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    if (check_signature(n_args, 0, 1, "(recency=None)") < 0)
        return NULL;
    Recency *lru = n_args && args[0] != Py_None ? (Recency *)args[0] : NULL;
    if (!lru)
        return add_holder(ix, NULL);
    if (check_type(args[0], &RecencyType) < 0)
        return NULL;
    if (recency_count(lru)) {
        PyErr_SetString(PyExc_ValueError, "a holder's recency list must be empty at first");
        return NULL;
    }
    if (!recency_attach(lru)) {
        PyErr_SetString(PyExc_ValueError, "the recency list belongs to another holder");
        return NULL;
    }
    PyObject *id = add_holder(ix, lru);
    if (!id)
        recency_detach(lru);
    return id;
}

static PyObject *index_clear(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_holder(ix, given, &number) < 0)
        return NULL;
    uint32_t id = ix->holders[number].id;
    if (ix->holders[number].lru) {
        PyErr_SetString(PyExc_ValueError, "a holder with a recency list can't be cleared; remove it and add another");
        return NULL;
    }
    ix->holders[number].lost_pairs = 0;
    if (!ix->holders[number].pairs.count)
        Py_RETURN_NONE;
    int failed = start_holder(ix, id);
    retire_holder(ix, number);
    sweep(ix, failed ? UINT64_MAX : SWEPT_AT_ONCE);
    if (failed) /* now there is a free number: the one that was swept */
        start_holder(ix, id);
    Py_RETURN_NONE;
}

static PyObject *index_remove_holder(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_holder(ix, given, &number) < 0)
        return NULL;
    free_id(ix, ix->holders[number].id);
    retire_holder(ix, number);
    sweep(ix, SWEPT_AT_ONCE);
    Py_RETURN_NONE;
}

static PyObject *index_sweep(BlockIndex *ix, PyObject *given) {
    long most;
    if (as_number(given, 0, LONG_MAX, &most, "max_pairs") < 0)
        return NULL;
    sweep(ix, (uint64_t)most);
    return as_int(ix->retired_pairs);
}

/* ---- Storing and removing ---- */

static PyObject *index_store(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t number, tier;
    uint64_t namespace, parent, parent_hash = 0;
    long block_size;
    if (check_signature(n_args, 7, 8,
                        "(holder, namespace, parent_engine_hash, engine_hashes, token_ids, block_size, tier, extra=None)") ||
        read_storing_holder(ix, args[0], args[6], &number, &tier) < 0 || read_int64(args[1], &namespace, "namespace") < 0 ||
        (args[2] != Py_None && read_engine_hash(args[2], &parent_hash) < 0) ||
        as_number(args[5], 1, MAX_BLOCK_TOKENS, &block_size, "block_size") < 0)
        return NULL;
    PyObject *extra = n_args == 8 && args[7] != Py_None ? args[7] : NULL, *result = NULL;
    values keys, blocks;
    tokens ids;
    blocks.at = NULL;
    if (open_hashes(args[3], &keys) < 0)
        return NULL;
    if (open_tokens(args[4], &ids) < 0) {
        close_values(&keys);
        return NULL;
    }
    if (ids.n % (size_t)block_size || ids.n / (size_t)block_size != keys.n) {
        PyErr_SetString(PyExc_ValueError, "token_ids must fill exactly one block for each engine hash");
        goto done;
    }
    if (check_extra(extra, keys.n) < 0 || make_values(&blocks, keys.n) < 0)
        goto done;
    parent = namespace;
    if (args[2] != Py_None) {
        pair *known = find_pair(ix, number, engine_key(ix, parent_hash));
        if (!known) {
            result = PyLong_FromLong(ix->holders[number].lost_pairs ? EVICTED_PARENT : UNKNOWN_PARENT);
            goto done;
        }
        refresh_pair(ix, known);
        parent = hash_of_block(ix, known->block);
    }
    hash_blocks(namespace, parent, ids.at, 4 * (size_t)block_size, extra, keys.n, (uint8_t *)blocks.at);
    for (size_t i = 0; i < keys.n; i++) {
        keys.at[i] = engine_key(ix, keys.at[i]);
        blocks.at[i] = block_key(ix, blocks.at[i]);
    }
    result = as_int(store_pairs(ix, number, keys.at, blocks.at, keys.n, tier));
done:
    close_tokens(&ids);
    close_values(&keys);
    close_values(&blocks);
    return result;
}

static PyObject *index_store_known(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t number, tier;
    values keys;
    if (check_signature(n_args, 3, 3, "(holder, engine_hashes, tier)") < 0 ||
        read_storing_holder(ix, args[0], args[2], &number, &tier) < 0 || open_hashes(args[1], &keys) < 0)
        return NULL;
    for (size_t i = 0; i < keys.n; i++)
        keys.at[i] = engine_key(ix, keys.at[i]);
    uint64_t stored = store_known_pairs(ix, number, keys.at, keys.n, tier);
    close_values(&keys);
    return as_int(stored);
}

static PyObject *index_store_hashes(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t number, tier;
    values blocks, keys;
    if (check_signature(n_args, 3, 4, "(holder, hashes, tier, engine_hashes=None)") < 0 ||
        read_storing_holder(ix, args[0], args[2], &number, &tier) < 0 || open_hashes(args[1], &blocks) < 0)
        return NULL;
    int has_engine_hashes = n_args == 4 && args[3] != Py_None;
    if (has_engine_hashes ? open_hashes(args[3], &keys) : make_values(&keys, blocks.n)) {
        close_values(&blocks);
        return NULL;
    }
    PyObject *result = NULL;
    if (keys.n != blocks.n) {
        PyErr_SetString(PyExc_ValueError, "there must be one engine hash for each hash");
    } else {
        for (size_t i = 0; i < keys.n; i++) {
            keys.at[i] = has_engine_hashes ? engine_key(ix, keys.at[i]) : own_key(ix, blocks.at[i]);
            blocks.at[i] = block_key(ix, blocks.at[i]);
        }
        result = as_int(store_pairs(ix, number, keys.at, blocks.at, keys.n, tier));
    }
    close_values(&keys);
    close_values(&blocks);
    return result;
}

static PyObject *index_touch_prompt(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    lru_touch t = {0};
    if (check_signature(n_args, 3, 3, "(holder, hashes, stamp)") < 0 || index_touch(ix, args, &t) < 0)
        return NULL;
    Py_XDECREF(t.uses);
    return t.new_hashes;
}

static PyObject *remove_by(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args, int by_engine_hash) {
    uint32_t number, tier;
    values keys;
    if (check_signature(n_args, 3, 3, "(holder, hashes, tier)") < 0 ||
        read_holder_and_tier(ix, args[0], args[2], &number, &tier) < 0 || open_hashes(args[1], &keys) < 0)
        return NULL;
    uint64_t n;
    if (ix->holders[number].lru) {
        n = release_hashes(ix, number, (const uint8_t *)keys.at, by_engine_hash ? 0 : keys.n);
    } else {
        for (size_t i = 0; i < keys.n; i++)
            keys.at[i] = by_engine_hash ? engine_key(ix, keys.at[i]) : own_key(ix, keys.at[i]);
        n = remove_pairs(ix, number, keys.at, keys.n, tier);
    }
    close_values(&keys);
    return as_int(n);
}

static PyObject *index_remove(BlockIndex *ix, PyObject *const *args, Py_ssize_t n) { return remove_by(ix, args, n, 1); }

static PyObject *index_remove_hashes(BlockIndex *ix, PyObject *const *args, Py_ssize_t n) { return remove_by(ix, args, n, 0); }

/* ---- Reading ---- */

static PyObject *index_match_hashes(BlockIndex *ix, PyObject *given) {
    values listed;
    Py_buffer view;
    const uint8_t *hashes;
    Py_ssize_t n;
    int is_sequence = PyList_CheckExact(given) || PyTuple_CheckExact(given);
    if (is_sequence) {
        if (open_hashes(given, &listed) < 0)
            return NULL;
        hashes = (const uint8_t *)listed.at;
        n = (Py_ssize_t)listed.n;
    } else {
        if ((n = open_integers(given, &view, 8, 8, "hashes")) < 0)
            return NULL;
        hashes = view.buf;
    }
    PyObject *rows = index_match_rows(ix, hashes, (size_t)n);
    if (is_sequence)
        close_values(&listed);
    else
        PyBuffer_Release(&view);
    return rows;
}

static PyObject *index_block_hash(BlockIndex *ix, PyObject *const *args, Py_ssize_t n_args) {
    uint32_t number;
    uint64_t hash;
    if (check_signature(n_args, 2, 2, "(holder, engine_hash)") < 0 || read_holder(ix, args[0], &number) < 0 ||
        read_engine_hash(args[1], &hash) < 0)
        return NULL;
    const pair *known = find_pair(ix, number, engine_key(ix, hash));
    if (!known)
        Py_RETURN_NONE;
    return as_int(hash_of_block(ix, known->block));
}

static int add_holding(PyObject *list, uint64_t hash, uint32_t gpu, uint32_t cpu, uint32_t disk, uint32_t remote) {
    PyObject *row = Py_BuildValue("KIIII", (unsigned long long)hash, gpu, cpu, disk, remote);
    int failed = !row || PyList_Append(list, row) < 0;
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

/* The blocks of its recency list, except those that the budget refused. */
static PyObject *holdings_of_lru(BlockIndex *ix, uint32_t number) {
    PyObject *list = PyList_New(0), *hashes = list ? recency_hashes(ix->holders[number].lru) : NULL;
    for (Py_ssize_t at = 0; hashes && list && at < PyBytes_GET_SIZE(hashes); at += 8) {
        uint64_t hash = read64((const uint8_t *)PyBytes_AS_STRING(hashes) + at);
        const slot *known = find_slot(&ix->blocks, block_key(ix, hash));
        if (known && tiers_of(ix, known->value, number) && add_holding(list, hash, 1, 0, 0, 0) < 0)
            Py_CLEAR(list);
    }
    if (!hashes)
        Py_CLEAR(list);
    Py_XDECREF(hashes);
    return list;
}

static PyObject *holdings_of_pairs(const BlockIndex *ix, uint32_t number) {
    const table *t = &ix->holders[number].pairs;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < t->n_pages; i++)
        for (uint32_t k = 0; list && k < t->pages[i]->n; k++) {
            const pair *p = (pair *)(void *)entry_at(t->pages[i], k, PAIR);
            if (add_holding(list, hash_of_block(ix, p->block), stores_of(p, TIER_GPU), stores_of(p, TIER_CPU),
                            stores_of(p, TIER_DISK), stores_of(p, TIER_REMOTE)) < 0)
                Py_CLEAR(list);
        }
    return list;
}

static PyObject *index_holdings(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    if (read_holder(ix, given, &number) < 0)
        return NULL;
    int collects = PyGC_Disable(); /* a finalizer might change the holder while it is read */
    PyObject *list = ix->holders[number].lru ? holdings_of_lru(ix, number) : holdings_of_pairs(ix, number);
    if (collects)
        PyGC_Enable();
    return list;
}

static PyObject *index_pair_count(BlockIndex *ix, PyObject *given) {
    uint32_t number;
    return read_holder(ix, given, &number) < 0 ? NULL : as_int(count_of(&ix->holders[number]));
}

static PyObject *index_stats(BlockIndex *ix, PyObject *unused) {
    uint64_t in_lru = 0;
    (void)unused;
    for (uint32_t i = 0; i < ix->n_holders; i++)
        if (ix->holders[i].lru && ix->holders[i].state == HOLDER_LIVE)
            in_lru += count_of(&ix->holders[i]);
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"budget_bytes", ix->budget_bytes},
        {"bytes", ix->table_bytes + ix->set_bytes},
        {"charged_bytes", charged_bytes(ix)},
        {"pairs", ix->pairs + in_lru},
        {"blocks", ix->blocks.count},
        {"sets", ix->live_sets},
        {"aliases", ix->aliases.count},
        {"unswept_pairs", ix->retired_pairs},
        {"evicted", ix->evicted},
        {"refused", ix->refused},
        {"unknown_removes", ix->unknown_removes},
        {"unresolved", ix->unresolved},
        {"saturated", ix->saturated},
        {"conflicts", ix->conflicts},
    };
    PyObject *stats = PyDict_New();
    for (size_t i = 0; stats && i < sizeof(rows) / sizeof(*rows); i++) {
        PyObject *value = as_int(rows[i].value);
        if (!value || PyDict_SetItemString(stats, rows[i].name, value) < 0)
            Py_CLEAR(stats);
        Py_XDECREF(value);
    }
    return stats;
}

/* ---- Registration ---- */

static PyMethodDef index_methods[] = {
    {"add_holder", FAST(index_add_holder), "Return the id of a new holder that has nothing yet."},
    {"remove_holder", (PyCFunction)index_remove_holder, METH_O, "Forget a holder; its id may be given to another one."},
    {"clear", (PyCFunction)index_clear, METH_O, "Forget everything that a holder has."},
    {"store", FAST(index_store), "Store blocks as KV events report them; return their number, or why their parent is missing."},
    {"store_known", FAST(index_store_known), "Store engine hashes, which the holder has stored before, in another tier."},
    {"store_hashes", FAST(index_store_hashes), "Store blocks by our own hashes."},
    {"touch", FAST(index_touch_prompt), "Touch a prompt in a holder's recency list; return the hashes that are new there."},
    {"remove", FAST(index_remove), "Take back one store of each engine hash; return how many of them were known."},
    {"remove_hashes", FAST(index_remove_hashes), "Take back one store_hashes of each hash; return how many were known."},
    {"match", (PyCFunction)index_match_hashes, METH_O, "Return (holder, depth by tier…) for every holder of the first block."},
    {"block_hash", FAST(index_block_hash), "Return our hash for an engine hash of the holder, or None."},
    {"holdings", (PyCFunction)index_holdings, METH_O, "Return (our hash, stores by tier…) for every pair of the holder."},
    {"pair_count", (PyCFunction)index_pair_count, METH_O, "Return how many pairs the holder has."},
    {"sweep", (PyCFunction)index_sweep, METH_O, "Sweep up to this number of retired pairs; return how many are left."},
    {"stats", (PyCFunction)index_stats, METH_NOARGS, "Return sizes and counters."},
    NO_METHOD};

PyTypeObject BlockIndexType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = MODULE "BlockIndex",
    .tp_doc = "Which holder has which block, within a budget of bytes.",
    .tp_basicsize = sizeof(BlockIndex),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = index_new,
    .tp_dealloc = (destructor)index_dealloc,
    .tp_methods = index_methods,
};

int add_index(PyObject *module) { return add_type(module, "BlockIndex", &BlockIndexType); }
