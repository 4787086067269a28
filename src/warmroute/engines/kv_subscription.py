"""Where a node publishes its KV events, and one subscription for each rank."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from warmroute.config import is_loopback
from warmroute.core.health import HealthState
from warmroute.core.node import Node
from warmroute.core.node_cache import NodeCache
from warmroute.core.reported_values import MAX_RANKS, MAX_SEQUENCE_NUMBER, ReportedValues, decode_json
from warmroute.engines import Get, Post, engine_of, trtllm, zmtp
from warmroute.engines.kv_events import BadPayload, ByteBudget, NodeKvEvents, RankEvents, decode_batch, sent_time_s
from warmroute.engines.zmtp import DEALER, SUB, ZmtpConnection
from warmroute.event_log import EventLog

# Parses where a node publishes its KV events, from its engine's HTTP responses or the configuration. No I/O.

_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?)\Z")
"""A host: a name, an IPv4 address, or an IPv6 address without brackets."""
_ANY_ADDRESS: Final = frozenset({"", "*", "0.0.0.0", "::"})


class KvEndpoint(NamedTuple):
    """The ZMQ endpoints of one data-parallel rank."""

    rank: int
    endpoint: str
    replay: str
    """Endpoint of the replays; empty if the engine replays nothing."""


class ServerInfo(NamedTuple):
    endpoints: list[KvEndpoint]
    block_size: int
    capacity_tokens: int


def reachable_endpoint(endpoint: Any, host: str, offset: int = 0) -> str:
    """Return an engine's endpoint as this router reaches it; empty if it cannot. Replace `*`, or an address that means
    the engine's own machine, by the node's host."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return ""
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    name = name.strip("[]")
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) + offset < 65536:
        return ""
    # Engines print the address that they bind, which is that of their own machine or Pod.
    if name in _ANY_ADDRESS or is_loopback(name):
        name = host
    if not _HOST.match(name):
        return ""
    return f"tcp://{f'[{name}]' if ':' in name else name}:{int(port) + offset}"


def configured_endpoints(events: str, replay: str, host: str) -> list[KvEndpoint]:
    endpoint = reachable_endpoint(events, host)
    return [KvEndpoint(0, endpoint, reachable_endpoint(replay, host))] if endpoint else []


def parse_event_sources(body: bytes, host: str, reported: ReportedValues) -> list[KvEndpoint]:
    """Parse vLLM's /kv_event_sources: a map from rank to publisher settings, or a list of settings with their ranks.
    Raises ValueError."""
    sources = decode_json(body)
    if isinstance(sources, dict):
        entries = list(sources.items())
    elif isinstance(sources, list):
        entries = [(entry.get("data_parallel_rank", 0), entry) for entry in sources if isinstance(entry, dict)]
    else:
        raise ValueError("not a list of sources")
    found: dict[int, KvEndpoint] = {}
    for name, entry in entries[:MAX_RANKS]:
        if not isinstance(entry, dict) or entry.get("publisher", "zmq") != "zmq":
            continue
        is_text = isinstance(name, str) and name.isdecimal() and len(name) < 9
        rank = reported.whole("rank", int(name) if is_text else name)
        endpoint = reachable_endpoint(entry.get("endpoint"), host)
        if endpoint and rank is not None:
            found[rank] = KvEndpoint(rank, endpoint, reachable_endpoint(entry.get("replay_endpoint"), host))
    return list(found.values())


