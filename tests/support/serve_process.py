"""`warmroute serve` as a process."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.polling import until
from support.raw_client import RawConnection, Response, get, post

_LISTENS = re.compile(r"service_started address=\S+?(?::(\d+))? admin=\S+?(?::(\d+))? nodes=")


class ServeProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        """What it logged."""
        self.port = 0
        self.admin_port = 0

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    async def connect(self, port: int | None = None) -> RawConnection:
        return RawConnection(*await asyncio.open_connection("127.0.0.1", port or self.port, limit=1 << 24))

    async def request(self, request: bytes | None = None, port: int | None = None) -> Response:
        peer = await self.connect(port)
        peer.write(post() if request is None else request)
        response = await peer.response()
        peer.close()
        return response

    async def ready(self) -> None:
        deadline_s = time.monotonic() + 20
        while (await self.request(get("/ready"))).status != 200:
            assert time.monotonic() < deadline_s, self.lines
            await asyncio.sleep(0.02)

    def _find_ports(self) -> bool:
        """Return whether the process listens, and set its ports."""
        for line in self.lines:
            if found := _LISTENS.search(line):
                self.port, self.admin_port = int(found[1] or 0), int(found[2] or 0)
                return True
        return False


@asynccontextmanager
async def serve(*arguments: str | Path) -> AsyncIterator[ServeProcess]:
    """Start the command, and wait until it listens or has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute", "serve", *map(str, arguments),
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    served = ServeProcess(process)

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            served.lines.append(line.decode().rstrip())

    reading = asyncio.ensure_future(read())
    try:
        await until(lambda: process.returncode is not None or served._find_ports(), "the command listens", 20)
        yield served
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
