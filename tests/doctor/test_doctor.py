"""`warmroute doctor`: each problem of a node is found, with the flag or the line of the configuration to change."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from small_model_router import template_checked_once as _autouse  # noqa: F401
from support.answering_node import AnsweringNode, answering_node
from support.engine_processes import FakeEngine
from support.engine_scripts import vllm_metrics
from support.free_port import free_port

from warmroute import build_advice, is_compiled, version_and_build
from warmroute.app.doctor import answers as sample_request
from warmroute.app.doctor import examine
from warmroute.app.doctor.checks import Check
from warmroute.app.main import main
from warmroute.config import from_table
from warmroute.lab.demo.processes import Children

SMALL_MODEL = Path(__file__).parents[1] / "prompt" / "small-model"
CACHE_INFO = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="100"} 1.0\n'
VLLM_PAGE = vllm_metrics().decode() + CACHE_INFO
COMPLETION = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}
SGLANG_PAGE = "sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 0.0\nsglang:token_usage 0.0\n"


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sample_request, "EVENT_S", 0.3)
    monkeypatch.setattr(sample_request, "SUBSCRIBE_S", 0.05)


def model_list(root: str = str(SMALL_MODEL), owner: str = "vllm", length: int | None = 4096, **more: Any) -> Any:
    card = {"id": "m", "object": "model", "owned_by": owner, "root": root, "parent": None, "max_model_len": length}
    return {"object": "list", "data": [{**card, **more}]}


def vllm_answers(**answers: Any) -> dict[str, Any]:
    """A vLLM engine without KV events and /tokenize, which is right otherwise."""
    paths = {
        "/metrics": VLLM_PAGE,
        "/v1/models": model_list(),
        "/version": {"version": "0.32.0"},
        "/kv_event_sources": {},
        "/v1/completions": COMPLETION,
    }
    return {**paths, **{"/" + name.replace("__", "/"): answer for name, answer in answers.items()}}


async def examined(
    node: AnsweringNode | str, send_requests: bool = True, node_keys: dict[str, Any] | None = None, **tables: Any
) -> dict[str, Check]:
    """Return the checks of one node by their names."""
    url = node if isinstance(node, str) else node.url
    config = from_table({"nodes": [{"url": url, "name": "gpu-a", **(node_keys or {})}], **tables})
    report = await examine(config, 2.0, send_requests)
    subject = next(one for one in report.subjects if one.name == "gpu-a")
    return {check.name: check for check in subject.checks}


@pytest.fixture
def listening_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# Reachability, engine, models.


async def test_a_node_that_does_not_answer_is_the_only_problem_of_that_node() -> None:
    checks = await examined("http://127.0.0.1:1")
    assert list(checks) == ["reachable"] and checks["reachable"].state == "problem"
    assert (
        "Connection refused" in checks["reachable"].found and 'url = "http://127.0.0.1:1"' in checks["reachable"].change
    )


async def test_a_node_that_requires_a_key_gets_the_line_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering_node(vllm_answers(v1__models=401)) as node:
        checks = await examined(node)
        assert checks["models"].state == "problem" and "api_key_env = " in checks["models"].change
        monkeypatch.setenv("KEY_OF_GPU_A", "secret")
        await examined(node, node_keys={"api_key_env": "KEY_OF_GPU_A"})
        assert node.requests[-1][2] == "Bearer secret"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("path", "name"), [("health", "reachable"), ("v1__models", "models"), ("metrics", "engine")])
async def test_a_wrong_key_is_not_answered_with_the_advice_to_name_its_variable(
    monkeypatch: pytest.MonkeyPatch, path: str, name: str, status: int
) -> None:
    with answering_node(vllm_answers(**{path: status})) as node:
        monkeypatch.setenv("KEY_OF_GPU_A", "wrong")
        check = (await examined(node, node_keys={"api_key_env": "KEY_OF_GPU_A"}))[name]
        assert check.state == "problem" and f"{status}: the node refuses the API key in KEY_OF_GPU_A" in check.found
        assert "Correct the value of KEY_OF_GPU_A" in check.change and "api_key_env" not in check.change
        monkeypatch.delenv("KEY_OF_GPU_A")
        check = (await examined(node, node_keys={"api_key_env": "KEY_OF_GPU_A"}))[name]
        assert "KEY_OF_GPU_A is not set" in check.found and "Set the environment variable" in check.change
        check = (await examined(node))[name]
        assert "requires an API key" in check.found and "api_key_env = " in check.change


async def test_a_complete_vllm_engine_is_ok() -> None:
    with answering_node(vllm_answers()) as node:
        checks = await examined(node, node_keys={"kv_events": "off"})
    states = {name: check.state for name, check in checks.items()}
    assert states == {
        "reachable": "ok", "engine": "ok", "models": "ok", "context window": "ok", "tokenizer": "ok",
        "chat template": "note", "prefix caching": "ok", "block size": "ok", "KV events": "ok", "cached tokens": "ok",
        "clock": "ok", "LoRA": "ok",
    }  # fmt: skip
    assert checks["engine"].found == "vLLM 0.32.0" and checks["block size"].found == "16 tokens"
    assert "has no /tokenize" in checks["chat template"].found


@pytest.mark.parametrize(
    ("owner", "flag"),
    [("sglang", "--enable-metrics"), ("vllm", "--disable-log-stats"), ("tensorrt_llm", "enable_iter_perf_stats: true")],
)
async def test_an_engine_without_metrics_gets_its_flag(owner: str, flag: str) -> None:
    with answering_node({"/v1/models": model_list(owner=owner)}) as node:
        checks = await examined(node, send_requests=False)
    assert checks["engine"].state == "problem" and flag in checks["engine"].change


async def test_an_unknown_engine_is_to_be_named() -> None:
    with answering_node({"/v1/models": model_list(owner="me")}) as node:
        checks = await examined(node, send_requests=False)
    assert checks["engine"].state == "problem" and 'engine = "vllm"' in checks["engine"].change


@pytest.mark.parametrize("answer", [404, {"data": []}, {"data": "none"}, "no JSON", 500])
async def test_a_node_without_a_list_of_models_gets_the_line_to_add(answer: Any) -> None:
    with answering_node(vllm_answers(v1__models=answer)) as node:
        checks = await examined(node)
        assert checks["models"].state == "problem" and 'models = ["NAME"]' in checks["models"].change
        assert (await examined(node, node_keys={"models": ["m"]}))["models"].state == "ok"


# Tokenizer and template.


async def test_a_missing_tokenizer_gets_the_lines_to_add() -> None:
    with answering_node(vllm_answers(v1__models=model_list("Qwen/Qwen3-8B"))) as node:
        check = (await examined(node))["tokenizer"]
    assert check.state == "problem" and "Qwen/Qwen3-8B: it is not in this machine's Hugging Face cache" in check.found
    lines = [line for line in check.change.splitlines() if line.startswith("    ")]
    table = tomllib.loads("\n".join(lines))
    assert from_table(table).models[0].name == "m" and table["models"][0]["tokenizer"] == "/models/Qwen3-8B"


async def test_a_tokenizer_that_the_nodes_replace_is_ok() -> None:
    with answering_node(vllm_answers(v1__models=model_list("Qwen/Qwen3-8B"))) as node:
        check = (await examined(node, prompts={"remote_tokenize": True}))["tokenizer"]
    assert check.state == "ok" and "/tokenize" in check.found


async def test_another_chat_template_is_a_problem_with_the_lines_to_add() -> None:
    from warmroute.lab.engine.tokenizers import ModelTokenizer

    tokenizer = ModelTokenizer(SMALL_MODEL)

    def tokenize(request: bytes) -> Any:
        fields = json.loads(request)
        if "messages" in fields:
            tokens = tokenizer.encode("other " + tokenizer.render(fields["messages"], None, True))
        else:
            tokens = tokenizer.encode(fields["prompt"], True)
        return {"count": len(tokens), "tokens": tokens}

    with answering_node(vllm_answers(tokenize=tokenize)) as node:
        check = (await examined(node))["chat template"]
    assert check.state == "problem" and "templates differ" in check.found and "--chat-template" in check.change


async def test_only_text_is_compared_with_sglang() -> None:
    from warmroute.lab.engine.tokenizers import ModelTokenizer

    tokenizer = ModelTokenizer(SMALL_MODEL)

    def tokenize(request: bytes) -> Any:
        return {"tokens": tokenizer.encode(json.loads(request)["prompt"], True)}

    answers = {"/metrics": SGLANG_PAGE, "/v1/models": model_list(owner="sglang"), "/tokenize": tokenize}
    with answering_node(answers) as node:
        check = (await examined(node, send_requests=False))["chat template"]
    assert check.state == "note" and "chats were not compared" in check.found


# KV events.


async def test_an_engine_without_kv_events_gets_its_flag() -> None:
    with answering_node(vllm_answers()) as node:
        check = (await examined(node))["KV events"]
    assert check.state == "problem" and check.change.startswith("Start vLLM with\n    --kv-events-config '")
    flag = check.change.partition("'")[2].rstrip("'")
    assert json.loads(flag)["replay_endpoint"] == "tcp://*:6557"


async def test_an_old_vllm_that_does_not_name_its_endpoint_gets_the_line_for_the_node() -> None:
    with answering_node(vllm_answers(kv_event_sources=404)) as node:
        check = (await examined(node))["KV events"]
    assert check.state == "problem" and 'kv_events = "tcp://*:5557"' in check.change


async def test_sglang_gets_its_own_flags() -> None:
    info = {"version": "0.5.23", "page_size": 1, "disable_radix_cache": True, "enable_cache_report": False}
    answers = {"/metrics": SGLANG_PAGE, "/v1/models": model_list(owner="sglang"), "/server_info": info}
    with answering_node(answers) as node:
        checks = await examined(node, send_requests=False)
    assert checks["engine"].found == "SGLang 0.5.23"
    assert checks["block size"].change == "Start SGLang with --page-size 64"
    assert checks["prefix caching"].change == "Start SGLang without --disable-radix-cache"
    assert checks["cached tokens"].change == "Start SGLang with --enable-cache-report"
    assert checks["KV events"].change.startswith("Start SGLang with\n    --kv-events-config")


async def test_the_events_of_tensorrt_llm_are_not_taken_from_the_router() -> None:
    with answering_node({"/v1/models": model_list(owner="tensorrt_llm"), "/v1/completions": {"usage": {}}}) as node:
        checks = await examined(node)
        assert not node.bodies("/kv_cache_events")
    assert checks["KV events"].state == "note" and "return_perf_metrics" in checks["cached tokens"].change


async def test_a_closed_port_of_kv_events_is_a_problem() -> None:
    sources = {"0": {"publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": None}}
    with answering_node(vllm_answers(kv_event_sources=sources)) as node:
        checks = await examined(node)
    assert checks["KV events"].state == "problem" and "tcp://127.0.0.1:1" in checks["KV events"].found
    assert checks["KV replay"].state == "problem" and "replay_endpoint" in checks["KV replay"].change


async def test_a_port_without_events_is_a_problem(listening_port: int) -> None:
    endpoint = f"tcp://*:{listening_port}"
    sources = {"0": {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": endpoint}}
    with answering_node(vllm_answers(kv_event_sources=sources)) as node:
        check = (await examined(node))["KV events"]
        silent = (await examined(node, send_requests=False))["KV events"]
    assert check.state == "problem" and "no event arrived" in check.found
    assert silent.state == "ok" and "whether events flow was not checked" in silent.found


async def test_a_port_that_does_not_speak_zmq_is_named() -> None:
    def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with answering_node(vllm_answers(kv_event_sources={"0": {"endpoint": f"tcp://*:{port}"}})) as node:
            check = (await examined(node))["KV events"]
    assert check.state == "problem" and "not a ZMQ socket" in check.found


async def test_events_that_the_router_cannot_read_are_a_problem() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        sources = {"0": {"publisher": "zmq", "endpoint": f"tcp://*:{publisher.bind_to_random_port('tcp://127.0.0.1')}"}}
        with answering_node(vllm_answers(kv_event_sources=sources)) as node:
            examining = asyncio.ensure_future(examined(node))
            while not examining.done():
                publisher.send_multipart((b"", b"\0" * 8, b"no events"))
                await asyncio.sleep(0.02)
            check = (await examining)["KV events"]
    assert check.state == "problem" and "cannot read" in check.found


async def test_kv_events_do_not_matter_to_a_policy_that_ignores_them() -> None:
    with answering_node(vllm_answers()) as node:
        assert "KV events" not in await examined(node, routing={"policy": "least_loaded"})


# The sample request.


async def test_an_engine_that_does_not_report_cached_tokens_gets_its_flag() -> None:
    with answering_node(vllm_answers(v1__completions={"usage": {"prompt_tokens_details": None}})) as node:
        check = (await examined(node))["cached tokens"]
        requests = node.bodies("/v1/completions")
    assert check.state == "problem" and check.change == "Start vLLM with --enable-prompt-tokens-details"
    assert len(requests) == 2 and requests[0] == requests[1], "some releases report only what is above 0"
    assert json.loads(requests[0])["max_tokens"] == 1


async def test_no_request_is_sent_if_the_operator_says_so() -> None:
    with answering_node(vllm_answers()) as node:
        check = (await examined(node, send_requests=False))["cached tokens"]
        assert not node.bodies("/v1/completions") and not node.bodies("/v1/chat/completions")
    assert check.state == "note" and "--no-requests" in check.found


async def test_a_model_without_completions_is_asked_by_chat() -> None:
    with answering_node(vllm_answers(v1__completions=404, v1__chat__completions=COMPLETION)) as node:
        assert (await examined(node))["cached tokens"].state == "ok"
    with answering_node(vllm_answers(v1__completions=400)) as node:
        check = (await examined(node))["cached tokens"]
    assert check.state == "note" and "404" in check.found


# Clock, windows, adapters, fleet.


@pytest.mark.parametrize(("date", "words"), [("Fri, 01 Jan 2010 00:00:00 GMT", "behind"), ("nonsense", "no date")])
async def test_a_wrong_clock_is_a_problem(date: str, words: str) -> None:
    with answering_node(vllm_answers()) as node:
        node.date = date
        check = (await examined(node, send_requests=False))["clock"]
    assert words in check.found and check.state == ("problem" if words == "behind" else "note")


async def test_an_unknown_window_gets_the_line_to_add() -> None:
    with answering_node(vllm_answers(v1__models=model_list(length=None))) as node:
        check = (await examined(node, send_requests=False))["context window"]
    assert check.state == "note" and "max_model_len = " in check.change


async def test_more_adapters_than_slots_are_noted() -> None:
    cards = model_list()
    cards["data"] += [{"id": f"lora-{number}", "root": "/x", "parent": "m"} for number in range(3)]
    page = VLLM_PAGE + 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'
    with answering_node(vllm_answers(v1__models=cards, metrics=page)) as node:
        check = (await examined(node, send_requests=False))["LoRA"]
    assert check.state == "note" and check.change.startswith("Start vLLM with --max-loras 3")


async def test_prefix_caching_that_is_off_gets_the_flag() -> None:
    page = VLLM_PAGE.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    with answering_node(vllm_answers(metrics=page)) as node:
        check = (await examined(node))["prefix caching"]
    assert check.change == "Start vLLM without --no-enable-prefix-caching"


async def test_the_fleet_is_checked_as_a_whole() -> None:
    sources = {"0": {"publisher": "zmq", "endpoint": "tcp://*:1"}}
    with (
        answering_node(vllm_answers(kv_event_sources=sources)) as one,
        answering_node(vllm_answers(v1__models=model_list(length=2048), kv_event_sources=sources)) as other,
    ):
        nodes = [{"url": one.url, "name": "a"}, {"url": other.url, "name": "b"}]
        config = from_table({"nodes": nodes, "models": [{"name": "mm"}]})
        report = await examine(config, 2.0, send_requests=False)
    fleet = {check.name: check for check in report.subjects[-1].checks}
    assert fleet["context windows"].state == "note" and "2,048, 4,096" in fleet["context windows"].found
    assert fleet["models"].state == "problem" and 'name = "mm"' in fleet["models"].change
    assert fleet["KV events"].state == "problem" and "a and b have the same endpoint" in fleet["KV events"].found


async def test_two_names_of_one_machine_are_one_engine() -> None:
    with answering_node(vllm_answers()) as node:
        nodes = [{"url": node.url, "name": "a"}, {"url": node.url.replace("127.0.0.1", "127.1"), "name": "b"}]
        report = await examine(from_table({"nodes": nodes}), 2.0, send_requests=False)
    assert "a and b are the same engine" in report.subjects[-1].checks[-1].found


@pytest.mark.parametrize("answer", ["[" * 100_000, "\x00\xff", {"data": [{"id": "\x1b[2J"}]}, 302, [], "null"])
async def test_a_node_may_answer_anything(answer: Any) -> None:
    paths = ("/metrics", "/v1/models", "/version", "/kv_event_sources", "/server_info", "/tokenize", "/v1/completions")
    with answering_node(dict.fromkeys(paths, answer)) as node:
        checks = await examined(node)
    assert checks["reachable"].state == "ok"
    assert all("\x1b" not in check.found for check in checks.values())


# The command.


def test_the_command_reports_a_simulated_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sample_request, "EVENT_S", 5.0)
    monkeypatch.setattr(sample_request, "SUBSCRIBE_S", 0.5)
    with Children() as children:
        engine = FakeEngine(children, "--tokenizer", str(SMALL_MODEL), "--model", "m")
        file = tmp_path / "w.toml"
        text = f'[[nodes]]\nurl = "{engine.url}"\nname = "gpu-a"\n[[models]]\nname = "m"\ntokenizer = "{SMALL_MODEL}"\n'
        file.write_text(text)
        assert main(["doctor", "--config", str(file), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        checks = {check["name"]: check for check in report["subjects"][1]["checks"]}
        assert report["warmroute"] == version_and_build()
        assert report["problems"] == 0 and "an event arrived" in checks["KV events"]["found"]
        assert "same tokens" in checks["chat template"]["found"]
        file.write_text(text + '[[nodes]]\nurl = "http://127.0.0.1:1"\nname = "gpu-b"\n')
        assert main(["doctor", "--config", str(file), "--no-requests"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"warmroute {version_and_build()}\n")
    assert report["build_advice"] == (build_advice() or None)
    assert ("1.2 to 1.8 times the CPU" in out) is not is_compiled()
    assert "gpu-b  http://127.0.0.1:1" in out and out.rstrip().endswith("1 problem")
    copied = [line for line in out.splitlines() if line.startswith("          ")]
    assert all(len(line) <= 80 for line in out.splitlines() if line not in copied)


def test_the_quick_start_without_a_gpu_ends_without_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the page, on other ports."""
    monkeypatch.setattr(sample_request, "EVENT_S", 10.0)
    monkeypatch.setattr(sample_request, "SUBSCRIBE_S", 0.5)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "quick-start.md").read_text()
    commands = re.findall(r"^    warmroute (.*)$", page[page.index("## Without a GPU") :], re.M)
    ports: dict[str, str] = {}
    ran = []
    with Children() as children:
        for command in commands:
            text = re.sub(r"\b[568][05]\d\d\b", lambda found: ports.setdefault(found[0], str(free_port())), command)
            name, *arguments = shlex.split(text)
            ran.append(name)
            if name == "engine":
                children.start(name, *arguments)
                wait_until_healthy(int(arguments[arguments.index("--port") + 1]))
            elif name == "serve":
                assert main(["check-config", arguments[arguments.index("--config") + 1]]) == 0
            else:
                capsys.readouterr()
                assert main([name, *arguments]) == 0, capsys.readouterr()
            if name == "doctor":
                out = capsys.readouterr().out
                assert out.rstrip().endswith("\nno problems"), out
                assert "problem " not in out and "note    tokenizer: none for sim" in out
    assert ran == ["engine", "engine", "init", "doctor", "serve"]


