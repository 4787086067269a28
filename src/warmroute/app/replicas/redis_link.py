"""The transport between replicas: Redis' publish and subscribe, and a hash for what has to outlive all replicas.

Messages are published, not put into a stream: they are gauges and running totals, so a lost one is made up for by the
next, nothing has to be trimmed, and a server that is full or read-only still passes them on.

    channel PREFIX:messages         the messages of all replicas
    channel PREFIX:to:ORIGIN        messages for one replica (snapshots)
    hash    PREFIX:nodes            changes of nodes at run time, by node; expires REGISTER_TTL_S after the last replica
    key     PREFIX:replica:ORIGIN   a replica's sign of life: shows an operator who is there, and whether writes work

A replica hears its own messages, too. So it knows at any time whether messages pass, and how long they take: if its own
have not come back for SILENCE_S, it is disconnected, whatever the reason. Nothing here is awaited by a request.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import random
from typing import Any, Final, Protocol

from warmroute.app.redis import Client, create_client, describe_error, end_tasks
from warmroute.config import Cluster, ConfigError, parse_redis_url
from warmroute.core.cluster.messages import FULL_S, MAX_MESSAGE_BYTES
from warmroute.core.cluster.transport import LinkStatus
from warmroute.event_log import EventLog

log = EventLog("warmroute.cluster")

SILENCE_S: Final = 1.0
"""A replica whose own messages do not return within this time is disconnected."""
STORE_S: Final = 2.0
"""Time between two comparisons of the stored register with this replica's."""
REGISTER_TTL_S: Final = 3600
REPLICA_TTL_S: Final = 10
MIN_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 1.0
"""Time between two attempts to connect; it doubles, with jitter."""
MAX_UNSENT_BYTES: Final = 8 << 20
"""What may wait for a slow server. Messages beyond it are lost."""
_HEADER: Final = struct.Struct("<Bd")
"""Before each message: the length of the origin, which follows, and when the origin sent it."""


class Receiver(Protocol):
    """What gets the messages. All methods return at once and never raise."""

    def receive(self, message: bytes) -> None:
        """A message of another replica."""

    def receive_stored(self, values: list[bytes]) -> None:
        """The changes of nodes that the server has."""

    def link_changed(self) -> None:
        """`connected` or `writable` has changed."""


def new_origin() -> str:
    """Return a name for this replica: another one after each start."""
    return f"{os.uname().nodename[:64]}-{os.getpid()}-{secrets.token_hex(3)}"


