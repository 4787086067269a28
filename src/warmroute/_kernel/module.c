/* The module `warmroute._kernel._native`: one extension, built from the parts that kernel.h lists.
 *
 * The module is initialised in two phases, so that it can be removed from sys.modules and imported again: the parts then
 * register the same types, and keep the tables and random keys that existing objects depend on.
 */
#include "kernel.h"

static int add_constants(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } integers[] = {
#define ROW(name, value) {#name, value},
        SHARED_INTEGERS(ROW)
    };
    static const struct {
        const char *name;
        double value;
    } doubles[] = {SHARED_DOUBLES(ROW)};
#undef ROW
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (PyModule_AddIntConstant(module, integers[i].name, integers[i].value) < 0)
            return -1;
    for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++) {
        PyObject *value = PyFloat_FromDouble(doubles[i].value);
        int failed = !value || PyModule_AddObjectRef(module, doubles[i].name, value) < 0;
        Py_XDECREF(value);
        if (failed)
            return -1;
    }
    return 0;
}

static int execute(PyObject *module) {
    static int (*const parts[])(PyObject *) = {
        add_constants, add_accounting, add_block_hashes, add_body_buffer, add_body_scan, add_capture_ids,
        add_digests, add_exit_deadline, add_http_heads, add_http_chunks, add_first_token, add_first_token_order, add_usage,
        add_recency, add_index, add_hits, add_prices, add_routing_hashes, add_message_tokens, add_peer_load, add_traffic,
        add_socket_poller, add_response_tail,
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i](module) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The compiled part of Warmroute.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
