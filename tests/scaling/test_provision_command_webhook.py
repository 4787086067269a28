"""The `command` and `webhook` provisioners with valid answers, invalid ones, and none."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvloop

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offers import Offer
from warmroute.scaling.provisioner import (
    Machine,
    MachineState,
    NoCapacity,
    Provisioner,
    ProvisionerError,
    ProvisionerTimeout,
)
from warmroute.scaling.provisioners import create_provisioner
from warmroute.scaling.provisioners.command import run_command

OFFERS = {
    "offers": [
        {
            "name": "a",
            "gpu": "L4",
            "usd_per_hour": 0.7,
            "start_s": 90,
            "island": "mine/east",
            "note": "unknown is fine",
        },
        {"name": "zero", "gpu": "L4", "usd_per_hour": 0},
        {"name": "below", "gpu": "L4", "usd_per_hour": -1},
        {"name": "absurd", "gpu": "L4", "usd_per_hour": 1e9},
        {"name": "words", "gpu": "L4", "usd_per_hour": "cheap"},
        {"name": "bare"},
        "nonsense",
    ]
}
MACHINES = {
    "machines": [
        {"id": "m1", "token": "t1", "offer": "a", "state": "running", "url": "http://10.1.1.1:8000", "reclaimed": True},
        {"id": "m2", "token": "t2", "offer": "a", "state": "pending"},
    ]
}
OWN = ProvisionerConfig(kind="command", name="own")
OFFER = Offer(provisioner="own", name="a", island="mine/east", gpu="L4", usd_per_hour=0.7)
MACHINE = Machine(id="m1", token="t1", offer="a", state=MachineState.RUNNING)


class Program:
    """An operator's program: its answer is scripted, and it records its calls."""

    def __init__(self, folder: Path) -> None:
        self.path, self._calls = folder / "my-cloud", folder / "calls"
        self._calls.touch()

    def script(self, body: str) -> None:
        text = f"""\
            #!{sys.executable}
            import json, sys, time
            verb, sent = sys.argv[-1], sys.stdin.read()
            with open({str(self._calls)!r}, "a") as file:
                file.write(json.dumps([verb, json.loads(sent)]) + "\\n")
            """
        self.path.write_text(textwrap.dedent(text) + textwrap.dedent(body))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[Any]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]

    def provisioner(self, **changes: Any) -> Provisioner:
        return create_provisioner(
            ProvisionerConfig(kind="command", name="own", command=(str(self.path), "--region", "east"), **changes)
        )


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


async def test_a_program_makes_offers_and_invalid_ones_are_dropped(program: Program) -> None:
    program.script(f"print(json.dumps({OFFERS!r}))")
    provisioner = program.provisioner(deployment="prod")
    (offer,) = await provisioner.offers()
    assert (offer.provisioner, offer.name, offer.usd_per_hour, offer.start_s) == ("own", "a", 0.7, 90.0)
    assert program.calls() == [["offers", {"protocol": 1, "call": "offers", "deployment": "prod"}]]
    problems = " ".join(provisioner._validator.problems)  # type: ignore[attr-defined]
    for name in ("zero", "below", "absurd", "words", "bare", "nonsense"):
        assert name in problems


async def test_a_program_provisions_reports_and_terminates(program: Program) -> None:
    program.script(f"print(json.dumps({MACHINES!r}) if verb == 'status' else 'fine')")
    provisioner = program.provisioner()
    await provisioner.provision(OFFER, "t1")
    first, second = await provisioner.status()
    assert (first.id, first.state, first.reclaimed) == ("m1", MachineState.RUNNING, True)
    assert (second.id, second.state, second.url) == ("m2", MachineState.PENDING, "")
    await provisioner.terminate(first)
    verbs = dict(program.calls())
    assert verbs["provision"]["token"] == "t1" and verbs["provision"]["offer"]["name"] == "a"
    assert verbs["terminate"]["machine"]["id"] == "m1" and verbs["terminate"]["machine"]["state"] == "running"


