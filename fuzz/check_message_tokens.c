/* Checks the tokens of messages: the order of use, the chains, and the sums. */
#include "checks.h"
#include "message_tokens.h"

void check_message_tokens(PyObject *messages) {
    const MessageTokens *t = (MessageTokens *)messages;
    uint64_t units = 0, in_chains = 0, bytes = malloc_bytes(t->n_chains * sizeof *t->chains);
    const unit *newer = NULL;
    for (const unit *u = t->newest; u; u = u->older) {
        CHECK(u->newer == newer);
        newer = u;
        bytes += malloc_bytes(sizeof(unit) + (u->n_tokens == NOT_CACHED ? 0 : TOKEN_BYTES * (uint64_t)u->n_tokens));
        units++;
    }
    CHECK(t->oldest == newer && units == t->n_units && bytes == t->bytes);
    CHECK(t->n_chains && !(t->n_chains & (t->n_chains - 1)));
    for (uint64_t i = 0; i < t->n_chains; i++)
        for (const unit *u = t->chains[i]; u; u = u->next) {
            CHECK((u->key.low & (t->n_chains - 1)) == i);
            CHECK(++in_chains <= units);
        }
    CHECK(in_chains == units);
}
