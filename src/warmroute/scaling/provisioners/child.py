"""Runs a program to its end within a time limit, off the event loop's way. The request's path waits for none of it."""

from __future__ import annotations

import asyncio
import os
import signal
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
    """Raises CloudError where it cannot be started or takes too long; then it is killed with all that it started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CloudError(f"{who}: {command[0]!r} cannot be run: {error.strerror}") from None
    ended = False
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin)
        ended = True
    except TimeoutError:
        raise CloudError(f"{who}: {' '.join(command[:3])!r} took longer than {timeout_s:g} s") from None
    finally:
        if not ended:
            _kill_group(process.pid)
            await process.wait()
    assert process.returncode is not None
    return Said(process.returncode, out, err)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
