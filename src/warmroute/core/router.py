"""The router: makes the decision for a request, and opens its ticket on the node it is sent to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from random import Random

from warmroute.config import Pricing, RouteConfig, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.decision_record import ASSUMED_PROMPT_TOKENS
from warmroute.core.demand import LONG_MS, DemandMeter
from warmroute.core.fleet import Fleet
from warmroute.core.group import Candidates, Group, is_outside_subset, within_subset
from warmroute.core.hot_prefixes import HotPrefixes
from warmroute.core.island_choice import IslandChoice
from warmroute.core.messages import Lookup, PromptBatch, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.pairs import WHOLE, Pair, Pairs
from warmroute.core.policies import make_policy
from warmroute.core.policies.price import PricePolicy
from warmroute.core.policy import Policy
from warmroute.core.prefill_work import work
from warmroute.core.rejections import MissingModel, NoNodeAvailable, NoNodeInSubset, RoutingError, UnknownModel
from warmroute.core.routing_context import ContextFit, Query
from warmroute.core.tickets import (
    DecodeTicket,
    OtherPrompts,
    PrefillTicket,
    PromptTicket,
    StoreTicket,
    WholeAnswerTicket,
)


class Router:
    def __init__(
        self,
        fleet: Fleet,
        cache_view: CacheView,
        config: Routing,
        pricing: Pricing | None = None,
        routes: Sequence[RouteConfig] = (),
    ) -> None:
        self._fleet = fleet
        self._by_model = fleet.by_model
        self.awaits_first_check = fleet.awaits_first_check
        self._cache_view = cache_view
        self.output_lengths = OutputLengthEstimate()
        self._context_fit = ContextFit(cache_view, self.output_lengths)
        self.island_choice = IslandChoice(fleet.islands, cache_view, self.output_lengths)
        self.demand_meter: DemandMeter | None = None
        """Set if the fleet is autoscaled."""
        self.hot: HotPrefixes | None = None
        """Set if the fleet is autoscaled."""
        self.on_dispatch: Callable[[], object] | None = None
        """Called for each request that is sent to a node, if the process has peers."""
        self.may_serve: Callable[[str], bool] = lambda _model: True
        """Whether a node that the autoscaler starts would serve a model. Asked while the fleet is empty."""
        cache_view.saved_shares = self._saved_by_store
        self.reconfigure(config, pricing or Pricing(), routes)

    def _saved_by_store(self, model: str, store: str, names: Collection[str], now_s: float) -> list[float]:
        """Return the share of its prefill that a token saves which each node loads from a shared KV store."""
        group, find = self._fleet.group(model), self._fleet.find
        shares = []
        load_ms: dict[str, float] = {}  # by island
        for name in names:
            node = find(name)
            if node is None or group is None:
                shares.append(0.0)
                continue
            ms = load_ms.get(node.island)
            if ms is None:
                speed = group.transfer_speeds.from_store(store, node.island)
                ms = load_ms[node.island] = speed.ms_per_token(now_s)
            shares.append(1.0 - ms / node.speed.ms_per_token)
        return shares

    def reconfigure(self, config: Routing, pricing: Pricing, routes: Sequence[RouteConfig] = ()) -> None:
        self._config, self._pricing = config, pricing
        self._random = Random(config.seed or None)
        self._pairs = Pairs(self._random)
        self._fleet.adapters.reconfigure(pricing.adapter_load_ms)
        self.policy = make_policy(config, pricing, self._cache_view, self.output_lengths, self._random)
        self.policies_by_route: dict[str, Policy] = {}
        """Policies of the routes that have their own."""
        for route in routes:
            of_route = (route.routing(config), route.pricing(pricing))
            if of_route != (config, pricing):
                self.policies_by_route[route.name] = make_policy(
                    *of_route, self._cache_view, self.output_lengths, self._random
                )

    def policy_of(self, request: RoutingRequest) -> Policy:
        return self.policies_by_route.get(request.route, self.policy) if self.policies_by_route else self.policy

    def snapshot(self) -> Router:
        """Return a copy for dry runs. Its decisions do not advance the policies' state."""
        snapshot = Router(self._fleet, self._cache_view, self._config, self._pricing)
        self._cache_view.saved_shares = self._saved_by_store  # the caches outlive the copy
        snapshot.output_lengths, snapshot._context_fit = self.output_lengths, self._context_fit
        snapshot.island_choice, snapshot.may_serve = self.island_choice, self.may_serve
        snapshot.on_dispatch = self.on_dispatch
        snapshot._random, snapshot._pairs = self._random, self._pairs
        snapshot.policy = copy(self.policy)
        snapshot.policies_by_route = {name: copy(policy) for name, policy in self.policies_by_route.items()}
        return snapshot

    def decide(self, request: RoutingRequest, now_s: float, lookup: Lookup | None = None) -> Decision:
        """`lookup` has the prompt's blocks, if the policy wants them. Raises RoutingError."""
        group = self._by_model.get(request.model)
        if group is None or not group.is_sorted:
            group = self._fleet.group(request.model) or self._group(request)
        up = candidates = group.up if request.subset is None else within_subset(group.up, request.subset)
        if group.windows is not None:
            up = candidates = self._context_fit.candidates(request, group, group.windows, up)
        if now_s < group.slow_start_until_s:
            candidates = self._apply_slow_start(candidates, now_s)
        uses_last_resort = False
        if not candidates.nodes:
            candidates = group.last_resort
            if request.subset is not None:
                candidates = within_subset(candidates, request.subset)
            if group.windows is not None:
                candidates = self._context_fit.candidates(request, group, group.windows, candidates)
            if not candidates.nodes:
                outside = request.subset is not None and is_outside_subset(group.members, request.subset)
                raise (NoNodeInSubset if outside else NoNodeAvailable)(request.model)
            uses_last_resort = True
        query = Query(request, candidates, group, now_s, lookup, self._cache_view, now_s)
        try:
            by_policy = not (self.policies_by_route or group.spans_islands or group.has_roles)
            decision = self.policy.decide(query) if by_policy else self._choose(query)
        except Exception as error:
            decision = self._decide_by_load(query, error)
        if candidates is not up and len(candidates) < len(up):  # nodes in slow start are still fallbacks
            decision = decision.with_fallbacks(up.nodes)
        if group.half_open and not uses_last_resort:
            node = self._half_open_node(request, group)
            if node is not None:
                chosen = decision
                decision = Decision(
                    node, "half_open", "trial request", lambda: [chosen.node, *chosen.fallbacks()], chosen.prices,
                    chosen.candidates,
                )  # fmt: skip
        decision.query = query
        return decision

    @staticmethod
    def _half_open_node(request: RoutingRequest, group: Group) -> Node | None:
        """Return a node for which the request can be the trial request."""
        windows, tokens, subset = group.windows, request.input_tokens, request.subset
        for node in group.half_open:
            if subset is not None and node.name not in subset:
                continue
            if node.needs_partner and not request.may_split:
                continue
            if node.needs_trial_request and (windows is None or windows.holds(node, tokens)):
                return node
        return None

    def _decide(self, query: Query) -> Decision:
        try:
            return self._choose(query)
        except Exception as error:
            return self._decide_by_load(query, error)

    def _choose(self, query: Query) -> Decision:
        policy = self.policy_of(query.request)
        group = query.group
        decision = self.island_choice.decide(query, policy) if group.spans_islands else policy.decide(query)
        if not group.has_roles:
            return decision
        return self._pairs.decide(decision, query, policy, has_peers=self.on_dispatch is not None)

    def _decide_by_load(self, query: Query, error: Exception) -> Decision:
        """Decide without the cache index, which failed at this prompt: an error in it must not fail a request."""
        if query.lookup is None or isinstance(error, RoutingError):
            raise error
        self._cache_view.lookup_failed(error)
        query.lookup, query.known_hits = None, {}
        return self._choose(query)

    def decide_again(self, query: Query, now_s: float) -> Decision:
        """Decide for the same request a moment later, without looking up its hits again."""
        group = self._fleet.group(query.group.model)
        if group is None or group.half_open or now_s < group.slow_start_until_s or query.request.subset is not None:
            return self.decide(query.request, now_s, query.lookup)
        up = group.up
        if group.windows is not None:
            up = self._context_fit.candidates(query.request, group, group.windows, up)
        if up is not query.candidates or not up.nodes:
            return self.decide(query.request, now_s, query.lookup)
        query.hits()
        query.now_s = now_s
        decision = self._decide(query)
        decision.query = query
        return decision

    def decide_among(self, nodes: Sequence[Node], query: Query) -> Decision:
        """Decide among some of the query's candidates. The others stay fallbacks."""
        among = query.repeat(query.now_s)
        among.candidates = Candidates(nodes, len(query.candidates))
        decision = self._decide(among).with_fallbacks(query.candidates.nodes)
        decision.query = among
        return decision

    def usable_nodes(self, request: RoutingRequest) -> tuple[Node, ...]:
        """Return the nodes that may serve the request: those that are up, then those of last resort."""
        try:
            group = self._fleet.group(request.model) or self._group(request)
            if group.windows is not None:
                fitting = partial(self._context_fit.candidates, request, group, group.windows)
                return (*fitting(group.up).nodes, *fitting(group.last_resort).nodes)
        except RoutingError:
            return ()
        return (*group.up.nodes, *group.last_resort.nodes)

    def partner(self, decision: Decision, node: Node, failed: Container[Node]) -> Node | None:
        """Return the least loaded prefill node for a decode node that needs one; None if there is none."""
        query = decision.query
        if query is None:
            return None
        nodes, request = query.group.sort_if_changed().prefill_nodes.nodes, query.request
        usable = (
            one for one in nodes
            if one.engine == node.engine and one not in failed and not one.is_full_for(request)
        )  # fmt: skip
        return min(usable, key=attrgetter("load"), default=None)

    def decode_node(self, decision: Decision, pair: Pair, current: Node, now_s: float) -> Node:
        """The prompt of a request is prefilled: return the node that decodes its answer at the lowest cost."""
        query = decision.query
        if query is None or not isinstance(policy := self.policy_of(query.request), PricePolicy):
            return current
        return self._pairs.decode_node(query.repeat(now_s), policy, pair, current)

    def open_ticket(
        self,
        decision: Decision,
        node: Node,
        now_s: float,
        kind: type[PromptTicket] = PromptTicket,
        counted: bool = False,
    ) -> Ticket:
        """Open the ticket of a request on the node that it is sent to: the chosen one or a fallback. `kind`: the node
        may only prefill, or only decode. `counted`: its ticket moves there from a node that did not get the request."""
        query = decision.query
        if self.on_dispatch is not None:
            self.on_dispatch()
        if query is not None and kind is not PrefillTicket:
            if (windows := query.group.windows) is not None and not counted:
                windows.record(self._context_fit.needed(query.request), now_s)
            if query.move_reason is not None and not counted:
                try:
                    self.island_choice.dispatched(query, node, now_s)
                except Exception as error:
                    self._cache_view.lookup_failed(error)
            if query.group.adapter is not None:
                node.loaded_adapters.mark_used(query.group.model)
        demand_meter = self.demand_meter if kind is not DecodeTicket else None
        if query is None or query.lookup is None:
            if demand_meter is not None:
                demand_meter.record_sent(ASSUMED_PROMPT_TOKENS, 0.0, ASSUMED_PROMPT_TOKENS, node.role == "prefill")
            return Ticket(node, now_s)
        request, lookup, cache_view = query.request, query.lookup, self._cache_view
        batch, others = lookup.batch, None
        try:
            hits = query.known_hits
            hit = (hits if hits is not None else query.hits()).get(node.name)
            prediction = cache_view.record_routed(
                query.group.model, lookup, node.name, hit, now_s, tell_peers=kind is not DecodeTicket, counted=counted
            )
            if batch is not None and batch.others:
                others = self._predict_others(query, batch, node, now_s)
        except Exception as error:
            cache_view.lookup_failed(error)
            return Ticket(node, now_s)
        tokens = lookup.token_count if batch is None else batch.total_tokens
        cached = hit.expected if hit is not None else 0.0
        new = tokens - cached
        new_work = work(new, cached) if others is None else others.work(new, cached)
        if kind is DecodeTicket:
            new_work = 0.0
        elif query.group.has_roles:
            prefill_ms = new_work * node.speed.ms_per_token
            if prefill_ms > LONG_MS:
                query.group.long_prompts.record(prefill_ms, now_s)
            if kind is PromptTicket and decision.reason == WHOLE and node is decision.node:
                kind = WholeAnswerTicket
        if demand_meter is not None:
            demand_meter.record_sent(tokens, tokens - int(new), new_work, node.role == "prefill")
            if self.hot is not None and prediction is not None:
                self.hot.record(prediction.chain, prediction.cache.block_size, lookup, now_s)
        if prediction is not None and prediction.store_tokens and kind is PromptTicket and others is None:
            return StoreTicket(
                request,
                node,
                now_s,
                cache_view,
                self.output_lengths,
                query.group,
                prediction,
                tokens,
                int(new),
                new_work,
            )
        return kind(
            request, node, now_s, cache_view, self.output_lengths, query.group.decode_speed, prediction, tokens,
            int(new), new_work, hit.tokens if hit is not None else 0, others,
        )  # fmt: skip

    def _predict_others(self, query: Query, batch: PromptBatch, node: Node, now_s: float) -> OtherPrompts:
        """Record the request's other prompts as sent to the node."""
        record, model = self._cache_view.record_routed, query.group.model
        predictions = [record(model, other, node.name, None, now_s) for other in batch.others]
        return OtherPrompts(batch.prompts, [one for one in predictions if one is not None])

    def _group(self, request: RoutingRequest) -> Group:
        """Return the group of a request whose model has none by that name. Raises RoutingError."""
        fleet = self._fleet
        if not request.model:
            group = fleet.only_group
            if group is None:
                raise MissingModel if fleet.models else NoNodeAvailable("")
            return group
        unknown = fleet.all_models_known if len(fleet) else not self.may_serve(request.model)
        raise UnknownModel(request.model) if unknown else NoNodeAvailable(request.model)

    def _apply_slow_start(self, candidates: Candidates, now_s: float) -> Candidates:
        """Leave out, at random, nodes that have recovered later than the others."""
        random = self._random.random
        shares = [node.health.traffic_share(now_s) for node in candidates.nodes]
        largest = max(shares, default=1.0)
        kept = [
            node for node, share in zip(candidates.nodes, shares, strict=True)
            if share == largest or random() < share / largest
        ]  # fmt: skip
        return candidates if not kept or len(kept) == len(candidates) else Candidates(kept)
