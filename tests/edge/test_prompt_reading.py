"""Prompts in the running router: which are read, where, and how that decides the node."""

from __future__ import annotations

import json
import logging
import random
import string
import threading
from array import array
from typing import Any

import pytest
from small_model_router import (
    BLOCK,
    CHAT,
    LONG,
    SMALL_MODEL,
    cache_of,
    prompt_tokenizer_of,
    small_model_router,
    tokens_in,
    unseen_text,
)
from small_model_router import template_checked_once as _autouse  # noqa: F401
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute._kernel import MAX_LOOP_BYTES
from warmroute.prompt import reader, registry
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import TokenizeJob
from warmroute.prompt.tokenizer import load_tokenizer


class TokenizerGate:
    """Makes every tokenization in a thread wait until the gate opens."""

    def __init__(self, r: RunningRouter) -> None:
        self.entered = 0
        self.on_loop = 0
        self.open = threading.Event()
        tokenizer, loop_thread = prompt_tokenizer_of(r), threading.get_ident()
        finish, tokenize_plain = tokenizer.finish, tokenizer.tokenize_plain

        def gated(job: TokenizeJob) -> Any:
            if threading.get_ident() == loop_thread:
                self.on_loop += 1
            else:
                self.entered += 1
                assert self.open.wait(30)
            return finish(job)

        def counted(*given: Any) -> Any:
            prompt = tokenize_plain(*given)
            self.on_loop += prompt is not None
            return prompt

        tokenizer.finish, tokenizer.tokenize_plain = gated, counted  # type: ignore[method-assign, assignment]


async def test_requests_are_matched_by_their_text_while_the_tokenizer_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_load = threading.Event()
    monkeypatch.setattr(registry, "load_tokenizer", lambda path: may_load.wait(30) and load_tokenizer(path))
    models = [{"name": "m", "tokenizer": str(SMALL_MODEL)}]
    async with (
        engines() as nodes,
        router(
            *nodes, routing={"policy": "overlap"}, wait_for_tokenizers=False, models=models, startup={"max_wait_s": 0}
        ) as r,
    ):
        assert (await r.request(post(chat(LONG)))).status == 200
        assert r.service.counters.prompts == {("m", "text"): 1}
        may_load.set()
        await r.service.tokenizer_registry.until_loaded()
        assert (await r.request(post(chat(LONG)))).status == 200
        assert r.service.counters.prompts == {("m", "text"): 1, ("m", "exact"): 1}


async def test_short_bodies_are_not_read() -> None:
    async with engines(2) as nodes, small_model_router(*nodes) as r:
        read: list[bytes] = []
        tokenize_plain = prompt_tokenizer_of(r).tokenize_plain

        def recorded(path: bytes, body: bytes, *given: Any) -> Prompt | None:
            read.append(body)
            return tokenize_plain(path, body, *given)

        prompt_tokenizer_of(r).tokenize_plain = recorded  # type: ignore[method-assign, assignment]
        short, middling, long = chat("hi"), chat("hi " * 60), chat(LONG)
        for body in (short, middling, long):
            assert (await r.request(post(body))).status == 200
        assert read == [middling, long]
        assert len(middling) > 200 > tokens_in(r, middling)
        kept = [r.service.cache_view.index.pair_count(cache_of(r, n).routed_holder) for n in (0, 1)]
        assert sorted(kept) == [0, tokens_in(r, long) // BLOCK], "the others are too short for a lookup"


async def test_policies_that_need_no_prompt_read_none() -> None:
    async with engines() as nodes, small_model_router(*nodes, routing={"policy": "least_loaded"}) as r:
        gate = TokenizerGate(r)
        assert (await r.request(post(chat(unseen_text(1))))).status == 200
        assert gate.entered == gate.on_loop == r.service.counters.prompts_in_threads == 0


async def test_a_short_prompt_is_read_on_the_event_loop() -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        gate = TokenizerGate(r)
        assert (await r.request(post(chat(LONG)))).status == 200
        assert (gate.on_loop, gate.entered, r.service.counters.prompts_in_threads) == (1, 0, 0)


@pytest.mark.parametrize(("estimate_ms", "where"), [(0.9, (1, 0)), (1.1, (0, 1))])
async def test_a_long_new_text_is_read_where_its_estimate_says(estimate_ms: float, where: tuple[int, int]) -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        gate = TokenizerGate(r)
        gate.open.set()
        tokenizer = prompt_tokenizer_of(r).tokenizer
        assert tokenizer is not None
        tokenizer.estimate_encode_ms = lambda _body, _spans: estimate_ms  # type: ignore[method-assign, assignment]
        assert (await r.request(post(chat(unseen_text(1, 30_000))))).status == 200
        assert (gate.on_loop, gate.entered) == where


@pytest.mark.parametrize("last", ["user", "tool"])
async def test_random_letters_are_read_in_a_thread_whatever_was_read_before(last: str) -> None:
    """Some 12 KB of them take more than a millisecond; so much ordinary text does not."""
    letters = "".join(random.Random(last).choices(string.ascii_letters, k=12_000))
    async with engines() as nodes, small_model_router(*nodes) as r:
        gate = TokenizerGate(r)
        gate.open.set()
        messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}]
        for _ in range(20):
            assert (await r.request(post(chat(LONG)))).status == 200
        entered = gate.entered
        body = {"model": "m", "messages": [*messages, {"role": last, "content": letters, "tool_call_id": "c"}]}
        assert (await r.request(post(json.dumps(body).encode()))).status == 200
        assert gate.entered == entered + 1


