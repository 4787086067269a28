"""The router: from an ask to a decision, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from random import Random

from warmroute.config import Pricing, RouteConfig, Routing
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.group import Candidates, Group
from warmroute.fleet.node import Node
from warmroute.fleet.speed import work
from warmroute.fleet.ticket import Ticket
from warmroute.index.cache_view import CacheView
from warmroute.index.hot import HotPrefixes
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision, Policy
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.islands import Crossings
from warmroute.routing.metered import MeteredDispatch, MeteredTicket
from warmroute.routing.outputs import OutputLengths
from warmroute.routing.policies import policy_named
from warmroute.routing.query import Query
from warmroute.routing.refusals import MissingModel, NobodyCanServe, UnknownModel


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
        self._cache_view = cache_view
        self.outputs = OutputLengths()
        self.crossings = Crossings(fleet.islands, cache_view, self.outputs)
        self.demand_meter: DemandMeter | None = None
        """Told of every request, where the fleet is scaled."""
        self.hot: HotPrefixes | None = None
        """Told of every prompt that was read, likewise."""
        self.may_serve: Callable[[str], bool] = lambda _model: True
        """Whether a node that comes would serve a model, where there is none at all."""
        self.reconfigure(config, pricing or Pricing(), routes)

    def reconfigure(self, config: Routing, pricing: Pricing, routes: Sequence[RouteConfig] = ()) -> None:
        self._random = Random(config.seed or None)
        self._fleet.adapters.reconfigure(pricing.adapter_load_ms)
        self.policy = policy_named(config, pricing, self._cache_view, self.outputs, self._random)
        self._by_route: dict[str, Policy] = {}
        """Policies of routes that have one of their own."""
        for route in routes:
            of_route = (route.routing(config), route.pricing(pricing))
            if of_route != (config, pricing):
                self._by_route[route.name] = policy_named(*of_route, self._cache_view, self.outputs, self._random)

    def policy_of(self, request: RoutingRequest) -> Policy:
        """The one of its route, or everybody's."""
        return self._by_route.get(request.route, self.policy) if self._by_route else self.policy

    def aside(self) -> Router:
        """The same, for those who only ask what it would do: its decisions take nobody's turn."""
        aside = copy(self)
        aside.demand_meter = None
        aside.policy = copy(self.policy)
        aside._by_route = {name: copy(policy) for name, policy in self._by_route.items()}
        return aside

    def decide(self, request: RoutingRequest, now_s: float, lookup: Lookup | None = None) -> Decision:
        """`lookup` is the prompt in blocks, where the policy wants it. Raises Undecided."""
        group = self._fleet.group(request.model) or self._group(request)
        everyone = candidates = group.up
        if now_s < group.ramping_until_s:
            candidates = self._thinned(candidates, now_s)
        if not candidates.nodes:
            candidates = group.at_need
            if not candidates.nodes:
                raise NobodyCanServe(request.model)
        query = Query(request, candidates, group, now_s, lookup, self._cache_view, now_s)
        decision = self._decided(query) if self._by_route or group.several else self.policy.decide(query)
        if candidates is not everyone and len(candidates) < len(everyone):  # left out for now, they stand in at need
            decision = decision.with_more(everyone.nodes)
        if group.trials and candidates is not group.at_need:
            node = next((node for node in group.trials if node.awaits_trial), None)
            if node is not None:
                chosen = decision
                decision = Decision(
                    node, "trial", "on trial", lambda: [chosen.node, *chosen.fallbacks()], chosen.prices,
                    chosen.candidates,
                )  # fmt: skip
        decision.query = query
        return decision

    def _decided(self, query: Query) -> Decision:
        policy = self.policy_of(query.request)
        return self.crossings.decide(query, policy) if query.group.several else policy.decide(query)

    def decide_again(self, query: Query, now_s: float) -> Decision:
        """The same request a moment later: with what nodes hold of it taken as known."""
        group = self._fleet.group(query.request.model)
        if group is None or group.up is not query.candidates or group.trials or now_s < group.ramping_until_s:
            return self.decide(query.request, now_s, query.lookup)
        again = query.again(now_s)
        decision = self._decided(again)
        decision.query = again
        return decision

    def decide_among(self, nodes: Sequence[Node], query: Query) -> Decision:
        """The same request, with these of its candidates only; the others stand in at need."""
        among = query.again(query.now_s)
        among.candidates = Candidates(nodes, len(query.candidates))
        decision = self._decided(among).with_more(query.candidates.nodes)
        decision.query = among
        return decision

    def dispatch(self, decision: Decision, node: Node, now_s: float) -> Ticket:
        """Enters a request in the books of the node that it is sent to: the decision's, or one that stands in."""
        query = decision.query
        if query is not None:
            if query.crossing is not None:
                self.crossings.sent(query, node, now_s)
            if query.group.adapter is not None:
                node.loaded.used(query.group.model)
        if query is None or query.lookup is None:
            if self.demand_meter is not None and query is not None:
                return MeteredTicket(node, now_s, self.demand_meter, query.request.arrived_s)
            return Ticket(node, now_s)
        request, lookup, cache_view = query.request, query.lookup, self._cache_view
        hits = query.known_hits
        hit = (hits if hits is not None else query.hits()).get(node.name)
        prediction = cache_view.sent(request.model, lookup, node.name, hit, now_s)
        tokens = lookup.token_count
        cached = hit.expected if hit is not None else 0.0
        new = tokens - cached
        demand_meter = self.demand_meter
        ticket = (Dispatch if demand_meter is None else MeteredDispatch)(
            request,
            node,
            now_s,
            cache_view,
            self.outputs,
            query.group.pace,
            prediction,
            tokens,
            int(new),
            work(new, cached),
        )
        if demand_meter is not None:
            assert isinstance(ticket, MeteredDispatch)
            ticket.begin(demand_meter, request.arrived_s)
            if self.hot is not None and prediction is not None:
                self.hot.saw(prediction.chain, prediction.cache.block_size, lookup, now_s)
        return ticket

    def _group(self, request: RoutingRequest) -> Group:
        fleet = self._fleet
        if not request.model:
            group = fleet.only_group
            if group is None:
                raise MissingModel if fleet.models else NobodyCanServe("")
            request.model = group.model
            return group
        group = fleet.group(request.model)
        if group is None:
            unknown = fleet.fully_known if len(fleet) else not self.may_serve(request.model)
            raise UnknownModel(request.model) if unknown else NobodyCanServe(request.model)
        return group

    def _thinned(self, candidates: Candidates, now_s: float) -> Candidates:
        """Leaves out, by chance, nodes that came back lately: slow start, for every policy alike."""
        chance = self._random.random
        keep = [node for node in candidates.nodes if chance() < node.health.share(now_s)]
        return candidates if not keep or len(keep) == len(candidates) else Candidates(keep)
