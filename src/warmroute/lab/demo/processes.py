"""Warmroute's commands as child processes, and a router among them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from warmroute import http_client
from warmroute.config import ConfigError
from warmroute.config.file import EXPERIMENT

# Warmroute commands as child processes that never outlive their parent.

GRACE_S = 3.0


class Child:
    """One `warmroute …` process. Ctrl-C in the terminal does not reach it: its parent stops it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.name = f"warmroute {arguments[0]}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmroute.lab.demo.die_with_parent", str(os.getpid()), "-", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            # The demo lasts a minute: its router looks back for seconds, which is no key of a file.
            env=os.environ | {EXPERIMENT: "1"},
        )

    def first_line(self) -> bytes:
        """Wait for the first line on standard output. Raises ConfigError if the process ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(GRACE_S)
            raise ConfigError(self.start_error())
        return line

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def stderr_text(self) -> str:
        """Return what the process has written to standard error so far."""
        file = self._stderr.fileno()  # pread, because the child writes at the file's own position
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def start_error(self) -> str:
        """Return why the process did not start, from its last line on standard error."""
        lines = self.stderr_text().strip().splitlines()
        reason = lines[-1].removeprefix("warmroute: ") if lines else f"exit status {self.process.returncode}"
        return f"{self.name} did not start: {reason}"

    def close(self) -> None:
        """Close the files of a process that has ended."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()


class Children:
    """The running child processes. Leaving the context stops them all."""

    def __init__(self) -> None:
        self._running: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end(*reversed(self._running))

    def start(self, *arguments: str) -> Child:
        child = Child(arguments)
        self._running.append(child)
        return child

    def end(self, *children: Child) -> None:
        """Terminate processes, and kill those that are still running after GRACE_S."""
        for child in children:
            child.process.terminate()
        deadline_s = time.monotonic() + GRACE_S
        for child in children:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.close()
            self._running.remove(child)


def free_port(first: int, host: str = "127.0.0.1", tries: int = 50) -> int:
    """Return the first free port from `first` on. Raises ConfigError."""
    for port in range(first, first + tries):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"the ports {first} to {first + tries - 1} are all in use")


# The router as a child process, with a configuration file written for it.

HOST: Final = "127.0.0.1"
FIRST_ADMIN_PORT: Final = 8181
_READY_WITHIN_S: Final = 60.0
_REQUEST_TIMEOUT_S: Final = 30.0
_MAX_RESPONSE_BYTES: Final = 64 << 20


async def send_request(method: str, url: str) -> tuple[int, bytes]:
    """Return status and body. Raises OSError if there is no complete response in time."""
    return await http_client.request(method, url, timeout_s=_REQUEST_TIMEOUT_S, limit_bytes=_MAX_RESPONSE_BYTES)


class RouterProcess:
    """A router that is ready."""

    def __init__(self, child: Child, port: int, admin_port: int) -> None:
        self.child = child
        self.url = f"http://{HOST}:{port}"
        self.admin_url = f"http://{HOST}:{admin_port}"

    async def admin_get(self, path: str) -> Any:
        """Return the JSON of an admin endpoint. Raises ConfigError."""
        try:
            status, body = await send_request("GET", self.admin_url + path)
        except OSError as error:
            if self.child.has_ended():
                raise ConfigError(f"the router exited with status {self.child.process.returncode}") from None
            raise ConfigError(f"the router's admin API does not answer: {error}") from None
        if status != 200:
            raise ConfigError(f"the router's admin API returned {status} for {path}")
        return msgspec.json.decode(body)


async def start_router(children: Children, folder: Path, port: int, tables: Mapping[str, Any]) -> RouterProcess:
    """Start a router and wait until it is ready. Raises ConfigError."""
    admin_port = free_port(max(FIRST_ADMIN_PORT, port + 1))
    ports = {"listen": {"host": HOST, "port": port}, "admin": {"port": admin_port}}
    file = folder / f"router-{port}.toml"
    file.write_text(as_toml({**ports, **tables}), encoding="utf-8")
    router = RouterProcess(children.start("serve", "--config", str(file)), port, admin_port)
    try:
        async with asyncio.timeout(_READY_WITHIN_S):
            while True:
                await asyncio.sleep(0.05)
                if router.child.has_ended():
                    raise ConfigError(router.child.start_error())
                try:
                    status, _ = await send_request("GET", f"{router.url}/ready")
                except OSError:
                    continue
                if status == 200:
                    return router
    except BaseException as error:
        children.end(router.child)
        if isinstance(error, TimeoutError):
            raise ConfigError(f"the router was not ready within {_READY_WITHIN_S:g} s") from None
        raise


def as_toml(tables: Mapping[str, Any]) -> str:
    """Write tables, and lists of tables, as TOML. Values are encoded as JSON, which is valid TOML for them."""
    lines: list[str] = []
    for name, content in tables.items():
        several = isinstance(content, list)
        for table in content if several else (content,):
            head = f"[[{name}]]" if several else f"[{name}]"
            lines += [head, *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()), ""]
    return "\n".join(lines)
