/* Arguments of the kernel's functions: numbers within limits, and what is raised where an argument is wrong. kernel.h has the
 * checks themselves. */
#include "kernel.h"

int as_number(PyObject *given, long least, long most, long *to, const char *what) {
    *to = PyLong_AsLong(given);
    if (*to == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
    } else if (*to >= least && *to <= most) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be %ld to %ld", what, least, most);
    return -1;
}

int wrong_count(Py_ssize_t given, Py_ssize_t expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, not %zd", expected, given);
    return -1;
}

int wrong_signature(const char *signature) {
    PyErr_Format(PyExc_TypeError, "expected %s", signature);
    return -1;
}

int wrong_type(PyTypeObject *expected) {
    PyErr_Format(PyExc_TypeError, "expected a %s", expected->tp_name);
    return -1;
}

int wrong_tuple(Py_ssize_t length) {
    PyErr_Format(PyExc_TypeError, "expected a tuple of %zd", length);
    return -1;
}
