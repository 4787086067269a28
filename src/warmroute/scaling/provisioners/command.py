"""The provisioners `command` and `webhook`: the operator's own program or service."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from warmroute.blocking import run_in_thread
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.http_client import request
from warmroute.scaling.offers import Offer, OfferValidator
from warmroute.scaling.provisioner import Machine, NoCapacity, ProvisionerError, ProvisionerTimeout, child_environment

# The JSON that the `command` and `webhook` provisioners exchange with the operator's program or service.
#
# A call is an object, and so is its answer:
#
# call        sent, beside `protocol`, `call`, `deployment`    answer
# ---------   ----------------------------------------------   --------------------------------------------------------
# offers                                                       {"offers": [{"name", "gpu", "usd_per_hour", …}]}
# provision   {"offer": {…}, "token"}                          {}
# status                                                       {"machines": [{"id", "token", "offer", "state", …}]}
# terminate   {"machine": {…}}                                 {}
#
# The router sends an offer or a machine back exactly as it was reported, fields included that the router does not know.
# Every answer may be {"error": {"code", "message"}} instead; the code `no_capacity` makes the offer back off.

PROTOCOL: Final = 1
"""Version of the protocol. It changes if a program that follows the old version would fail."""
NO_CAPACITY: Final = "no_capacity"

Send = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a call's name and body, and returns the answer. Raises ProvisionerError."""


class JsonProvisioner:
    """The Provisioner protocol over `send`."""

    def __init__(self, config: ProvisionerConfig, send: Send) -> None:
        self.name = config.label
        self._config = config
        self._send = send
        self._validator = OfferValidator(config)
        self._reported_offers: dict[str, dict[str, Any]] = {}
        self._reported_machines: dict[str, dict[str, Any]] = {}
        """What the latest answers contained, by name and by id."""

    async def offers(self) -> list[Offer]:
        entries = _entries(await self._call("offers"), "offers", self.name)
        offers = self._validator.validate(*parse_offers(entries, self._config))
        self._reported_offers = {entry["name"]: entry for entry in reversed(entries) if _has_name(entry)}
        return offers

    async def provision(self, offer: Offer, token: str) -> None:
        await self._call("provision", offer=self._reported_offers.get(offer.name, offer), token=token)

    async def status(self) -> list[Machine]:
        entries = _entries(await self._call("status"), "machines", self.name)
        machines = parse_machines(entries, self.name)
        self._reported_machines = {entry["id"]: entry for entry in entries}
        return machines

    async def terminate(self, machine: Machine) -> None:
        await self._call("terminate", machine=self._reported_machines.get(machine.id, machine))

    async def close(self) -> None:
        pass

    async def _call(self, call: str, **fields: Any) -> bytes:
        body = {"protocol": PROTOCOL, "call": call, "deployment": self._config.deployment, **fields}
        answer = await self._send(call, msgspec.json.encode(body))
        raise_reported_error(answer, f"{self.name}: {call}")
        return answer


def raise_reported_error(answer: bytes, what: str, *, no_capacity: bool = False) -> None:
    """Raise the `error` of an answer, if it has one: text, or an object with a message and a code. `no_capacity`: the
    transport said so."""
    try:
        error = msgspec.json.decode(answer, type=dict[str, Any]).get("error")
    except (ValueError, RecursionError):
        return
    if not error:
        return
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    kind = NoCapacity if no_capacity or code == NO_CAPACITY else ProvisionerError
    raise kind(f"{what}: {str(message or code)[:300]}")


def parse_offers(entries: list[Any], config: ProvisionerConfig) -> tuple[list[Offer], list[str]]:
    """Return the offers, and a sentence for each invalid entry, which does not affect the others."""
    offers: list[Offer] = []
    problems: list[str] = []
    defaults = {"island": config.island or config.label, "gpus": 1, "role": config.role}
    defaults["bootstrap_port"] = config.bootstrap_port
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f"dropping an offer that is not an object: {entry!r:.60}")
            continue
        try:
            offers.append(msgspec.convert(defaults | entry | {"provisioner": config.label}, Offer))
        except msgspec.ValidationError as error:
            problems.append(f"dropping offer {str(entry.get('name'))[:60]!r}: {error}")
    return offers, problems


