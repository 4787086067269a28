"""`warmroute init`: a commented configuration from what nodes answer."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.answering_node import answering_node
from support.engine_scripts import vllm_metrics
from support.free_port import free_port

from warmroute.cli.main import main
from warmroute.config import from_table


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


def test_a_node_that_does_not_answer_is_written_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--node", f"127.0.0.1:{free_port()}"]) == 1
    text = capsys.readouterr().out
    assert "# It did not answer: " in text and len(from_table(tomllib.loads(text)).nodes) == 1
