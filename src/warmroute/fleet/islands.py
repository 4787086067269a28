"""Islands: nodes that share a cheap network. Each knows how far it is and what its network costs, and tells its nodes.

    distance = round trip + egress + line                                              [ms]

    round trip   as configured, or the quickest answer to a health check of late
    egress       bytes of a usual request × the island's price of a byte ÷ what a millisecond is worth
    line         prefill work that waits at the router for the island's nodes, shared among them

A busy node answers its checks late, and an idle one beside it does not: the least of all that an island's nodes took
within WINDOW_S or so is the network's. Nothing is done here for each request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from warmroute.config import Crossing, IslandConfig
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node

WINDOW_S: Final = 60.0
"""What was measured counts for so long, or up to twice that."""
MOVED_SHARE: Final = 0.05
MOVED_MS: Final = 0.5
"""A distance is told anew when it has changed by so much."""
USUAL_BYTES: Final = 60_000.0
LINE_WEIGHT: Final = 0.2
"""How much one look at those who wait moves an island's line: it is looked at 20 times a second."""
HOUR_MS: Final = 3_600_000.0


class Island:
    __slots__ = ("_began_s", "_least_ms", "_least_now_ms", "config", "line_ms", "name", "nodes", "told_ms")

    def __init__(self, name: str, config: IslandConfig | None = None) -> None:
        self.name = name
        self.config = config or IslandConfig(name=name)
        self.nodes: dict[Node, None] = {}
        self.line_ms = 0.0
        """How long those who wait at the router for its nodes keep them busy."""
        self.told_ms = 0.0
        """The distance that its nodes know."""
        self._began_s = -1e9
        self._least_ms: float | None = None
        self._least_now_ms: float | None = None

    @property
    def round_trip_ms(self) -> float:
        """0 where nothing was measured yet."""
        return self.config.round_trip_ms or self.measured_ms or 0.0

    @property
    def measured_ms(self) -> float | None:
        """The quickest answer of this window and of the one before."""
        seen = [least for least in (self._least_ms, self._least_now_ms) if least is not None]
        return min(seen) if seen else None

    def saw(self, took_ms: float, now_s: float) -> bool:
        """A check was answered in so long; whether that changes what is believed."""
        before = self.measured_ms
        if now_s - self._began_s >= WINDOW_S:
            self._began_s = now_s
            self._least_ms, self._least_now_ms = self._least_now_ms, None
        if self._least_now_ms is None or took_ms < self._least_now_ms:
            self._least_now_ms = took_ms
        return self.measured_ms != before

    def egress_ms(self, usual_bytes: float, usd_per_hour: float) -> float:
        """What a usual request pays for its network, as time."""
        return usual_bytes * 1e-9 * self.config.egress_usd_per_gb / usd_per_hour * HOUR_MS


class Books:
    """How conversations moved. For the policies that mind islands."""

    __slots__ = ("away", "came_home", "crossed", "fresh", "stayed")

    def __init__(self) -> None:
        self.crossed: Counter[tuple[str, str, str]] = Counter()
        """By home, the island gone to, and why. Once for each time that a conversation leaves."""
        self.came_home: Counter[str] = Counter()
        """By home."""
        self.stayed: Counter[str] = Counter()
        """Turns of known conversations that were served at home, by home."""
        self.away: Counter[str] = Counter()
        """Those served elsewhere, by home."""
        self.fresh: Counter[str] = Counter()
        """New conversations, by the island that they went to."""


class Islands:
    def __init__(self, config: Sequence[IslandConfig] = (), crossing: Crossing | None = None) -> None:
        self._islands: dict[str, Island] = {}
        self.several = False
        """Whether there is more than one."""
        self.books = Books()
        self._usual_bytes = self._told_bytes = USUAL_BYTES
        self._costs = False
        self.crossing = crossing or Crossing()
        self.reconfigure(config, self.crossing)

    def __iter__(self) -> Iterator[Island]:
        return iter(list(self._islands.values()))  # as they are now: the metrics page is read in a thread

    def __len__(self) -> int:
        return len(self._islands)

    def get(self, name: str) -> Island | None:
        return self._islands.get(name)

    def reconfigure(self, config: Sequence[IslandConfig], crossing: Crossing) -> None:
        self.crossing = crossing
        self._configured: Mapping[str, IslandConfig] = {island.name: island for island in config}
        self._costs = any(island.egress_usd_per_gb for island in config)
        for island in self._islands.values():
            island.config = self._configured.get(island.name) or IslandConfig(name=island.name)
            self._tell(island)

    # Who stands where.

    def joined(self, node: Node) -> None:
        """A node stands on an island, or on another one than before."""
        island = self._islands.get(node.island)
        if island is None or node not in island.nodes:  # what was measured of the only node's island stays
            self.left(node)
            island = self._islands.get(node.island)
        if island is None:
            island = self._islands[node.island] = Island(node.island, self._configured.get(node.island))
        island.nodes[node] = None
        self.several = len(self._islands) > 1
        self._tell(island)

    def left(self, node: Node) -> None:
        for island in list(self._islands.values()):
            if node in island.nodes:
                del island.nodes[node]
                if not island.nodes:
                    del self._islands[island.name]
        self.several = len(self._islands) > 1

    # How far it is.

    def answered(self, node: Node, took_ms: float, now_s: float) -> None:
        """A node answered a health check."""
        island = self._islands.get(node.island)
        if island is not None and island.saw(took_ms, now_s):
            self._tell_if_moved(island)

    def saw_request(self, size_bytes: float) -> None:
        """A request and its answer are so large. Only where an island's network has its price."""
        if not self._costs:
            return
        self._usual_bytes += 0.01 * (size_bytes - self._usual_bytes)
        if abs(self._usual_bytes - self._told_bytes) > MOVED_SHARE * self._told_bytes:
            self._told_bytes = self._usual_bytes
            for island in self._islands.values():
                self._tell_if_moved(island)

    def egress_ms(self, island: Island) -> float:
        return island.egress_ms(self._told_bytes, self.crossing.usd_per_hour)

    def saw_waiting(self, work_ms: Mapping[str, float]) -> None:
        """Prefill work that waits at the router, by the island that it waits for. Told 20 times a second."""
        for island in self._islands.values():
            serving = sum(1 for node in island.nodes if _serves(node))
            line_ms = work_ms.get(island.name, 0.0) / max(1, serving)
            island.line_ms += LINE_WEIGHT * (line_ms - island.line_ms)
            if island.line_ms < MOVED_MS:
                island.line_ms = 0.0
            self._tell_if_moved(island)

    @property
    def has_lines(self) -> bool:
        return any(island.line_ms for island in self._islands.values())

    def distance_ms(self, island: Island) -> float:
        return island.round_trip_ms + self.egress_ms(island) + island.line_ms

    def _tell_if_moved(self, island: Island) -> None:
        moved_ms = abs(self.distance_ms(island) - island.told_ms)
        if moved_ms > max(MOVED_MS, MOVED_SHARE * island.told_ms) or (moved_ms and not island.line_ms):
            self._tell(island)

    def _tell(self, island: Island) -> None:
        island.told_ms, round_trip_ms = self.distance_ms(island), island.round_trip_ms
        for node in island.nodes:
            node.distance_ms, node.round_trip_ms = island.told_ms, round_trip_ms


def _serves(node: Node) -> bool:
    return node.health.standing is Standing.UP and not node.draining


def several(nodes: Iterable[Node]) -> bool:
    """Whether they stand on more than one island."""
    return len({node.island for node in nodes}) > 1
