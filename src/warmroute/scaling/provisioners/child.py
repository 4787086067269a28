"""Runs a program to its end within a time limit, off the event loop's way. The request's path waits for none of it."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from warmroute.blocking import aside
from warmroute.scaling.provisioner import CloudError, NoAnswer

MOST_BYTES: Final = 64 << 20
"""What a program may say."""


class Said(NamedTuple):
    code: int
    out: bytes
    err: bytes

    @property
    def last_line(self) -> str:
        """Of what it said on standard error, or else on standard output: where programs say what went wrong."""
        for text in (self.err, self.out):
            lines = text.decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()[:300]
        return "it said nothing"


async def run(command: Sequence[str], who: str, *, timeout_s: float, stdin: bytes = b"") -> Said:
    """Raises CloudError where it cannot be started or says too much, and NoAnswer where it takes too long; then it is
    killed with all that it started. It need not read what it is told. It runs in a thread of its own: the event loop's
    own pipes fail where a program has gone before they are written."""
    started: list[subprocess.Popen[bytes]] = []
    given_up = threading.Event()
    try:
        return await aside(lambda: _run(command, who, timeout_s, stdin, started, given_up), who)
    except asyncio.CancelledError:
        given_up.set()
        for process in started:
            _kill_group(process)
        raise


def _run(
    command: Sequence[str], who: str, timeout_s: float, stdin: bytes, started: list[subprocess.Popen[bytes]],
    given_up: threading.Event,
) -> Said:  # fmt: skip
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CloudError(f"{who}: {command[0]!r} cannot be run: {error.strerror}") from None
    started.append(process)
    if given_up.is_set():
        _kill_group(process)
    try:
        out, err = _talk(process, stdin, time.monotonic() + timeout_s)
    except TimeoutError:
        raise NoAnswer(f"{who}: {' '.join(command[:3])!r} took longer than {timeout_s:g} s") from None
    except _TooMuch:
        raise CloudError(f"{who}: {' '.join(command[:3])!r} said more than {MOST_BYTES >> 20} MiB") from None
    finally:
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return Said(process.returncode, out, err)


class _TooMuch(Exception):
    pass


def _talk(process: subprocess.Popen[bytes], stdin: bytes, give_up_s: float) -> tuple[bytes, bytes]:
    """Tells it what it need not read, and takes what it says until it has ended. As `communicate`, which would take
    any amount. Raises TimeoutError."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = memoryview(stdin)
    with selectors.DefaultSelector() as pipes:
        for pipe in said:
            pipes.register(pipe, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        pipes.register(process.stdin, selectors.EVENT_WRITE)
        while pipes.get_map():
            for key, _events in pipes.select(_time_until(give_up_s)):
                if key.fileobj is process.stdin:
                    left = _told(process.stdin.fileno(), left)
                    over = not left
                else:
                    part = os.read(key.fd, 1 << 16)
                    said[key.fileobj].extend(part)  # type: ignore[index]
                    over = not part
                    if sum(map(len, said.values())) > MOST_BYTES:
                        raise _TooMuch
                if over:
                    pipes.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    try:
        process.wait(_time_until(give_up_s))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return bytes(said[process.stdout]), bytes(said[process.stderr])


def _told(pipe: int, left: memoryview) -> memoryview:
    """What is left to tell: nothing where nobody listens any more."""
    try:
        return left[os.write(pipe, left[: 1 << 16]) :]
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]


def _time_until(give_up_s: float) -> float:
    left_s = give_up_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.returncode is not None:
        return  # its id may be another's by now
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
