"""The router reports how well it reads prompts: one warning for each model without a tokenizer, GET /admin/models, a
metric, and a comparison with the nodes' /tokenize."""

from __future__ import annotations

import json
import logging
import shutil
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from small_model_router import template_checked_once as _autouse  # noqa: F401
from support.engine_scripts import failing, http_response, normal, script
from support.fake_hub import FakeHub, fake_hub
from support.polling import until
from support.raw_client import post
from support.running_router import RunningRouter, router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines
from tokenizers import Tokenizer

from warmroute.app import models as model_watch
from warmroute.config import from_table
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.tokenizer import load_tokenizer

SMALL_MODEL = Path(__file__).parent / "prompt" / "small-model"
HUB_ID = "org/small-model"
LONG = "the router reads this prompt before it sends it anywhere. " * 20


@pytest.fixture(scope="module", autouse=True)
def _template_checked(_autouse: None) -> None:  # noqa: F811
    """Check the chat template before the tests: on a busy machine that takes longer than a test waits."""
    PromptTokenizer(load_tokenizer(SMALL_MODEL))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_watch, "INTERVAL_S", 0.02)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add(HUB_ID, SMALL_MODEL)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def lists(root: str, *adapters: str) -> Any:
    cards = [{"id": "m", "object": "model", "root": root, "parent": None, "max_model_len": 4096}]
    cards += [{"id": name, "object": "model", "root": "/x", "parent": "m"} for name in adapters]
    return script(http_response(json.dumps({"object": "list", "data": cards}).encode()))


@asynccontextmanager
async def router_for(root: str, *adapters: str, **tables: Any) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    async with engines(1) as (engine,):
        engine.list_models = lists(root, *adapters)
        async with router(engine, **{"routing": {"policy": "price"}, **tables}) as r:
            yield engine, r


async def models(r: RunningRouter) -> dict[str, dict[str, Any]]:
    response = await r.admin("GET", "/admin/models")
    assert response.status == 200
    return {model["name"]: model for model in json.loads(response.body)["models"]}


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


def chat(text: str = LONG, model: str = "m") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()


def suggested_toml(record: logging.LogRecord) -> dict[str, Any]:
    """Return the lines of the log record that are indented, as TOML."""
    lines = [line for line in record.getMessage().splitlines()[1:] if line.startswith("    ")]
    return tomllib.loads("\n".join(lines))


