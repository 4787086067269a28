"""Receives one node's KV events. Finds out where the node publishes them, and subscribes to every rank over ZMQ; polls
TensorRT-LLM.

The client repeats discovery at growing intervals while the node publishes nothing, now and then while it publishes, and
at once when the node comes back or restarts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec

from warmroute.engines import kv_endpoints, trtllm
from warmroute.engines.byte_budget import ByteBudget
from warmroute.engines.kv_endpoints import KvEndpoint
from warmroute.engines.kv_events import BadPayload, decode_batch, sent_time_s
from warmroute.engines.kv_rank import NodeKvEvents, RankEvents
from warmroute.engines.kv_zmq import SLICE_S, KvSubscription, SliceScheduler
from warmroute.engines.node_http import Get, Post
from warmroute.event_log import EventLog
from warmroute.fleet.health import HealthState
from warmroute.fleet.node import Node
from warmroute.fleet.reported_values import ReportedValues
from warmroute.index.node_cache import NodeCache

log = EventLog("warmroute.engines")

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 60.0
"""Discovery is retried after the first interval, which then doubles up to the last."""
REDISCOVERY_S: Final = 30.0
"""Interval of discovery for a node that publishes events."""
POLL_S: Final = 0.15
TIMEOUT_S: Final = 2.0


@dataclass(eq=False)
class KvEventClient:
    _node: Node
    cache: NodeCache
    _scheduler: SliceScheduler
    _get: Get
    _post: Post
    _now: Callable[[], float] = time.monotonic
    _enabled: Callable[[], bool] = lambda: True
    _random: Random = field(default_factory=Random)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _subscriptions: dict[int, KvSubscription] = field(default_factory=dict)
    _has_asked: bool = False
    _polls: bool = False
    _page_size: int = 0
    _logged: list[KvEndpoint] | None = None
    _budget: ByteBudget = field(default_factory=ByteBudget)

    def __post_init__(self) -> None:
        self._events = NodeKvEvents(self.cache)

    @property
    def block_size(self) -> int:
        """From its events or its /server_info; 0 if neither contains it."""
        return self._events.block_size or self._page_size

    @property
    def is_connected(self) -> bool:
        return bool(self._events.ranks)

    @property
    def is_settled(self) -> bool:
        """Whether the router has asked for the node's events, and has applied those that it sent before."""
        return self._has_asked and all(rank.is_settled for rank in self._events.ranks.values())

    def rediscover(self) -> None:
        self._wake.set()

    def restarted(self, started_s: float, polled_s: float) -> None:
        """Start again with the engine's new process, which started at `started_s` by its own clock. The previous one
        was last seen at `polled_s`."""
        self._read_again(self._events.restarted(started_s, polled_s))
        self.rediscover()

    def model_changed(self) -> None:
        """Read everything again: the node's blocks belong to another model than before."""
        for rank in self._events.ranks.values():
            rank.restart()
        self._read_again(self._events.ranks)

    def _read_again(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._subscriptions:
                self._subscriptions[rank].read_from_start()

    def close(self) -> None:
        self._subscribe([])
        self._stop_polling()

    # Discovery.

    async def run(self) -> None:
        """Receive events for as long as the node is in the fleet."""
        pause_s = FIRST_RETRY_S
        while True:
            if self.cache.model and self._node.health.state is not HealthState.DOWN:
                found = await self._discover()
                self._has_asked = self._has_asked or not self._polls
                pause_s = REDISCOVERY_S if found else min(2 * pause_s, LAST_RETRY_S)
            else:
                pause_s = FIRST_RETRY_S
            if self._polls:
                pause_s = await self._poll()
            if await self._pause(pause_s):
                pause_s = FIRST_RETRY_S

    async def _pause(self, seconds: float) -> bool:
        """Return whether `rediscover` ended the pause."""
        try:
            async with asyncio.timeout(seconds * (0.8 + 0.4 * self._random.random())):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _discover(self) -> bool:
        """Subscribe to what the node publishes. Return False if that is nothing, or if the node did not answer."""
        node = self._node
        setting = node.config.kv_events if self._enabled() else "off"
        if node.engine == "trtllm" and setting == "auto":
            self._subscribe([])
            self._polls = True
            return True
        self._stop_polling()
        if setting == "off":
            found: list[KvEndpoint] | None = []
        elif setting == "auto":
            found = await self._ask_endpoints()
        else:
            found = kv_endpoints.configured_endpoints(setting, node.config.kv_replay, node.host)
        if found is None:
            return False
        self._subscribe(found)
        self._log_endpoints(found)
        return bool(found) or setting == "off"

    async def _ask_endpoints(self) -> list[KvEndpoint] | None:
        """Return None if the node did not answer: the subscriptions stay."""
        node = self._node
        try:
            status, body = await self._get(node, "/kv_event_sources", TIMEOUT_S)
            endpoints = kv_endpoints.parse_event_sources(body, node.host, node.reported) if status == 200 else []
            if not endpoints and node.engine != "vllm":
                status, body = await self._get(node, "/server_info", TIMEOUT_S)
                if status == 200:
                    info = kv_endpoints.parse_server_info(body, node.host, node.reported)
                    endpoints, self._page_size = info.endpoints, info.block_size
                    self.cache.set_size(info.block_size, info.capacity_tokens)
        except (OSError, ValueError):
            return None
        replay = node.config.kv_replay
        return [
            one if one.replay else one._replace(replay=kv_endpoints.reachable_endpoint(replay, node.host, one.rank))
            for one in endpoints
        ]

    def _log_endpoints(self, found: list[KvEndpoint]) -> None:
        if not self._enabled():
            self._logged = None  # no policy uses events: that says nothing about the node
            return
        if found == self._logged:
            return
        self._logged = found
        name = self._node.name
        if not found:
            log.info("kv_events_absent", "The router infers the node's cache from routed requests.", node=name)
            return
        endpoints = ",".join(one.endpoint for one in found)
        log.info("kv_events_found", "The router subscribes to them.", node=name, ranks=len(found), endpoints=endpoints)
        if not all(one.replay for one in found):
            log.warning(
                "kv_replay_absent",
                "The router cannot learn what the node cached before. When an event is lost, it forgets what events "
                "reported, and uses routed prompts. "
                "docs/reference/kv-events.md names the flag that turns replay on.",
                node=name,
            )

    # Subscriptions.

    def _subscribe(self, endpoints: list[KvEndpoint]) -> None:
        wanted = {one.rank: one for one in endpoints}
        for rank, subscription in list(self._subscriptions.items()):
            endpoint = wanted.get(rank)
            if endpoint is not None and subscription.endpoints == (endpoint.endpoint, endpoint.replay):
                subscription.catch_up()
                continue
            subscription.close()
            del self._subscriptions[rank]
            self._events.remove_rank(rank)
        for rank, endpoint in wanted.items():
            if rank not in self._subscriptions:
                self._connect(endpoint)

    def _connect(self, endpoint: KvEndpoint) -> None:
        rank = endpoint.rank
        events = self._events.ranks[rank] = RankEvents(
            self.cache,
            rank,
            lambda: lambda payload: decode_batch(payload).events,
            sent_time_s,
            self._now,
            budget=self._budget,
            size_bytes=len,
        )
        self._subscriptions[rank] = KvSubscription(
            events, endpoint.endpoint, endpoint.replay, self._scheduler, self._node.reported, self._budget
        )

    # Polling.

    async def _poll(self) -> float:
        """Poll until the node fails or discovery is due. Return how long to wait then."""
        while not self._wake.is_set():
            if self._node.health.state is HealthState.DOWN:
                return FIRST_RETRY_S
            try:
                status, body = await self._post(self._node, trtllm.PATH, b"", TIMEOUT_S)
                if status != 200:
                    self._stop_polling()
                    return LAST_RETRY_S
                events = trtllm.split_events(body)
            except OSError:
                return FIRST_RETRY_S
            except BadPayload as error:
                log.warning(
                    "kv_events_unreadable", "The router infers the node's cache from routed requests.",
                    node=self._node.name, reason=str(error),
                )  # fmt: skip
                self._stop_polling()
                return LAST_RETRY_S
            self.cache.last_contact_s = self._now()
            await apply_polled(self._events, events, self._node.reported, self._now)
            self._has_asked = True
            await asyncio.sleep(POLL_S * (0.8 + 0.4 * self._random.random()))
        return FIRST_RETRY_S

    def _stop_polling(self) -> None:
        if self._polls:
            self._polls = False
            for rank in list(self._events.ranks):
                self._events.remove_rank(rank)


async def apply_polled(
    node: NodeKvEvents, events: Iterable[msgspec.Raw], reported: ReportedValues, now: Callable[[], float]
) -> None:
    """Apply polled events, each of which has a sequence number. Yields to the event loop every few milliseconds.

    The number that an unreadable event leaves out counts as lost."""
    until_s = time.monotonic() + SLICE_S
    for raw in events:
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = time.monotonic() + SLICE_S
        try:
            event = trtllm.decode_event(raw)
        except BadPayload as error:
            reported.ignore("kv_cache_events", "an event", str(error))
            continue
        number = event.attention_dp_rank or 0
        rank = node.ranks.get(number)
        if rank is None:
            rank = node.ranks[number] = RankEvents(node.cache, number, lambda: trtllm.EventConverter().convert, now=now)
        rank.receive(event.event_id, event)
        rank.sequence.skip_missing()
        while rank.work(until_s):
            await asyncio.sleep(0)
            until_s = time.monotonic() + SLICE_S
