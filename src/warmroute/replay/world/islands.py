"""Worlds of several islands: what happens to a whole island, who moved from one to another, and what that cost.

The router stands at one place, with its clients. An island's round trip is the way from there and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from warmroute.config import Config
from warmroute.fleet.node import Node
from warmroute.replay.world.conditions import Conditions, NodeSpec
from warmroute.replay.world.flight import Flight
from warmroute.replay.world.node import Life
from warmroute.replay.world.world import World
from warmroute.routing.decision import Decision, Policy
from warmroute.routing.islands import ANSWER_TOKEN_BYTES, PROMPT_TOKEN_BYTES, Crossings
from warmroute.routing.query import Query
from warmroute.routing.refusals import NobodyCanServe


class Moves:
    """Where each conversation was served, turn by turn, whatever the router thinks of it."""

    def __init__(self) -> None:
        self._first: dict[bytes, str] = {}
        self._last: dict[bytes, str] = {}
        self.turns = 0
        """Of conversations that were somewhere before, where that island is well."""
        self.kept = 0
        """Of these, those served there again, or where the conversation began."""
        self.fled = 0
        """Turns whose island was failing, whether they left it or not."""
        self.requests: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        """By island: prompts and answers."""

    def saw(self, flight: Flight, island: str, failing: set[str]) -> None:
        prompt = flight.prompt
        self.requests[island] += 1
        self.sent_bytes[island] += int(
            PROMPT_TOKEN_BYTES * prompt.prompt_tokens + ANSWER_TOKEN_BYTES * prompt.output_tokens
        )
        before = self._last.get(prompt.session)
        if before in failing:
            self.fled += 1
        elif before is not None:
            self.turns += 1
            self.kept += island in (before, self._first[prompt.session])
        self._first.setdefault(prompt.session, island)
        self._last[prompt.session] = island

    @property
    def kept_share(self) -> float:
        return self.kept / self.turns if self.turns else 1.0


class IslandWorld(World):
    """A world whose conversations are followed. `home_only`: everybody is served on the nearest island, and waits where
    that is down."""

    def __init__(
        self, specs: Iterable[NodeSpec], conditions: Conditions, config: Config, *, home_only: bool = False
    ) -> None:
        super().__init__(specs, conditions, config)
        self.moves = Moves()
        self._failing: set[str] = set()
        if home_only:
            self.router.crossings = HomeOnly(self.fleet.islands, self.cache_view, self.router.outputs)
            self.admission.node_wait_s = 1e6

    def _try(self, flight: Flight, node: Node) -> None:
        self.moves.saw(flight, self.nodes[node.name].spec.island, self._failing)
        super()._try(flight, node)

    def fail_island(self, name: str, left: int = 0) -> None:
        """Everything on it dies, but so many nodes."""
        self._failing.add(name)
        for sim in [sim for sim in self.nodes.values() if sim.spec.island == name][left:]:
            self.fail(sim.node.name)

    def restore_island(self, name: str) -> None:
        """New processes in place of those that died, their caches empty."""
        self._failing.discard(name)
        for sim in list(self.nodes.values()):
            if sim.spec.island == name and sim.life is not Life.SERVING:
                self.restart(sim.node.name)


class HomeOnly(Crossings):
    """To compare with: everybody is served on the nearest island, and nowhere else."""

    def decide(self, query: Query, policy: Policy) -> Decision:
        nearest = min(query.group.members, key=lambda node: node.round_trip_ms).island
        everyone = query.candidates
        query.candidates = self._on(query, nearest)
        try:
            if not query.candidates.nodes:
                raise NobodyCanServe(query.request.model)
            return policy.decide(query)
        finally:
            query.candidates = everyone