def wait_until_healthy(port: int) -> None:
    deadline_s = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return
        except OSError:
            pass
        assert time.monotonic() < deadline_s, "the engine does not start"
        time.sleep(0.05)


def test_a_missing_tokenizer_of_a_configured_model_stays_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = vllm_answers(version={"version": "0.32", "simulated_by": "warmroute"}, v1__models=model_list("m"))
    with answering_node(answers) as node:
        file = tmp_path / "w.toml"
        file.write_text(f'[[nodes]]\nurl = "{node.url}"\n[[models]]\nname = "m"\ntokenizer = "/nowhere"\n')
        assert main(["doctor", "--config", str(file), "--no-requests"]) == 1
        assert main(["doctor", "--node", node.url, "--no-requests"]) == 1, "it publishes no KV events"
        assert "note    tokenizer: none for m" in capsys.readouterr().out


def test_doctor_takes_the_variable_of_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    with answering_node(vllm_answers()) as node:
        main(["doctor", "--node", node.url, "--key-env", "ENGINE_KEY", "--no-requests"])
        assert {request[2] for request in node.requests} == {"Bearer secret"}
    assert main(["doctor", "--node", "http://127.0.0.1:1", "--key-env", "NOT_SET"]) == 2
    assert "'NOT_SET' is not set" in capsys.readouterr().err
    (tmp_path / "w.toml").write_text("")
    assert main(["doctor", "--config", str(tmp_path / "w.toml"), "--key-env", "ENGINE_KEY"]) == 2
    assert "--key-env is for --node" in capsys.readouterr().err


def test_the_command_needs_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 2 and "--config FILE" in capsys.readouterr().err
    (tmp_path / "w.toml").write_text("[listen]\nport = 1")
    assert main(["doctor", "--config", str(tmp_path / "w.toml")]) == 2
    assert "has no [[nodes]]" in capsys.readouterr().err


def test_the_configuration_is_examined_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.toml").write_text(
        '[[nodes]]\nurl = "http://127.0.0.1:1"\n[[models]]\nname = "m"\ntokenizer = "/nowhere/at/all"\n'
    )
    assert main(["doctor", "--config", str(tmp_path / "w.toml"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    problems = [check["found"] for check in report["subjects"][0]["checks"]]
    assert problems == ["models: cannot load the tokenizer of 'm': /nowhere/at/all: No such file or directory"]
