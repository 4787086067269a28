"""One node: what the router knows of it, what its engine reports, its accounting and the tickets of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from warmroute._kernel import (
    LATENCY_WEIGHT,
    NodeState,
    TicketState,
    key_hash,
)
from warmroute.config import Health, NodeConfig, node_name
from warmroute.config.nodes import Role
from warmroute.core.adapters import FleetAdapters, LoadedAdapters
from warmroute.core.health import NodeHealth, RecentRequests
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.prefill_work import work
from warmroute.core.reported_values import ReportedValues
from warmroute.core.speeds import INTERVAL_S, NEEDS_PARTNER, NodeSpeed, WholeAnswers

if TYPE_CHECKING:
    from warmroute.core.failed_tries import FailedTry
    from warmroute.core.group import Group


# What an engine's own counters say about the last half minute: its cache hits, preemptions and queue times.
#
#     hit share      tokens found in its cache ÷ tokens looked up
#     pressure       p / (p + 3), with p preemptions in the last ten seconds or so: an engine preempts when its KV
#     memory
#                    is full, whatever its usage is when the router polls it
#     prefill        mean time of a prefill for its mean number of uncached tokens: the only sign of the speed of a node
#                    whose responses are not streamed
#     queue          mean queue time of the requests that ended × (its queue now ÷ its mean queue), while it has a queue
#
# Rates come from two readings of a counter. A counter that falls (a restart) or jumps by more than any engine can do
# starts anew. Older readings fade: the weight of one DECAY_S ago is 1/e.

DECAY_S: Final = 30.0
PREEMPTION_DECAY_S: Final = 10.0
PRESSURE_PREEMPTIONS: Final = 3.0
"""With this many preemptions, half of the free KV memory counts as used."""
MAX_TOKENS_PER_S: Final = 1e7
MAX_EVENTS_PER_S: Final = 1e5
"""Requests or preemptions."""
MIN_QUEUE_MS: Final = 100.0
"""A shorter mean queue time counts as none: a request waits for the next step of the batch in any case."""
MAX_QUEUE_MS: Final = 60_000.0
"""A longer queue time counts as this."""
MAX_PREFILL_S: Final = 600.0
"""A longer prefill counts as this."""


class EngineCounters(msgspec.Struct, frozen=True):
    """Totals since the engine's start; below 0 where the engine does not report them."""

    queried_tokens: float = -1
    """Prompt tokens that were looked up in its prefix cache."""
    hit_tokens: float = -1
    """Those that were found."""
    preemptions: float = -1
    queue_time_s: float = -1.0
    """Sum of the times that ended requests had waited in its queue."""
    queue_times: float = -1
    """Number of these requests."""
    hit_share: float = -1.0
    """Of the last requests, for engines that report no totals."""
    prefill_time_s: float = -1.0
    """Sum of the times from the engine's queue to the first token."""
    prefills: float = -1
    """Number of the requests in this sum."""
    prefilled_tokens: float = -1
    """Their prompt tokens that were not cached."""
    first_tokens_are_late: bool = False
    """Whether the engine may notice the first token of a response that is not streamed later than it comes."""


