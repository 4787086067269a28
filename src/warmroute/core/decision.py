"""A decision: candidates' prices, fallbacks, deadlines, the reason in words, what is kept of it; what a policy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from warmroute._kernel import Prices
from warmroute.core.decision_record import DecisionRecord, Price
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.rejections import DeadlineUnreachable
from warmroute.core.routing_context import Query

if TYPE_CHECKING:
    from warmroute.core.pairs import Pair


# A decision: the chosen node, the fallbacks in order, and the reason.


class Decision:
    """The price and the order of the fallbacks are computed when first needed."""

    node: Node
    policy: str
    reason: str
    order: Callable[[], Sequence[Node]] | None
    """Returns all nodes, the best first; None: they are ordered by price."""
    prices: Prices | None
    """One for each of the `candidates`; None if the policy has no prices."""
    candidates: tuple[Node, ...]
    index: int
    """The chosen node's index in `candidates`; -1 if it was not chosen by price."""
    cache_counts: bool
    """Whether cached prefixes lowered the prices."""
    query: Query | None = None
    """What the decision is based on."""
    pair: Pair | None
    """Set if another node prefills the prompt, and `node` decodes."""
    _price: Price | None = None

    def __init__(
        self,
        node: Node,
        policy: str,
        reason: str,
        order: Callable[[], Sequence[Node]] | None = None,
        prices: Prices | None = None,
        candidates: tuple[Node, ...] = (),
        index: int = -1,
        cache_counts: bool = True,
        pair: Pair | None = None,
    ) -> None:
        self.node = node
        self.policy = policy
        self.reason = reason
        self.order = order
        self.prices = prices
        self.candidates = candidates
        self.index = index
        self.cache_counts = cache_counts
        self.pair = pair

    @property
    def price(self) -> Price | None:
        """The chosen node's price; None if it was not chosen by price."""
        if self._price is None and self.index >= 0:
            if self.pair is not None and self.pair.price is not None:
                return self.pair.price
            assert self.prices is not None
            self._price = tuple.__new__(Price, self.prices[self.index])
        return self._price

    @property
    def entry_node(self) -> Node:
        """The node that gets the request first: its queue is the one to wait for."""
        return self.node if self.pair is None else self.pair.prefill_node

    @property
    def is_full(self) -> bool:
        """Whether a node that the request would be sent to has as many requests as it may have."""
        if not self.is_limited:
            return False
        request = self.query.request if self.query is not None else None
        return self.node.is_full_for(request) or self.entry_node.is_full_for(request)

    @property
    def is_limited(self) -> bool:
        """Whether a node that the request would be sent to has a limit of its requests."""
        return self.node.is_limited or (self.pair is not None and self.pair.prefill_node.is_limited)

    def fallbacks(self) -> list[Node]:
        """Return the other candidates, the best first."""
        order = self.order() if self.order is not None else self._by_price()
        return [node for node in order if node is not self.node]

    def _by_price(self) -> list[Node]:
        prices, nodes = self.prices, self.candidates
        assert prices is not None
        return [nodes[index] for index in sorted(range(len(nodes)), key=prices.__getitem__)]

    def with_fallbacks(self, nodes: Sequence[Node]) -> Decision:
        """Return the same decision with `nodes` as further fallbacks, behind its own."""

        def order() -> list[Node]:
            ranked = self.fallbacks()
            return [*ranked, *(node for node in nodes if node not in ranked)]

        return Decision(
            self.node, self.policy, self.reason, order, self.prices, self.candidates, self.index, self.cache_counts,
            pair=self.pair,
        )  # fmt: skip

    def record(self) -> DecisionRecord:
        """Return what the journal keeps."""
        node, query = self.node, self.query
        candidates, reason = self.candidates, self.reason
        tokens, expected_cached = 0, 0.0
        if query is not None:
            if not candidates:
                candidates = query.candidates.nodes
            elif query.conversation is not None and reason == "cheapest" and len(candidates) < len(query.candidates):
                reason = f"stays on {node.island}, its conversation's island"
            lookup = query.lookup
            if lookup is not None:
                tokens = lookup.token_count if lookup.batch is None else lookup.batch.total_tokens
                if self.index < 0 and (hit := query.hits().get(node.name)) is not None:
                    expected_cached = hit.expected
        record = DecisionRecord(
            node, self.policy, reason, tokens, expected_cached, self.index, (self.prices, candidates), len(candidates),
            (node if self.pair is None else self.pair.prefill_node).speed.ms_per_token, self.cache_counts,
            pair=self.pair,
        )  # fmt: skip
        if tokens and query is not None and query.cache_view.stores and query.lookup is not None:
            name = self.entry_node.name
            found = query.cache_view.from_store(query.group.model, query.lookup, name, query.hits().get(name))
            record.store, record.store_tokens = found
        return record


