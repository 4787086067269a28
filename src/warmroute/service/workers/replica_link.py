"""The parent's link to other replicas: it passes the workers' messages to Redis, and those of other replicas to all
workers. Workers of one parent hear each other through it alone, so no message arrives twice."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from warmroute.cluster.messages import VERSION, Update, encode
from warmroute.cluster.redis.link import RedisLink
from warmroute.config import Cluster
from warmroute.service.workers.frames import DIRECT, LINK, STATE, STORE, STORED, unpack_named
from warmroute.service.workers.worker_process import WorkerProcess

STATUS_S: Final = 1.0
"""Time between two reports of the link's state to the workers."""


class ReplicaLink:
    """The receiver of the link's messages."""

    def __init__(self, origin: str, workers: Callable[[], Iterable[WorkerProcess]]) -> None:
        """`workers` returns those that take part in the cluster."""
        self._origin = origin
        self._workers = workers
        self._link: RedisLink | None = None
        self._stored = msgspec.msgpack.encode([])

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
        if kind == STORE and self._link is not None:
            self._link.store(name, value)
        elif kind == DIRECT:
            worker = next((one for one in self._workers() if one.cluster_id == name.encode()), None)
            if worker is not None:
                worker.link.send_frame(STATE, value)
            elif self._link is not None:
                self._link.send(name, value)

    def joined(self, worker: WorkerProcess) -> None:
        """A worker takes part now."""
        if self._link is not None:
            worker.link.send_frame(LINK, msgspec.msgpack.encode(self._link.status()))
            worker.link.send_frame(STORED, self._stored)

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
        self._stored = msgspec.msgpack.encode(values)
        self._to_workers(STORED, self._stored)

    def link_changed(self) -> None:
        if self._link is not None:
            self._to_workers(LINK, msgspec.msgpack.encode(self._link.status()))
