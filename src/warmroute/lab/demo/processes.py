"""Warmroute commands as child processes that never outlive their parent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

from warmroute.config import ConfigError

GRACE_S = 3.0


class Child:
    """One `warmroute …` process. Ctrl-C in the terminal does not reach it: its parent stops it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.name = f"warmroute {arguments[0]}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "warmroute.demo.die_with_parent", str(os.getpid()), "-", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
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
