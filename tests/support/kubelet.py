"""Runs the Pods of a workload as a kubelet would: it starts an engine for each, writes that it is ready, and after a
Pod's deletion lets it finish before it is gone. Each Pod has its own loopback address.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.engine_scripts import Behaviour
from support.kubernetes_workload import Workload
from support.scripted_engine import ScriptedEngine


class PodRun:
    def __init__(self, name: str, engine: ScriptedEngine) -> None:
        self.name = name
        self.engine = engine
        self.ready_s = 0.0
        self.ready_at = 0.0
        """The same as wall-clock time, to compare with logs."""
        self.terminating_s = 0.0
        """When the kubelet saw its deletion; 0 before."""
        self.gone = False

    @property
    def first_request_s(self) -> float | None:
        return self.engine.seen[0].at_s if self.engine.seen else None

    def requests_after(self, at_s: float) -> int:
        return sum(1 for one in self.engine.seen if one.at_s > at_s)


class Kubelet:
    def __init__(self, workload: Workload, port: int, pre_stop_s: float, behave: Behaviour | None) -> None:
        self._workload = workload
        self._port = port
        self._pre_stop_s = pre_stop_s
        """For how long a Pod serves after its deletion, as with `preStop: sleep`."""
        self._behave = behave
        self._numbers = itertools.count(2)
        self.pods: dict[str, PodRun] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> list[PodRun]:
        return [pod for pod in self.pods.values() if not pod.gone]

    async def run(self) -> None:
        while True:
            for pod in await asyncio.to_thread(self._workload.pods):
                name, deleted = pod["metadata"]["name"], "deletionTimestamp" in pod["metadata"]
                known = self.pods.get(name)
                if known is None and not deleted:
                    await self._start(name)
                elif known is not None and deleted and not known.terminating_s:
                    known.terminating_s = time.monotonic()
                    task = asyncio.ensure_future(self._end(known))
                    self._ending.add(task)
            await asyncio.sleep(0.02)

    async def _start(self, name: str) -> None:
        address = f"127.0.77.{next(self._numbers)}"
        run = self.pods[name] = PodRun(name, ScriptedEngine(host=address, port=self._port))
        run.engine.behave = self._behave or run.engine.behave
        await run.engine.listen()
        await asyncio.to_thread(self._workload.run, name, address=address)
        run.ready_s, run.ready_at = time.monotonic(), time.time()

    async def _end(self, run: PodRun) -> None:
        await asyncio.sleep(self._pre_stop_s)
        await run.engine.close()
        run.gone = True
        await asyncio.to_thread(self._workload.end, run.name)

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        for run in self.running:
            await run.engine.close()


@asynccontextmanager
async def kubelet(
    workload: Workload, port: int, pre_stop_s: float = 1.0, behave: Behaviour | None = None
) -> AsyncIterator[Kubelet]:
    """`behave`: how the engines answer."""
    one = Kubelet(workload, port, pre_stop_s, behave)
    running = asyncio.ensure_future(one.run())
    try:
        yield one
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await one.close()
