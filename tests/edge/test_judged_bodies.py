"""An engine reads model, stream, max_tokens and priority of a body as the router judged them, or refuses the body."""

from __future__ import annotations

import contextlib
import email.message
import json
from typing import Any

import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from support.cpu_limit import cpu_limit
from support.raw_client import chat, post
from support.running_router import router
from support.scripted_engine import engines

from warmroute.edge.arrival import hash_key, scan
from warmroute.edge.errors import HttpError
from warmroute.edge.http1 import form_boundary

CHAT = b"/v1/chat/completions"


class EngineRequest(pydantic.BaseModel):
    """As vLLM declares its requests. Pydantic converts texts, booleans and numbers to the type of a field."""

    model: str | None = None
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    priority: int = 0


NAMES = st.sampled_from(
    ["model", "stream", "max_tokens", "max_completion_tokens", "priority", "mod\\u0065l", "str\\u0065am",
     "\\u0070riority", "Model", "MODEL", "priority ", "x"]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["null", "true", "false", "0", "1", "-1", "-0", "5", "5.0", "-5.00", "5.5", "1e1", "NaN", "Infinity",
         "-Infinity", '"m"', '"\\u006d"', '"5"', '" 5 "', '"-5"', '"true"', '"yes"', '"on"', '"1"', '"5_0"', "[]", "{}",
         '["m"]', "9" * 25, "-" + "9" * 25, '"n"', '"\\ud800"']
    ),
    st.integers().map(str),
    st.floats().map(json.dumps),
    st.text(max_size=5).map(json.dumps),
)  # fmt: skip
BODIES = st.builds(
    lambda members, start, end: start + "{" + ",".join(f'"{name}":{value}' for name, value in members) + "}" + end,
    st.lists(st.tuples(NAMES, VALUES), max_size=5),
    st.sampled_from(["", "", " ", "\ufeff", "\ufeff ", "\n", "\0", "["]),
    st.sampled_from(["", "", " ", "\0", "]", "{}"]),
)
ENCODINGS = st.sampled_from(["utf-8"] * 6 + ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "cp037"])


@settings(max_examples=2000)
@given(BODIES, ENCODINGS)
@example('{"model":"a","model":"b"}', "utf-8")
@example('{"model":"m","priority":-5,"priority":0}', "utf-8")
@example('{"\\u0070riority":-5}', "utf-8")
@example('{"priority":"-5"}', "utf-8")
@example('{"model":"m"}', "utf-16")
def test_the_engine_reads_what_the_router_judged(text: str, encoding: str) -> None:
    body = text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")
    try:
        judged = scan(CHAT, b"application/json", body)
    except HttpError:
        return
    try:
        read = EngineRequest.model_validate(json.loads(body))  # what Starlette and FastAPI do
    except (ValueError, pydantic.ValidationError):
        return  # the engine refuses it
    assert judged.model == (read.model or "")
    assert judged.streams == bool(read.stream)
    limit = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    bound = 10**18
    assert judged.max_output_tokens == (None if limit is None else max(-bound, min(bound, limit)))
    assert judged.priority == max(-bound, min(bound, read.priority))


# Content types.

TYPES = st.sampled_from(
    ["application/json", "APPLICATION/JSON", "application/vnd.api+json", "text/plain", "multipart/form-data",
     "Multipart/Form-Data", "multipart/mixed", "application/x-www-form-urlencoded", "multipart/form-datax", "json",
     "application/json, multipart/form-data", "multipart/form-data, application/json", "", "/", "application/",
     " application/json", "application/json/x", "multipart /form-data"]
)  # fmt: skip
PARAMETERS = st.lists(
    st.sampled_from(
        ["boundary=x", "boundary=y", 'boundary="x"', 'boundary="a b"', "Boundary=z", "boundary=", "boundary*=utf-8''q",
         "boundary*0=a", "charset=utf-8", "charset=UTF-8", 'charset="utf-8"', "charset=utf-16", "charset=utf-7",
         "charset=cp037", "charset*=utf-8''utf-16", "a=b", "", 'boundary="x\\"y"', "boundary=x y", "boundary",
         "b\u00e9=1"]
    ),
    max_size=3,
)  # fmt: skip