def parse_machines(entries: list[Any], provisioner: str) -> list[Machine]:
    """Return the machines. An invalid entry is an error: without it, the router would take the machine for gone."""
    try:
        return msgspec.convert(entries, list[Machine])
    except msgspec.ValidationError as error:
        raise ProvisionerError(f"{provisioner}: invalid machine in the answer: {error}") from None


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _entries(answer: bytes, key: str, provisioner: str) -> list[Any]:
    try:
        decoded = msgspec.json.decode(answer)
    except (ValueError, RecursionError) as error:
        raise ProvisionerError(f"{provisioner}: the answer is not JSON ({error}): {excerpt(answer)}") from None
    found = decoded.get(key) if isinstance(decoded, dict) else None
    if not isinstance(found, list):
        raise ProvisionerError(f'{provisioner}: the answer is not like {{"{key}": […]}}: {excerpt(answer)}')
    return found


def excerpt(answer: bytes) -> str:
    """Return the start of an answer, for an error message."""
    return repr(answer[:80].decode(errors="replace"))


# command: the operator's own program. The router runs `PROGRAM offers`, `provision`, `status` or `terminate`; the
# program reads JSON from standard input and writes JSON to standard output.
#
# Exit code 0 means success, 75 (EX_TEMPFAIL) no capacity, any other a failure. The last line on standard error says
# why.

MAX_OUTPUT_BYTES: Final = 64 << 20
"""A program that writes without end must not take the router's memory."""
NO_CAPACITY_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same request may succeed later."""


def command_provisioner(config: ProvisionerConfig) -> JsonProvisioner:
    name = config.label

    async def send(call: str, body: bytes) -> bytes:
        result = await run_command([*config.command, call], config, timeout_s=config.timeout_s, stdin=body)
        if result.code:
            # The `error` of the answer says more than the exit code: it comes first.
            raise_reported_error(result.out, f"{name}: {call}", no_capacity=result.code == NO_CAPACITY_EXIT_CODE)
        if result.code == NO_CAPACITY_EXIT_CODE:
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
    (scaling/provisioner.py).

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
    # The caller may have given up between two lines here. It saw no process to kill.
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


# webhook: the operator's own service. The router posts JSON to URL/offers, URL/provision,
# URL/status and URL/terminate.
#
# 2xx means success, unless the answer has an `error`. 429, 503 and 507 on `provision` mean no capacity. Any other
# status is a failure. The bearer token comes from the environment. The router follows no redirects, so that the token
# stays with this service.

NO_CAPACITY_STATUSES = (429, 503, 507)
"""Statuses of `provision` that mean "not now": too many requests, unavailable, insufficient storage."""
MAX_ANSWER_BYTES = 64 << 20
MAX_CONCURRENT_CALLS = 8
"""Each call has a connection of its own: a fleet that shrinks by 100 nodes must not open 100."""


def webhook_provisioner(config: ProvisionerConfig) -> JsonProvisioner:
    """Raises ConfigError if the URL or the token is invalid."""
    name, timeout_s, url = config.label, config.timeout_s, config.url.rstrip("/")
    tls = ssl.create_default_context() if _is_https(url) else None
    headers = {"Accept": "application/json"} | _authorization(config.token_env)
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def send(call: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(timeout_s), slots:
                status, answer = await request(
                    "POST",
                    f"{url}/{call}",
                    body,
                    headers.items(),
                    timeout_s=timeout_s,
                    limit_bytes=MAX_ANSWER_BYTES,
                    tls=tls,
                )
        except TimeoutError:
            raise ProvisionerTimeout(f"{name}: {call} took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise ProvisionerError(f"{name}: {call} failed: {error or type(error).__name__}") from None
        if 200 <= status < 300:
            return answer
        no_capacity = call == "provision" and status in NO_CAPACITY_STATUSES
        raise_reported_error(answer, f"{name}: {call} returned status {status}", no_capacity=no_capacity)
        kind = NoCapacity if no_capacity else ProvisionerError
        raise kind(f"{name}: {call} returned status {status}: {excerpt(answer)}")

    return JsonProvisioner(config, send)


def _is_https(url: str) -> bool:
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"provisioners.url: {url!r}: {error}") from None
    if not parts.hostname:
        raise ConfigError(f"provisioners.url: {url!r} has no host")
    return parts.scheme == "https"


def _authorization(token_env: str) -> dict[str, str]:
    if not token_env:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise ConfigError(f"provisioners.token_env: the environment variable {token_env} is not set")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"provisioners.token_env: {token_env} has characters that an HTTP header must not have")
    return {"Authorization": f"Bearer {token}"}
