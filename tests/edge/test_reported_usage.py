"""The token counts that a response reports: how they are read, and what they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from small_model_router import (
    BLOCK,
    CHAT,
    LONG,
    cache_of,
    small_model_router,
    tokens_in,
)
from small_model_router import template_checked_once as _autouse  # noqa: F401
from support.engine_scripts import DONE, SSE_HEAD, chunk, http_response, script
from support.polling import until
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute._kernel import read_usage
from warmroute.core.tickets import PromptTicket

CHAT_USAGE = {"prompt_tokens": 900, "total_tokens": 940, "completion_tokens": 40}
USAGE_IN_TEXT = (
    'they ask: {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}} and "cached_tokens": 3'
)


def completion(text: str = "ok", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], **more}


def usage_with_cached(cached: int) -> dict[str, Any]:
    return {**CHAT_USAGE, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize(
    ("response_body", "expected"),
    [
        (completion(usage=usage_with_cached(640)), (900, 640, 40)),
        (completion(usage={**CHAT_USAGE, "prompt_tokens_details": None}), (900, None, 40)),
        (completion(usage=None), (None, None, None)),
        (completion(), None),
        ({"choices": [{"text": "ok"}], "usage": usage_with_cached(32)}, (900, 32, 40)),
        # OpenAI's Responses API, as one object and as the last event of a stream
        (
            {"usage": {"input_tokens": 900, "input_tokens_details": {"cached_tokens": 640}, "output_tokens": 40}},
            (900, 640, 40),
        ),
        (
            {
                "type": "response.completed",
                "response": {
                    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 4}
                },
            },
            (9, 0, 4),
        ),
        # Anthropic's input_tokens leave out what was read from the cache or written to it
        (
            {"usage": {"input_tokens": 200, "output_tokens": 40, "cache_read_input_tokens": 640}},
            (840, 640, 40),
        ),
        (
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {
                    "input_tokens": 10,
                    "cache_creation_input_tokens": 50,
                    "cache_read_input_tokens": 640,
                    "output_tokens": 40,
                },
            },
            (700, 640, 40),
        ),
        ({"usage": {"input_tokens": 200, "output_tokens": 40}}, (200, None, 40)),
        # usage in the text of the model is not the response's usage
        (completion(USAGE_IN_TEXT), None),
        (completion(USAGE_IN_TEXT, usage=usage_with_cached(640)), (900, 640, 40)),
        ({"usage": {**CHAT_USAGE, "prompt_tokens_details": None}, **completion(USAGE_IN_TEXT)}, (900, None, 40)),
        (completion(json.dumps(json.dumps(completion(USAGE_IN_TEXT, usage=usage_with_cached(1))))), None),
        ({"choices": [{"logprobs": {"content": [{"token": "usage"}, {"token": "cached_tokens"}]}}]}, (None,) * 3),
    ],
)
@pytest.mark.parametrize("spaced", [False, True])
def test_usage_is_read_in_every_format(
    response_body: dict[str, Any], expected: tuple[int | None, ...] | None, spaced: bool
) -> None:
    text = json.dumps(response_body) if spaced else json.dumps(response_body, separators=(",", ":"))
    assert read_usage(text.encode()) == expected


def test_usage_is_read_across_two_chunks() -> None:
    event = b"data: " + json.dumps(completion(usage=usage_with_cached(640))).encode() + b"\n\n"
    for at in range(1, len(event) - 1):
        assert read_usage(chunk(event[:at]) + chunk(event[at:]) + DONE) == (900, 640, 40), at


def as_stream(*events: dict[str, Any]) -> list[bytes]:
    return [chunk(b"data: " + json.dumps(event).encode() + b"\n\n") for event in events]


def halves(data: bytes) -> tuple[bytes, float, bytes]:
    """Return script steps that send the data in two packets."""
    return data[: len(data) // 2], 0.02, data[len(data) // 2 :]


def responses_with_usage(total: int, cached: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return a path and a behaviour for each format in which engines report cached tokens."""
    usage = {"prompt_tokens": total, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    whole = http_response(json.dumps(completion("ok", usage=usage)).encode())
    last = as_stream({"choices": [], "usage": usage})[0]
    split_event = json.dumps({"choices": [], "usage": usage}).encode()
    parts = (
        chunk(b"data: " + split_event[: len(split_event) // 2]),
        chunk(split_event[len(split_event) // 2 :] + b"\n\n"),
    )
    first = as_stream(completion("ok"))[0]
    words = as_stream(*({"choices": [{"delta": {"content": f"{n} {USAGE_IN_TEXT}"}}]} for n in range(50)))
    anthropic = {"input_tokens": total - cached, "cache_read_input_tokens": cached, "output_tokens": 3}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}
    delta = {"type": "message_delta", "usage": anthropic}
    responses = {"input_tokens": total, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": 3}
    return {
        "whole": (CHAT, lambda: script(whole)),
        "whole, in two packets": (CHAT, lambda: script(*halves(whole))),
        "stream": (CHAT, lambda: script(SSE_HEAD, first, last, DONE)),
        "stream, at once": (CHAT, lambda: script(SSE_HEAD + first + last + DONE)),
        "stream, in packets": (
            CHAT,
            lambda: script(SSE_HEAD, 0.02, first, 0.02, *halves(last), 0.02, DONE[:-5], 0.02, DONE[-5:]),
        ),
        "stream, usage across two chunks": (CHAT, lambda: script(SSE_HEAD, 0.02, parts[0], 0.02, parts[1], 0.02, DONE)),
        "stream, with usage in its text": (CHAT, lambda: script(SSE_HEAD, *words, last, DONE)),
        "anthropic": ("/v1/messages", lambda: script(http_response(json.dumps({"usage": anthropic}).encode()))),
        "anthropic stream": (
            "/v1/messages",
            lambda: script(SSE_HEAD, *as_stream(start, delta, {"type": "message_stop"}), b"0\r\n\r\n"),
        ),
        "responses": ("/v1/responses", lambda: script(http_response(json.dumps({"usage": responses}).encode()))),
        "responses stream": (
            "/v1/responses",
            lambda: script(
                SSE_HEAD,
                *as_stream({"type": "response.created", "response": {"usage": None}}),
                *as_stream({"type": "response.completed", "response": {"usage": responses}}),
                b"0\r\n\r\n",
            ),
        ),
    }


@pytest.mark.parametrize("form", list(responses_with_usage(0, 0)))
async def test_the_reported_cached_tokens_are_compared_with_the_prediction(form: str) -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        path = responses_with_usage(0, 0)[form][0]
        body = chat(LONG, max_tokens=5)
        if path == "/v1/responses":
            body = json.dumps({"model": "m", "input": LONG}).encode()
        total = tokens_in(r, body, path)
        cached = (total - 1) // BLOCK * BLOCK
        for number in range(10):
            engine.behave = responses_with_usage(total, cached if number else 0)[form][1]()
            response = await r.request(post(body, path))
            assert response.status == 200 and response.complete
        accuracy = cache_of(r).accuracy
        await until(lambda: accuracy.compared == 10)
        assert accuracy.exact == 10
        assert accuracy.reported_tokens == accuracy.predicted_tokens == 9 * cached
        assert cache_of(r).token_mismatches == 0 and not cache_of(r).token_mismatch


async def test_text_of_the_model_is_not_read_as_usage() -> None:
    async with engines() as nodes, small_model_router(*nodes) as r:
        (engine,) = nodes
        text = as_stream(*({"choices": [{"delta": {"content": USAGE_IN_TEXT}}]} for _ in range(3)))
        for behave in (
            script(SSE_HEAD, *text, DONE),
            script(http_response(json.dumps(completion(USAGE_IN_TEXT)).encode())),
        ):
            engine.behave = behave
            assert (await r.request(post(chat(LONG)))).status == 200
        engine.behave = script(http_response(json.dumps(completion(usage=usage_with_cached(5))).encode(), status=400))
        assert (await r.request(post(chat(LONG)))).status == 400
        assert cache_of(r).accuracy.compared == 0 and cache_of(r).token_mismatches == 0


async def test_a_stream_that_arrives_in_one_piece_has_a_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router divides by the duration when it learns a node's decode speed: it must not be zero."""
    durations_s: list[float] = []

    def record_usage(
        ticket: PromptTicket, prompt: int | None, cached: int | None, output: int | None, now_s: float
    ) -> None:
        durations_s.append(now_s - ticket.first_token_s)

    monkeypatch.setattr(PromptTicket, "record_usage", record_usage)
    async with engines() as [engine], router(engine, routing={"policy": "price"}) as r:
        for name in ("stream, at once", "whole"):
            engine.behave = responses_with_usage(900, 0)[name][1]()
            assert (await r.request(post(chat("a" * 2000)))).status == 200
    assert len(durations_s) == 2 and min(durations_s) > 0.0