def parse_server_info(body: bytes, host: str, reported: ReportedValues) -> ServerInfo:
    """Parse SGLang's /server_info. `kv_events` has a base port, to which each rank adds its number, or an endpoint for
    each rank. The replay endpoint is in the flag that the engine was started with. Raises ValueError."""
    info = decode_json(body)
    if not isinstance(info, dict):
        raise ValueError("not an object")
    whole = reported.whole
    block_size = whole("block_size", info.get("page_size")) or 0
    capacity = whole("capacity_tokens", info.get("max_total_num_tokens")) or 0
    events = info.get("kv_events")
    if not isinstance(events, dict) or events.get("publisher", "zmq") != "zmq":
        return ServerInfo([], block_size, capacity)
    ranks = whole("ranks", events.get("dp_size")) or 1
    base = f"tcp://{events.get('endpoint_host') or '*'}:{whole('port', events.get('endpoint_port_base')) or 0}"
    by_rank = {rank: reachable_endpoint(base, host, rank) for rank in range(ranks)}
    publishers = events.get("publishers")
    for entry in publishers[:MAX_RANKS] if isinstance(publishers, list) else ():
        if isinstance(entry, dict) and (rank := whole("rank", entry.get("dp_rank"))) is not None:
            by_rank[rank] = reachable_endpoint(entry.get("endpoint"), host)
    replay = _replay_in_flag(info.get("kv_events_config"))
    endpoints = [
        KvEndpoint(rank, endpoint, reachable_endpoint(replay, urlsplit(endpoint).hostname or host, rank))
        for rank, endpoint in by_rank.items()
        if endpoint
    ]
    return ServerInfo(endpoints, whole("block_size", events.get("block_size")) or block_size, capacity)


def _replay_in_flag(flag: Any) -> Any:
    try:
        return decode_json(flag.encode()).get("replay_endpoint") if isinstance(flag, str) else None
    except (ValueError, AttributeError):
        return None


# One rank's KV events over ZMQ: a subscription to its live messages, and replay requests for missing ones.
#
# All subscriptions together get a slice of a few milliseconds in each iteration of the event loop. kv_events.py decides
# what the message numbers mean. zmtp.py limits the size of a message, kv_events.py the memory of all.

log = EventLog("warmroute.engines")

SLICE_S: Final = 0.002
"""Time for messages in one iteration of the event loop."""
MAX_SHARE: Final = 0.2
"""Messages that take longer than a slice get at most this share of the event loop's time."""
REPLAY_TIMEOUT_S: Final = 2.0
"""How long to wait for the first message of a replay."""
REPLAY_PAUSE_S: Final = 0.2
"""How long to wait for each further message: an engine that replays more than its socket holds drops the end."""
REPLAY_MAX_S: Final = 60.0
"""How long a replay may take altogether."""
SUBSCRIBED_S: Final = 1.0
"""Time after which a subscription has reached the engine. Then the router requests what was sent before."""
MAX_REPLAYS: Final = 60
"""Replays that may follow each other at once. One more is allowed each second: an engine whose numbers jump back and
forth must not keep the router busy."""
_END_OF_REPLAY: Final = b"\xff" * 8
SUBSCRIBE_TO_ALL: Final = zmtp.encode(b"\x01")
"""The subscription to every topic: engines name theirs after their address and model."""

Task = Callable[[float], bool]
"""Work until a moment of `time.monotonic`. Return whether work is left."""


