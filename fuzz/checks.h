/* Checks of the kernel's internal structures: every link, count and byte is as the others say. */
#ifndef WARMROUTE_FUZZ_CHECKS_H
#define WARMROUTE_FUZZ_CHECKS_H

#include "harness.h"

void check_recency(PyObject *recency);
void check_index(PyObject *index);
void check_message_tokens(PyObject *messages);

#endif