async def test_a_model_without_a_tokenizer_is_logged_once_with_the_lines_to_add(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with router_for(HUB_ID, "lora") as (_engine, r):
        await until(lambda: bool(logged(caplog, "tokenizer_missing")), "the warning")
        for _ in range(5):
            r.service.model_watch.warn_missing()
    (record,) = logged(caplog, "tokenizer_missing")
    assert record.levelno == logging.WARNING
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["model"] == "m" and HUB_ID in fields["reason"] and "Hugging Face cache" in fields["reason"]
    table = suggested_toml(record)
    assert table["models"] == [{"name": "m", "tokenizer": "/models/small-model"}]
    from_table(table, experiment=True)
    assert "download_tokenizers = true in [prompts]" in record.getMessage()


async def test_a_model_that_has_a_table_gets_the_line_to_add_to_it(caplog: pytest.LogCaptureFixture) -> None:
    async with router_for("", models=[{"name": "m", "max_model_len": 100}]):
        await until(lambda: bool(logged(caplog, "tokenizer_missing")), "the warning")
    (record,) = logged(caplog, "tokenizer_missing")
    assert suggested_toml(record) == {"tokenizer": "/models/m"} and "[[models]]\n" not in record.getMessage()


@pytest.mark.parametrize("tables", [{"routing": {"policy": "round_robin"}}, {"prompts": {"remote_tokenize": True}}])
async def test_nothing_is_logged_where_tokens_are_not_needed_or_come_from_nodes(
    caplog: pytest.LogCaptureFixture, tables: dict[str, Any]
) -> None:
    async with router_for(HUB_ID, **tables) as (_engine, r):
        await until(lambda: r.node(0).engine == "vllm", "the engine is detected")
        caplog.clear()
        await until(lambda: r.service.tokenizer_registry.status("m").state == "missing", "the search has ended")
        for _ in range(2):
            if r.service.config.uses_kv_events:
                r.service.model_watch.warn_missing()
    assert not logged(caplog, "tokenizer_missing")


async def test_a_tokenizer_in_the_hugging_face_cache_is_used(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    repository = tmp_path / "hf" / "hub" / "models--org--small-model"
    shutil.copytree(SMALL_MODEL, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    caplog.set_level(logging.INFO)
    async with router_for(HUB_ID, "lora") as (engine, r):
        await until(lambda: r.service.tokenizer_registry.status("m").state == "loaded", "the tokenizer")
        report = await models(r)
        engine.behave = normal()
        assert (await r.request(post(chat()))).status == 200
        assert (await r.request(post(chat(model="lora")))).status == 200
        report = await models(r)
    tokenizer = report["m"]["tokenizer"]
    assert (tokenizer["state"], tokenizer["source"], tokenizer["hub_id"]) == ("loaded", "hugging_face_cache", HUB_ID)
    assert tokenizer["path"] == str(repository / "snapshots" / ("a" * 40))
    assert report["m"]["prompts"] == {"exact": 1, "inexact": 0, "text": 0, "none": 0}
    assert report["lora"]["base_model"] == "m" and report["lora"]["prompts"]["exact"] == 1
    assert report["lora"]["tokenizer"]["path"] == tokenizer["path"]
    assert report["m"]["context_windows"] == [4096]
    (record,) = logged(caplog, "tokenizer_loaded")
    assert record.fields["source"] == "hugging_face_cache"  # type: ignore[attr-defined]
    assert not logged(caplog, "tokenizer_missing")


async def test_a_tokenizer_is_downloaded_if_the_operator_allows_it(
    caplog: pytest.LogCaptureFixture, hub: FakeHub
) -> None:
    async with router_for(HUB_ID, prompts={"download_tokenizers": True}) as (_engine, r):
        await until(lambda: r.service.tokenizer_registry.status("m").state == "loaded", "the tokenizer")
        report = await models(r)
    assert report["m"]["tokenizer"]["source"] == "download" and hub.requests
    assert not logged(caplog, "tokenizer_missing")


async def test_a_download_that_fails_is_the_reason_in_the_warning(
    caplog: pytest.LogCaptureFixture, hub: FakeHub
) -> None:
    hub.token = "required"
    async with router_for(HUB_ID, prompts={"download_tokenizers": True}) as (_engine, r):
        await until(lambda: bool(logged(caplog, "tokenizer_missing")), "the warning")
        report = await models(r)
    (record,) = logged(caplog, "tokenizer_missing")
    assert "set HF_TOKEN" in record.fields["reason"]  # type: ignore[attr-defined]
    assert report["m"]["tokenizer"] == {
        "state": "missing", "path": None, "source": "none", "hub_id": HUB_ID,
        "reason": report["m"]["tokenizer"]["reason"], "inexact_reason": None, "slow_reason": None,
    }  # fmt: skip
    assert "401" in report["m"]["tokenizer"]["reason"]


async def test_prompts_are_counted_by_how_they_were_read() -> None:
    tables = {"models": [{"name": "m", "tokenizer": str(SMALL_MODEL)}]}
    async with router_for(str(SMALL_MODEL), **tables) as (engine, r):
        engine.behave = normal()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        mixed = [{"type": "text", "text": LONG}, image]
        own_template = {"chat_template": "{{ messages }}"}
        for message, more in ((LONG, {}), (LONG, {}), (mixed, {}), (LONG, own_template)):
            body = {"model": "m", "messages": [{"role": "user", "content": message}], **more}
            assert (await r.request(post(json.dumps(body).encode()))).status == 200
        await r.request(post(chat(model="a name that a client invented")))
        report = await models(r)
        page = (await r.admin("GET", "/metrics")).body.decode()
        counted = {model for model, _reading in r.service.counters.prompts}
    assert report["m"]["prompts"] == {"exact": 2, "inexact": 1, "text": 1, "none": 0}
    assert 'warmroute_prompts_total{model="m",reading="exact"} 2' in page
    assert 'warmroute_prompts_total{model="m",reading="text"} 1' in page
    assert counted == {"m"} and "invented" not in page


async def test_a_prompt_that_cannot_be_read_is_counted() -> None:
    async with router_for(HUB_ID) as (engine, r):
        engine.behave = normal()

        def fail(*_arguments: object) -> None:
            raise RuntimeError

        r.service.tokenizer_registry.text_matching.begin = fail  # type: ignore[method-assign, assignment]
        r.service.prompt_reader._max_text_prompt_bytes = -1
        assert (await r.request(post(chat()))).status == 200
        report = await models(r)
    assert report["m"]["prompts"]["none"] == 1


# The comparison with the nodes' /tokenize.


class Tokenize:
    """A node's /tokenize with the small model's tokenizer, and a chat template of its own."""

    def __init__(self, template: str | None = None) -> None:
        from warmroute.lab.engine.tokenizers import ModelTokenizer

        self._tokenizer = ModelTokenizer(SMALL_MODEL)
        self._reference = Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
        self._prefix = template
        self.requests = 0

    async def __call__(self, engine: ScriptedEngine, received: ReceivedRequest, writer: Any) -> None:
        self.requests += 1
        body = json.loads(received.body)
        if "messages" in body:
            text = (self._prefix or "") + self._tokenizer.render(body["messages"], None, True)
            tokens = self._tokenizer.encode(text)
        else:
            tokens = self._reference.encode(body["prompt"], add_special_tokens=True).ids
        writer.write(http_response(json.dumps({"count": len(tokens), "tokens": tokens}).encode()))


async def compared(r: RunningRouter) -> dict[str, Any]:
    await until(lambda: r.service.model_watch.agreement("node0", "m") is not None, "the comparison")
    return (await models(r))["m"]


async def test_the_routers_tokens_are_compared_once_with_a_nodes(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(1) as (engine,):
        engine.list_models, engine.tokenize = lists(str(SMALL_MODEL)), (answer := Tokenize())
        async with router(engine, routing={"policy": "price"}) as r:
            report = await compared(r)
            for _ in range(3):
                await r.service.model_watch.compare()
            assert answer.requests == 3, "a text and two chats"
            # a restarted engine may have other flags
            r.node(0).incarnation += 1
            await r.service.model_watch.compare()
            assert answer.requests == 6
    assert report["chat_template"] == {
        "source": "model", "path": None, "inexact_reason": None, "agrees_with_nodes": True,
    }  # fmt: skip
    assert report["nodes"][0]["tokenize"]["state"] == "agrees" and report["nodes"][0]["context_window"] == 4096
    assert not logged(caplog, "tokenize_mismatch")


async def test_another_chat_template_on_a_node_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(1) as (engine,):
        engine.list_models, engine.tokenize = lists(str(SMALL_MODEL)), Tokenize("Today is Monday. ")
        async with router(engine, routing={"policy": "price"}) as r:
            report = await compared(r)
            await r.service.model_watch.compare()
    assert report["chat_template"]["agrees_with_nodes"] is False
    (record,) = logged(caplog, "tokenize_mismatch")
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["node"], fields["model"], fields["differs"]) == ("node0", "m", "chat_template")
    assert "chat_template" in record.getMessage()


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (failing(404), "unavailable"),
        (normal(b'{"tokens": [1, 2, 3], "count": 3}'), "differs"),
        (normal(b'{"tokens": "many"}'), "differs"),
        (failing(400), "differs"),
    ],
)
async def test_a_node_may_answer_the_comparison_with_anything(answer: Any, state: str) -> None:
    async with engines(1) as (engine,):
        engine.list_models, engine.tokenize = lists(str(SMALL_MODEL)), answer
        async with router(engine, routing={"policy": "price"}) as r:
            report = await compared(r)
    assert report["nodes"][0]["tokenize"]["state"] == state


async def test_a_node_that_does_not_answer_the_comparison_is_asked_again_later() -> None:
    async with engines(1) as (engine,):
        engine.list_models, engine.tokenize = lists(str(SMALL_MODEL)), failing(503)
        async with router(engine, routing={"policy": "price"}) as r:
            watch = r.service.model_watch
            await until(lambda: bool(watch._retry_at_s), "the first attempt")
            assert watch.agreement("node0", "m") is None
            engine.tokenize = Tokenize()
            watch._retry_at_s.clear()
            assert (await compared(r))["chat_template"]["agrees_with_nodes"] is True
