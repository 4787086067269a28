"""What edges know of the fleet, built from it when it has changed."""

from __future__ import annotations

from warmroute.core.admission import Admitter
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import NodeRow, Tables
from warmroute.core.node import Node
from warmroute.core.router import Router


class FleetTables:
    def __init__(self, fleet: Fleet, router: Router, admission: Admitter, cache_view: CacheView) -> None:
        self._fleet = fleet
        self._router = router
        self._cache_view = cache_view
        self.starting = False
        """Requests wait at the edges."""
        self.captures = False
        """A capture runs."""
        self.edges = 1
        """Those that share the limits of nodes and tenants."""
        self._without_node = admission.without_node
        self._tables = Tables()
        self._rows: dict[Node, NodeRow] = {}
        self._built_for: tuple[object, ...] = ()

    def current(self) -> Tables:
        fleet = self._fleet
        now_is = (
            fleet.version, self._router.policy, fleet.islands.several, self._without_node.first_node_wait_s,
            self._cache_view.chain_keys, self.starting, self.captures, self.edges,
        )  # fmt: skip
        if now_is != self._built_for:
            self._built_for = now_is
            self._tables = self._build()
        return self._tables

    def _build(self) -> Tables:
        fleet, router = self._fleet, self._router
        only = fleet.only_group
        # Then requests wait for the node that the autoscaler will add.
        scaled_to_zero = self._without_node.first_node_wait_s > 0.0 and all(node.draining for node in fleet)
        return Tables(
            version=self._tables.version + 1,
            nodes=self._nodes(),
            is_ready=fleet.can_serve or scaled_to_zero,
            cards=lambda: _model_cards(fleet),
            only_model=only.model if only is not None else "",
            has_several_islands=fleet.islands.several,
            has_pairs=fleet.has_roles,
            pairs_only_with_vllm=fleet.pairs_only_with_vllm,
            shortest_window={
                group.model: group.windows.sizes[0] for group in fleet.groups if group.windows is not None
            },
            wants_tokens=router.policy.wants_tokens,
            route_wants_tokens={name: policy.wants_tokens for name, policy in router.policies_by_route.items()},
            chains=self._cache_view.chain_keys,
            keeps_prompts=router.hot is not None and router.hot.keeps_examples,
            starting=self.starting,
            serving={
                group.model: tuple([node.number for node in group.sort_if_changed().up.nodes if not node.needs_partner])
                for group in fleet.groups
            },
            captures=self.captures,
            edges=self.edges,
        )  # fmt: skip

    def _nodes(self) -> dict[int, NodeRow]:
        """Return a row for each node: the one of before, if it is still right."""
        before, self._rows = self._rows, {}
        for node in self._fleet:
            row = before.get(node)
            role, engine, most = node.role, node.engine, node.max_inflight
            if row is None or row.role != role or row.engine != engine or row.max_inflight != most:
                row = row_of(node)
            self._rows[node] = row
        return {row.number: row for row in self._rows.values()}


def row_of(node: Node) -> NodeRow:
    return NodeRow(
        node.number, node.name, node.scheme, node.host, node.port, node.api_key_env, node.engine, node.role,
        node.config.bootstrap_port, node.max_inflight,
    )  # fmt: skip


def _model_cards(fleet: Fleet) -> tuple[dict[str, object], ...]:
    """Every model of the fleet, as the first node with the longest context window describes it."""
    cards: dict[str, dict[str, object]] = {}
    for node in fleet:
        if node.draining:
            continue
        described = {str(card.get("id")): card for card in node.model_cards}
        for model in node.models or ():
            plain = {"id": model, "object": "model", "created": 0, "owned_by": "warmroute"}
            card = described.get(model, plain)
            if model not in cards or _window(card) > _window(cards[model]):
                cards[model] = card
    return tuple(cards.values())


def _window(card: dict[str, object]) -> int:
    window = card.get("max_model_len")
    return window if isinstance(window, int) else 0
