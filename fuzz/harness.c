/* The embedded Python of the fuzz targets. harness.h says what each function does. */
#include "harness.h"
#include <stdarg.h>
#include <sys/random.h>

PyMODINIT_FUNC PyInit__native(void);

static PyObject *module;

/* The kernel draws its random keys here, so that an input always does the same. The build defines getrandom as this. */
ssize_t fuzz_getrandom(void *buffer, size_t length, unsigned int flags);

ssize_t fuzz_getrandom(void *buffer, size_t length, unsigned int flags) {
    static uint64_t state = 0x9e3779b97f4a7c15ULL;
    (void)flags;
    for (size_t i = 0; i < length; i++) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        ((uint8_t *)buffer)[i] = (uint8_t)(state >> 56);
    }
    return (ssize_t)length;
}

static void start_python(void) {
    PyPreConfig before;
    PyConfig config;
    PyPreConfig_InitPythonConfig(&before);
    before.allocator = PYMEM_ALLOCATOR_MALLOC; /* so that AddressSanitizer sees every object */
    if (PyStatus_Exception(Py_PreInitialize(&before)))
        abort();
    PyConfig_InitPythonConfig(&config);
    config.site_import = 0;
    config.install_signal_handlers = 0;
    PyImport_AppendInittab("_native", PyInit__native);
    PyStatus status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
    module = PyImport_ImportModule("_native");
    CHECK(module);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!module) {
        start_python();
        fuzz_setup();
    }
    fuzz_one(data, size);
    CHECK(!PyErr_Occurred());
    return 0;
}

PyObject *kernel(const char *name) {
    PyObject *found = PyDict_GetItemString(PyModule_GetDict(module), name);
    CHECK(found);
    return found;
}

#define MAX_ARGUMENTS 12

static PyObject *call_with(PyObject *function, unsigned n, va_list list) {
    PyObject *arguments[MAX_ARGUMENTS] = {NULL};
    CHECK(n <= MAX_ARGUMENTS && function);
    for (unsigned i = 0; i < n; i++)
        CHECK((arguments[i] = va_arg(list, PyObject *)));
    PyObject *result = PyObject_Vectorcall(function, arguments, n, NULL);
    for (unsigned i = 0; i < n; i++)
        Py_DECREF(arguments[i]);
    CHECK(!result == !!PyErr_Occurred());
    return result;
}

PyObject *call(PyObject *function, unsigned n, ...) {
    va_list list;
    va_start(list, n);
    PyObject *result = call_with(function, n, list);
    va_end(list);
    return result;
}

static PyObject *call_method_with(PyObject *self, const char *name, unsigned n, va_list list) {
    PyObject *method = PyObject_GetAttrString(self, name);
    PyObject *result = call_with(method, n, list);
    Py_XDECREF(method);
    return result;
}

PyObject *call_method(PyObject *self, const char *name, unsigned n, ...) {
    va_list list;
    va_start(list, n);
    PyObject *result = call_method_with(self, name, n, list);
    va_end(list);
    return result;
}

PyObject *must_call(PyObject *function, unsigned n, ...) {
    va_list list;
    va_start(list, n);
    PyObject *result = call_with(function, n, list);
    va_end(list);
    CHECK(result);
    return result;
}

PyObject *must_call_method(PyObject *self, const char *name, unsigned n, ...) {
    va_list list;
    va_start(list, n);
    PyObject *result = call_method_with(self, name, n, list);
    va_end(list);
    CHECK(result);
    return result;
}

void expect_error(PyObject *type, PyObject *other) {
    CHECK(PyErr_ExceptionMatches(type) || (other && PyErr_ExceptionMatches(other)));
    PyErr_Clear();
}

long attribute(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    CHECK(value);
    long number = PyLong_AsLong(value);
    CHECK(number != -1 || !PyErr_Occurred());
    Py_DECREF(value);
    return number;
}

long long as_integer(PyObject *number) {
    CHECK(number && PyLong_Check(number));
    long long value = PyLong_AsLongLong(number);
    CHECK(value != -1 || !PyErr_Occurred());
    Py_DECREF(number);
    return value;
}
