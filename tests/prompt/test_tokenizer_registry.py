"""Configured tokenizers: loading, reconfiguring, verifying."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from registry_harness import CHAT, HI, card, has_tokenizer, loading_done, new_registry, path_in_use, warnings
from sample_requests import TOOL, assistant, user

from warmroute.config import ConfigError, ModelConfig, Prompts, from_table
from warmroute.prompt import prompt_tokenizer
from warmroute.prompt import registry as tokenizer_loader
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.template_messages import EngineOptions
from warmroute.prompt.tokenizer import load_tokenizer

# ---- The configuration ----


def test_the_configuration_has_the_same_defaults_as_the_code() -> None:
    assert Prompts().cache_bytes == prompt_tokenizer.CACHE_BYTES
    model, options = ModelConfig(name="m"), EngineOptions()
    assert model.chat_template == options.chat_template == ""
    assert model.chat_template_content_format == "auto" and options.chat_template_content_format is None
    assert model.default_chat_template_kwargs == options.default_chat_template_kwargs == {}
    assert model.trust_request_chat_template == options.trust_request_chat_template
    assert model.exclude_tools_when_tool_choice_none == options.exclude_tools_when_tool_choice_none
    assert model.max_model_len == 0 and options.max_model_len is None
    shared = {field for field in ModelConfig.__struct_fields__ if field not in ("name", "tokenizer")}
    assert shared == set(EngineOptions.__dataclass_fields__)


def test_models_are_read_from_the_configuration_file() -> None:
    entry = {"name": "m", "default_chat_template_kwargs": {"enable_thinking": False, "n": 1, "f": 1.5, "s": "x"}}
    config = from_table({"models": [entry], "prompts": {"discover_tokenizers": False}}, experiment=True)
    assert config.models[0].default_chat_template_kwargs == entry["default_chat_template_kwargs"]
    assert not config.prompts.discover_tokenizers


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"models": [{"name": "a"}, {"name": "a"}]}, "'a'"),
        ({"models": [{"name": ""}]}, "models[0].name"),
        ({"models": [{"name": "a", "tokeniser": "x"}]}, "did you mean models.tokenizer?"),
        ({"models": [{"name": "a", "default_chat_template_kwargs": {"x": [1]}}]}, "default_chat_template_kwargs"),
    ],
)
def test_an_invalid_models_table_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_table(table)
    assert message in str(error.value)


# ---- Loading ----


async def test_a_model_without_a_tokenizer_uses_text_matching() -> None:
    async with new_registry() as registry:
        await registry.load_configured()
        tokenizer = registry.prompt_tokenizer("m")
        assert tokenizer is registry.prompt_tokenizer("another") and tokenizer.tokenizer is None
        prompt = tokenizer.tokenize(CHAT, HI)
        assert prompt is not None and not prompt.exact


async def test_a_configured_tokenizer_is_loaded_before_the_first_request(
    thinking_folder: Path, loads: list[str]
) -> None:
    models = [
        ModelConfig(name="m", tokenizer=str(thinking_folder)),
        ModelConfig(name="f", tokenizer=f"{thinking_folder}/tokenizer.json"),
    ]
    async with new_registry(*models) as registry:
        await registry.load_configured()
        prompt = registry.prompt_tokenizer("m").tokenize(CHAT, HI)
        assert prompt is not None and prompt.exact and prompt.exact_tokens == len(prompt.tokens) // 4
        assert registry.prompt_tokenizer("f") is registry.prompt_tokenizer("m") and len(loads) == 1
        registry.set_model_cards("node", [card("m", "/somewhere/else")])
        await loading_done(registry)
        assert len(loads) == 1, "a configured path takes precedence over a node's"


async def test_the_engines_options_reach_the_tokenizer(thinking_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<|start|>{{ x }}{{ m.content }}<|end|>{% endfor %}")
    model = ModelConfig(
        name="m",
        tokenizer=str(thinking_folder),
        chat_template=str(template),
        default_chat_template_kwargs={"x": "VARIABLE"},
        max_model_len=7,
    )
    async with new_registry(model, cache_bytes=1 << 20) as registry:
        await registry.load_configured()
        tokenizer = registry.prompt_tokenizer("m")
        assert tokenizer.tokenizer is not None and tokenizer.chats is not None
        prompt = tokenizer.tokenize(CHAT, HI)
        assert prompt is not None and prompt.tokens == tokenizer.tokenizer.encode("<|start|>VARIABLEhi<|end|>")
        long = {"messages": [user("many many words")], "truncate_prompt_tokens": -1}
        truncated = tokenizer.tokenize(CHAT, json.dumps(long).encode())
        assert truncated is not None and truncated.exact_tokens == 0 and "truncate" in truncated.inexact_reason
        assert tokenizer.chats.token_cache.budget_bytes < 1 << 20


@pytest.mark.parametrize("what", ["missing", "pipe", "device", "not json", "no template", "empty", "weights"])
async def test_the_error_for_a_bad_path_names_the_model_and_the_path(
    thinking_folder: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "it"
    model = ModelConfig(name="my-model", tokenizer=str(path))
    if what == "pipe":
        path.mkdir()
        os.mkfifo(path / "tokenizer.json")
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "not json":
        path.mkdir()
        (path / "tokenizer.json").write_text("{")
    elif what == "weights":
        path.write_bytes(b"GGUF")
    elif what in ("no template", "empty"):
        path.write_text("{% for %}" if what == "no template" else " ")
        model = ModelConfig(name="my-model", tokenizer=str(thinking_folder), chat_template=str(path))
    async with new_registry(model) as registry:
        with pytest.raises(ConfigError) as error:
            await registry.load_configured()
    assert "'my-model'" in str(error.value)
    if what != "not json":
        assert str(path) in str(error.value)


# ---- Reconfiguring ----


async def test_an_unchanged_model_keeps_its_tokenizer(thinking_folder: Path, loads: list[str]) -> None:
    path = str(thinking_folder)
    kept, dropped = ModelConfig(name="kept", tokenizer=path), ModelConfig(name="dropped", tokenizer=path)
    async with new_registry(kept, dropped) as registry:
        await registry.load_configured()
        tokenizer = registry.prompt_tokenizer("kept")
        added = ModelConfig(name="added", tokenizer=path, default_chat_template_kwargs={"n": 1})
        registry.reconfigure(Prompts(threads=2), [kept, added])
        assert registry.prompt_tokenizer("kept") is tokenizer and not has_tokenizer(registry, "dropped")
        await loading_done(registry)
        new = registry.prompt_tokenizer("added")
        assert new.tokenizer is tokenizer.tokenizer and new is not tokenizer and len(loads) == 1
        with_true = ModelConfig(name="added", tokenizer=path, default_chat_template_kwargs={"n": True})
        registry.reconfigure(Prompts(), [kept, with_true])
        assert registry.prompt_tokenizer("added") is new, "the old one is used while the new one is loaded"
        await loading_done(registry)
        assert registry.prompt_tokenizer("added") is not new and registry.prompt_tokenizer("kept") is tokenizer


async def test_a_failed_change_is_logged_and_the_previous_tokenizer_stays(
    thinking_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = ModelConfig(name="m", tokenizer=str(thinking_folder))
    async with new_registry(good) as registry:
        await registry.load_configured()
        tokenizer = registry.prompt_tokenizer("m")
        registry.reconfigure(Prompts(), [ModelConfig(name="m", tokenizer=str(tmp_path / "none"))])
        await loading_done(registry)
        assert registry.prompt_tokenizer("m") is tokenizer
        ((event, fields),) = warnings(caplog)
        assert event == "tokenizer_load_failed" and fields["model"] == "m" and fields["path"] == str(tmp_path / "none")
        assert "The router keeps the previous tokenizer." in caplog.text
        assert path_in_use(registry, "m") == str(thinking_folder)
        registry.reconfigure(Prompts(), [good])
        assert registry.prompt_tokenizer("m") is tokenizer and not registry._tasks


async def test_changed_files_are_loaded_again_when_the_configuration_changes(
    thinking_folder: Path, copy_model: Callable[..., Path], loads: list[str]
) -> None:
    folder = copy_model(thinking_folder, "mine")
    async with new_registry(ModelConfig(name="m", tokenizer=str(folder))) as registry:
        await registry.load_configured()
        before = registry.prompt_tokenizer("m")
        (folder / "chat_template.jinja").write_text("NEW{{ messages[0].content }}")
        registry.reconfigure(Prompts(), [ModelConfig(name="m", tokenizer=f"{folder}/")])
        await loading_done(registry)
        assert registry.prompt_tokenizer("m").tokenizer is not before.tokenizer and len(loads) == 2


# ---- Upkeep ----


def conversation(turns: int, plain: bool = True) -> bytes:
    more = {} if plain else {"reasoning": "hm"}
    messages = [message for n in range(turns) for message in (user(f"question {n}"), assistant(f"answer {n}", **more))]
    return json.dumps({"messages": [*messages, user("and now?")], "tools": [TOOL]}).encode()


@pytest.mark.parametrize("plain", [True, False])
async def test_a_failed_check_is_logged_once(
    plain: bool, thinking_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_registry(ModelConfig(name="m", tokenizer=str(thinking_folder))) as registry:
        await registry.load_configured()
        await registry.verify_samples()
        tokenizer = registry.prompt_tokenizer("m")
        assert tokenizer.chats is not None
        for turns in range(1, 4):
            tokenizer.tokenize(CHAT, conversation(turns, plain))
        await registry.verify_samples()
        assert tokenizer.chats.failed_checks == tokenizer.chats.failed_layouts == 0
        assert len(tokenizer.chats.token_cache) == (0 if plain else 3)
        assert 0 < tokenizer.chats.used_bytes < 1 << 20
        real = type(tokenizer.chats).tokenize_without_cache
        wrong = lambda *arguments: real(*arguments) + b"\0\0\0\0"  # noqa: E731
        monkeypatch.setattr(type(tokenizer.chats), "tokenize_without_cache", wrong)
        tokenizer._warm_requests = 0  # the next warm request becomes the sample
        tokenizer.tokenize(CHAT, conversation(3, plain))
        await registry.verify_samples()
        assert (tokenizer.chats.failed_layouts, tokenizer.chats.failed_checks) == ((1, 0) if plain else (0, 1))
        tokenizer.chats.failed_checks *= 2
        await registry.verify_samples()
        assert warnings(caplog) == [("chat_layout_disabled" if plain else "tail_rendering_disabled", {"model": "m"})]


async def test_an_error_in_a_check_is_logged_without_its_message(
    thinking_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_registry(ModelConfig(name="m", tokenizer=str(thinking_folder))) as registry:
        await registry.load_configured()

        def fail(_tokenizer: PromptTokenizer) -> bool:
            raise RuntimeError("what a user typed")

        monkeypatch.setattr(PromptTokenizer, "verify_sample", fail)
        await registry.verify_samples()
        assert "prompt_verification_failed" in caplog.text
        assert "RuntimeError" in caplog.text and "typed" not in caplog.text


async def test_closing_does_not_wait_for_the_thread(thinking_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()
    monkeypatch.setattr(tokenizer_loader, "load_tokenizer", lambda path: may_load.wait(10) and load_tokenizer(path))
    async with new_registry() as registry:
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        await asyncio.sleep(0.01)
        began_s = time.monotonic()
        registry.close()
        await asyncio.sleep(0)
        assert time.monotonic() - began_s < 1
        await registry.verify_samples()
    may_load.set()


async def test_finding_a_tokenizer_takes_less_than_a_microsecond(thinking_folder: Path) -> None:
    async with new_registry(ModelConfig(name="m", tokenizer=str(thinking_folder))) as registry:
        await registry.load_configured()
        best_s = 1.0
        for _ in range(20):
            began_s = time.perf_counter()
            for _repetition in range(1000):
                registry.prompt_tokenizer("m")
            best_s = min(best_s, time.perf_counter() - began_s)
        assert best_s < 1000 * 1e-6