@settings(max_examples=2000)
@given(TYPES, PARAMETERS, st.sampled_from(["; ", ";", " ; ", ";;"]))
@example("multipart/form-data", ["boundary=x", "boundary=y"], ";")
@example("application/json", ["charset=utf-16"], "; ")
def test_servers_agree_with_the_router_about_a_content_type(media_type: str, some: list[str], separator: str) -> None:
    given_type = separator.join([media_type, *some])
    try:
        boundary = form_boundary(given_type.encode("latin-1"))
    except HttpError:
        return
    stored = Headers(raw=[(b"content-type", given_type.encode("latin-1"))]).get("content-type") or ""
    kind, options = parse_options_header(stored)  # Starlette, for forms
    assert (kind == b"multipart/form-data") == (boundary is not None)
    assert kind != b"application/x-www-form-urlencoded"
    if boundary is not None:
        assert options[b"boundary"] == boundary
    assert options.get(b"charset", b"utf-8").lower() in (b"utf-8", b"us-ascii")
    if stored:
        message = email.message.Message()  # FastAPI, for JSON
        message["content-type"] = stored
        if message.get_content_maintype() == "application" and message.get_content_subtype().endswith("json"):
            assert boundary is None


@pytest.mark.parametrize(
    "content_type",
    [
        b"a/b" + b";   " * 20 + b"(",
        b"a/b" + b";" * 250,
        b"a/b" + b"; \t" * 80,
        b"a/b" + b";   " * 16_000 + b"(",
        b"a/b;" + b"a" * 65_000,
        b"a" * 65_000,
        b"a/b" + b" " * 65_000 + b"(",
    ],
)
def test_a_content_type_is_judged_in_time_that_grows_with_its_length(content_type: bytes) -> None:
    with cpu_limit(2.0), contextlib.suppress(HttpError):
        assert form_boundary(content_type) is None


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200), ("", 200), ("application/json; charset=utf-8", 200), ("text/plain", 200),
        ("application/json; charset=utf-16", 415), ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415), ("multipart/form-data; boundary=x", 400), ("a", 415),
    ],
)  # fmt: skip
async def test_the_content_type_of_a_request_is_judged(content_type: str, status: int) -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(content_type=content_type))).status == status
        assert len(engine.seen) == (status == 200)


# Priorities.

KEYS = [
    {"sha256": hash_key("high"), "tenant": "h", "max_priority": "high"},
    {"sha256": hash_key("normal"), "tenant": "n"},
    {"sha256": hash_key("low"), "tenant": "l", "max_priority": "low"},
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize(
    ("body", "header", "allowed"),
    [
        ({}, "", {"high", "normal", "low"}),
        ({"priority": 0}, "", {"high", "normal", "low"}),
        ({"priority": 7}, "", {"high", "normal", "low"}),
        ({"priority": -1}, "", {"high"}),
        ({}, "X-Vllm-Priority: -1", {"high"}),
        ({"priority": 7}, "X-Vllm-Priority: -1", {"high"}),
        ({"priority": -1}, "X-Vllm-Priority: 3", {"high", "normal", "low"}),
        ({}, "X-Priority: high", {"high", "normal", "low"}),
    ],
)
async def test_a_key_limits_the_priority_that_the_engine_reads(
    path: str, body: dict[str, Any], header: str, allowed: set[str]
) -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        for key in ("high", "normal", "low"):
            headers = [f"Authorization: Bearer {key}", *([header] if header else [])]
            response = await r.request(post(chat(**body), path, headers))
            assert response.status == (200 if key in allowed else 403), key
            if key not in allowed:
                assert response.error["code"] == "priority_not_allowed"
        assert len(engine.seen) == len(allowed)


async def test_without_keys_every_priority_is_allowed() -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.request(post(chat(priority=-5)))).status == 200
        assert (await r.request(post(headers=["X-Vllm-Priority: -5"]))).status == 200
        for value in ("high", "1.0", "-", "1_0", "+1", "9" * 30):
            response = await r.request(post(headers=[f"X-Vllm-Priority: {value}"]))
            assert response.error["code"] == "invalid_header"
        assert len(engine.seen) == 2
