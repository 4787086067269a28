"""Tokenizers that are discovered through the nodes' model cards."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from registry_harness import CHAT, HI, Clock, card, has_tokenizer, loading_done, new_registry, path_in_use, warnings
from sample_requests import user

from warmroute.config import ModelConfig, Prompts
from warmroute.prompt.registry import RETRY_S, read_model_cards


async def test_a_path_that_several_nodes_name_is_loaded_once(thinking_folder: Path, loads: list[str]) -> None:
    cards = [card("m", str(thinking_folder)), card("alias", str(thinking_folder))]
    async with new_registry() as registry:
        for node in ("a", "b", "c"):
            registry.set_model_cards(node, cards)
        assert not has_tokenizer(registry, "m"), "it is loaded in a thread"
        await loading_done(registry)
        tokenizer = registry.prompt_tokenizer("m")
        assert tokenizer.tokenizer is not None and registry.prompt_tokenizer("alias") is tokenizer
        registry.set_model_cards("d", cards)
        await loading_done(registry)
        assert registry.prompt_tokenizer("m") is tokenizer and len(loads) == 1


async def test_the_maximum_length_comes_from_the_card(thinking_folder: Path) -> None:
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", str(thinking_folder), length=7)])
        await loading_done(registry)
        body = json.dumps({"messages": [user("many many words")], "truncate_prompt_tokens": -1}).encode()
        prompt = registry.prompt_tokenizer("m").tokenize(CHAT, body)
        assert prompt is not None and prompt.exact_tokens == 0


async def test_configured_options_apply_to_a_discovered_tokenizer(thinking_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("OWN{{ messages[0].content }}")
    async with new_registry(ModelConfig(name="m", chat_template=str(template))) as registry:
        await registry.load_configured()
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        await loading_done(registry)
        tokenizer = registry.prompt_tokenizer("m")
        prompt = tokenizer.tokenize(CHAT, HI)
        assert tokenizer.tokenizer is not None and prompt is not None
        assert prompt.tokens == tokenizer.tokenizer.encode("OWNhi")


@pytest.mark.parametrize("root", [None, 5, "", "Qwen/Qwen3-8B", "models/here", "../up"])
async def test_only_absolute_paths_are_loaded(root: Any, loads: list[str]) -> None:
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", root)])
        assert not registry._tasks and not loads and not has_tokenizer(registry, "m")


async def test_discovery_can_be_switched_off(thinking_folder: Path, loads: list[str]) -> None:
    async with new_registry(discover_tokenizers=False) as registry:
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        assert not registry._tasks and not loads
        registry.reconfigure(Prompts(), [])
        await loading_done(registry)
        assert has_tokenizer(registry, "m")
        registry.reconfigure(Prompts(discover_tokenizers=False), [])
        assert not has_tokenizer(registry, "m")


async def test_a_failure_is_logged_once_and_retried_later(
    tmp_path: Path, thinking_folder: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "later"
    path.mkdir()
    (path / "tokenizer.json").write_text("[")
    async with new_registry(clock=clock) as registry:
        for number in range(20):
            registry.set_model_cards(f"node-{number % 3}", [card("m", str(path))])
            await loading_done(registry)
        assert len(loads) == 1
        clock.s += RETRY_S + 1
        for _ in range(5):
            registry.set_model_cards("node-0", [card("m", str(path))])
            await loading_done(registry)
        assert len(loads) == 2
        ((event, fields),) = warnings(caplog)
        assert event == "tokenizer_load_failed" and fields["node"] == "node-0" and fields["path"] == str(path)
        assert "set [[models]] tokenizer" in caplog.text
        shutil.copytree(thinking_folder, path, dirs_exist_ok=True)
        clock.s += RETRY_S + 1
        registry.set_model_cards("node-0", [card("m", str(path))])
        await loading_done(registry)
        assert has_tokenizer(registry, "m")


async def test_a_model_that_comes_back_before_the_retry_is_loaded_at_the_retry(
    tmp_path: Path, thinking_folder: Path
) -> None:
    clock, path = Clock(), tmp_path / "later"
    async with new_registry(clock=clock) as registry:
        registry.set_model_cards("a", [card("m", str(path))])
        await loading_done(registry)
        registry.remove_node("a")
        registry.set_model_cards("a", [card("m", str(path))])
        await loading_done(registry)
        assert registry._entries["m"].failed
        shutil.copytree(thinking_folder, path)
        clock.s += RETRY_S + 1
        registry.set_model_cards("a", [card("m", str(path))])
        await loading_done(registry)
        assert has_tokenizer(registry, "m")


async def test_a_tokenizer_that_no_node_names_any_more_is_freed(thinking_folder: Path) -> None:
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        await loading_done(registry)
        tokenizer = registry.prompt_tokenizer("m")
        references = weakref.ref(tokenizer), weakref.ref(tokenizer.tokenizer)
        del tokenizer
        registry.remove_node("a")
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        await loading_done(registry)
        assert has_tokenizer(registry, "m")


async def test_if_one_nodes_path_fails_another_nodes_path_is_loaded(thinking_folder: Path, tmp_path: Path) -> None:
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", str(tmp_path / "not here"))])
        registry.set_model_cards("b", [card("m", str(thinking_folder))])
        await loading_done(registry)
        assert has_tokenizer(registry, "m") and path_in_use(registry, "m") == str(thinking_folder)


async def test_nodes_with_different_tokenizers_are_logged(
    thinking_folder: Path, copy_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    same, other = copy_model(thinking_folder, "same"), copy_model(thinking_folder, "other", added="<|more|>")
    template = copy_model(thinking_folder, "template")
    (template / "chat_template.jinja").write_text("{{ messages }}")
    async with new_registry() as registry:
        registry.set_model_cards("first", [card("m", str(thinking_folder))])
        await loading_done(registry)
        tokenizer = registry.prompt_tokenizer("m")
        registry.set_model_cards("same", [card("m", str(same))])
        await loading_done(registry)
        assert not warnings(caplog)
        registry.set_model_cards("other-tokenizer", [card("m", str(other))])
        registry.set_model_cards("other-template", [card("m", str(template))])
        await loading_done(registry)
        for _ in range(3):
            registry.set_model_cards("other-tokenizer", [card("m", str(other))])
            await loading_done(registry)
        assert registry.prompt_tokenizer("m") is tokenizer
        logged = [(event, fields["node"], fields["differs"]) for event, fields in warnings(caplog)]
        assert logged == [
            ("tokenizer_mismatch", "other-tokenizer", "tokenizer"),
            ("tokenizer_mismatch", "other-template", "chat_template"),
        ]
        # equal files at another path are the same tokenizer
        registry.remove_node("first")
        await loading_done(registry)
        assert registry.prompt_tokenizer("m") is tokenizer
        registry.remove_node("same")
        registry.remove_node("other-template")
        await loading_done(registry)
        assert registry.prompt_tokenizer("m").tokenizer is not tokenizer.tokenizer
        registry.remove_node("other-tokenizer")
        assert not has_tokenizer(registry, "m") and not registry._entries


async def test_an_adapter_uses_the_tokenizer_of_its_base_model(thinking_folder: Path, loads: list[str]) -> None:
    path = str(thinking_folder)
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", path), card("lora", "/adapters/lora", parent="m")])
        await loading_done(registry)
        assert has_tokenizer(registry, "lora")
        assert registry.prompt_tokenizer("lora") is registry.prompt_tokenizer("m") and loads == [path]
        registry.set_model_cards("a", [card("m", path), card("new", "/adapters/new", parent="m")])
        assert registry.prompt_tokenizer("new") is registry.prompt_tokenizer("m")
        assert not has_tokenizer(registry, "lora")


def test_invalid_cards_are_ignored() -> None:
    cards: list[dict[str, object]] = [
        {"id": 5, "root": "/x"},
        {"root": "/x"},
        card("a", "/x", parent="a"),
        card("b", ["/x"], parent="", length=True),
        card("c", "/x", length=-1),
        card("lora", "/y", parent="a name that nobody serves"),
        card("other", "/y", parent="configured"),
    ]
    listed = read_model_cards(cards, ["configured"])
    assert {name: (root.path, root.max_model_len) for name, root in listed.roots.items()} == {
        "a": ("/x", 4096),
        "b": ("", 0),
        "c": ("/x", 0),
    }
    assert listed.adapters == {"lora": "a", "other": "configured"}


async def test_pipes_devices_and_weights_are_not_opened(tmp_path: Path, loads: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "pipe.json", tmp_path / "weights.gguf", Path("/dev/zero"), Path("/proc/self/mem")):
        async with new_registry() as registry:
            registry.set_model_cards("a", [card("m", str(path))])
            await loading_done(registry)
            assert registry._entries["m"].failed and not loads


@pytest.mark.parametrize(
    ("qwen_like", "llama_like"),
    [("thinking", "llama"), pytest.param("qwen3", "tinyllama", marks=pytest.mark.data)],
)
async def test_tokenizers_of_different_kinds_are_discovered(
    qwen_like: str, llama_like: str, model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    qwen, llama = str(model_folder(qwen_like)), str(model_folder(llama_like))
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("qwen", qwen)])
        registry.set_model_cards("b", [card("llama", llama)])
        registry.set_model_cards("c", [card("qwen", llama)])
        await loading_done(registry, patience_s=50)
        first, second = (registry.prompt_tokenizer(model).tokenizer for model in ("qwen", "llama"))
        assert first is not None and not first.inexact_reason and not first.slow_reason
        assert second is not None and not second.inexact_reason and second.slow_reason
        assert first.fingerprint != second.fingerprint and path_in_use(registry, "qwen") == qwen
        assert [event for event, _fields in warnings(caplog)] == ["tokenizer_mismatch"]
