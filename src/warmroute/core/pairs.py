"""Pairs: one node prefills a prompt, transfers its KV cache to another one, and that one decodes the answer. No I/O.

A pair is a candidate like a node, with a price in the same milliseconds:

    own      wait, prefill, room, distance     on the prefill node, with what it has cached, for one output token
           + transfer                          of the KV tokens that the decode node lacks (core/speeds.py)
           + room, distance, first step        on the decode node
           + contention                        on the decode node
           + risk                              as for a node
    others'  memory, congestion                on both nodes

`_price_of_pair` shows the sum in the terms of a single node's price: it books what it does not name under congestion.

A node that prefills on its own delays the answers that it decodes meanwhile. So the price of a node alone gets one more
term where some nodes have a role:

           + interference = (prefill − TOLERATED_MS)² / STALL_SCALE_MS [ms] · requests of the node

Short prompts delay no answer noticeably: they fit into a step of the batch, or make one short gap. They are not split,
unless the node's queue is long. A long gap is worse than several short ones of the same length together, so the square
counts. All requests of the node are delayed: those that wait there for their own prefill, or for a KV cache, decode by
the time that this prompt is prefilled.

A prefill node without requests may serve the whole request (group.py has that price).

The decode node is chosen a second time when the prompt is prefilled, perhaps seconds later (`decode_node`).

The cheapest of all wins: short or cached prompts stay on the decode node because that is cheaper, and there is no
threshold to set. Only the best few nodes of each side are combined. Where no node of a model has a role, nothing of it
runs.

Both nodes of a pair run the same engine, and the router knows which: engines have different protocols.
A decode node of an engine that cannot prefill there (NEEDS_PARTNER) always gets a prefill node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter
from random import Random
from typing import Final

import msgspec

from warmroute._kernel import FIRST_TOKEN_STEPS, STREAMED_WEIGHT, Prices
from warmroute.core.decision import Decision
from warmroute.core.decision_record import TIE, Price
from warmroute.core.demand import LONG_MS
from warmroute.core.group import ANSWER_LEFT, Candidates, Group, blocking_ms, idle_nodes, is_prefill_node
from warmroute.core.messages import RoutingRequest
from warmroute.core.node import Node
from warmroute.core.policies.price import BEHIND_SHARE, PricePolicy
from warmroute.core.policy import Policy
from warmroute.core.rejections import NoNodeAvailable
from warmroute.core.routing_context import Query
from warmroute.core.speeds import transfer_ms

MAX_PREFILL: Final = 4
"""Prefill nodes that are combined with decode nodes."""
MAX_DECODE: Final = 4
"""Decode nodes by each of two orders: the cheapest ones, and those with the least context."""
MAX_RATIO_TO_CHEAPEST: Final = 1.5
"""Nodes with a price up to this × the lowest one are among the cheapest."""
STALL_SCALE_MS: Final = 200.0
"""An answer that stands still for this long costs as much as a first token that comes later by this time."""
TOLERATED_MS: Final = LONG_MS
"""A gap between two tokens that users do not notice."""
MIN_SAVED_MS: Final = 10.0
"""A request goes to another decode node than its first one if that saves at least this."""
REASON: Final = "cheapest pair"
ALONE: Final = "cheapest alone"
"""The node costs less than any pair."""
WHOLE: Final = "idle prefill node"
"""A prefill node without requests serves the whole request."""


class Pair(msgspec.Struct, eq=False):
    """The part of a decision that is about its prefill node."""

    prefill_node: Node
    transfer_tokens: float
    """KV tokens that the decode node is expected to lack."""
    price: Price | None = None
    """Of the pair: `wait`, `prefill` and `cached` are those of the prefill node, and `distance` includes the transfer.
    None if the pair was not chosen by price."""
    transfer_ms: float = 0.0
    alone_ms: float = 0.0
    """The price of the cheapest node alone."""


class _Part(msgspec.Struct, eq=False, gc=False):
    """A node as one side of a pair, or alone."""

    node: Node
    index: int
    row: Price
    own_ms: float
    """Its part of the request's own time."""
    others_ms: float
    """What its part costs besides."""
    alone_ms: float = 0.0
    contention_ms: float = 0.0
    fastest_ms: float = 0.0
    """Time per token on the fastest decode node."""
    step_ms: float = 0.0
    """Until the batch of the node has its first token."""
    is_short: bool = False
    """Whether the node prefills the prompt soon, and no other answer is delayed noticeably."""


