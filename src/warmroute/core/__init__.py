"""The core: everything that decides. It takes events and a clock, and returns commands. No I/O.

Edges drive it: edge/ over sockets, edge/envoy over Envoy's connections, lab/request_flow.py in virtual time. All of
them go through one door, `commands = brain.handle(event, now_s)`. Events and commands are the values of messages.py.

The way of a request:

    event        first function        what happens                                                         command
    Charge       Calls.charge          a tenant with limits pays for one request (rate_limits.py)           Reject
    Arrive       Calls.arrive          the tenant pays for the tokens, and admission is asked:
                   Admitter.place        the router decides; no room: queue or reject                       Reject
                     Router.decide       candidates, what they have cached, the policy's choice
                 Calls.admit           there is room: the first decision is remembered
                   Router.open_ticket    the ticket opens in the accounting of the node                     Send
    AnswerNow    Calls.answer_now      Envoy waits no longer: the best node gets the call, or it is shed    Send, Reject
    Started      Calls.started         the response has begun: this try answers, every other one closes
    FirstToken   Calls.first_token     the node's speed is learned; implies Started
    Ended        Calls.ended           usage settles the charge, the ticket closes, the call is done; implies both
    Prefilled    Calls.prefilled       the decode node gets the request                                     Send
    Failed       Calls.failed          failover.py finds the next node; there is none: the call ends        Send, Reject
                 Calls.broke           the response had begun: the call ends as broken
    Withdrawn    Calls.gone            the try has left its node: what was planned for the call follows     Send, Reject
    Cancel       Calls.cancel_…        the client left, or the edge stops: every ticket closes
    Due          Brain._due            time has passed: the queue, deadlines, calls that hang               all four

Withdraw asks the edge to give a try up: its node is down, was removed or hangs, its pair has failed, or another node
may meet the deadline.
Cut asks it to end a response that has begun: its route ends requests at their deadline.

What follows from an event for other calls comes after it, in the same `handle`: first calls leave nodes that went down,
then come deadlines and pairs, then hedges, and at the end queued calls get the room that became free (brain.py). While
one call waits for the answer to its Withdraw, none of this goes on. Nothing is re-entered.

The edge is never called back. Within the core, cluster/ sets `Calls.on_freed` and `Router.on_dispatch` to hear when it
should publish, and `Admitter.turns`; `Fleet` has observers. At its start the service sets `demand_meter`, `hot` and
`may_serve` of the router.

Where what is:

    one request    brain.py  calls.py  messages.py  failover.py  overdue.py  rejections.py  failed_tries.py
    waiting        admission.py  queue.py  queue_order.py  rate_limits.py
    choosing       router.py  routing_context.py  decision.py  decision_record.py  policy.py  policies/  pairs.py
                   island_choice.py  output_length.py
    nodes          fleet.py  group.py  node.py  tickets.py  health.py  speeds.py  islands.py  adapters.py
                   context_windows.py  node_reports.py  reported_values.py  demand.py  prefill_work.py
    caches         cache_view.py  node_cache.py  kv_store.py  prediction.py  reuse.py  hot_prefixes.py
                   tenant_isolation.py
    for others     tables.py (what edges know of the fleet)  last_decisions.py  traffic.py  trace_row.py
    processes      cluster/ (several router processes in front of one fleet)

Which node holds which block is a compiled index (`_kernel/index.h`): a prompt is a chain of block hashes in a
namespace, and a holder is a number for one cache, for example one data-parallel rank of a node.
"""