@dataclass(slots=True, eq=False)
class EngineRates:
    _last: EngineCounters | None = None
    _at_s: float = 0.0
    _queried: float = 0.0
    _hits: float = 0.0
    _preemptions: float = 0.0
    _queue_s: float = 0.0
    _queue_times: float = 0.0
    _prefill_s: float = 0.0
    _prefills: float = 0.0
    _prefilled_tokens: float = 0.0
    new_prefills: int = 0
    """Prefills that the last report added."""
    speed_answers: int = 0
    """First tokens that the node's speed was learned from up to the last report."""
    _waiting_s: float = 0.0
    """Length of its queue, integrated over time."""
    _span_s: float = 0.0
    _gauge: float | None = None
    # totals of what the engine counted while this router watched it; None where it does not report them
    queries_total: float | None = None
    hits_total: float | None = None
    preemptions_total: float | None = None
    # this router's predictions for the same node
    _last_predicted: tuple[int, int, int] | None = None
    _prompts: float = 0.0
    _routed: float = 0.0
    _predicted: float = 0.0

    def update(self, counters: EngineCounters, waiting: int, now_s: float) -> None:
        last, span_s = self._last, now_s - self._at_s
        self._last, self._at_s = counters, now_s
        self.new_prefills = 0
        if last is None or span_s <= 0.0:
            return
        share = counters.hit_share
        self._gauge = share if 0.0 <= share <= 1.0 else None
        kept = exp(-span_s / DECAY_S)
        tokens = _growths(last, counters, ("queried_tokens", "hit_tokens"), MAX_TOKENS_PER_S * span_s)
        times = _growths(last, counters, ("queue_times", "queue_time_s"), MAX_EVENTS_PER_S * span_s)
        prefills = _growths(
            last, counters, ("prefills", "prefilled_tokens", "prefill_time_s"), MAX_TOKENS_PER_S * span_s
        )
        (preempted,) = _growths(last, counters, ("preemptions",), MAX_EVENTS_PER_S * span_s)
        self._add_totals(counters, tokens, preempted)
        self._queried = self._queried * kept + tokens[0]
        self._hits = self._hits * kept + min(tokens)
        self._queue_times = self._queue_times * kept + times[0]
        self._queue_s = self._queue_s * kept + min(times[1], times[0] * MAX_QUEUE_MS / 1000.0)
        self.new_prefills = int(min(prefills[0], MAX_EVENTS_PER_S * span_s))
        self._prefills = self._prefills * kept + self.new_prefills
        self._prefilled_tokens = self._prefilled_tokens * kept + prefills[1]
        self._prefill_s = self._prefill_s * kept + min(prefills[2], self.new_prefills * MAX_PREFILL_S)
        self._preemptions = self._preemptions * exp(-span_s / PREEMPTION_DECAY_S) + preempted
        if self._preemptions < 0.05:  # the last one was more than 30 s ago
            self._preemptions = 0.0
        self._span_s = self._span_s * kept + span_s
        self._waiting_s = self._waiting_s * kept + waiting * span_s
        self._prompts *= kept
        self._routed *= kept
        self._predicted *= kept

    def _add_totals(self, counters: EngineCounters, tokens: list[float], preempted: float) -> None:
        """Unlike the engine's own totals, these survive its restart, and ignore counters that jump."""
        if counters.queried_tokens >= 0 and counters.hit_tokens >= 0:
            self.queries_total = (self.queries_total or 0.0) + tokens[0]
            self.hits_total = (self.hits_total or 0.0) + min(tokens)
        if counters.preemptions >= 0:
            self.preemptions_total = (self.preemptions_total or 0.0) + preempted

    def update_predictions(self, prompts: int, routed_tokens: int, predicted_tokens: int) -> None:
        """Take over the totals of what this router sent to the node, and of what it predicted to be cached there. To be
        called after `update`."""
        last = self._last_predicted or (prompts, routed_tokens, predicted_tokens)
        self._last_predicted = (prompts, routed_tokens, predicted_tokens)
        self._prompts += max(0, prompts - last[0])
        self._routed += max(0, routed_tokens - last[1])
        self._predicted += max(0, predicted_tokens - last[2])

    def forget(self) -> None:
        """The engine has restarted."""
        self._last = self._last_predicted = self._gauge = None
        self._queried = self._hits = self._preemptions = self._queue_s = self._queue_times = 0.0
        self._prefill_s = self._prefills = self._prefilled_tokens = 0.0
        self.new_prefills = 0
        self._waiting_s = self._span_s = self._prompts = self._routed = self._predicted = 0.0

    # What it says.

    @property
    def queried_tokens(self) -> float:
        """Tokens that the hit share is based on."""
        return self._queried

    @property
    def routed_prompts(self) -> float:
        """Prompts that the predicted share is based on."""
        return self._prompts

    @property
    def routed_tokens(self) -> float:
        """Tokens that the predicted share is based on."""
        return self._routed

    @property
    def hit_share(self) -> float | None:
        """None if the engine reports no hits, or had no request."""
        return self._hits / self._queried if self._queried >= 1.0 else self._gauge

    @property
    def predicted_share(self) -> float | None:
        """The share of the prompt tokens that this router predicted to be cached; None if it sent none."""
        return self._predicted / self._routed if self._routed >= 1.0 else None

    @property
    def preemptions_per_s(self) -> float:
        return self._preemptions / PREEMPTION_DECAY_S

    @property
    def kv_pressure(self) -> float:
        return self._preemptions / (self._preemptions + PRESSURE_PREEMPTIONS)

    @property
    def queue_time_ms(self) -> float | None:
        """Mean queue time of the requests that ended; None if the engine does not report it, or none ended."""
        return 1000.0 * self._queue_s / self._queue_times if self._queue_times >= 0.5 else None

    @property
    def mean_prefill(self) -> tuple[float, float] | None:
        """The uncached tokens and the time [ms] of a prefill; None if the engine does not report them. Prefills that
        overlap share the time."""
        if self._prefills < 0.5 or self._prefilled_tokens < 1.0:
            return None
        busy_s = min(self._prefill_s, self._span_s)
        return self._prefilled_tokens / self._prefills, 1000.0 * busy_s / self._prefills

    def expected_queue_ms(self, waiting: int) -> float:
        """Return how long a new request waits in the engine's queue, which has this many requests; 0 if unknown."""
        mean_ms = self.queue_time_ms if waiting else None
        if mean_ms is None or mean_ms < MIN_QUEUE_MS:
            return 0.0
        mean_waiting = self._waiting_s / self._span_s if self._span_s else 0.0
        return min(mean_ms, MAX_QUEUE_MS) * min(1.0, waiting / max(1.0, mean_waiting))


