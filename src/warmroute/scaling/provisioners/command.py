"""command: the operator's own program. The router runs `PROGRAM offers`, `provision`, `status` or `terminate`; the
program reads JSON from standard input and writes JSON to standard output (json_protocol.py).

Exit code 0 means success, 75 (EX_TEMPFAIL) no capacity, any other a failure. The last line on standard error says why.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from warmroute.blocking import run_in_thread
from warmroute.config import ProvisionerConfig
from warmroute.scaling.provisioner import NoCapacity, ProvisionerError, ProvisionerTimeout
from warmroute.scaling.provisioners.child_environment import child_environment
from warmroute.scaling.provisioners.json_protocol import JsonProvisioner, raise_reported_error

MAX_OUTPUT_BYTES: Final = 64 << 20
NO_CAPACITY = 75


def command_provisioner(config: ProvisionerConfig) -> JsonProvisioner:
    name = config.label

    async def send(call: str, body: bytes) -> bytes:
        result = await run_command([*config.command, call], config, timeout_s=config.timeout_s, stdin=body)
        if result.code:
            raise_reported_error(result.out, f"{name}: {call}", no_capacity=result.code == NO_CAPACITY)
        if result.code == NO_CAPACITY:
            raise NoCapacity(f"{name}: no capacity: {result.last_line}")
        if result.code:
            raise ProvisionerError(f"{name}: {call} failed (exit code {result.code}): {result.last_line}")
        return result.out

    return JsonProvisioner(config, send)


class CommandResult(NamedTuple):
    code: int
    out: bytes
    err: bytes

    @property
    def last_line(self) -> str:
        """The last line on standard error, or else on standard output: where programs report errors."""
        for text in (self.err, self.out):
            lines = text.decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()[:300]
        return "no output"


async def run_command(
    command: Sequence[str], config: ProvisionerConfig, *, timeout_s: float, stdin: bytes = b""
) -> CommandResult:
    """Return the program's exit code and output. The program need not read its input. It runs in a thread, because the
    event loop's own pipes fail where a program ends before it has read its input. Its environment is minimal
    (child_environment.py).

    Raises ProvisionerError if it cannot be started or writes too much, and ProvisionerTimeout if it takes too long.
    Then it is killed with all processes that it started, as it is when the caller is cancelled.
    """
    started: list[subprocess.Popen[bytes]] = []
    cancelled = threading.Event()
    try:
        return await run_in_thread(lambda: _run(command, config, timeout_s, stdin, started, cancelled), config.label)
    except asyncio.CancelledError:
        cancelled.set()
        for process in started:
            _kill_group(process)
        raise


def _run(
    command: Sequence[str], config: ProvisionerConfig, timeout_s: float, stdin: bytes,
    started: list[subprocess.Popen[bytes]], cancelled: threading.Event,
) -> CommandResult:  # fmt: skip
    provisioner = config.label
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(config),
        )
    except OSError as error:
        raise ProvisionerError(f"{provisioner}: cannot run {command[0]!r}: {error.strerror}") from None
    started.append(process)
    if cancelled.is_set():
        _kill_group(process)
    shown = repr(" ".join(command[:3]))
    try:
        out, err = _communicate(process, stdin, time.monotonic() + timeout_s)
    except TimeoutError:
        raise ProvisionerTimeout(f"{provisioner}: {shown} took longer than {timeout_s:g} s") from None
    except _TooMuchOutput:
        raise ProvisionerError(f"{provisioner}: {shown} wrote more than {MAX_OUTPUT_BYTES >> 20} MiB") from None
    finally:
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return CommandResult(process.returncode, out, err)


class _TooMuchOutput(Exception):
    pass


def _communicate(process: subprocess.Popen[bytes], stdin: bytes, deadline_s: float) -> tuple[bytes, bytes]:
    """Like Popen.communicate, with a limit on the output. Raises TimeoutError and _TooMuchOutput."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    unsent = memoryview(stdin)
    with selectors.DefaultSelector() as pipes:
        for pipe in output:
            pipes.register(pipe, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        pipes.register(process.stdin, selectors.EVENT_WRITE)
        while pipes.get_map():
            for key, _events in pipes.select(_time_until(deadline_s)):
                if key.fileobj is process.stdin:
                    unsent = _write(process.stdin.fileno(), unsent)
                    done = not unsent
                else:
                    part = os.read(key.fd, 1 << 16)
                    output[key.fileobj].extend(part)  # type: ignore[index]
                    done = not part
                    if sum(map(len, output.values())) > MAX_OUTPUT_BYTES:
                        raise _TooMuchOutput
                if done:
                    pipes.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    try:
        process.wait(_time_until(deadline_s))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return bytes(output[process.stdout]), bytes(output[process.stderr])


def _write(pipe: int, unsent: memoryview) -> memoryview:
    """Return what is left to write: nothing if the program has closed its input."""
    try:
        return unsent[os.write(pipe, unsent[: 1 << 16]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]


def _time_until(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program with all processes that it started."""
    if process.returncode is None:  # else another process may have its id by now
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
