"""`warmroute init`: a commented configuration from what nodes answer."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.answering_node import answering_node
from support.engine_scripts import vllm_metrics
from support.free_port import free_port

from warmroute.app.main import main
from warmroute.config import from_table
from warmroute.config.file import BASIC_KEYS


def test_the_configuration_names_what_nodes_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = 'm"\n[admin]\nhost = "0.0.0.0'
    llama = {"id": "org/llama", "max_model_len": 32768}
    cards = {"data": [llama, {"id": hostile}, {"id": "ad", "parent": "org/llama"}]}
    answers = {"/v1/models": cards, "/metrics": vllm_metrics().decode(), "/version": {"version": "0.32"}}
    output = tmp_path / "warmroute.toml"
    with answering_node(answers) as node:
        assert main(["init", "--node", node.url, "--output", str(output), "--port", "9000"]) == 0
        text = output.read_text()
        config = from_table(tomllib.loads(text))
        assert [one.url for one in config.nodes] == [node.url] and config.listen.port == 9000
        assert "# vllm 0.32: org/llama (context window 32,768 tokens)" in text
        assert "LoRA adapters: ad" in text and "--kv-events-config" in text
        assert '# name = "org/llama"' in text and config.admin.host == "127.0.0.1"
        assert main(["check-config", str(output)]) == 0
        assert main(["init", "--node", node.url, "--output", str(output)]) == 2
        assert "use --force" in capsys.readouterr().err
        assert main(["init", "--node", node.url, "--output", str(output), "--force"]) == 0


def test_the_file_has_every_key_that_most_operators_set(capsys: pytest.CaptureFixture[str]) -> None:
    main(["init", "--node", f"127.0.0.1:{free_port()}"])
    table, found = "", set()
    for line in capsys.readouterr().out.splitlines():
        if heading := re.match(r"(?:# )?\[+([a-z_]+)\]", line):
            table = heading[1]
        elif key := re.match(r"(?:# )?([a-z_0-9]+) = ", line):
            found.add(f"{table}.{key[1]}")
    assert found >= set(BASIC_KEYS) - {"models.name", "models.tokenizer"}  # these two if a node names a model


def test_a_node_that_does_not_answer_is_written_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--node", f"127.0.0.1:{free_port()}"]) == 1
    text = capsys.readouterr().out
    assert "# It did not answer: " in text and len(from_table(tomllib.loads(text)).nodes) == 1


def test_a_node_that_refuses_the_requests_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "wrong")
    with answering_node({"/v1/models": 401, "/metrics": vllm_metrics().decode()}) as node:
        assert main(["init", "--node", node.url]) == 1
        printed = capsys.readouterr()
        assert "# It answered 401 to GET /v1/models: the node requires an API key" in printed.out
        assert f"{node.url} answered 401 to GET /v1/models" in printed.err and "--key-env NAME" in printed.err
        assert main(["init", "--node", node.url, "--key-env", "ENGINE_KEY"]) == 1
        printed = capsys.readouterr()
        assert {request[2] for request in node.requests[-3:]} == {"Bearer wrong"}
        assert "the node refuses the API key in ENGINE_KEY" in printed.err and "--key-env NAME" not in printed.err
        assert from_table(tomllib.loads(printed.out)).nodes[0].api_key_env == "ENGINE_KEY"
        assert "wrong" not in printed.out + printed.err
        assert main(["init", "--node", node.url, "--key-env", "NOT_SET"]) == 2
        assert "the environment variable 'NOT_SET' is not set" in capsys.readouterr().err


def test_the_variable_of_a_key_goes_into_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    answers = {"/v1/models": {"data": [{"id": "m"}]}, "/metrics": vllm_metrics().decode()}
    with answering_node(answers) as node:
        assert main(["init", "--node", node.url, "--key-env", "ENGINE_KEY"]) == 0
        printed = capsys.readouterr()
        assert from_table(tomllib.loads(printed.out)).nodes[0].api_key_env == "ENGINE_KEY" and not printed.err
        assert main(["init", "--node", node.url]) == 0
        assert '# api_key_env = "ENGINE_API_KEY"' in capsys.readouterr().out
