"""A node: one engine endpoint, what the router knows about it, and its accounting."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from warmroute._kernel import (
    LATENCY_WEIGHT,
    OUTCOME_BROKEN,
    OUTCOME_BUSY,
    OUTCOME_CANCELLED,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    NodeState,
    key_hash,
)
from warmroute._kernel import TTFT_BOUNDS_MS as TTFT_BOUNDS_MS
from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig, node_name
from warmroute.config.node_settings import Role
from warmroute.fleet.concurrency_limit import ConcurrencyLimit
from warmroute.fleet.engine_rates import EngineCounters, EngineRates
from warmroute.fleet.health import Health
from warmroute.fleet.kv_transfer import NEEDS_PARTNER
from warmroute.fleet.lora_adapters import FleetAdapters, LoadedAdapters
from warmroute.fleet.node_speed import NodeSpeed
from warmroute.fleet.outlier_detection import RecentRequests
from warmroute.fleet.prefill_work import work
from warmroute.fleet.reported_values import ReportedValues
from warmroute.fleet.whole_answers import INTERVAL_S, WholeAnswers

if TYPE_CHECKING:
    from warmroute.fleet.failed_tries import FailedTry
    from warmroute.fleet.group import Group

MAX_HIT_SHARE: Final = 0.99
"""A higher share of cached tokens counts as this where the engine reports the mean time of a prefill."""
LATENCY_DECAY_AFTER_S: Final = 5.0
"""Without a new request for this time, the latency average decays."""


class Outcome(enum.IntEnum):
    """How a ticket ended. The values index `Node.outcomes`."""

    OK = OUTCOME_OK
    REJECTED = OUTCOME_REJECTED  # the node answered 4xx: the client's mistake
    BUSY = OUTCOME_BUSY  # the node answered 429 or 503
    FAILED = OUTCOME_FAILED  # connection error, timeout, other 5xx or an invalid response, before the first byte
    BROKEN = OUTCOME_BROKEN  # the response broke off after its first byte
    CANCELLED = OUTCOME_CANCELLED  # the client disconnected


class Node(NodeState):
    """NodeState holds the fields that the kernel reads for prices and updates for tickets."""

    speed: NodeSpeed
    __slots__ = (
        "adapter_names", "api_key_env", "blocked_until_s", "busy_until_s", "concurrency", "config", "context_windows",
        "drained_by_hand", "draining", "engine", "engine_undetected", "excused_failures", "groups", "health", "host",
        "incarnation", "is_limited", "island", "kv_connector", "last_failure", "last_progress_s", "last_served_s",
        "loaded_adapters", "max_inflight", "model_cards", "models", "no_transfer_until_s", "number", "port", "rates",
        "recent_requests", "reported", "role", "running", "scheme", "seed", "transfer_tokens", "url", "waiting",
        "whole_answer_times", "whole_answers",
    )  # fmt: skip

    def __init__(self, config: NodeConfig, health: HealthConfig, adapters: FleetAdapters | None = None) -> None:
        parts = urlsplit(config.url)
        self.name = node_name(config)
        self.url = config.url.rstrip("/")
        self.scheme = parts.scheme
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.reported = ReportedValues(self.name)
        self.concurrency = ConcurrencyLimit()
        self._apply_config(config)
        self.seed = key_hash(self.name.encode())
        """Seed for rendezvous hashing. Derived from the name, so that the address may change."""

        self.number = 0
        """Nodes are in the order of their numbers, which the fleet gives them."""

        # What it serves.
        self.models: tuple[str, ...] | None = config.models or None
        """None until the node was asked."""
        self.model_cards: tuple[dict[str, object], ...] = ()
        self.adapter_names: frozenset[str] = frozenset()
        """Those of `models` that are LoRA adapters."""
        self.loaded_adapters = LoadedAdapters(adapters or FleetAdapters())
        self.context_windows: dict[str, int] = {}
        """By model (see context_windows.py)."""
        self.kv_connector = False
        """Whether the engine reports that it can transfer KV cache to and from other nodes."""
        self.engine_undetected = False
        """Whether the router asked the node which engine it runs, and could not tell."""
        self.no_transfer_until_s = 0.0
        """Until when the node prefills for no other one, because its last answer had no KV transfer parameters."""
        self.transfer_tokens = 0.0
        """KV tokens that other nodes will fetch from this one, or are fetching."""
        self.whole_answers = 0
        """Requests of this process that a prefill node serves alone, although other nodes could."""
        self.blocked_until_s = 0.0
        """Until when it prefills for no other node because of them, if they do not end before."""
        self.incarnation = 0.0
        """Start time of the engine's process, as it reports it. It changes with a restart."""

        # Health, and load as last polled.
        self.health = Health(health)
        self.draining = False
        self.drained_by_hand = False
        """An operator drained it, and only an operator ends that."""
        self.recent_requests = RecentRequests()
        self.excused_failures = 0
        """Failed requests that failed on other nodes, too, or of which it is not known yet whether they do."""
        self.last_served_s = -1e9
        """When a response with a status below 400 had its first token or its end."""
        self.last_failure: FailedTry | None = None
        """The last request that it did not complete."""
        self.last_progress_s = -1e9
        """When a response of the node last began or ended, or the KV usage that it reports changed."""
        self.busy_until_s = 0.0
        """Until when the node asked not to be sent requests: the Retry-After of its last 429 or 503."""
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.polled_s = -1e9
        self.polls = 0
        self.rates = EngineRates()
        self.kv_pressure = 0.0
        """0 to 1: how much less KV memory is free than `kv_usage` says, because the engine preempts requests."""
        self.queue_ms = 0.0
        """Expected time in the engine's own queue; 0 while it has none, or if it is unknown."""
        self.other_load = 0
        """Requests that the node reported at the last poll beyond those of this router."""

        # Distance (see island_registry.py).
        self.distance_ms = 0.0
        self.round_trip_ms = 0.0

        # Accounting of requests on the node: those of this process, and those that its peers have published.
        self.groups: tuple[Group, ...] = ()
        self.inflight = 0
        self.unstarted = 0
        """Requests sent since the last poll that have no first token yet."""
        self.pending_work = 0.0
        """Prefill work of the requests without a first token, in tokens (see node_speed.py)."""
        self.context_tokens = 0
        """Tokens of the requests: what each decode step attends to."""
        self.kv_new = 0
        """Uncached prompt tokens of the requests."""
        self.kv_delta = 0.0
        """KV tokens that requests allocated, minus those they freed, since the last poll."""
        self.arrival_rate = 0.0
        """Arrivals per millisecond, as of `arrival_s`."""
        self.arrival_s = 0.0
        self.last_ticket_s = -1e9
        self.latency_ms = 0.0
        """Moving average of the time a response takes."""
        self.speed = NodeSpeed()
        self.whole_answer_times = WholeAnswers()

    def _apply_config(self, config: NodeConfig) -> None:
        self.config = config
        self.island = config.island
        self.role: Role = config.role
        self.engine: str = config.engine
        self.api_key_env = config.api_key_env
        self.max_inflight = config.max_inflight
        """Requests that it gets at the same time; 0: any number."""
        self.update_is_limited()

    def update_config(self, config: NodeConfig) -> None:
        """Take over a changed configuration of the same endpoint. What the router learned about it stays, and
        so does a role that it got at run time, unless the configured role changes."""
        detected = self.engine if config.engine == self.config.engine else config.engine
        role = self.role if config.role == self.config.role else config.role
        self._apply_config(config)
        self.engine, self.role = detected, role
        if config.models:
            self.models = config.models

    def context_window(self, model: str) -> int:
        """Return the longest prompt and output that the node serves, in tokens; 0 if it is neither configured nor
        reported."""
        windows = self.context_windows
        return self.config.max_model_len or windows.get(model) or windows.get("", 0)

    @property
    def transfers_kv(self) -> bool:
        """Whether the node can be one of a pair: it has a role, or its engine says so; and it is known which engine."""
        if self.engine == "auto":
            return False
        return self.role != "mixed" or (self.kv_connector and self.engine not in NEEDS_PARTNER)

    @property
    def prefills_for_others(self) -> bool:
        return self.role != "decode" and self.transfers_kv

    @property
    def needs_partner(self) -> bool:
        """Whether the node cannot prefill: its requests need a prefill node as well."""
        return self.role == "decode" and self.engine in NEEDS_PARTNER

    @property
    def awaits_detection(self) -> bool:
        """Whether it is not known yet if the node needs a partner: its engine is not detected."""
        return self.role == "decode" and self.engine == "auto" and not self.engine_undetected

    def is_blocked(self, now_s: float) -> bool:
        """Whether a prefill node decodes an answer that a prefill would stop."""
        return self.whole_answers > 0 and now_s < self.blocked_until_s and self.role == "prefill"

    @property
    def can_serve_alone(self) -> bool:
        """Whether a prefill node can serve whole requests. SGLang's cannot."""
        return self.engine not in NEEDS_PARTNER and self.engine != "auto"

    def obstacle_to(self, role: Role) -> str:
        """Return why the node cannot have another role, or an empty string. SGLang is started for one role; an engine
        without a KV connector can only serve whole requests."""
        if role == self.role:
            return ""
        if self.engine == "auto":
            return "its engine is not known: set `engine`"
        if self.engine in NEEDS_PARTNER:
            return f"{self.engine} has the role that it was started with"
        if self.engine == "vllm" and not self.kv_connector:
            return "its engine reports no KV connector"
        return ""

    @property
    def needs_trial_request(self) -> bool:
        """Whether a half-open node has no request that could be its trial. Older requests do not count."""
        return not self.inflight or self.last_ticket_s < self.health.half_open_s

    def update_is_limited(self) -> None:
        """Must follow each change of a limit: requests look at the limits only where there is one."""
        self.is_limited = self.max_inflight > 0 or self.concurrency.most > 0

    @property
    def is_full(self) -> bool:
        """Whether the node has as many requests of this process and its peers as it may have."""
        return 0 < self.max_inflight <= self.inflight

    @property
    def at_concurrency_limit(self) -> bool:
        """Whether the node has as many requests as it seems to serve at a time, some of them without streaming."""
        return 0 < self.concurrency.most <= self.inflight and self.unstreamed > 0

    @property
    def own_inflight(self) -> int:
        """Requests of this process."""
        return self.inflight - self.peer_inflight

    @property
    def load(self) -> int:
        """Requests on the node: exact for this process's, as published for its peers', as polled for others."""
        return self.inflight + self.other_load

    @property
    def queued(self) -> int:
        """Requests that wait on the node for their prefill: in the engine's queue at the last poll, or sent since."""
        return self.waiting + self.unstarted

    def update_load(self, running: int, waiting: int, kv_usage: float, now_s: float) -> None:
        """Take over what the engine's metrics report."""
        self.running = running
        self.waiting = waiting
        if kv_usage != self.kv_usage:  # the engine stores blocks or frees them
            self.last_progress_s = now_s
        self.kv_usage = kv_usage
        self.kv_delta = 0.0
        self.unstarted = 0
        self.polls += 1
        self.polled_s = now_s
        self.other_load = max(0, running + waiting - self.inflight)
        if self.unstreamed:
            if waiting:
                self.assume_prefilled(now_s)
            expected = self.unstreamed_prefills + self.inflight - self.unstreamed
            self.concurrency.reported(running, waiting, expected, self.inflight)
            self.update_is_limited()

    def update_rates(self, counters: EngineCounters, now_s: float) -> None:
        """Take over the engine's counters. To be called after `update_load`."""
        rates = self.rates
        rates.update(counters, self.waiting, now_s)
        self._learn_reported_prefills(counters.first_tokens_are_late, now_s)
        self.kv_pressure = rates.kv_pressure
        self.queue_ms = rates.expected_queue_ms(self.waiting)

    def _learn_reported_prefills(self, may_be_late: bool, now_s: float) -> None:
        """Learn the speed from the engine's own times, unless first tokens have shown it since the last report."""
        rates, speed = self.rates, self.speed
        mean = rates.mean_prefill if rates.new_prefills and speed.answers == rates.speed_answers else None
        if mean is not None:
            tokens, took_ms = mean
            share = min(rates.hit_share or 0.0, MAX_HIT_SHARE)
            done = work(tokens, tokens * share / (1.0 - share))
            if not may_be_late or took_ms < done * speed.ms_per_token:
                step_ms = speed.step_ms if self.running > 1 else 0.0
                speed.learn_reported(rates.new_prefills, done, took_ms, step_ms, now_s)
        rates.speed_answers = speed.answers

    def learn_whole_answer(self, done: float, output_tokens: int, took_ms: float, now_s: float) -> None:
        """Learn the speed from an answer that was not streamed, unless the engine reports the times of its prefills."""
        answers = self.whole_answer_times
        answers.next_s = now_s + INTERVAL_S
        answers.add(done, output_tokens, took_ms)
        ms_per_token = answers.ms_per_token if self.rates.mean_prefill is None else None
        if ms_per_token is not None and done > 0.0:
            self.speed.learn_reported(1, done, done * ms_per_token, 0.0, now_s)

    def drop_stale_load(self, stale_s: float, now_s: float) -> None:
        """Forget what the metrics reported if it is too old."""
        if now_s - self.polled_s > stale_s:
            self.concurrency.forget()
            self.update_is_limited()
            self.running = self.waiting = self.other_load = 0
            self.kv_usage = self.kv_delta = self.kv_pressure = self.queue_ms = 0.0

    def decay_latency(self, now_s: float) -> None:
        """Lower the latency average of a node without requests, so that policies try a slow node again."""
        if now_s - self.last_ticket_s > LATENCY_DECAY_AFTER_S:
            self.latency_ms *= 1.0 - LATENCY_WEIGHT
