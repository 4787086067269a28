"""The parent's link to other replicas: it passes the workers' messages to Redis, and those of other replicas to all
workers. Workers of one parent hear each other through it alone, so no message arrives twice. The parent keeps the
changes of nodes for workers that start later, and for its next start.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from warmroute.app.node_state import NodeState
from warmroute.app.workers.frames import DIRECT, KEPT, LINK, STATE, STORE, STORED, unpack_named
from warmroute.app.workers.redis_link import RedisLink
from warmroute.app.workers.worker_process import WorkerProcess
from warmroute.config import Cluster
from warmroute.core.cluster.messages import VERSION, Update, encode
from warmroute.core.cluster.shared_nodes import decode_change, encode_change

STATUS_S: Final = 1.0
"""Time between two reports of the link's state to the workers."""


class ReplicaLink:
    """The receiver of the link's messages."""

    def __init__(self, origin: str, workers: Callable[[], Iterable[WorkerProcess]], node_state: NodeState) -> None:
        """`workers` returns those that take part in the cluster."""
        self._origin = origin
        self._node_state = node_state
        self._workers = workers
        self._link: RedisLink | None = None
        self._answering: set[asyncio.Task[None]] = set()

    def start(self, config: Cluster) -> None:
        """Connect to Redis, if the configuration names one."""
        if config.url:
            self._link = RedisLink(config, self._origin, self)
            self._link.start()

    async def run(self) -> None:
        """Report the state of the link to the workers."""
        while self._link is not None:
            self.link_changed()
            await asyncio.sleep(STATUS_S)

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    # From workers.

    def pass_on(self, sender: WorkerProcess, kind: bytes, payload: bytes) -> None:
        if kind == STATE:
            self._to_workers(STATE, payload, sender)
            if self._link is not None:
                self._link.publish(payload)
            return
        try:
            name, value = unpack_named(payload)
        except (ValueError, struct.error):
            return
        if kind == STORE:
            self._store(sender, name, value)
        elif kind == DIRECT:
            worker = next((one for one in self._workers() if one.cluster_id == name.encode()), None)
            if worker is not None:
                worker.link.send_frame(STATE, value)
            elif self._link is not None:
                self._link.send(name, value)

    def _store(self, sender: WorkerProcess, name: str, value: bytes) -> None:
        if self._link is not None:
            self._link.store(name, value)
        self._keep([value])
        answering = asyncio.get_running_loop().create_task(self._say_whether_kept(sender))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    def _keep(self, values: Iterable[bytes]) -> None:
        for value in values:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._node_state.keep(decode_change(value))

    async def _say_whether_kept(self, worker: WorkerProcess) -> None:
        kept = await self._node_state.all_kept() or (self._link is not None and self._link.writable)
        worker.link.send_frame(KEPT, b"1" if kept else b"0")

    def joined(self, worker: WorkerProcess) -> None:
        """A worker takes part now. It confirms that it has applied the changes of nodes."""
        if self._link is not None:
            worker.link.send_frame(LINK, msgspec.msgpack.encode(self._link.status()))
        changes = [encode_change(change) for change in self._node_state.changes.values()]
        worker.link.send_frame(STORED, msgspec.msgpack.encode(changes))

    def ended(self, worker: WorkerProcess) -> None:
        """Tell other replicas that a worker is gone."""
        if self._link is not None:
            sender = worker.cluster_id.decode("utf-8", "replace")
            self._link.publish(encode(Update(VERSION, sender, 0, 0.0, True, leaving=True)))

    def _to_workers(self, kind: bytes, payload: bytes, sender: WorkerProcess | None = None) -> None:
        for worker in self._workers():
            if worker is not sender:
                worker.link.send_frame(kind, payload)

    # From other replicas.

    def receive(self, message: bytes) -> None:
        self._to_workers(STATE, message)

    def receive_stored(self, values: list[bytes]) -> None:
        self._keep(values)
        self._to_workers(STORED, msgspec.msgpack.encode(values))

    def link_changed(self) -> None:
        if self._link is not None:
            self._to_workers(LINK, msgspec.msgpack.encode(self._link.status()))