class Pairs:
    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, decision: Decision, query: Query, policy: Policy, has_peers: bool = False) -> Decision:
        """Return the decision for a pair, or for a node alone, whichever costs less. `has_peers`: other processes send
        requests to the same nodes. Raises NoNodeAvailable."""
        if decision.pair is not None:
            return decision
        group = query.group
        prefill_nodes = group.prefill_nodes
        if decision.node.role == "prefill":  # no other node is up
            return decision
        if not query.request.may_split:
            return self._without_partner(decision, query, policy)
        if decision.prices is None or not isinstance(policy, PricePolicy) or query.lookup is None:
            return self._by_load(decision, group, query.request) if decision.node.needs_partner else decision
        never = policy.split == "never" and not decision.node.needs_partner
        if never or query.lookup.batch is not None:  # several prompts, or one that the engine truncates
            return self._without_partner(decision, query, policy)
        engine = decision.node.engine
        trial = next((n for n in group.half_open_prefill if n.needs_trial_request and n.engine == engine), None)
        if trial is not None:
            prefill_nodes = Candidates((trial,))
        elif any(node.no_transfer_until_s > query.now_s for node in prefill_nodes.nodes):
            prefill_nodes = Candidates([n for n in prefill_nodes.nodes if n.no_transfer_until_s <= query.now_s])
        if len({node.engine for node in prefill_nodes.nodes}) > 1:  # the best few are those that can be combined
            engines = {node.engine for node in decision.candidates if node.transfers_kv}
            prefill_nodes = Candidates([node for node in prefill_nodes.nodes if node.engine in engines])
        if any(node.is_full_for(query.request) for node in prefill_nodes.nodes):
            prefill_nodes = Candidates([n for n in prefill_nodes.nodes if not n.is_full_for(query.request)])
        if not prefill_nodes.nodes:
            return self._by_load(decision, group, query.request) if decision.node.needs_partner else decision
        may_serve_whole = not has_peers and trial is None and query.request.subset is None
        return self._by_price(decision, query, policy, prefill_nodes, may_serve_whole and policy.split != "always")

    def _by_load(self, decision: Decision, group: Group, request: RoutingRequest) -> Decision:
        """Find the least loaded prefill node for a decode node that needs one."""
        nodes = _partners(decision.node, group.prefill_nodes.nodes)
        nodes = nodes or _partners(decision.node, group.half_open_prefill)
        if not nodes:
            raise NoNodeAvailable(group.model)
        nodes = [node for node in nodes if not node.is_full_for(request)] or nodes
        least = min([node.load for node in nodes])
        tied = [node for node in nodes if node.load == least]
        decision.pair = Pair(tied[int(self._random.random() * len(tied))], 0.0)
        return decision

    def _without_partner(self, decision: Decision, query: Query, policy: Policy) -> Decision:
        """Return a decision for a node that can serve the request alone. Raises NoNodeAvailable."""
        if not decision.node.needs_partner:
            return decision
        nodes = [node for node in query.candidates.nodes if not node.needs_partner]
        if not nodes:
            raise NoNodeAvailable(query.group.model)
        among = query.repeat(query.now_s)
        among.candidates = Candidates(nodes, len(query.candidates))
        return policy.decide(among)

    # By price.

    def _by_price(
        self, decision: Decision, query: Query, policy: PricePolicy, prefill_nodes: Candidates, may_serve_whole: bool
    ) -> Decision:
        """`may_serve_whole`: whether an idle prefill node may serve the whole request."""
        assert decision.prices is not None
        decode = self._decode_parts(decision.prices, decision.candidates, decision.index, query)
        alone = [part for part in decode if not part.node.needs_partner]
        least_alone = min([part.alone_ms for part in alone], default=math.inf)
        always = policy.split == "always"
        short = next((part for part in alone if part.alone_ms <= least_alone and part.is_short), None)
        is_short = short is not None and not always
        idle = self._idle(decision, query, prefill_nodes, short) if may_serve_whole else 0
        if is_short and not idle:
            return self._alone(decision, alone, least_alone)
        prefill, prices = self._prefill_parts(query, policy, prefill_nodes, decode[0].row.output)
        least_whole, whole = self._whole(decision, query, prefill, idle - 1, decode[0]) if idle else (math.inf, None)
        if whole is not None and least_whole >= least_alone:
            whole = None
        if whole is None and is_short:
            return self._alone(decision, alone, least_alone)
        least_pair = math.inf if always else min(least_alone, least_whole)
        found: list[tuple[float, _Part, _Part, float, float]] = []
        speeds, rates = query.group.transfer_speeds, dict[tuple[str, str], float]()
        for d in decode if not is_short else ():
            if not d.node.transfers_kv:
                continue
            missing, needs_partner = max(0.0, d.row.new), d.node.needs_partner
            for p in prefill:
                if p.node is d.node or p.node.engine != d.node.engine:
                    continue
                islands = (p.node.island, d.node.island)
                ms_per_token = rates.get(islands)
                if ms_per_token is None:
                    ms_per_token = rates[islands] = speeds.between(*islands).ms_per_token(query.now_s)
                # Transfers from the same node share its network; those that end during the prefill delay nothing.
                link_ms = p.node.transfer_tokens * ms_per_token - p.row.prefill
                moved_ms = transfer_ms(ms_per_token, missing) + (link_ms if link_ms > 0.0 else 0.0)
                own_ms = p.own_ms + moved_ms + d.own_ms
                total = own_ms + p.others_ms + d.others_ms + policy.risk_ms(query, own_ms)
                if total < least_pair * TIE or needs_partner:
                    found.append((total, p, d, moved_ms, own_ms))
                    least_pair = min(least_pair, total)
        if whole is not None and least_whole <= least_pair:
            return _serve_whole(decision, whole, prices, prefill_nodes.nodes)
        if not found or (least_pair >= least_alone and not always):
            if not alone:
                raise NoNodeAvailable(query.group.model)
            return self._alone(decision, alone, least_alone)
        least_pair = min(one[0] for one in found)
        tied = [one for one in found if one[0] <= least_pair * TIE]
        # Seconds of prefill make all decode nodes look alike: what these differ in decides among them.
        on_decode = [one[3] + one[2].own_ms + one[2].others_ms for one in tied]
        most_ms = min(on_decode) * TIE
        tied = [one for one, ms in zip(tied, on_decode, strict=True) if ms <= most_ms]
        total, p, d, moved_ms, own_ms = tied[int(self._random.random() * len(tied))]
        price = _price_of_pair(total, p, d, moved_ms, own_ms)
        pair = Pair(p.node, max(0.0, d.row.new), price, moved_ms, least_alone if alone else 0.0)
        return Decision(
            d.node, decision.policy, REASON, decision.order, decision.prices, decision.candidates, d.index,
            decision.cache_counts, pair=pair,
        )  # fmt: skip

    def _alone(self, decision: Decision, decode: Sequence[_Part], least: float) -> Decision:
        """Keep the policy's node, unless it delays the answers that it decodes more than another one would."""
        chosen = next((part for part in decode if part.node is decision.node), None)
        if chosen is not None and chosen.alone_ms <= least * TIE:
            return decision
        tied = [part for part in decode if part.alone_ms <= least * TIE]
        part = tied[int(self._random.random() * len(tied))]
        return Decision(
            part.node, decision.policy, ALONE, decision.order, decision.prices, decision.candidates, part.index,
            decision.cache_counts,
        )  # fmt: skip

    @staticmethod
    def _idle(decision: Decision, query: Query, prefill_nodes: Candidates, short: _Part | None) -> int:
        """Return how many idle prefill nodes could serve the whole request. `short`: the node that prefills it without
        delaying others; then 0 also if an idle prefill node could not be better."""
        gain_ms = math.inf if short is None else short.step_ms + short.row.contention + short.row.wait
        if gain_ms <= 0.0:
            return 0
        idle = idle_nodes(prefill_nodes.nodes, decision.node.island)
        if idle and short is not None:
            answer_ms = short.row.output * short.fastest_ms
            return idle if blocking_ms(query.group, answer_ms, idle - 1, query.now_s) < gain_ms else 0
        return idle

    @staticmethod
    def _whole(
        decision: Decision, query: Query, prefill: Sequence[_Part], others: int, decode: _Part
    ) -> tuple[float, _Part | None]:
        """Return the lowest price of an idle prefill node that serves the whole request, and this node."""
        speed, output = query.group.decode_speed, decode.row.output
        least, best = math.inf, None
        for part in prefill:
            node, row = part.node, part.row
            if node.load or not is_prefill_node(node, decision.node.island):
                continue
            tokens = row.cached + row.new
            if 0 < node.context_window(query.group.model) <= tokens + output:
                continue
            contention_ms = STREAMED_WEIGHT * output * (speed.token_ms(0.0) * node.speed.factor - decode.fastest_ms)
            answer_ms = output * speed.token_ms(tokens) * node.speed.factor
            total = row.total + contention_ms + blocking_ms(query.group, answer_ms, others, query.now_s)
            if total < least:
                least, best = total, part
        return least, best

    def _prefill_parts(
        self, query: Query, policy: PricePolicy, prefill_nodes: Candidates, output: float
    ) -> tuple[list[_Part], Prices]:
        on_prefill = query.repeat(query.now_s)
        on_prefill.candidates = prefill_nodes
        prices = policy.prices(on_prefill, 1.0)
        tied = prices.least_loaded(prices.cheapest(TIE))
        best = tied[int(self._random.random() * len(tied))]
        indexes = [best, *[index for index in prices.cheapest(MAX_RATIO_TO_CHEAPEST)[:MAX_PREFILL] if index != best]]
        parts = []
        for index in indexes[:MAX_PREFILL]:
            row = Price._make(prices[index])
            node = prefill_nodes.nodes[index]
            if 0 < node.context_window(query.group.model) <= row.cached + row.new:
                continue
            decoding_ms = 0.0
            if node.role != "prefill" or node.whole_answers:
                token_ms = query.group.decode_speed.token_ms(node.context_tokens) * node.speed.factor
                if node.is_blocked(query.now_s):  # admission waits for the end of the answer
                    row = row._replace(wait=row.wait + ANSWER_LEFT * output * token_ms)
                else:
                    decoding_ms = _interference_ms(node, _stall_ms(row, token_ms))
            parts.append(_Part(node, index, row, row.own, row.memory + row.congestion + decoding_ms))
        return parts, prices

    def decode_node(self, query: Query, policy: PricePolicy, pair: Pair, current: Node) -> Node:
        """The prompt is prefilled: return the node that decodes its answer at the lowest cost now. `current` has a
        ticket of the request."""
        group, engine = query.group.sort_if_changed(), pair.prefill_node.engine
        if query.candidates is not group.up:  # some have gone down, or only some may serve the request
            up = group.up.by_name
            query.candidates = Candidates([node for node in query.candidates.nodes if node.name in up])
        nodes = query.candidates.nodes
        if current not in nodes or len(nodes) < 2:
            return current
        speed = group.transfer_speeds.between(pair.prefill_node.island, current.island)
        ms_per_token = speed.ms_per_token(query.now_s)
        best, least = current, math.inf
        for part in self._decode_parts(policy.prices(query), nodes, nodes.index(current), query):
            node, row = part.node, part.row
            if node.engine != engine or node.island != current.island or not node.transfers_kv:
                continue
            if node is not current and node.is_full_for(query.request):
                continue
            if node is pair.prefill_node:  # a mixed one: nothing would be transferred
                continue
            moved_ms = transfer_ms(ms_per_token, max(0.0, row.new))
            total = moved_ms + part.own_ms + part.contention_ms + row.memory
            stall_ms = row.wait - moved_ms
            if stall_ms > TOLERATED_MS:  # the node prefills another prompt
                total += stall_ms + stall_ms * stall_ms / STALL_SCALE_MS
            if node is current:  # its memory is taken already
                total -= row.room + row.memory + part.step_ms * (node.load == 1) + MIN_SAVED_MS
            if total < least:
                best, least = node, total
        return best

    def _decode_parts(self, prices: Prices, nodes: Sequence[Node], chosen: int, query: Query) -> list[_Part]:
        group = query.group
        # The queue is for the prefill nodes: decode nodes get short prompts at once.
        behind = BEHIND_SHARE * group.waiting / query.candidates.shared_by
        indexes = _best_decode(prices, nodes, chosen)
        decode_speed = group.decode_speed
        tokens_ms = [decode_speed.token_ms(nodes[at].context_tokens) * nodes[at].speed.factor for at in indexes]
        fastest_ms = min(tokens_ms)
        parts = []
        for index, token_ms in zip(indexes, tokens_ms, strict=True):
            node, row = nodes[index], Price._make(prices[index])
            step_ms = FIRST_TOKEN_STEPS * token_ms if node.load else 0.0
            # Without the stall of a prefill, which is elsewhere.
            contention_ms = STREAMED_WEIGHT * row.output * (token_ms - fastest_ms)
            work_ms = row.prefill + row.room + row.adapter + row.memory
            share = (step_ms + row.room + row.adapter + row.memory) / work_ms if work_ms > 0.0 else 0.0
            others_ms = contention_ms + row.memory + row.congestion * min(1.0, share)
            own_ms = row.room + row.distance + row.adapter + step_ms
            stall_ms = _stall_ms(row, token_ms)
            alone_ms = row.total + _interference_ms(node, stall_ms) - behind * work_ms
            is_short = stall_ms <= 0.0 and row.wait <= TOLERATED_MS
            parts.append(
                _Part(node, index, row, own_ms, others_ms, alone_ms, contention_ms, fastest_ms, step_ms, is_short)
            )
        return parts


