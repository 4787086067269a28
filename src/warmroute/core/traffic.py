"""Counters of requests, and what routing was worth, by model, route and tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

from warmroute._kernel import TIME_BOUNDS_MS, RouteTraffic, TokenTraffic, TrafficRecorder
from warmroute.core.hot_prefixes import PopularPrefixes
from warmroute.core.messages import Usage
from warmroute.core.node import Node, Ticket
from warmroute.core.tickets import PromptTicket

if TYPE_CHECKING:
    from warmroute.core.calls import Call

# What routing was worth: tokens, times and saved prefill time of complete responses.
#
# The responses are counted by model and route, by model and tenant, and by model and node: not by all of them at once,
# which would be a number of counters that no operator can use. _kernel/traffic.c has the counters.
#
# Cached tokens save the time that their node would have needed to prefill them, at the speed of long prompts. A prefill
# takes at least one step of the engine, however few tokens are left:
#
#     cost(new, cached) = max(step_ms, long_ms_per_token · work(new, cached))                              [ms]
#     saved(cached)     = cost(prompt, 0) − cost(prompt − cached, cached)                                  [ms]
#
# `saved_ms` compares with a cold fleet: the cached tokens are those that the node reported, or the predicted ones if it
# reported none. `round_robin_saved_ms` estimates what round robin would have saved: the mean over all candidates of
# what the prompt's prefix on each of them would have saved. It assumes the caches that this router's choices have
# filled. If the router chose without looking up caches (another policy, a short prompt), both are equal. They exist in
# GPU milliseconds, too: multiplied by the number of GPUs of the node.

MAX_ROUTES: Final = 256
"""Pairs of model and route that are counted apart. Further ones count as OTHER."""
MAX_TENANTS: Final = 2048
"""Pairs of model and tenant."""
MAX_NODES: Final = 4096
"""Pairs of model and node."""
MAX_RECORDERS: Final = 16_384
"""Combinations of model, route, tenant and node that are remembered. Finding the counters again takes microseconds."""
OTHER: Final = ("(other)", "")
_UNREPORTED: Final[Usage] = (None, None, None)

TrafficCounters = TypeVar("TrafficCounters", bound=TokenTraffic)


class Traffic:
    def __init__(self) -> None:
        self.by_route: dict[tuple[str, str], RouteTraffic] = {}
        """By model and route. The route is empty for requests that match none."""
        self.by_tenant: dict[tuple[str, str], TokenTraffic] = {}
        """By model and tenant. The tenant is empty if no keys are configured."""
        self.by_node: dict[tuple[str, str], TokenTraffic] = {}
        """By model and node. Nodes that left the fleet are forgotten."""
        self.prefixes = PopularPrefixes()
        self._recorders: dict[tuple[str, str, str, str], TrafficRecorder] = {}
        """By model, route, tenant and node."""

    def record(self, call: Call, ticket: Ticket, now_s: float) -> None:
        """Count a complete response with a status below 400. `ticket`: that of the try that answered."""
        request, query = call.request, call.decision.query if call.decision is not None else None
        model, node = query.group.model if query is not None else OTHER[0], ticket.node
        recorder = self._recorders.get((model, request.route, request.tenant, node.name))
        if recorder is None:
            recorder = self._recorder(model, request.route, request.tenant, node)
        predicted = None
        if isinstance(ticket, PromptTicket):
            predicted = ticket.cached
            if now_s >= self.prefixes.next_sample_s:
                self.prefixes.sample(
                    (model, request.route), request.tenant, ticket.prediction, call.lookup, now_s
                )  # fmt: skip
            prediction = ticket.prediction
            if prediction is not None and prediction.sampled_blocks:
                recorder.route.sampled_blocks += prediction.sampled_blocks
                recorder.route.known_blocks += prediction.known_blocks
        prompt, cached, output = call.usage or _UNREPORTED
        recorder.record(
            ticket, request.arrived_s, call.admitted_s - call.entered_s, now_s, request.streams, prompt, cached,
            output, predicted, query.known_hits if query is not None else None,
            query.candidates.by_name if query is not None else None,
        )  # fmt: skip

    def requests(self, key: tuple[str, str]) -> int:
        """Return the number of complete requests of a model and route."""
        traffic = self.by_route.get(key)
        return traffic.requests if traffic is not None else 0

    @property
    def total(self) -> RouteTraffic:
        """The sum over all routes. A thread may ask for it."""
        routes = list(self.by_route.values())
        if len(routes) == 1:
            return routes[0]
        total = RouteTraffic()
        for route in routes:
            total.add(route)
        return total

    def keep_nodes(self, names: Container[str]) -> None:
        """Forget the nodes that are not among these. Call it now and then: a scaled fleet has new names every day."""
        gone = [key for key in self.by_node if key[1] not in names and key != OTHER]
        for key in gone:
            del self.by_node[key]
        self._recorders.clear()  # also because a node's number of GPUs may have changed

    def _recorder(self, model: str, route: str, tenant: str, node: Node) -> TrafficRecorder:
        if len(self._recorders) >= MAX_RECORDERS:
            self._recorders.clear()
        recorder = self._recorders[model, route, tenant, node.name] = TrafficRecorder(
            _counters(self.by_route, (model, route), MAX_ROUTES, RouteTraffic),
            _counters(self.by_tenant, (model, tenant), MAX_TENANTS, TokenTraffic),
            _counters(self.by_node, (model, node.name), MAX_NODES, TokenTraffic),
            node.config.gpus,
        )
        return recorder


def _counters(
    known: dict[tuple[str, str], TrafficCounters], key: tuple[str, str], most: int, create: type[TrafficCounters]
) -> TrafficCounters:
    found = known.get(key)
    if found is None:
        found = known.setdefault(key if len(known) < most else OTHER, create())
    return found


def time_percentile(counts: Sequence[int], fraction: float) -> float | None:
    """Return a percentile in milliseconds, interpolated within its bucket; None without any response."""
    wanted = fraction * sum(counts)
    if not wanted:
        return None
    seen = 0.0
    for count, (low, high) in zip(counts, pairwise((0.0, *TIME_BOUNDS_MS, TIME_BOUNDS_MS[-1])), strict=True):
        if count and seen + count >= wanted:
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return TIME_BOUNDS_MS[-1]


# Counters of the router. app/metrics/page.py exports them.

PROMPT_READINGS: Final = ("exact", "inexact", "text", "none")
"""How the router read a prompt: as the engine's tokens; as tokens of which the engine may not have all; as text
because there is no tokenizer, or it cannot render the request; or not at all."""

TRACE_DROPS: Final = ("queue_full", "export_failed", "shutdown")


class Counters:
    __slots__ = (
        "capture_dropped",
        "capture_written",
        "cut_off",
        "disconnects",
        "errors",
        "hedges",
        "hedges_won",
        "interrupted",
        "journal_dropped",
        "journal_written",
        "prompts",
        "prompts_in_threads",
        "prompts_not_tokenized",
        "protocol_errors",
        "rejected",
        "rejected_by_tenant",
        "responses",
        "retries",
        "route_requests",
        "split_requests",
        "stale_connections",
        "traces_dropped",
        "traces_exported",
    )

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        """Complete responses of nodes, by status."""
        self.errors: Counter[tuple[int, str]] = Counter()
        """Error responses of the router itself, by status and code."""
        self.rejected: Counter[tuple[str, int]] = Counter()
        """Requests that admission rejected, by reason and priority. They are in `errors`, too."""
        self.rejected_by_tenant: Counter[tuple[str, int, str]] = Counter()
        """The same requests by tenant, priority and reason."""
        self.route_requests: Counter[str] = Counter()
        """Requests by route."""
        self.interrupted = 0
        """Responses that failed after their first byte."""
        self.disconnects = 0
        """Clients that disconnected before they had their whole response."""
        self.cut_off = 0
        """Requests that Envoy goes on with while the router stops."""
        self.protocol_errors = 0
        """Messages of edges for calls and tries that the core does not know."""
        self.retries = 0
        """Attempts on another node after a failed one."""
        self.split_requests: Counter[str] = Counter()
        """Requests that one node prefilled for another one, by outcome."""
        self.hedges = 0
        """Requests sent to a second node because their first token was overdue."""
        self.hedges_won = 0
        """Of these, the ones that the second node answered."""
        self.stale_connections = 0
        """Requests sent again because the node had closed the kept-alive connection."""
        self.prompts: Counter[tuple[str, str]] = Counter()
        """Prompts by served model and reading (PROMPT_READINGS)."""
        self.prompts_in_threads = 0
        """Prompts that a thread tokenized."""
        self.prompts_not_tokenized = 0
        """Prompts that the router routed by load because too many prompts waited for a thread."""
        self.journal_written = 0
        """Decisions written to the journal file."""
        self.journal_dropped = 0
        """Decisions that could not be written to the journal file."""
        self.capture_written = 0
        """Requests written to captures, once for each capture."""
        self.capture_dropped = 0
        """Requests that could not be written to a capture."""
        self.traces_exported = 0
        """Traces that the collector took."""
        self.traces_dropped: Counter[str] = Counter()
        """Traces that the collector did not get, by reason (TRACE_DROPS)."""