@pytest.fixture
def on_uvloop() -> Iterator[asyncio.Runner]:
    """The router's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


def test_a_program_need_not_read_its_input(tmp_path: Path, on_uvloop: asyncio.Runner) -> None:
    """It may end before it gets its input, and the input may be larger than a pipe."""

    async def often() -> None:
        for stdin in (b"{}", bytes(1 << 20)):
            for _ in range(30):
                assert await run_command(("/bin/echo", "fine"), OWN, timeout_s=30.0, stdin=stdin) == (
                    0,
                    b"fine\n",
                    b"",
                )

    on_uvloop.run(often())


async def test_a_program_is_killed_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"echo $$ > {note}.part; mv {note}.part {note}; sleep 600; true"
    calling = asyncio.create_task(run_command(("/bin/sh", "-c", script), OWN, timeout_s=600.0))
    async with asyncio.timeout(30):
        while not note.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        process = Path("/proc", note.read_text().strip())
        while await asyncio.to_thread(process.exists):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_program_reports_no_capacity(program: Program) -> None:
    program.script("print('trying\\neast is full', file=sys.stderr); sys.exit(75)")
    with pytest.raises(NoCapacity, match="own: no capacity: east is full"):
        await program.provisioner().provision(OFFER, "t1")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "print('a\\nb\\nbad credentials', file=sys.stderr); sys.exit(3)",
            r"status failed \(exit code 3\): bad credentials",
        ),
        ("sys.exit(1)", r"status failed \(exit code 1\): no output"),
        ("print('<html>')", "the answer is not JSON .*: '<html>"),
        ("print('[]')", r'the answer is not like {"machines": \[…\]}: \'\[\]'),
        ("print(json.dumps({'machines': [{'id': 'm'}]}))", "invalid machine in the answer: .*token"),
        ("print(json.dumps({'machines': [{'id': 'm', 'token': 't', 'offer': '', 'state': 'odd'}]}))", "invalid enum"),
        ("sys.stdout.buffer.write(bytes([255, 254]))", "the answer is not JSON"),
    ],
)
async def test_a_failing_program_is_a_provisioner_error(program: Program, body: str, sentence: str) -> None:
    program.script(body)
    with pytest.raises(ProvisionerError, match="own: ") as error:
        await program.provisioner().status()
    assert re.search(sentence, str(error.value), re.IGNORECASE), str(error.value)
    assert not isinstance(error.value, NoCapacity)


async def test_a_program_that_hangs_is_killed_with_its_children(program: Program, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    child = f"import time\nwhile True: open({str(beat)!r}, 'a').write('x'); time.sleep(0.02)"
    program.script(f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)")
    provisioner = program.provisioner(timeout_s=1.5)
    with pytest.raises(ProvisionerError, match=r"took longer than 1.5 s"):
        await provisioner.status()
    size = beat.stat().st_size if beat.exists() else 0
    await asyncio.sleep(0.3)
    assert (beat.stat().st_size if beat.exists() else 0) <= size + 1


async def test_a_missing_program_is_a_provisioner_error(tmp_path: Path) -> None:
    with pytest.raises(ProvisionerError, match=r"cannot run .*: No such file or directory"):
        await Program(tmp_path).provisioner().status()


class Service:
    """An operator's service: its answer is scripted, and it records its requests."""

    def __init__(self) -> None:
        self.status, self.answer, self.hang_s, self.trickles = 200, b"{}", 0.0, ""
        """`trickles`: the part that it sends byte by byte without an end, `head` or `body`."""
        self.requests: list[tuple[str, str | None, Any]] = []
        self.trickling = 0
        """Answers that it is sending byte by byte."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.requests.append((self.path, self.headers["authorization"], body))
                time.sleep(service.hang_s)
                if service.trickles:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\nx: ")
                    self.wfile.write(b"\r\n\r\n" if service.trickles == "body" else b"")
                    service.trickling += 1
                    try:
                        while True:  # until the client closes the connection
                            self.wfile.write(b" ")
                            time.sleep(0.02)
                    finally:
                        service.trickling -= 1
                self.send_response(service.status)
                self.send_header("location", "http://127.0.0.1:9/elsewhere")
                self.send_header("content-length", str(len(service.answer)))
                self.end_headers()
                self.wfile.write(service.answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that close are no error
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def provisioner(self, **changes: Any) -> Provisioner:
        url = f"http://127.0.0.1:{self.server.server_port}/scale"
        return create_provisioner(ProvisionerConfig(kind="webhook", name="own", url=url, **changes))


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.server.shutdown()
    running.server.server_close()


async def test_a_service_gets_its_bearer_token(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "secret")
    provisioner = service.provisioner(token_env="OWN_TOKEN")
    service.answer = json.dumps(OFFERS).encode()
    assert [offer.name for offer in await provisioner.offers()] == ["a"]
    service.answer = json.dumps(MACHINES).encode()
    assert [machine.id for machine in await provisioner.status()] == ["m1", "m2"]
    service.answer = b""
    await provisioner.provision(OFFER, "t1")
    await provisioner.terminate(MACHINE)
    paths = [path for path, _token, _body in service.requests]
    assert paths == ["/scale/offers", "/scale/status", "/scale/provision", "/scale/terminate"]
    assert {token for _path, token, _body in service.requests} == {"Bearer secret"}
    assert service.requests[2][2]["token"] == "t1" and service.requests[3][2]["machine"]["id"] == "m1"
    await provisioner.close()


@pytest.mark.parametrize("status", [429, 503, 507])
async def test_a_service_reports_no_capacity(service: Service, status: int) -> None:
    service.status, service.answer = status, b'{"error": {"message": "all taken"}}'
    provisioner = service.provisioner()
    with pytest.raises(NoCapacity, match=f"own: provision returned status {status}: all taken"):
        await provisioner.provision(OFFER, "t1")
    with pytest.raises(ProvisionerError) as error:  # for a status call it means only that the service is busy
        await provisioner.status()
    assert not isinstance(error.value, NoCapacity)
    await provisioner.close()


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [
        (500, b"oops", "status returned status 500: 'oops'"),
        (302, b"", "status returned status 302: ''"),
        (200, b"<html>", "the answer is not JSON"),
        (200, b'{"machines": 3}', "the answer is not like"),
    ],
)
async def test_a_failing_service_is_a_provisioner_error(
    service: Service, status: int, answer: bytes, sentence: str
) -> None:
    service.status, service.answer = status, answer
    provisioner = service.provisioner()
    with pytest.raises(ProvisionerError, match=sentence):
        await provisioner.status()
    await provisioner.close()


async def test_a_service_that_hangs_or_is_gone_is_a_provisioner_error(service: Service) -> None:
    service.hang_s = 1.0
    provisioner = service.provisioner(timeout_s=0.2)
    with pytest.raises(ProvisionerError, match=r"own: status (took longer than 0.2 s|failed: timed out)"):
        await provisioner.status()
    await provisioner.close()
    gone = Service()
    provisioner = gone.provisioner()
    gone.server.shutdown()
    gone.server.server_close()
    with pytest.raises(ProvisionerError, match=r"own: status failed: .*refused"):
        await provisioner.status()
    await provisioner.close()


@pytest.mark.parametrize("where", ["head", "body"])
async def test_a_service_that_trickles_its_answer_times_out(service: Service, where: str) -> None:
    """Each byte arrives in time; the whole answer does not."""
    provisioner = service.provisioner(timeout_s=0.2)
    service.trickles = where
    for _ in range(3):
        with pytest.raises(ProvisionerTimeout, match=r"own: status took longer than 0.2 s"):
            await provisioner.status()
    results = await asyncio.gather(*(provisioner.terminate(MACHINE) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(one, ProvisionerTimeout) for one in results)
    service.trickles, service.answer = "", json.dumps(MACHINES).encode()
    async with asyncio.timeout(10):
        while service.trickling:  # noqa: ASYNC110 (it runs in a thread)
            await asyncio.sleep(0.01)
    assert len(await service.provisioner().status()) == len(await provisioner.status()) == 2
    await provisioner.close()


async def test_a_cancelled_call_closes_its_connection(service: Service) -> None:
    service.trickles = "body"
    provisioner = service.provisioner(timeout_s=60.0)
    call = asyncio.create_task(provisioner.status())
    async with asyncio.timeout(10):
        while not service.trickling:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        call.cancel()
        while service.trickling:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await provisioner.close()


@pytest.mark.parametrize("verb", ["provision", "terminate"])
async def test_an_error_in_a_successful_answer_is_an_error(service: Service, verb: str) -> None:
    service.answer = b'{"error": {"message": "the database is away"}}'
    provisioner = service.provisioner()
    with pytest.raises(ProvisionerError, match=f"own: {verb}: the database is away"):
        await (provisioner.provision(OFFER, "t1") if verb == "provision" else provisioner.terminate(MACHINE))
    service.answer = b'{"error": null}'
    await (provisioner.provision(OFFER, "t1") if verb == "provision" else provisioner.terminate(MACHINE))
    await provisioner.close()


def test_an_invalid_token_is_rejected_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "sec\nret")
    with pytest.raises(ConfigError, match="OWN_TOKEN has characters that an HTTP header must not have") as error:
        create_provisioner(ProvisionerConfig(kind="webhook", url="http://x", token_env="OWN_TOKEN"))
    assert "ret" not in str(error.value)
    with pytest.raises(ConfigError, match="Port out of range"):
        create_provisioner(ProvisionerConfig(kind="webhook", url="http://x:99999"))


def test_a_missing_token_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_TOKEN is not set"):
        create_provisioner(ProvisionerConfig(kind="webhook", url="http://x", token_env="NO_SUCH_TOKEN"))


def test_a_program_with_endless_output_is_stopped(program: Program, tmp_path: Path) -> None:
    """In a process of its own with a limit of half a gigabyte."""
    program.script("while True: sys.stdout.write('x' * (1 << 20))")
    script = f"""
        import asyncio, resource
        from warmroute.config import ProvisionerConfig
        from warmroute.scaling.provisioners.command import run_command
        own = ProvisionerConfig(kind="command", name="own")
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        try:
            asyncio.run(run_command(({str(program.path)!r}, "status"), own, timeout_s=20.0, stdin=b"{{}}"))
        except Exception as error:
            print(type(error).__name__, error)
        """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert re.match(r"ProvisionerError own: '.*' wrote more than 64 MiB", result.stdout), result