async def test_other_requests_are_served_while_a_long_prompt_is_read() -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        gate = TokenizerGate(r)
        slow = await r.connect()
        slow.write(post(chat(unseen_text(1))))
        await until(lambda: gate.entered == 1)
        for _ in range(5):
            assert (await r.request(post(chat("hi")))).status == 200
            assert (await r.request(post(chat(LONG)))).status == 200
        assert len(engine.seen) == 10 and r.inflight() == 0
        gate.open.set()
        assert (await slow.response()).status == 200
        assert engine.seen[-1].body == chat(unseen_text(1))
        page = (await r.admin("GET", "/metrics")).body
        assert b"\nwarmroute_prompts_tokenized_in_thread_total 1\n" in page
        assert b"\nwarmroute_prompts_not_tokenized_total 0\n" in page


async def test_a_prompt_read_in_a_thread_is_routed_by_its_cache() -> None:
    async with engines(2) as nodes, small_model_router(*nodes) as r:
        body = chat(unseen_text(2))
        for _ in range(4):
            assert (await r.request(post(body))).status == 200
        assert sorted(len(engine.seen) for engine in nodes) == [0, 4], "the same node each time"
        blocks = tokens_in(r, body) // BLOCK
        assert sorted(r.service.cache_view.index.pair_count(cache_of(r, n).routed_holder) for n in (0, 1)) == [
            0,
            blocks,
        ]