def _growths(before: EngineCounters, now: EngineCounters, names: tuple[str, ...], most: float) -> list[float]:
    """Return by how much these counters grew; zeros if one is not reported, fell, or grew by more than `most`."""
    grown = []
    for name in names:
        old, new = getattr(before, name), getattr(now, name)
        if old < 0.0 or not 0.0 <= new - old <= most:
            return [0.0] * len(names)
        grown.append(float(new - old))
    return grown


# The learned limit of a node's concurrent requests, while it has some that are not streamed.
#
# Nobody sees the first token of a response that is not streamed. The router assumes when its prefill ends, and sends
# the next request. If the node is slower than assumed, or has no place in its batch, the requests wait in the engine's
# own queue, which knows no tenants. The engine reports how many wait there:
#
#     waiting more than the router expects    the limit falls by one step, a quarter, down to what the engine runs
#     nobody waits, and the limit was hit     the limit rises by one step, an eighth
#
# A report only moves the limit. The limit itself is never below 1, so an idle node always gets a request. The first
# report of waiting requests starts from the requests that the node has then. Without reports there is no limit.

LOWER_BY: Final = 4
"""One step down is this part of the limit, and at least one request."""
RAISE_BY: Final = 8
UNUSED_REPORTS: Final = 60
"""A limit that was not hit for this number of reports ends."""


class ConcurrencyLimit:
    __slots__ = ("_unused", "most", "was_hit")

    def __init__(self) -> None:
        self.most = 0
        """Requests that the node gets at the same time; 0: there is no limit."""
        self.was_hit = False
        """Whether it kept a request waiting since the last report."""
        self._unused = 0

    def forget(self) -> None:
        """The engine has restarted, or its reports are too old."""
        self.most = self._unused = 0
        self.was_hit = False

    def reported(self, running: int, waiting: int, expected_waiting: int, inflight: int) -> None:
        """Take over a report. `expected_waiting`: requests without a first token, as far as the router knows;
        `inflight`: all requests of this router and its peers on the node."""
        if waiting > expected_waiting and inflight:
            now = min(self.most, inflight) if self.most else inflight
            self.most = max(1, min(running, now), now - max(1, now // LOWER_BY))
            self._unused = 0
        elif self.was_hit:
            if not waiting:
                self.most += max(1, self.most // RAISE_BY)
            self._unused = 0
        elif self.most:
            self._unused += 1
            if self._unused >= UNUSED_REPORTS:
                self.forget()
        self.was_hit = False


# A node: one engine endpoint, what the router knows about it, and its accounting.

MAX_HIT_SHARE: Final = 0.99
"""A higher share of cached tokens counts as this where the engine reports the mean time of a prefill."""
LATENCY_DECAY_AFTER_S: Final = 5.0
"""Without a new request for this time, the latency average decays."""


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

    def __init__(self, config: NodeConfig, health: Health, adapters: FleetAdapters | None = None) -> None:
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
        self.health = NodeHealth(health)
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

        # Distance (see islands.py).
        self.distance_ms = 0.0
        self.round_trip_ms = 0.0

        # Accounting of requests on the node: those of this process, and those that its peers have published.
        self.groups: tuple[Group, ...] = ()
        self.inflight = 0
        self.unstarted = 0
        """Requests sent since the last poll that have no first token yet."""
        self.pending_work = 0.0
        """Prefill work of the requests without a first token, in tokens (see speeds.py)."""
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

    def is_full_for(self, request: RoutingRequest | None) -> bool:
        """Whether the node has as many requests of this process and its peers as it may have. Who has a request in hand
        names it, since a limit may depend on the request; None: whatever the request."""
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


# A ticket: one request's entry in a node's accounting. Opened at dispatch, and closed exactly once.


class Ticket(TicketState):
    """The kernel's TicketState updates the node's counters at dispatch, first token and end."""

    node: Node
    rank: int
    """The data-parallel rank that holds the prompt's prefix; -1: none is known, or the node has only one."""
    __slots__ = ("_groups", "rank")

    def __init__(self, node: Node, now_s: float) -> None:
        self.rank = -1
        self.open(node, now_s)
        groups = self._groups = node.groups
        for group in groups:
            group.inflight += 1

    def close(self, outcome: Outcome, now_s: float) -> None:
        if self.release(outcome, now_s):
            for group in self._groups:
                group.inflight -= 1


class LoadReport(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    kv_usage: float
    """Share of KV blocks that running requests use, 0 to 1."""
    incarnation: float
    """Start time of the engine's process; 0 if the engine does not report it."""
    block_size: int = 0
    """Tokens in a block of its cache; 0 if the engine does not report it."""
    capacity_tokens: int = 0
    """Tokens that the caches of all ranks hold; 0 if the engine does not report it."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of running requests."""
    adapter_slots: int = 0
    """Adapters that it keeps loaded; 0 if the engine does not report it."""
    counters: EngineCounters = EngineCounters()