class RedisLink:
    def __init__(self, config: Cluster, origin: str, receiver: Receiver, now: Callable[[], float] = time.monotonic):
        self._config = config
        self.address = parse_redis_url(config.url).label
        self.origin = origin
        self._origin = origin.encode()
        self._receiver = receiver
        self._now = now
        prefix = config.prefix
        self._channel, self._nodes_key = f"{prefix}:messages", f"{prefix}:nodes"
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        self._unstored: dict[str, bytes] = {}
        self._store_wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._heard_s = -1e9
        """When the last message of this replica returned."""
        self.connected = False
        """Whether messages pass."""
        self.writable = False
        """Whether the server takes writes."""
        self.reason = "not connected yet"
        """Why it is not connected, or not writable; empty if all is well."""
        self._writable_until_s = 0.0
        """Since when nothing can be stored, if that is not logged yet."""
        self.changed_s = now()
        """When `connected` or `writable` last changed."""
        self.delay_s = 0.0
        """How long the last message of this replica took to return."""
        self.sent = self.received = self.lost = self.disconnects = 0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for run in (self._listen, self._send, self._keep_stored):
            self._tasks.append(loop.create_task(self._repeat(run)))
        self._tasks.append(loop.create_task(self._watch()))

    async def close(self) -> None:
        """Send what waits, and disconnect."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while self.connected and self._unsent:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        self._closing = True
        await end_tasks(self._tasks)

    # For the cluster's state.

    def publish(self, message: bytes) -> None:
        """Send a message to all other replicas. Returns at once; the message is lost if the server does not take it."""
        self._enqueue(self._channel, message)

    def send(self, to: str, message: bytes) -> None:
        """Send a message to one replica: `to` begins with its origin."""
        self._enqueue(f"{self._config.prefix}:to:{to.partition('/')[0]}", message)

    def _enqueue(self, channel: str, message: bytes) -> None:
        if not self.connected or self._unsent_bytes + len(message) > MAX_UNSENT_BYTES:
            self.lost += 1
            return
        self._unsent.append((channel, message))
        self._unsent_bytes += len(message)
        self._wake.set()

    def store(self, name: str, value: bytes) -> None:
        """Store a change of a node, as soon as the server takes it."""
        self._unstored[name] = value
        self._store_wake.set()

    def status(self) -> LinkStatus:
        return LinkStatus(
            self.address, self.connected, self.writable, self.reason, self.changed_s, self.delay_s, self.lost,
            self.disconnects,
        )  # fmt: skip

    # Connections.

    async def _repeat(self, run: Callable[[Client], Any]) -> None:
        """Run with a new connection, and again after each failure."""
        pause_s = MIN_PAUSE_S
        while True:
            client: Client | None = None
            began_s = self._now()
            try:
                client = create_client(self._config)  # reads the password again
                await run(client)
            except ConfigError as error:
                self.reason = str(error)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # redis-py raises many
                self.reason = describe_error(error)
            finally:
                if client is not None:
                    with suppress(Exception):
                        await client.aclose()
            pause_s = MIN_PAUSE_S if self._now() - began_s > 5.0 else min(MAX_PAUSE_S, 2.0 * pause_s)
            await asyncio.sleep(pause_s * (0.75 + 0.5 * random()))

    async def _listen(self, client: Client) -> None:
        subscription = client.pubsub(ignore_subscribe_messages=True)
        try:
            await subscription.subscribe(self._channel, f"{self._config.prefix}:to:{self.origin}")
            subscribed_s = self._now()
            while True:
                found = await subscription.get_message(ignore_subscribe_messages=True, timeout=SILENCE_S)
                if found is not None:
                    self._receive(found["data"])
                elif self._now() - max(self._heard_s, subscribed_s) > 2.0 * SILENCE_S:
                    raise TimeoutError
        finally:
            with suppress(Exception):
                await subscription.aclose()

    def _receive(self, data: bytes) -> None:
        if len(data) < _HEADER.size or len(data) > MAX_MESSAGE_BYTES + 512:
            return
        length, sent_s = _HEADER.unpack_from(data)
        start = _HEADER.size + length
        if data[_HEADER.size : start] == self._origin:
            self._heard_s = self._now()
            self.delay_s = max(0.0, self._heard_s - sent_s)
            self._update()
        elif len(data) > start:
            self.received += 1
            self._receiver.receive(data[start:])

    async def _send(self, client: Client) -> None:
        """Send what waits, and a sign of life if nothing does."""
        while True:
            if not self._unsent:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FULL_S):
                        await self._wake.wait()
            self._wake.clear()
            header = _HEADER.pack(len(self._origin), self._now()) + self._origin
            pipeline = client.pipeline(transaction=False)
            if not self._unsent:
                pipeline.publish(self._channel, header)
            count = 0
            while self._unsent and count < 64:
                channel, message = self._unsent.popleft()
                self._unsent_bytes -= len(message)
                pipeline.publish(channel, header + message)
                count += 1
            try:
                await pipeline.execute()
            except BaseException:
                self.lost += count
                raise
            self.sent += count

    async def _keep_stored(self, client: Client) -> None:
        """Compare the stored register with this replica's, and store what changed."""
        try:
            while True:
                self._store_wake.clear()
                self._receiver.receive_stored(list(await _values(client, self._nodes_key)))
                await self._write(client)
                self._set_writable(True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(STORE_S):
                        await self._store_wake.wait()
        except Exception as error:
            self.reason = describe_error(error)
            raise
        finally:
            self._set_writable(False)

    async def _write(self, client: Client) -> None:
        unstored = dict(self._unstored)
        pipeline = client.pipeline(transaction=False)
        pipeline.set(f"{self._config.prefix}:replica:{self.origin}", self.origin, ex=REPLICA_TTL_S)
        if unstored:
            pipeline.hset(self._nodes_key, mapping=unstored)
        pipeline.expire(self._nodes_key, REGISTER_TTL_S)
        await pipeline.execute()
        for name, value in unstored.items():
            if self._unstored.get(name) == value:
                del self._unstored[name]

    # State.

    async def _watch(self) -> None:
        """Notice silence."""
        while True:
            await asyncio.sleep(SILENCE_S / 10.0)
            self._update()
            self._check_writable()

    def _update(self) -> None:
        connected = self._now() - self._heard_s <= SILENCE_S
        if connected == self.connected:
            return
        self.connected = connected
        self.changed_s = self._now()
        if connected:
            if self.writable:
                self.reason = ""
            log.info("cluster_connected", "Messages of other replicas arrive.", address=self.address)
        else:
            self.disconnects += 1
            self.reason = self.reason or "the server does not reply"
            self._unsent.clear()
            self._unsent_bytes = 0
            log.warning(
                "cluster_disconnected",
                "This replica goes on alone: it uses its share of the rate limits and does not scale.",
                address=self.address,
                reason=self.reason,
            )
        self._receiver.link_changed()

    def _set_writable(self, writable: bool) -> None:
        if writable == self.writable or self._closing:
            return
        self.writable = writable
        self.changed_s = self._now()
        if writable:
            if self.connected:
                self.reason = ""
            log.info("cluster_writable", "Changes of nodes and the lease of the autoscaler are stored.")
        else:
            self._writable_until_s = self.changed_s
        self._receiver.link_changed()

    def _check_writable(self) -> None:
        """Log that nothing can be stored, once it is clear that the server itself is there."""
        if self.writable or not self.connected or not self._writable_until_s:
            return
        if self._now() - self._writable_until_s > SILENCE_S:
            self._writable_until_s = 0.0
            log.warning(
                "cluster_not_writable",
                "Messages pass, but nothing can be stored: no replica scales.",
                address=self.address,
                reason=self.reason,
            )


async def _values(client: Client, key: str) -> Iterable[bytes]:
    found: dict[bytes, bytes] = await client.hgetall(key)
    return found.values()
