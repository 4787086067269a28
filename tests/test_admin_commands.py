"""Commands that ask a running router: how they find it, `nodes`, `drain`, `undrain`, and the list of `explain`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from support.engine_scripts import failing, normal
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute import version_and_build
from warmroute.app.main import main
from warmroute.edge.arrival import hash_key

COMMANDS = (
    ["explain"],
    ["top", "--once"],
    ["capture", "--status"],
    ["doctor", "prompts"],
    ["nodes"],
    ["drain", "node0"],
)


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, list(map(str, arguments)))
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.delenv("WARMROUTE_ADMIN_URL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Command(capsys)


def url_of(running: RunningRouter) -> str:
    return f"http://127.0.0.1:{running.service.admin_port}"


def config_file(folder: Path, host: str, port: int) -> Path:
    file = folder / "router.toml"
    file.write_text(f'[admin]\nhost = "{host}"\nport = {port}\ntoken_sha256 = "{"0" * 64}"\n')
    return file


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
async def test_a_command_finds_the_router_by_option_configuration_and_environment(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    async with engines() as nodes, router(*nodes) as running:
        url = url_of(running)
        wrong = config_file(tmp_path, "127.0.0.1", 9)
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", "http://127.0.0.1:9")
        for admin in (url, f"{url}/", url.removeprefix("http://")):
            assert (await command(*arguments, "--admin", admin, "--config", wrong))[0] == 0
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            right = config_file(tmp_path, host, running.service.admin_port)
            assert (await command(*arguments, "--config", right))[0] == 0
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", url)
        assert (await command(*arguments))[0] == 0


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
async def test_an_error_says_which_address_was_used_and_why(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    file = config_file(tmp_path, "127.0.0.1", 9)
    for more, origin in ((["--admin", "127.0.0.1:9"], "--admin"), (["--config", str(file)], f"[admin] in {file}")):
        code, _, problem = await command(*arguments, *more)
        assert code == 2 and f"no router answers at http://127.0.0.1:9 ({origin}): Connection refused" in problem
    monkeypatch.setenv("WARMROUTE_ADMIN_URL", "127.0.0.1:9")
    code, _, problem = await command(*arguments)
    assert code == 2 and "http://127.0.0.1:9 (WARMROUTE_ADMIN_URL)" in problem
    monkeypatch.setattr("warmroute.app.commands._default_url", lambda: "http://127.0.0.1:9")
    monkeypatch.setenv("WARMROUTE_ADMIN_URL", "")
    code, _, problem = await command(*arguments)
    assert code == 2 and "http://127.0.0.1:9 (the default)" in problem and "--config FILE" in problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--admin", ""], "--admin: '' is not the URL"),
        (["--admin", "ftp://x"], "expected http://host:port"),
        (["--admin", "http://127.0.0.1:99999"], "expected http://host:port"),
        (["--admin", "http://127.0.0.1:x"], "expected http://host:port"),
        (["--admin", "http://a b"], "expected http://host:port"),
        (["--admin", "http://a\r\nX: y"], "expected http://host:port"),
        (["--config", "FILE", "port = 0"], "port = 0"),
        (["--config", "FILE", "enabled = false"], "has no admin listener"),
        (["--config", "FILE", "nonsense = 1"], "unknown key"),
        (["--config", "/nowhere.toml"], "cannot read the file"),
    ],
)
async def test_an_address_that_is_none_is_an_error(
    command: Command, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    if len(arguments) == 3:
        file = tmp_path / "router.toml"
        file.write_text(f"[admin]\n{arguments.pop()}\n")
        arguments[1] = str(file)
    code, _, printed = await command("nodes", *arguments)
    assert code == 2 and problem in printed and "Traceback" not in printed


async def test_nodes_are_listed_drained_and_undrained(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines(2) as nodes, router(*nodes) as running:
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", url_of(running))
        code, printed, _ = await command("nodes")
        assert code == 0
        head, *rows = printed.splitlines()
        assert head.split()[:3] == ["node", "state", "role"] and "requests" in head and "models" in head
        assert [row.split()[:3] for row in rows] == [[f"node{at}", "up", "mixed"] for at in range(2)]
        code, printed, _ = await command("drain", "node1")
        assert code == 0 and printed.startswith("node1 gets no new requests; requests that still run: 0\n")
        assert "A restart of the router loses this" in printed
        assert running.node(1).draining
        code, printed, _ = await command("nodes")
        assert re.search(r"^node1 +draining ", printed, re.M) and "node1: an operator drained it" in printed
        code, printed, _ = await command("nodes", "--json")
        assert [node["state"] for node in json.loads(printed)] == ["up", "draining"]
        code, printed, _ = await command("undrain", "node1")
        assert code == 0 and printed == "node1 gets requests again; it is up\n"
        assert not running.node(1).draining
        code, _, problem = await command("drain", "no such/node?x=1")
        assert code == 2 and "'no such/node?x=1'; `warmroute nodes` lists all" in problem
    async with router() as running:
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", url_of(running))
        assert (await command("nodes"))[1] == "the router has no nodes\n"


async def test_a_drain_that_survives_is_not_said_to_be_lost(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with engines() as nodes, router(*nodes, state={"directory": str(tmp_path / "state")}) as running:
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", url_of(running))
        code, printed, _ = await command("drain", "node0")
        assert code == 0 and "restart" not in printed


async def test_the_list_of_explain_has_time_status_times_model_and_tenant(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [{"sha256": hash_key("one"), "tenant": "team-a"}]
    async with engines() as [engine], router(engine, keys=keys) as running:
        monkeypatch.setenv("WARMROUTE_ADMIN_URL", url_of(running))
        assert (await command("explain"))[1] == "no decisions yet\n"
        for behave, request_id in ((normal(), "first"), (failing(418), "second")):
            engine.behave = behave
            headers = ["Authorization: Bearer one", f"X-Request-Id: {request_id}"]
            await running.request(post(chat("hello"), headers=headers))
        code, printed, _ = await command("explain")
        head, *lines = printed.splitlines()
        assert code == 0 and re.split(r" {2,}", head) == [
            "time (UTC)", "status", "first token", "total", "model", "tenant", "request",
        ]  # fmt: skip
        second, first = [line for line in lines if not line.startswith("    ")]
        assert re.fullmatch(r"\d\d:\d\d:\d\d +418 rejected +– +[\d.,]+ ms +m +team-a +second", second), lines
        assert re.fullmatch(r"\d\d:\d\d:\d\d +200 +– +[\d.,]+ ms +m +team-a +first", first), "not streamed"
        assert second.index("team-a") == first.index("team-a"), "the columns are aligned"
        assert all(lines[lines.index(row) + 1].startswith("    node0: ") for row in (first, second)), "and explained"
        code, printed, _ = await command("explain", "--json")
        assert [one["request_id"] for one in json.loads(printed)] == ["second", "first"]


async def test_version_is_a_command_too(command: Command) -> None:
    assert await command("version") == (0, f"warmroute {version_and_build()}\n", "")
    assert (await command("--version"))[1] == f"warmroute {version_and_build()}\n"
