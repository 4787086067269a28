"""Islands: how far they are from each other, and on which of them each conversation lives."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from warmroute._kernel import key_hash
from warmroute.config import IslandAffinity, IslandConfig
from warmroute.core.health import HealthState
from warmroute.core.node import Node

# The islands of the fleet: nodes that share a cheap network, and what reaching them costs.
#
#     distance = round trip + egress + queue                                             [ms]
#
#     round trip   as configured, or the fastest health check of the last minute or two
#     egress       bytes of an average request × the island's price per byte ÷ what a millisecond is worth
#     queue        prefill work in the admission queue for the island's nodes, divided among them
#
# A busy node answers health checks late while an idle one next to it does not, so the fastest check of all its nodes is
# the island's round trip. Nothing here runs per request, except where an island has an egress price.

WINDOW_S: Final = 60.0
"""A measured round trip counts for this time, up to twice as long."""
CHANGE_SHARE: Final = 0.05
CHANGE_MS: Final = 0.5
"""Nodes get a new distance when it has changed by more than both."""
DEFAULT_REQUEST_BYTES: Final = 60_000.0
REQUEST_BYTES_WEIGHT: Final = 0.01
QUEUE_WEIGHT: Final = 0.2
"""Weight of one sample in `queue_ms`. Admission takes 20 samples a second."""
HOUR_MS: Final = 3_600_000.0


@dataclass(slots=True, eq=False)
class Island:
    name: str
    config: IslandConfig
    nodes: dict[Node, None] = field(default_factory=dict)
    queue_ms: float = 0.0
    """How long the queued requests for this island keep its nodes busy."""
    distance_ms: float = 0.0
    """The distance that its nodes have."""
    _window_s: float = -1e9
    _fastest_ms: float | None = None
    _previous_ms: float | None = None

    @property
    def round_trip_ms(self) -> float:
        """As configured, else as measured; 0 before the first health check."""
        return self.config.round_trip_ms or self.measured_ms or 0.0

    @property
    def measured_ms(self) -> float | None:
        """The fastest health check of this window and the previous one."""
        measured = [ms for ms in (self._previous_ms, self._fastest_ms) if ms is not None]
        return min(measured) if measured else None

    def record_round_trip(self, took_ms: float, now_s: float) -> bool:
        """Return whether this health check changes the measured round trip."""
        before = self.measured_ms
        if now_s - self._window_s >= WINDOW_S:
            self._window_s = now_s
            self._previous_ms, self._fastest_ms = self._fastest_ms, None
        if self._fastest_ms is None or took_ms < self._fastest_ms:
            self._fastest_ms = took_ms
        return self.measured_ms != before


@dataclass(slots=True, eq=False)
class ConversationCounts:
    moved: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Times a conversation left its home island, by home, destination and reason."""
    returned: Counter[str] = field(default_factory=Counter)
    """Times a conversation returned to its home, by home."""
    served_at_home: Counter[str] = field(default_factory=Counter)
    """Turns of known conversations served at home, by home."""
    served_away: Counter[str] = field(default_factory=Counter)
    """Turns served elsewhere, by home."""
    started: Counter[str] = field(default_factory=Counter)
    """New conversations, by island."""


