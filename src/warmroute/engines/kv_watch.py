"""Listens to one node's KV events: finds out where they are, follows every rank, and begins anew when the node does.

Discovery is asked for again while the node has nothing to say (at growing intervals), now and then while it has, and at
once when the node comes back or has restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import msgspec
import zmq

from warmroute.engines import trtllm
from warmroute.engines.kv_poll import PolledEvents
from warmroute.engines.kv_source import KvSource
from warmroute.engines.kv_sources import Source, configured, reachable, read_server_info, read_sources
from warmroute.engines.kv_stream import Context, KvStream, Turns
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node
from warmroute.index.node_cache import NodeCache

log = logging.getLogger("warmroute.engines")

Fetch = Callable[[Node, str, float], Awaitable[tuple[int, bytes]]]
Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
"""POST a body to a path of a node: status and body. Raises as Fetch does."""

FIRST_S: Final = 0.5
LAST_S: Final = 60.0
"""Discovery is tried again after the first of these, then twice as long each time, up to the last."""
AGAIN_S: Final = 30.0
"""How often a node that told its sources is asked again."""
POLL_S: Final = 0.15
TIMEOUT_S: Final = 2.0


class NodeEvents:
    def __init__(
        self,
        node: Node,
        cache: NodeCache,
        context: Context,
        turns: Turns,
        fetch: Fetch,
        post: Post | None,
        now: Callable[[], float] = time.monotonic,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._node = node
        self._cache = cache
        self._context = context
        self._turns = turns
        self._fetch = fetch
        self._post = post
        self._now = now
        self._wanted = wanted
        self._random = Random()
        self._wake = asyncio.Event()
        self._streams: dict[int, tuple[KvSource, KvStream]] = {}
        self._polled: PolledEvents | None = None
        self._said: str = ""
        self.capacity_tokens = 0
        self._page_size = 0

    @property
    def block_size(self) -> int:
        """As its events tell, or its description; 0 where neither does."""
        if self._polled is not None:
            return self._polled.block_size
        return next((source.block_size for source, _ in self._streams.values()), 0) or self._page_size

    @property
    def sources(self) -> list[Source]:
        return [Source(rank, *stream.endpoints) for rank, (_, stream) in self._streams.items()]

    # What the watcher tells.

    def look_again(self) -> None:
        """Something has changed: ask at once."""
        self._wake.set()

    def restarted(self, started_s: float) -> None:
        """The engine's process is another one since then, by its own clock."""
        if self._polled is not None:
            self._polled.restarted()
        begun = [rank for rank, (source, _) in self._streams.items() if (source.began_s or 0.0) >= started_s]
        self._cache.restarted(begun)
        for rank, (_, stream) in self._streams.items():
            if rank not in begun:
                stream.restarted()
        self.look_again()

    def renamed(self) -> None:
        """Its blocks belong to another model than was thought: read everything again."""
        if self._polled is not None:
            self._polled.restarted()
        for _, stream in self._streams.values():
            stream.restarted()

    def close(self) -> None:
        self._follow([])
        self._end_polling()

    # Discovery.

    async def listen(self) -> None:
        """For as long as the node is there."""
        pause_s = FIRST_S
        while True:
            if self._cache.model and self._node.health.standing is not Standing.OPEN:
                found = await self._look()
                pause_s = AGAIN_S if found else min(2 * pause_s, LAST_S)
            else:
                pause_s = FIRST_S
            if self._polled is not None:
                pause_s = await self._poll(self._polled)
            if await self._pause(pause_s):
                pause_s = FIRST_S

    async def _pause(self, seconds: float) -> bool:
        """True where it was woken."""
        try:
            async with asyncio.timeout(seconds * (0.8 + 0.4 * self._random.random())):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _look(self) -> bool:
        """Follows what the node has to say; False where it has nothing, or could not be asked."""
        node = self._node
        events = node.config.kv_events if self._wanted() else "off"
        if node.engine == "trtllm" and events == "auto":
            self._follow([])
            if self._post is not None and self._polled is None:
                self._polled = PolledEvents(self._cache, self._now)
            return self._polled is not None
        self._end_polling()
        if events == "off":
            found: list[Source] | None = []
        elif events == "auto":
            found = await self._ask()
        else:
            found = configured(events, node.config.kv_replay, node.host)
        if found is None:
            return False
        self._follow(found)
        self._say(found)
        return bool(found) or events == "off"

    async def _ask(self) -> list[Source] | None:
        """None where the node did not answer: what is followed stays."""
        node = self._node
        try:
            status, body = await self._fetch(node, "/kv_event_sources", TIMEOUT_S)
            sources = read_sources(body, node.host) if status == 200 else []
            if not sources and node.engine != "vllm":
                status, body = await self._fetch(node, "/server_info", TIMEOUT_S)
                if status == 200:
                    info = read_server_info(body, node.host)
                    sources, self._page_size, self.capacity_tokens = info
                    self._cache.describe(self._page_size, self.capacity_tokens)
        except (OSError, ValueError):
            return None
        replay = node.config.kv_replay
        return [
            source if source.replay else source._replace(replay=reachable(replay, node.host, source.rank))
            for source in sources
        ]

    def _say(self, found: list[Source]) -> None:
        said = ", ".join(f"rank {source.rank} {source.endpoint}" for source in found) or "none"
        if said == self._said:
            return
        self._said = said
        if not found:
            log.info("node %s publishes no KV events: its cache is told by what is sent there", self._node.name)
            return
        log.info("node %s publishes KV events: %s", self._node.name, said)
        if not all(source.replay for source in found):
            log.warning(
                "node %s does not replay KV events: what it held before is not known, and a lost event costs all "
                "(docs/events.md has the flag)", self._node.name,
            )  # fmt: skip

    # Following.

    def _follow(self, sources: list[Source]) -> None:
        wanted = {source.rank: source for source in sources}
        for rank, (_, stream) in list(self._streams.items()):
            source = wanted.get(rank)
            if source is not None and stream.endpoints == (source.endpoint, source.replay):
                stream.catch_up()
                continue
            stream.close()
            del self._streams[rank]
            self._cache.unfollow(rank)
        for rank, source in wanted.items():
            if rank not in self._streams:
                self._connect(rank, source)

    def _connect(self, rank: int, where: Source) -> None:
        source = KvSource(self._cache, rank, self._now)
        name = f"{self._node.name} (rank {rank})" if rank else self._node.name
        try:
            stream = KvStream(
                self._context, source.feed, where.endpoint, where.replay, name,
                turns=self._turns, work=source.work, heard=source.heard,
            )  # fmt: skip
        except zmq.ZMQError as error:
            log.warning("KV events of %s at %s can't be listened to: %s", name, where.endpoint, error)
            self._cache.unfollow(rank)
            return
        self._streams[rank] = (source, stream)

    # Fetching.

    async def _poll(self, polled: PolledEvents) -> float:
        """Fetches until the node can't be asked or is told to be another; returns how long to wait then."""
        post = self._post
        assert post is not None
        while not self._wake.is_set():
            if self._node.health.standing is Standing.OPEN:
                return FIRST_S
            try:
                status, body = await post(self._node, trtllm.PATH, b"", TIMEOUT_S)
                if status != 200:
                    self._end_polling()
                    return LAST_S
                told = trtllm.read_events(body)
            except OSError:
                return FIRST_S
            except msgspec.DecodeError as error:
                log.warning("KV events of node %s can't be read: %s", self._node.name, error)
                self._end_polling()
                return LAST_S
            await polled.take(told)
            await asyncio.sleep(POLL_S * (0.8 + 0.4 * self._random.random()))
        return FIRST_S

    def _end_polling(self) -> None:
        if self._polled is not None:
            self._polled.close()
            self._polled = None
