"""Runs a program to its end within a time limit, off the event loop's way. The request's path waits for none of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple

from warmroute.scaling.provisioner import CloudError


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
    """Raises CloudError where it cannot be started or takes too long; then it is killed with all that it started.
    It need not read what it is told. It runs in a thread of its own: the event loop's own pipes fail where a program
    has gone before they are written."""
    started: list[subprocess.Popen[bytes]] = []
    given_up = threading.Event()
    ended: asyncio.Future[Said] = asyncio.get_running_loop().create_future()

    def work() -> None:
        said: Said | BaseException
        try:
            said = _run(command, who, timeout_s, stdin, started, given_up)
        except Exception as error:
            said = error
        try:
            ended.get_loop().call_soon_threadsafe(_tell, ended, said)
        except RuntimeError:
            pass  # the loop is closed: nobody listens any more

    threading.Thread(target=work, name=f"warmroute-{who}", daemon=True).start()
    try:
        return await ended
    except asyncio.CancelledError:
        given_up.set()
        for process in started:
            _kill_group(process)
        raise


def _tell(ended: asyncio.Future[Said], said: Said | BaseException) -> None:
    if ended.done():
        return
    if isinstance(said, BaseException):
        ended.set_exception(said)
    else:
        ended.set_result(said)


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
        out, err = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # what it was still to be told
        raise CloudError(f"{who}: {' '.join(command[:3])!r} took longer than {timeout_s:g} s") from None
    return Said(process.returncode, out, err)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.returncode is not None:
        return  # its id may be another's by now
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