class IslandRegistry:
    def __init__(self, config: Sequence[IslandConfig] = (), affinity: IslandAffinity | None = None) -> None:
        self._islands: dict[str, Island] = {}
        self.several = False
        """Whether the fleet has more than one island."""
        self.conversations = ConversationCounts()
        self._request_bytes = self._published_request_bytes = DEFAULT_REQUEST_BYTES
        self._has_egress_price = False
        self.affinity = affinity or IslandAffinity()
        self.reconfigure(config, self.affinity)

    def __iter__(self) -> Iterator[Island]:
        return iter(list(self._islands.values()))  # a copy: a thread renders the metrics page

    def reconfigure(self, config: Sequence[IslandConfig], affinity: IslandAffinity) -> None:
        self.affinity = affinity
        self._configured: Mapping[str, IslandConfig] = {island.name: island for island in config}
        self._has_egress_price = any(island.egress_usd_per_gb for island in config)
        for island in self._islands.values():
            island.config = self._config_of(island.name)
            self._publish(island)

    def _config_of(self, name: str) -> IslandConfig:
        return self._configured.get(name) or IslandConfig(name=name)

    # Members.

    def add(self, node: Node) -> None:
        """Add a node to its island, or move it there."""
        island = self._islands.get(node.island)
        if island is None or node not in island.nodes:  # else keep what the island has measured
            self.remove(node)
            island = self._islands.get(node.island)
        if island is None:
            island = self._islands[node.island] = Island(node.island, self._config_of(node.island))
        island.nodes[node] = None
        self.several = len(self._islands) > 1
        self._publish(island)

    def remove(self, node: Node) -> None:
        for island in list(self._islands.values()):
            if node in island.nodes:
                del island.nodes[node]
                if not island.nodes:
                    del self._islands[island.name]
        self.several = len(self._islands) > 1

    # Distance.

    def record_round_trip(self, node: Node, took_ms: float, now_s: float) -> None:
        """A node answered a health check."""
        island = self._islands.get(node.island)
        if island is not None and island.record_round_trip(took_ms, now_s):
            self._publish_if_changed(island)

    def round_trip_ms(self, island: str) -> float:
        """Return the round trip to an island, which need not have nodes yet; 0 if it is unknown."""
        known = self._islands.get(island)
        return known.round_trip_ms if known is not None else self._config_of(island).round_trip_ms

    def record_request_size(self, size_bytes: float) -> None:
        """A request and its response have this size. Ignored while no island has an egress price."""
        if not self._has_egress_price:
            return
        self._request_bytes += REQUEST_BYTES_WEIGHT * (size_bytes - self._request_bytes)
        if abs(self._request_bytes - self._published_request_bytes) > CHANGE_SHARE * self._published_request_bytes:
            self._published_request_bytes = self._request_bytes
            for island in self._islands.values():
                self._publish_if_changed(island)

    def egress_ms(self, island: Island) -> float:
        """Return what the network costs for an average request, converted to time."""
        usd = self._published_request_bytes * 1e-9 * island.config.egress_usd_per_gb
        return usd / self.affinity.gpu_usd_per_hour * HOUR_MS

    def update_queues(self, work_ms: Mapping[str, float]) -> None:
        """Take a sample of the prefill work in the admission queue, by island."""
        for island in self._islands.values():
            serving = sum(1 for node in island.nodes if node.health.state is HealthState.UP and not node.draining)
            queue_ms = work_ms.get(island.name, 0.0) / max(1, serving)
            island.queue_ms += QUEUE_WEIGHT * (queue_ms - island.queue_ms)
            if island.queue_ms < CHANGE_MS:
                island.queue_ms = 0.0
            self._publish_if_changed(island)

    @property
    def has_queues(self) -> bool:
        return any(island.queue_ms for island in self._islands.values())

    def _distance_ms(self, island: Island) -> float:
        return island.round_trip_ms + self.egress_ms(island) + island.queue_ms

    def _publish_if_changed(self, island: Island) -> None:
        change_ms = abs(self._distance_ms(island) - island.distance_ms)
        if change_ms > max(CHANGE_MS, CHANGE_SHARE * island.distance_ms) or (change_ms and not island.queue_ms):
            self._publish(island)

    def _publish(self, island: Island) -> None:
        """Write the island's distance into its nodes, where the price reads it."""
        island.distance_ms, round_trip_ms = self._distance_ms(island), island.round_trip_ms
        for node in island.nodes:
            node.distance_ms, node.round_trip_ms = island.distance_ms, round_trip_ms


# Conversation affinity: which island each conversation belongs to.
#
# A conversation is recognised by the block at which its last prompt ended. The next turn's prompt contains that block;
# prompts that only share a prefix (a system prompt, a document) do not.
#
#     turn 1     [s1 s2 s3 u4]                   sent to A: remember u4 → A
#     turn 2     [s1 s2 s3 u4 a5 a6 u7]          contains u4: its home is A; remember u7 → A
#     another    [s1 s2 s3 v4]                   contains no remembered block: a new conversation
#
# A session header identifies a conversation directly, per model. Two generations of dictionaries let unused entries
# expire without a search.

