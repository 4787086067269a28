"""Who reads which model's prompts: configured, discovered, shared, replaced; and what is said when that fails."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asks import TOOL, assistant, user
from harness import until
from prompt_data import SHARED

from warmroute import config as configuration
from warmroute.config import ConfigError, ModelConfig, Prompts, from_table
from warmroute.prompt import reading
from warmroute.prompt import tokenizer_registry as library_module
from warmroute.prompt.chat_setting import EngineOptions
from warmroute.prompt.reading import PromptTokenizer
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer
from warmroute.prompt.tokenizer_registry import REST_S, TokenizerRegistry, read_cards

CHAT = b"/v1/chat/completions"
HI = json.dumps({"messages": [user("hi")]}).encode()


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@asynccontextmanager
async def a_library(
    *models: ModelConfig, clock: Clock | None = None, **prompts: Any
) -> AsyncIterator[TokenizerRegistry]:
    library = TokenizerRegistry(Prompts(**prompts), models, clock or time.monotonic)
    try:
        yield library
    finally:
        library.close()


def card(name: str, root: Any = None, parent: str | None = None, length: Any = 4096) -> dict[str, object]:
    return {"id": name, "object": "model", "root": root, "parent": parent, "max_model_len": length}


async def at_rest(library: TokenizerRegistry) -> None:
    await until(lambda: not library._tasks, "loading")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were loaded."""
    seen: list[str] = []

    def load(path: str) -> Tokenizer:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(str(path))
        return load_tokenizer(path)

    monkeypatch.setattr(library_module, "load_tokenizer", load)
    return seen


@pytest.fixture
def folder(small_folder: Callable[[str], Path]) -> Path:
    return small_folder("thinking")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """The same files elsewhere; with one more added token, they are others."""

    def make(source: Path, name: str, added: str = "") -> Path:
        copy = tmp_path / name
        shutil.copytree(source, copy)
        if added:
            tree = json.loads((copy / "tokenizer.json").read_text())
            last = max(token["id"] for token in tree["added_tokens"])
            tree["added_tokens"].append({**tree["added_tokens"][-1], "id": last + 1, "content": added})
            (copy / "tokenizer.json").write_text(json.dumps(tree))
        return copy

    return make


# ---- The configuration ----


def test_the_configuration_has_the_readers_own_defaults() -> None:
    assert Prompts().cache_bytes == reading.CACHE_BYTES
    model, options = ModelConfig(name="m"), EngineOptions()
    assert model.chat_template == options.chat_template == ""
    assert model.chat_template_content_format == "auto" and options.chat_template_content_format is None
    assert model.default_chat_template_kwargs == options.default_chat_template_kwargs == {}
    assert model.trust_request_chat_template == options.trust_request_chat_template
    assert model.exclude_tools_when_tool_choice_none == options.exclude_tools_when_tool_choice_none
    assert model.max_model_len == 0 and options.max_model_len is None
    shared = {field for field in ModelConfig.__struct_fields__ if field not in ("name", "tokenizer")}
    assert shared == set(EngineOptions.__dataclass_fields__)


def test_models_stand_in_the_file() -> None:
    entry = {"name": "m", "default_chat_template_kwargs": {"enable_thinking": False, "n": 1, "f": 1.5, "s": "x"}}
    config = from_table({"models": [entry], "prompts": {"discover": False}})
    assert config.models[0].default_chat_template_kwargs == entry["default_chat_template_kwargs"]
    assert not config.prompts.discover
    words = {name: (kind, default) for name, kind, default, _ in configuration.described(ModelConfig)}
    assert words["default_chat_template_kwargs"] == ("table of true / false, whole number, number, text", {})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"models": [{"name": "a"}, {"name": "a"}]}, "models: the model 'a' stands there twice"),
        ({"models": [{"name": ""}]}, "models[0].name: expected text of length >= 1"),
        ({"models": [{"name": "a", "tokeniser": "x"}]}, "did you mean models.tokenizer?"),
        ({"models": [{"name": "a", "default_chat_template_kwargs": {"x": [1]}}]}, "default_chat_template_kwargs"),
        ({"prompts": {"loop_ms": -1}}, "prompts.loop_ms: "),
    ],
)
def test_models_that_make_no_sense_are_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_table(table)
    assert words in str(error.value)


