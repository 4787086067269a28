"""A node: one engine endpoint, what is known of it, and its books."""

from __future__ import annotations

import enum
from math import exp
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from warmroute._kernel._books import NodeState
from warmroute._kernel._hash import key_hash
from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig, node_name
from warmroute.fleet.adapters import Adapters, Loaded
from warmroute.fleet.arrivals import KEPT_S
from warmroute.fleet.health import Health
from warmroute.fleet.speed import Speed

if TYPE_CHECKING:
    from warmroute.fleet.group import Group

FIRST_BYTE_BOUNDS_MS: Final = (
    5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0, 60_000.0,
)  # fmt: skip
"""Of `Node.first_byte_counts`. _books.c has the same."""
LATENCY_KEPT_S: Final = 5.0
"""How long an average stands without a new request."""
LATENCY_WEIGHT: Final = 0.1
"""How much one answer moves the latency average. _books.c has the same."""


class Outcome(enum.IntEnum):
    """How a ticket ended. The values index `Node.outcomes`; _books.c knows how many there are, and OK."""

    OK = 0
    REJECTED = 1  # the node said 4xx: the client's affair
    BUSY = 2  # the node said 429 or 503
    FAILED = 3  # connect error, time-out, 5xx, garbage, before the first byte went out
    BROKEN = 4  # the answer broke off after it had begun
    LEFT = 5  # the client went away


class Node(NodeState):
    """What a price is made of, and the books, lie in NodeState, for the kernel; that is used like the rest."""

    speed: Speed
    __slots__ = (
        "adapter_names",
        "api_key_env",
        "config",
        "draining",
        "engine",
        "groups",
        "health",
        "host",
        "incarnation",
        "island",
        "loaded",
        "model_cards",
        "models",
        "port",
        "role",
        "running",
        "scheme",
        "seed",
        "url",
        "waiting",
    )

    def __init__(self, config: NodeConfig, health: HealthConfig, adapters: Adapters | None = None) -> None:
        parts = urlsplit(config.url)
        self.name = node_name(config)
        self.url = config.url.rstrip("/")
        self.scheme = parts.scheme
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._describe(config)
        self.seed = key_hash(self.name.encode())
        """The node's seed in rendezvous hashing: from its name, so that an address may change under it."""

        # What it serves. None: not asked yet.
        self.models: tuple[str, ...] | None = config.models or None
        self.model_cards: tuple[dict[str, object], ...] = ()
        self.adapter_names: frozenset[str] = frozenset()
        """Of its models, those that are LoRA adapters on another one."""
        self.loaded = Loaded(adapters or Adapters(0.0))
        self.incarnation = 0.0
        """Start time of the engine's process, as it reports it; another value is another incarnation."""

        # What is believed of it.
        self.health = Health(health)
        self.draining = False
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.kv_delta = 0.0
        """Tokens of KV memory that our requests took, less those given back, since the last poll."""
        self.context = 0
        """Tokens of our requests there: what each step of its batch has to look back at."""
        self.arrival_rate = 0.0
        """Of our requests there, as of `arrival_s` [1/ms]."""
        self.arrival_s = 0.0
        self.distance_ms = 0.0
        """The way to its island and back, and what that costs (see routing/terms.py)."""
        self.round_trip_ms = 0.0
        """The way alone (see islands)."""
        self.kv_new = 0
        """Tokens of prompts that our requests there brought, beyond what was cached."""
        self.polled_s = -1e9
        self.polls = 0

        # The books: what this process has there, and what others have.
        self.groups: tuple[Group, ...] = ()
        self.inflight = 0
        self.other_load = 0
        """Requests that the node reported at the last poll beyond those this router had there."""
        self.pending_work = 0.0
        """Prefill work of our requests there that have no first token yet, in tokens (see speed)."""
        self.unstarted = 0
        """Our requests that were sent there since the last poll, and have no first byte yet."""
        self.speed = Speed()
        self.last_ticket_s = -1e9
        self.latency_ms = 0.0

    def _describe(self, config: NodeConfig) -> None:
        self.config = config
        self.island = config.island
        self.role = config.role
        self.engine: str = config.engine
        self.api_key_env = config.api_key_env

    def redescribe(self, config: NodeConfig) -> None:
        """Takes a changed configuration of the same endpoint: what is known of it stays."""
        self._describe(config)
        if config.models:
            self.models = config.models

    @property
    def awaits_trial(self) -> bool:
        """On trial, and no request is there that could pass it: older ones do not count."""
        return not self.inflight or self.last_ticket_s < self.health.half_open_s

    @property
    def load(self) -> int:
        """Requests on the node now: exact for ours, as last polled for others'."""
        return self.inflight + self.other_load

    @property
    def queued(self) -> int:
        """Requests that wait there for their prefill: in the engine's queue at the last poll, and sent since."""
        return self.waiting + self.unstarted

    def rate(self, now_s: float) -> float:
        """Our requests there a millisecond, over the last ten seconds or so."""
        return self.arrival_rate * exp((self.arrival_s - now_s) / KEPT_S)

    def saw_load(self, running: int, waiting: int, kv_usage: float, now_s: float) -> None:
        """Takes what the engine's metrics say."""
        self.running = running
        self.waiting = waiting
        self.kv_usage = kv_usage
        self.kv_delta = 0.0
        self.unstarted = 0
        self.polls += 1
        self.polled_s = now_s
        self.other_load = max(0, running + waiting - self.inflight)

    def kv_used(self, capacity: float, output: float) -> float:
        """Tokens of KV memory that running requests hold: as polled and changed since, and at least what our own
        requests must have taken, with half of their answers of `output` tokens."""
        return max(self.kv_usage * capacity + self.kv_delta, self.kv_new + 0.5 * output * self.inflight)

    def lost_sight_of_load(self) -> None:
        """Forgets what the metrics said: they are too old to count."""
        self.running = self.waiting = self.other_load = 0
        self.kv_usage = 0.0
        self.kv_delta = 0.0

    def age_latency(self, now_s: float) -> None:
        """Lets an average that no answer confirms fade, so that a node that was slow once gets tried again."""
        if now_s - self.last_ticket_s > LATENCY_KEPT_S:
            self.latency_ms *= 1.0 - LATENCY_WEIGHT
