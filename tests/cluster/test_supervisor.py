"""The parent of workers keeps its workers running, whatever happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.polling import until

from warmroute.app.workers.supervisor import Supervisor
from warmroute.config import Admin, Config, Listen, NodeConfig

WORKER = """
import os, pathlib, struct, sys, time
from warmroute.app.workers.seat import take_seat
seat = take_seat()
folder = pathlib.Path(sys.argv[1])
if (folder / "broken").exists():
    sys.exit(3)
(folder / f"pid-{os.getpid()}").touch()
for kind, payload in ((b"R", b"worker-%d" % os.getpid()), (b"A", b"")):
    os.write(seat.link_fd, struct.pack("<Ic", len(payload), kind) + payload)
time.sleep(60)
"""


@asynccontextmanager
async def supervised(command: list[str]) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    config = Config(listen=Listen(port=0), admin=Admin(port=0), nodes=(NodeConfig(url="http://127.0.0.1:1"),))
    supervisor = Supervisor(lambda: config, None, 2, command)
    running = asyncio.create_task(supervisor.run_until_signal())
    try:
        yield supervisor, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_workers_that_fail_to_start_again_do_not_end_a_parent_whose_workers_have_served(tmp_path: Path) -> None:
    async with supervised([sys.executable, "-c", WORKER, str(tmp_path)]) as (supervisor, running):
        await until(lambda: len(supervisor.serving) == 2)
        (tmp_path / "broken").touch()
        for name in os.listdir(tmp_path):
            if name.startswith("pid-"):
                os.kill(int(name.removeprefix("pid-")), signal.SIGKILL)
        await until(lambda: supervisor.restarts >= 4)
        assert not running.done() and not supervisor.serving
        (tmp_path / "broken").unlink()
        await until(lambda: len(supervisor.serving) == 2)


async def test_a_parent_that_cannot_start_any_worker_ends(tmp_path: Path) -> None:
    async with supervised([str(tmp_path / "missing")]) as (_, running), asyncio.timeout(10.0):
        assert await running == 1