def _stall_ms(row: Price, token_ms: float) -> float:
    """Return how long a prefill stops the answers that the node decodes, beyond a gap that users do not notice."""
    return row.prefill - FIRST_TOKEN_STEPS * token_ms - max(token_ms, TOLERATED_MS)


def _interference_ms(node: Node, stall_ms: float) -> float:
    """Return what that costs all requests of the node."""
    return stall_ms * stall_ms / STALL_SCALE_MS * node.inflight if stall_ms > 0.0 else 0.0


def _serve_whole(decision: Decision, part: _Part, prices: Prices, nodes: tuple[Node, ...]) -> Decision:
    return Decision(
        part.node, decision.policy, WHOLE, lambda: [decision.node, *decision.fallbacks()], prices, nodes, part.index,
        decision.cache_counts,
    )  # fmt: skip


def _best_decode(prices: Prices, nodes: Sequence[Node], chosen: int) -> Sequence[int]:
    if len(nodes) <= 2 * MAX_DECODE:
        return range(len(nodes))
    emptiest = nsmallest(MAX_DECODE, range(len(nodes)), key=lambda index: nodes[index].context_tokens)
    best = dict.fromkeys((*prices.cheapest(MAX_RATIO_TO_CHEAPEST)[:MAX_DECODE], *emptiest))
    if chosen >= 0:
        best[chosen] = None
    return list(best)


def _price_of_pair(total: float, p: _Part, d: _Part, transfer_ms: float, own_ms: float) -> Price:
    on_p, on_d = p.row, d.row
    others_ms = total - own_ms
    congestion_ms = others_ms - d.contention_ms - on_p.memory - on_d.memory
    return Price(
        total, on_p.wait, on_p.prefill + d.step_ms, on_p.room + on_d.room, d.contention_ms,
        on_p.distance + on_d.distance + transfer_ms, on_p.adapter + on_d.adapter, 0.0, on_p.memory + on_d.memory,
        max(0.0, congestion_ms), on_p.cached, on_p.new, on_d.output,
    )  # fmt: skip


def _partners(node: Node, nodes: Sequence[Node]) -> list[Node]:
    return sorted([one for one in nodes if one.engine == node.engine], key=attrgetter("number"))
