/* Ends the process some time after a signal, whatever it is doing then.
 *
 * Python handles a signal only between two of its own instructions: a C call that does not return keeps the handler from
 * running. So the C handler of the signal starts the system's alarm clock before it calls Python's, and the alarm ends the
 * process. A process that stops in time never sees the alarm.
 */
#include "kernel.h"

#include <signal.h>
#include <unistd.h>

#define MAX_EXIT_DEADLINE_S 1000000

static volatile sig_atomic_t deadline_s;
static volatile sig_atomic_t is_armed;
static struct sigaction python_handlers[NSIG];

static void end_process(int number) {
    static const char message[] = "warmroute: did not stop in time after a signal; ending the process\n";
    (void)number;
    if (write(STDERR_FILENO, message, sizeof message - 1) < 0) {
        /* nothing is left to do about it */
    }
    _exit(1);
}

static void start_alarm(int number) {
    if (!is_armed && deadline_s) {
        is_armed = 1;
        alarm((unsigned)deadline_s);
    }
    if (python_handlers[number].sa_handler && python_handlers[number].sa_handler != SIG_IGN)
        python_handlers[number].sa_handler(number);
}

static PyObject *set_exit_deadline(PyObject *self, PyObject *seconds) {
    long number;
    (void)self;
    if (as_number(seconds, 0, MAX_EXIT_DEADLINE_S, &number, "seconds") < 0)
        return NULL;
    deadline_s = (sig_atomic_t)number;
    Py_RETURN_NONE;
}

static PyObject *exit_after_signal(PyObject *self, PyObject *signal_number) {
    long number;
    (void)self;
    if (as_number(signal_number, 1, NSIG - 1, &number, "signal") < 0)
        return NULL;
    struct sigaction ending = {.sa_handler = end_process}, before, chained;
    if (sigaction((int)number, NULL, &before) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (before.sa_handler != start_alarm) {
        python_handlers[number] = before;
        chained = before;
        chained.sa_flags &= ~SA_SIGINFO;
        chained.sa_handler = start_alarm;
        if (before.sa_flags & SA_SIGINFO || sigaction(SIGALRM, &ending, NULL) < 0 ||
            sigaction((int)number, &chained, NULL) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_exit_deadline", set_exit_deadline, METH_O, "Set the time between a signal and the end of the process; 0: never."},
    {"exit_after_signal", exit_after_signal, METH_O, "Start the exit deadline when this signal arrives."},
    NO_METHOD};

int add_exit_deadline(PyObject *module) { return PyModule_AddFunctions(module, functions); }