# ---- Configured ----


async def test_an_unknown_model_has_a_stand_in() -> None:
    async with a_library() as library:
        await library.load_configured()
        reader = library.reader("m")
        assert reader is library.reader("another") and reader.tokenizer is None
        prompt = reader.read(CHAT, HI)
        assert prompt is not None and not prompt.exact
        assert library.status() == []


async def test_a_configured_tokenizer_is_there_before_anybody_asks(folder: Path, loads: list[str]) -> None:
    models = [ModelConfig(name="m", tokenizer=str(folder)), ModelConfig(name="f", tokenizer=f"{folder}/tokenizer.json")]
    async with a_library(*models) as library:
        await library.load_configured()
        prompt = library.reader("m").read(CHAT, HI)
        assert prompt is not None and prompt.exact and prompt.sure_tokens == len(prompt.tokens) // 4
        assert library.reader("f") is library.reader("m") and len(loads) == 1
        library.saw_models([card("m", "/somewhere/else")], "node")
        await at_rest(library)
        assert len(loads) == 1, "what a node names does not count where one is configured"


async def test_the_engines_options_reach_the_reader(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<|start|>{{ x }}{{ m.content }}<|end|>{% endfor %}")
    model = ModelConfig(
        name="m",
        tokenizer=str(folder),
        chat_template=str(template),
        default_chat_template_kwargs={"x": "VARIABLE"},
        max_model_len=7,
    )
    async with a_library(model, cache_bytes=1 << 20) as library:
        await library.load_configured()
        reader = library.reader("m")
        assert reader.tokenizer is not None and reader.chats is not None
        prompt = reader.read(CHAT, HI)
        assert prompt is not None and prompt.tokens == reader.tokenizer.encode("<|start|>VARIABLEhi<|end|>")
        long = {"messages": [user("many many words")], "truncate_prompt_tokens": -1}
        cut = reader.read(CHAT, json.dumps(long).encode())
        assert cut is not None and cut.sure_tokens == 0 and "cut" in cut.doubt
        assert reader.chats.stems.budget_bytes < 1 << 20


@pytest.mark.parametrize("what", ["missing", "pipe", "device", "not json", "no template", "empty", "weights"])
async def test_a_bad_path_is_said_with_the_model_and_the_path(folder: Path, tmp_path: Path, what: str) -> None:
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
        model = ModelConfig(name="my-model", tokenizer=str(folder), chat_template=str(path))
    async with a_library(model) as library:
        with pytest.raises(ConfigError) as error:
            await library.load_configured()
    assert "'my-model'" in str(error.value)
    if what != "not json":
        assert str(path) in str(error.value)


# ---- Discovered ----


async def test_a_path_that_a_node_names_is_loaded_once(folder: Path, loads: list[str]) -> None:
    async with a_library() as library:
        for node in ("a", "b", "c"):
            library.saw_models([card("m", str(folder)), card("alias", str(folder))], node)
        assert library.reader("m").tokenizer is None, "it takes its time, elsewhere"
        assert {line["loading"] for line in library.status()} == {str(folder)}
        await at_rest(library)
        reader = library.reader("m")
        assert reader.tokenizer is not None and library.reader("alias") is reader
        library.saw_models([card("m", str(folder)), card("alias", str(folder))], "d")
        await at_rest(library)
        assert library.reader("m") is reader and len(loads) == 1 and library.mismatches == 0


async def test_the_length_comes_from_the_card(folder: Path) -> None:
    async with a_library() as library:
        library.saw_models([card("m", str(folder), length=7)], "a")
        await at_rest(library)
        body = json.dumps({"messages": [user("many many words")], "truncate_prompt_tokens": -1}).encode()
        prompt = library.reader("m").read(CHAT, body)
        assert prompt is not None and prompt.sure_tokens == 0


async def test_options_of_a_model_without_a_tokenizer_count_when_it_is_discovered(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("OWN{{ messages[0].content }}")
    async with a_library(ModelConfig(name="m", chat_template=str(template))) as library:
        await library.load_configured()
        library.saw_models([card("m", str(folder))], "a")
        await at_rest(library)
        reader = library.reader("m")
        prompt = reader.read(CHAT, HI)
        assert reader.tokenizer is not None and prompt is not None
        assert prompt.tokens == reader.tokenizer.encode("OWNhi")


@pytest.mark.parametrize("root", [None, 5, "", "Qwen/Qwen3-8B", "models/here", "../up"])
async def test_what_is_no_absolute_path_is_not_looked_for(root: Any, loads: list[str]) -> None:
    async with a_library() as library:
        library.saw_models([card("m", root)], "a")
        assert not library._tasks and not loads and library.reader("m").tokenizer is None
        (line,) = library.status()
        assert line["exact"] is False and "name no path" in str(line["problem"])


async def test_discovery_may_be_switched_off(folder: Path, loads: list[str]) -> None:
    async with a_library(discover=False) as library:
        library.saw_models([card("m", str(folder))], "a")
        assert not library._tasks and not loads
        assert "prompts.discover" in str(library.status()[0]["problem"])
        library.reconfigure(Prompts(), [])
        await at_rest(library)
        assert library.reader("m").tokenizer is not None
        library.reconfigure(Prompts(discover=False), [])
        assert library.reader("m").tokenizer is None


async def test_what_cannot_be_loaded_is_said_once_and_rested(
    tmp_path: Path, folder: Path, loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "later"
    path.mkdir()
    (path / "tokenizer.json").write_text("[")
    async with a_library(clock=clock) as library:
        for number in range(20):
            library.saw_models([card("m", str(path))], f"node-{number % 3}")
            await at_rest(library)
        assert len(loads) == 1
        clock.s += REST_S + 1
        for _ in range(5):
            library.saw_models([card("m", str(path))], "node-0")
            await at_rest(library)
        assert len(loads) == 2
        (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "[[models]] tokenizer" in said.getMessage() and "node-0" in said.getMessage()
        assert library.status()[0]["problem"]
        shutil.copytree(folder, path, dirs_exist_ok=True)
        clock.s += REST_S + 1
        library.saw_models([card("m", str(path))], "node-0")
        await at_rest(library)
        assert library.reader("m").tokenizer is not None and not library.status()[0]["problem"]


async def test_a_model_that_comes_back_while_its_path_rests_is_tried_again_after_that(
    tmp_path: Path, folder: Path
) -> None:
    clock, path = Clock(), tmp_path / "later"
    async with a_library(clock=clock) as library:
        library.saw_models([card("m", str(path))], "a")
        await at_rest(library)
        library.forget_node("a")
        library.saw_models([card("m", str(path))], "a")
        await at_rest(library)
        assert str(path) in str(library.status()[0]["problem"])
        shutil.copytree(folder, path)
        clock.s += REST_S + 1
        library.saw_models([card("m", str(path))], "a")
        await at_rest(library)
        assert library.reader("m").tokenizer is not None


async def test_what_nobody_names_any_more_is_let_go(folder: Path) -> None:
    async with a_library() as library:
        library.saw_models([card("m", str(folder))], "a")
        await at_rest(library)
        gone = weakref.ref(library.reader("m")), weakref.ref(library.reader("m").tokenizer)
        library.forget_node("a")
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        library.saw_models([card("m", str(folder))], "a")
        await at_rest(library)
        assert library.reader("m").tokenizer is not None


async def test_another_nodes_path_is_tried_where_the_first_fails(folder: Path, tmp_path: Path) -> None:
    async with a_library() as library:
        library.saw_models([card("m", str(tmp_path / "not here"))], "a")
        library.saw_models([card("m", str(folder))], "b")
        await at_rest(library)
        assert library.reader("m").tokenizer is not None and library.mismatches == 0
        assert library.status()[0]["tokenizer"] == str(folder)


async def test_two_nodes_with_different_tokenizers_are_noticed(
    folder: Path, copy_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    same, other = copy_of(folder, "same"), copy_of(folder, "other", added="<|more|>")
    template = copy_of(folder, "template")
    (template / "chat_template.jinja").write_text("{{ messages }}")
    async with a_library() as library:
        library.saw_models([card("m", str(folder))], "first")
        await at_rest(library)
        reader = library.reader("m")
        library.saw_models([card("m", str(same))], "same")
        await at_rest(library)
        assert library.mismatches == 0 and not [r for r in caplog.records if r.levelno >= logging.WARNING]
        library.saw_models([card("m", str(other))], "odd")
        library.saw_models([card("m", str(template))], "even")
        await at_rest(library)
        for _ in range(3):
            library.saw_models([card("m", str(other))], "odd")
            await at_rest(library)
        assert library.mismatches == 2 and library.reader("m") is reader
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 2 and "odd has another tokenizer" in said[0] and "even has another chat template" in said[1]
        # the first goes, and its path with it: an equal one elsewhere is the same reader, another one is another
        library.forget_node("first")
        await at_rest(library)
        assert library.reader("m") is reader
        library.forget_node("same")
        library.forget_node("even")
        await at_rest(library)
        assert library.reader("m").tokenizer is not reader.tokenizer
        library.forget_node("odd")
        assert library.reader("m").tokenizer is None and library.status() == []


async def test_an_adapter_has_the_reader_of_its_base(folder: Path, loads: list[str]) -> None:
    async with a_library() as library:
        library.saw_models([card("m", str(folder)), card("lora", "/adapters/lora", parent="m")], "a")
        await at_rest(library)
        assert library.adapters == {"lora": "m"} and library.reader("lora") is library.reader("m")
        assert loads == [str(folder)]
        lines = {line["model"]: line for line in library.status()}
        assert lines["lora"]["adapter_of"] == "m" and lines["lora"]["exact"] and lines["lora"]["fingerprint"]
        library.saw_models([card("m", str(folder)), card("new", "/adapters/new", parent="m")], "a")
        assert library.reader("new") is library.reader("m") and library.reader("lora").tokenizer is None


def test_nonsense_in_cards_is_passed_over() -> None:
    cards: list[dict[str, object]] = [
        {"id": 5, "root": "/x"},
        {"root": "/x"},
        card("a", "/x", parent="a"),
        card("b", ["/x"], parent="", length=True),
        card("c", "/x", length=-1),
        card("lora", "/y", parent="a name that nobody serves"),
        card("other", "/y", parent="configured"),
    ]
    said = read_cards(cards, ["configured"])
    assert {name: (root.path, root.max_model_len) for name, root in said.roots.items()} == {
        "a": ("/x", 4096),
        "b": ("", 0),
        "c": ("/x", 0),
    }
    assert said.adapters == {"lora": "a", "other": "configured"}


async def test_pipes_devices_and_weights_that_a_node_names_are_left_alone(tmp_path: Path, loads: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "pipe.json", tmp_path / "weights.gguf", Path("/dev/zero"), Path("/proc/self/mem")):
        async with a_library() as library:
            library.saw_models([card("m", str(path))], "a")
            await at_rest(library)
            assert library.status()[0]["problem"] and not loads


# ---- Changed ----


async def test_what_is_unchanged_keeps_its_reader(folder: Path, loads: list[str]) -> None:
    kept, dropped = ModelConfig(name="kept", tokenizer=str(folder)), ModelConfig(name="dropped", tokenizer=str(folder))
    async with a_library(kept, dropped) as library:
        await library.load_configured()
        reader = library.reader("kept")
        added = ModelConfig(name="added", tokenizer=str(folder), default_chat_template_kwargs={"n": 1})
        library.reconfigure(Prompts(threads=2), [kept, added])
        assert library.reader("kept") is reader and library.reader("dropped").tokenizer is None
        await at_rest(library)
        new = library.reader("added")
        assert new.tokenizer is reader.tokenizer and new is not reader and len(loads) == 1
        as_truth = ModelConfig(name="added", tokenizer=str(folder), default_chat_template_kwargs={"n": True})
        library.reconfigure(Prompts(), [kept, as_truth])
        assert library.reader("added") is new, "the old goes on while the new is loaded"
        await at_rest(library)
        assert library.reader("added") is not new and library.reader("kept") is reader


async def test_a_bad_change_is_said_and_the_old_stays(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = ModelConfig(name="m", tokenizer=str(folder))
    async with a_library(good) as library:
        await library.load_configured()
        reader = library.reader("m")
        library.reconfigure(Prompts(), [ModelConfig(name="m", tokenizer=str(tmp_path / "none"))])
        await at_rest(library)
        assert library.reader("m") is reader
        (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "'m'" in said.getMessage() and str(tmp_path / "none") in said.getMessage()
        assert library.status()[0]["problem"] and library.status()[0]["tokenizer"] == str(folder)
        library.reconfigure(Prompts(), [good])
        assert library.reader("m") is reader and not library.status()[0]["problem"] and not library._tasks


async def test_files_that_have_changed_are_read_again_when_they_are_asked_for(
    folder: Path, copy_of: Callable[..., Path], loads: list[str]
) -> None:
    mine = copy_of(folder, "mine")
    async with a_library(ModelConfig(name="m", tokenizer=str(mine))) as library:
        await library.load_configured()
        before = library.reader("m")
        (mine / "chat_template.jinja").write_text("NEW{{ messages[0].content }}")
        library.reconfigure(Prompts(), [ModelConfig(name="m", tokenizer=f"{mine}/")])
        await at_rest(library)
        assert library.reader("m").tokenizer is not before.tokenizer and len(loads) == 2


# ---- Looked after ----


def a_conversation(turns: int) -> bytes:
    messages = [message for n in range(turns) for message in (user(f"question {n}"), assistant(f"answer {n}"))]
    return json.dumps({"messages": [*messages, user("and now?")], "tools": [TOOL]}).encode()


async def test_contradictions_are_counted_and_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_library(ModelConfig(name="m", tokenizer=str(folder))) as library:
        await library.load_configured()
        await library.audit()
        reader = library.reader("m")
        assert reader.chats is not None
        for turns in range(1, 4):
            reader.read(CHAT, a_conversation(turns))
        await library.audit()
        assert library.contradictions == 0 and library.status()[0]["conversations"] == 3
        assert 0 < int(str(library.status()[0]["cache_bytes"])) < 1 << 20
        real = type(reader.chats).read_plainly
        monkeypatch.setattr(type(reader.chats), "read_plainly", lambda *given: real(*given) + b"\0\0\0\0")
        reader._warm_reads = 0  # the next warm one is kept for the audit
        reader.read(CHAT, a_conversation(3))
        await library.audit()
        assert library.contradictions == 1
        reader.chats.contradictions += 1
        await library.audit()
        await library.audit()
        assert library.contradictions == 2
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1 and "'m'" in said[0]


async def test_an_audit_that_breaks_is_said_without_its_words(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_library(ModelConfig(name="m", tokenizer=str(folder))) as library:
        await library.load_configured()

        def breaks(_reader: PromptTokenizer) -> bool:
            raise RuntimeError("what a user typed")

        monkeypatch.setattr(PromptTokenizer, "audit", breaks)
        await library.audit()
        assert "RuntimeError" in caplog.text and "typed" not in caplog.text


async def test_closing_waits_for_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(library_module, "load_tokenizer", lambda path: let_go.wait(10) and load_tokenizer(path))
    async with a_library() as library:
        library.saw_models([card("m", str(folder))], "a")
        await asyncio.sleep(0.01)
        began_s = time.monotonic()
        library.close()
        await asyncio.sleep(0)
        assert time.monotonic() - began_s < 1
        await library.audit()
    let_go.set()


async def test_finding_a_reader_takes_less_than_a_microsecond(folder: Path) -> None:
    async with a_library(ModelConfig(name="m", tokenizer=str(folder))) as library:
        await library.load_configured()
        best_s = 1.0
        for _ in range(20):
            began_s = time.perf_counter()
            for _again in range(1000):
                library.reader("m")
            best_s = min(best_s, time.perf_counter() - began_s)
        assert best_s < 1000 * 1e-6


@pytest.mark.skipif(not SHARED.exists(), reason="the shared tokenizers are not on this machine")
async def test_real_tokenizers_are_discovered() -> None:
    qwen, llama = SHARED / "tokenizers" / "qwen3-rebuilt", SHARED / "tokenizers" / "tinyllama"
    async with a_library() as library:
        library.saw_models([card("qwen", str(qwen))], "a")
        library.saw_models([card("llama", str(llama))], "b")
        library.saw_models([card("qwen", str(llama))], "c")
        await until(lambda: not library._tasks, "loading", patience_s=50)
        lines = {line["model"]: line for line in library.status()}
        assert lines["qwen"]["exact"] and lines["llama"]["exact"] and not lines["qwen"]["slow_because"]
        assert lines["llama"]["slow_because"] and lines["qwen"]["fingerprint"] != lines["llama"]["fingerprint"]
        assert library.mismatches == 1 and lines["qwen"]["tokenizer"] == str(qwen)