@pytest.mark.parametrize("pipelined", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing_behind(pipelined: bool) -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        gate = TokenizerGate(r)
        leaving = await r.connect()
        leaving.write(post(chat(unseen_text(1))) + (post(chat("next")) if pipelined else b""))
        await until(lambda: gate.entered == 1)
        leaving.disconnect()
        await until(lambda: r.service.counters.disconnects == 1)
        assert r.service.listener.buffered_bytes == 0 and not r.service.listener.connections
        gate.open.set()
        assert (await r.request(post(chat("another")))).status == 200
        await until(lambda: r.service.prompt_reader._pending == 0)
        assert [seen.body for seen in engine.seen] == [chat("another")]
        assert sum(r.node(0).outcomes) == 1 and r.inflight() == 0
        pairs = r.service.cache_view.index.stats()["pairs"]
        assert pairs == 0, "the index holds nothing for a request that was never sent"


async def test_the_prompt_of_a_client_that_left_is_not_read() -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        gate = TokenizerGate(r)
        first = await r.connect()
        first.write(post(chat(unseen_text(1))))
        await until(lambda: gate.entered == 1)
        leaving = await r.connect()
        leaving.write(post(chat(unseen_text(2))))
        await until(lambda: r.service.prompt_reader._pending == 2)
        leaving.disconnect()
        await until(lambda: r.service.counters.disconnects == 1)
        gate.open.set()
        assert (await first.response()).status == 200
        await until(lambda: r.service.prompt_reader._pending == 0)
        assert gate.entered == 1


@pytest.mark.interpreted
async def test_a_request_is_routed_by_load_when_too_many_prompts_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_PENDING", 2)
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        gate = TokenizerGate(r)
        waiting = [await r.connect() for _ in range(2)]
        for number, peer in enumerate(waiting):
            peer.write(post(chat(unseen_text(number))))
        await until(lambda: r.service.prompt_reader._pending == 2)
        for number in (7, 8, 9):
            assert (await r.request(post(chat(unseen_text(number))))).status == 200
        assert [seen.body for seen in engine.seen] == [chat(unseen_text(number)) for number in (7, 8, 9)]
        gate.open.set()
        for peer in waiting:
            assert (await peer.response()).status == 200
        page = (await r.admin("GET", "/metrics")).body
        assert b"\nwarmroute_prompts_not_tokenized_total 3\n" in page
        assert b"\nwarmroute_prompts_tokenized_in_thread_total 2\n" in page
        assert (await r.request(post(chat(unseen_text(9))))).status == 200
        assert r.service.counters.prompts_in_threads == 3


@pytest.mark.parametrize("step", ["tokenize_plain", "begin", "finish"])
@pytest.mark.parametrize(
    "content", [LONG, unseen_text(3), unseen_text(4, 1_200_000)], ids=["at once", "in a thread", "over 1 MB"]
)
async def test_a_request_whose_prompt_cannot_be_read_is_served(
    step: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:

        def breaks(*_given: Any) -> None:
            raise ZeroDivisionError("text of a user")

        tokenizer = prompt_tokenizer_of(r)
        if step == "tokenize_plain" and len(content) > MAX_LOOP_BYTES:
            step = "tokenize"
        tokenizer.tokenize_plain = lambda *_given: None  # type: ignore[method-assign]
        setattr(tokenizer, step, breaks)
        with caplog.at_level(logging.WARNING):
            assert (await r.request(post(chat(content)))).status == 200
        assert nodes[0].seen[0].body == chat(content)
        assert "prompt_read_failed" in caplog.text and "text of a user" not in caplog.text
        assert r.service.prompt_reader._pending == 0


# Data-parallel ranks.


async def _report(r: RunningRouter, rank: int, packed: bytes) -> None:
    tokens = array("I", packed).tolist()
    hashes = [1000 * (rank + 1) + number for number in range(len(tokens) // BLOCK)]
    stored = [{"hashes": hashes, "token_ids": tokens[: len(hashes) * BLOCK]}] if hashes else []
    report = {"sequence": 0, "rank": rank, "snapshot": True, "block_size": BLOCK, "stored": stored}
    response = await r.admin("POST", "/admin/nodes/node0/blocks", json.dumps(report).encode())
    assert response.status == 200, response.body


async def test_the_rank_header_is_sent_only_if_one_of_several_ranks_holds_the_prompt() -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        held, other = chat(LONG), chat("something else. " + LONG)
        prompt = prompt_tokenizer_of(r).tokenize(CHAT.encode(), held)
        assert prompt is not None

        async def rank_of(body: bytes) -> list[bytes]:
            assert (await r.request(post(body))).status == 200
            return engine.seen[-1].get(b"x-data-parallel-rank")

        assert await rank_of(chat(LONG + "first")) == []
        await _report(r, 0, prompt.tokens)
        assert await rank_of(held) == [], "the node has only one rank"
        await _report(r, 1, b"")
        assert await rank_of(held) == [b"0"]
        assert await rank_of(other) == [], "no rank holds it"
        assert await rank_of(chat("hi")) == []
        await _report(r, 0, b"")
        await _report(r, 1, prompt.tokens)
        assert await rank_of(held) == [b"1"]
        assert (await r.request(get("/v1/models"))).status == 200
