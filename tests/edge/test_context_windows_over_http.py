"""Nodes with one model and different context windows, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_model_router import LONG, prompt_tokenizer_of, small_model_router
from small_model_router import template_checked_once as _autouse  # noqa: F401
from support.engine_scripts import http_response, script
from support.polling import until
from support.raw_client import chat, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

WINDOWS = (2048, 32_000)


def set_windows(*nodes: ScriptedEngine) -> None:
    for node, window in zip(nodes, WINDOWS, strict=True):
        cards = {"data": [{"id": "m", "object": "model", "max_model_len": window}]}
        node.list_models = script(http_response(json.dumps(cards).encode()))


async def ready(r: RunningRouter) -> None:
    def has_windows() -> bool:
        group = r.service.fleet.group("m")
        return group is not None and group.windows is not None and len(group.up) == 2

    await until(has_windows)


def text_of(r: RunningRouter, tokens: int) -> str:
    """Return a message whose prompt has at least this many tokens, and few more."""
    tokenizer = prompt_tokenizer_of(r).tokenizer
    assert tokenizer is not None
    one = len(tokenizer.encode(LONG)) // 4
    return LONG * (tokens // one + 1)


@pytest.mark.parametrize("policy", ["price", "round_robin"])
async def test_a_prompt_goes_only_to_nodes_whose_window_holds_it(policy: str) -> None:
    async with engines(2) as (small, long):
        set_windows(small, long)
        async with small_model_router(small, long, routing={"policy": policy, "seed": 7}) as r:
            await ready(r)
            for _ in range(2):
                assert (await r.request(post(chat("short")))).status == 200
            assert small.seen, "a short prompt may go to both"
            small.seen.clear()
            for _ in range(6):
                assert (await r.request(post(chat(text_of(r, 4500))))).status == 200
            assert not small.seen and len(long.seen) >= 6


async def test_a_prompt_that_fits_nowhere_gets_a_clear_400() -> None:
    async with engines(2) as (small, long):
        set_windows(small, long)
        async with small_model_router(small, long, routing={"policy": "price", "seed": 7}) as r:
            await ready(r)
            response = await r.request(post(chat(text_of(r, 33_000))))
            error: dict[str, Any] = response.json["error"]
            assert (response.status, error["code"]) == (400, "context_length_exceeded")
            assert error["type"] == "invalid_request_error" and "32,000 tokens" in error["message"]
            assert "33," in error["message"], error["message"]
            assert not small.seen and not long.seen
            models = await r.request(get("/v1/models"))
            assert [card["max_model_len"] for card in models.json["data"]] == [32_000], "the longest window"


async def test_without_a_tokenizer_the_length_is_estimated_and_nothing_is_rejected() -> None:
    async with engines(2) as (small, long):
        set_windows(small, long)
        async with router(small, long, routing={"policy": "price", "seed": 7}) as r:
            await ready(r)
            for words in (8, 300):  # about 6,000 and 240,000 tokens
                for _ in range(4):
                    assert (await r.request(post(chat(LONG * words)))).status == 200
            assert (len(small.seen), len(long.seen)) == (0, 8)