REMEMBERED_S: Final = 3600.0
"""Time for which a conversation without requests is remembered, and at least half of it."""
MAX_ENTRIES: Final = 1 << 17
"""Entries in each of the two generations, about 100 bytes each."""
SEARCHED_BLOCKS: Final = 256
"""Blocks from a prompt's end that are searched for the end of the previous turn: its response, and the new messages."""
UNSTABLE_TOKENS: Final = 8
"""The last tokens of a prompt open the response's turn; some chat templates render them differently later."""


class ConversationIslands(NamedTuple):
    home: str
    last: str
    """Where the last turn was served: differs from `home` if the home could not serve it."""


class ConversationAffinity:
    __slots__ = ("_generation_s", "_new", "_old", "_pairs", "log")

    def __init__(self) -> None:
        self._new: dict[int, ConversationIslands] = {}
        self._old: dict[int, ConversationIslands] = {}
        self._generation_s = 0.0
        self._pairs: dict[tuple[str, str], ConversationIslands] = {}
        """One object per pair: there are few islands and many conversations."""
        self.log: list[tuple[int, str, str]] | None = None
        """Key, home and last island of what was remembered, for the peers of this process; None without peers."""

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def entries(self) -> Iterator[tuple[int, str, str]]:
        """Yield the key, home and last island of each conversation, those of the older generation first."""
        for generation in (self._old, self._new):
            for key, islands in list(generation.items()):
                yield key, *islands

    def by_session(self, tenant: str, model: str, session: bytes) -> ConversationIslands | None:
        key = _session_key(tenant, model, session)
        return self._new.get(key) or self._old.get(key)

    def by_prompt(self, chain: bytes, blocks: int, cache_group: str) -> ConversationIslands | None:
        """Return the islands of the conversation that this prompt continues. `blocks`: see `stable_blocks`."""
        if blocks < 2:
            return None
        ends = array("Q", chain[max(0, blocks - 1 - SEARCHED_BLOCKS) * 8 : (blocks - 1) * 8]).tolist()
        if cache_group:
            salt = _salt(cache_group)
            ends = [end ^ salt for end in ends]
        for known in (self._new, self._old):
            if not known.keys().isdisjoint(ends):
                return next(known[end] for end in reversed(ends) if end in known)
        return None

    def remember_session(self, tenant: str, model: str, session: bytes, islands: tuple[str, str], now_s: float) -> None:
        self._remember(_session_key(tenant, model, session), islands, now_s)

    def remember_prompt(
        self, chain: bytes, blocks: int, cache_group: str, islands: tuple[str, str], now_s: float
    ) -> None:
        if blocks:
            (end,) = array("Q", chain[(blocks - 1) * 8 : blocks * 8])
            self._remember(end ^ _salt(cache_group) if cache_group else end, islands, now_s)

    def _remember(self, key: int, islands: tuple[str, str], now_s: float) -> None:
        if self.log is not None:
            self.log.append((key, *islands))
        self.remember(key, islands, now_s)

    def remember(self, key: int, islands: tuple[str, str], now_s: float) -> None:
        """Remember the islands of a conversation, also of one that a peer serves."""
        if now_s - self._generation_s > REMEMBERED_S / 2 or len(self._new) >= MAX_ENTRIES:
            self._generation_s = now_s
            self._old, self._new = self._new, {}
            self._pairs.clear()
        found = self._pairs.get(islands)
        if found is None:
            found = self._pairs[islands] = ConversationIslands(*islands)
        self._new[key] = found


def _session_key(tenant: str, model: str, session: bytes) -> int:
    """Equal in all processes, unlike Python's hash()."""
    tenant_bytes, model_bytes = tenant.encode("utf-8", "surrogatepass"), model.encode("utf-8", "surrogatepass")
    return key_hash(b"%d %s%d %s%s" % (len(tenant_bytes), tenant_bytes, len(model_bytes), model_bytes, session))


def _salt(cache_group: str) -> int:
    return key_hash(cache_group.encode("utf-8", "surrogatepass"))


def stable_blocks(tokens: int, block_size: int) -> int:
    """Return how many of a prompt's blocks the next turn's prompt will begin with."""
    return max(0, tokens - UNSTABLE_TOKENS) // block_size