# Whether a request can meet its deadlines on the node chosen for it, and what ends when one has passed. No I/O.
#
#     first token      price.own                                  ≤ time left until it is due        [ms]
#     whole response   price.own + output · token_ms of the node  ≤ time left until it is due        [ms]
#
# For a queued request, the work of the requests ahead of it counts, too. On a node without a measured speed the
# estimate
# does not count. On an idle node it counts only with `on_deadline = "end"`: any other request may try, which corrects a
# wrong estimate. With `end`, a node that got no request for TRIAL_S may be tried as well, unless the estimate is more
# than HOPELESS times the time left: no estimate is so wrong.

TRIAL_S: Final = 10.0
HOPELESS: Final = 20.0


def check_deadlines(
    request: RoutingRequest, decision: Decision, now_s: float, margin_s: float = 0.0, queue_ms: float = 0.0
) -> DeadlineUnreachable | None:
    """Return the error if the request would miss a deadline, else None.

    `margin_s`: how much earlier than the deadline it has to be. `queue_ms`: work of the queued requests ahead of it.
    """
    price, node = decision.price, decision.node
    expected_ms = decode_ms = 0.0
    counts = bool(node.load) or (request.ends_late and not _may_try(decision, now_s))
    if price is not None and node.speed.answers and counts:
        expected_ms = price.own + queue_ms
        if request.total_deadline_s:
            decode_ms = _decode_ms(decision)
    if request.deadline_s:
        left_ms = (request.deadline_s - now_s - margin_s) * 1000.0
        if expected_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(True, expected_ms, left_ms)
    if request.total_deadline_s:
        left_ms = (request.total_deadline_s - now_s - margin_s) * 1000.0
        if expected_ms + decode_ms > left_ms or left_ms <= 0.0:
            return DeadlineUnreachable(False, expected_ms + decode_ms, left_ms)
    return None


def missed(request: RoutingRequest, now_s: float) -> DeadlineUnreachable:
    """Return the error of a request that has no node when its deadline passes."""
    first_token = 0.0 < request.deadline_s <= (request.total_deadline_s or inf)
    due_s = request.deadline_s if first_token else request.total_deadline_s
    return DeadlineUnreachable(first_token, 0.0, (due_s - now_s) * 1000.0)


def _may_try(decision: Decision, now_s: float) -> bool:
    """Return whether an idle node may be tried although its estimate is too long."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or now_s - node.last_ticket_s < TRIAL_S:
        return False
    return price.own <= HOPELESS * max_ttft_ms(query.request, decision, now_s)


def max_ttft_ms(request: RoutingRequest, decision: Decision, now_s: float) -> float:
    """Return the longest time to first token that meets the request's deadlines on the decision's node."""
    left_s = request.deadline_s - now_s if request.deadline_s else inf
    if request.total_deadline_s:
        left_s = min(left_s, request.total_deadline_s - now_s - _decode_ms(decision) / 1000.0)
    return left_s * 1000.0


def _decode_ms(decision: Decision) -> float:
    """Return how long decoding the expected output takes on the node; 0.0 before the first measurement."""
    price, node, query = decision.price, decision.node, decision.query
    if price is None or query is None or not query.group.decode_speed.answers:
        return 0.0
    return price.output * query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