class SliceScheduler:
    """Runs tasks in turn, in one slice of time in each iteration of the event loop.

    A message is applied as a whole. After one that took longer than a slice, the tasks pause, so that messages take at
    most MAX_SHARE of the time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Task, None] = {}
        self._scheduled = False

    def add(self, task: Task) -> None:
        self._ready[task] = None
        self._schedule()

    def _schedule(self, pause_s: float = 0.0) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            if pause_s > 0.0:
                self._loop.call_later(pause_s, self._run_slice)
            else:
                self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._scheduled = False
        started_s = time.monotonic()
        until_s = started_s + SLICE_S
        for _ in range(len(self._ready)):
            task = next(iter(self._ready))
            del self._ready[task]
            try:
                if task(until_s):
                    self._ready[task] = None
            except Exception:
                log.exception("kv_events_failed", "The router skips these KV events.")
            if time.monotonic() >= until_s:
                break
        took_s = time.monotonic() - started_s
        self._schedule(took_s * (1.0 / MAX_SHARE - 1.0) if took_s > 4 * SLICE_S else 0.0)


class KvSubscription:
    """Delivers one rank's messages, live and replayed, to its RankEvents."""

    def __init__(
        self,
        events: RankEvents[bytes],
        endpoint: str,
        replay_endpoint: str,
        scheduler: SliceScheduler | None = None,
        reported: ReportedValues | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self._events = events
        self._sequence = events.sequence
        self.endpoints = (endpoint, replay_endpoint)
        self._replay_endpoint = replay_endpoint
        self._scheduler = scheduler or SliceScheduler()
        self._reported = reported or ReportedValues(str(events.log_fields["node"]))
        self._budget = budget or ByteBudget()
        self._loop = asyncio.get_running_loop()
        self._replay: ZmtpConnection | None = None
        self._replay_timer: asyncio.TimerHandle | None = None
        self._catch_up_timer: asyncio.TimerHandle | None = None
        self._replay_started_s = self._replay_received_s = 0.0
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._replays_left = float(MAX_REPLAYS)
        self._replays_counted_s = time.monotonic()
        self._closed = False
        # The subscription first, then the replay: a message between the two arrives twice, not never.
        self._live = self._connect(SUB, endpoint, SUBSCRIBE_TO_ALL, self._catch_up_soon)
        self.read_from_start()

    def _connect(
        self, socket_type: bytes, endpoint: str, message: bytes, on_ready: Callable[[], object]
    ) -> ZmtpConnection:
        parts = urlsplit(endpoint)

        def on_error(reason: str) -> None:
            self._reported.ignore("kv_events", endpoint, reason)

        return ZmtpConnection(
            parts.hostname or "", parts.port or 0, socket_type, message, self._budget, self._wake, on_ready, on_error
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._live.close()
        self._close_replay()
        if self._catch_up_timer is not None:
            self._catch_up_timer.cancel()

    def read_from_start(self) -> None:
        """Request all messages of the engine's process, now and once the subscription has reached the engine."""
        self._close_replay()
        if self._replay_endpoint:
            self._request_replay(0)
            self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._catch_up_timer is not None:
            self._catch_up_timer.cancel()
        self._catch_up_timer = self._loop.call_later(SUBSCRIBED_S, self.catch_up)

    def catch_up(self) -> None:
        """Request the messages that the engine has sent since the last one, in case they did not arrive."""
        if not self._closed and self._replay_endpoint and not self._sequence.replaying:
            self._request_replay(self._sequence.next_number)

    # Reading.

    def _wake(self) -> None:
        self._scheduler.add(self._read)

    def _read(self, until_s: float) -> bool:
        if self._closed:
            return False
        more = self._receive(self._live, self._on_live_message, until_s)
        if self._replay is not None:
            more = self._receive(self._replay, self._on_replayed_message, until_s) or more
        while (start := self._sequence.missing_from) is not None:
            if self._replay_endpoint and self._may_request_replay():
                self._request_replay(start)
            else:
                self._sequence.skip_missing()
        return self._events.work(until_s) or more

    def _receive(self, source: ZmtpConnection, deliver: Callable[[list[bytes]], None], until_s: float) -> bool:
        """Deliver and apply received messages. Return whether there may be more."""
        while not self._events.work(until_s) and time.monotonic() < until_s:
            frames = source.receive()
            if frames is None:
                return False
            try:
                deliver(frames)
            except Exception:
                log.exception("kv_events_failed", "The router skips this message.", **self._events.log_fields)
            if source.closed:
                return False
        return True

    def _on_live_message(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and (number := self._number(frames[1])) is not None:
            self._events.receive(number, frames[2])

    def _number(self, frame: bytes) -> int | None:
        """Return a message's number; None if it is impossible."""
        number = int.from_bytes(frame, "big")
        if len(frame) == 8 and number <= MAX_SEQUENCE_NUMBER:
            return number
        self._reported.ignore("sequence_number", frame[:8].hex(), "not 8 bytes, or too large")
        return None

    # Replay.

    def _may_request_replay(self) -> bool:
        now_s = time.monotonic()
        self._replays_left = min(MAX_REPLAYS, self._replays_left + now_s - self._replays_counted_s)
        self._replays_counted_s = now_s
        if self._replays_left < 1.0:
            self._reported.ignore("kv_replay", MAX_REPLAYS, "its messages have too many gaps")
            return False
        self._replays_left -= 1.0
        return True

    def _request_replay(self, start: int) -> None:
        self._close_replay()
        self._sequence.start_replay()
        request = zmtp.encode(b"", start.to_bytes(8, "big"))
        self._replay = self._connect(DEALER, self._replay_endpoint, request, lambda: None)
        self._replay_started_s = self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_TIMEOUT_S
        self._replay_timer = self._loop.call_later(REPLAY_PAUSE_S, self._check_replay)

    def _on_replayed_message(self, frames: list[bytes]) -> None:
        """Frames: ["", topic, number, payload]; vLLM before 0.24 sends no topic."""
        self._replay_received_s = time.monotonic()
        self._replay_wait_s = REPLAY_PAUSE_S
        if len(frames) < 3:
            return
        if frames[-2] == _END_OF_REPLAY:
            self._close_replay()
            self._sequence.end_replay(finished=True)
            self._wake()
        elif (number := self._number(frames[-2])) is not None:
            self._sequence.receive_replayed(number, frames[-1])

    def _check_replay(self) -> None:
        now_s = time.monotonic()
        left_s = self._replay_received_s + self._replay_wait_s - now_s
        if left_s > 0 and now_s - self._replay_started_s < REPLAY_MAX_S:
            self._replay_timer = self._loop.call_later(min(left_s, REPLAY_PAUSE_S), self._check_replay)
            return
        if self._replay_wait_s == REPLAY_TIMEOUT_S:
            self._warn_of_replay(f"no answer within {REPLAY_TIMEOUT_S:g} s")
        self._give_up_replay()

    def _warn_of_replay(self, reason: str) -> None:
        log.warning(
            "kv_replay_failed", "The router knows only the blocks of KV events that it received live.",
            **self._events.log_fields, endpoint=self._replay_endpoint, reason=reason,
        )  # fmt: skip

    def _give_up_replay(self) -> None:
        self._close_replay()
        self._sequence.end_replay()
        self._wake()

    def _close_replay(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None


# Receives one node's KV events. Finds out where the node publishes them, and subscribes to every rank over ZMQ; polls
# TensorRT-LLM.
#
# The client repeats discovery at growing intervals while the node publishes nothing, now and then while it publishes,
# and at once when the node comes back or restarts.

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 60.0
"""Discovery is retried after the first interval, which then doubles up to the last."""
REDISCOVERY_S: Final = 30.0
"""Interval of discovery for a node that publishes events."""
POLL_S: Final = 0.15
"""Pause between two polls of TensorRT-LLM. Its event buffer is bounded, and events that nobody reads are lost."""
TIMEOUT_S: Final = 2.0
"""A busy engine answers slowly. The subscriptions stay meanwhile."""


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
        """Block size from the node's events or its /server_info; 0 if neither contains it."""
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
        engine = engine_of(node.engine)
        if setting == "auto" and engine.why_no_subscription:
            self._subscribe([])
            self._polls = engine.polls_kv_events
            return True
        self._stop_polling()
        if setting == "off":
            found: list[KvEndpoint] | None = []
        elif setting == "auto":
            found = await self._ask_endpoints()
        else:
            found = configured_endpoints(setting, node.config.kv_replay, node.host)
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
            endpoints = parse_event_sources(body, node.host, node.reported) if status == 200 else []
            # The paths of each engine answer 404 in the others. vLLM is the one engine that surely has no /server_info
            # of this form.
            if not endpoints and node.engine != "vllm":
                status, body = await self._get(node, "/server_info", TIMEOUT_S)
                if status == 200:
                    info = parse_server_info(body, node.host, node.reported)
                    endpoints, self._page_size = info.endpoints, info.block_size
                    self.cache.set_size(info.block_size, info.capacity_tokens)
        except (OSError, ValueError):
            return None
        replay = node.config.kv_replay
        return [
            one if one.replay else one._replace(replay=reachable_endpoint(replay, node.host, one.rank))
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
                # Discovery runs every 30 s. A message that was lost without a successor (the engine is idle now) is
                # found here.
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
        # A polled event that is missing was taken by another consumer, or fell out of the buffer: there is no replay.
        rank.sequence.skip_missing()
        while rank.work(until_s):
            await asyncio.sleep(0)
            until_s = time.monotonic() + SLICE_S
