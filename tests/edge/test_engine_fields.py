"""Clients set no field with which engines exchange KV caches: an engine would connect to the address in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.picker import picker
from support.raw_client import Response, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute._kernel import ENGINE_FIELDS, ENGINE_OPTIONS, outline_body
from warmroute.edge.arrival import FORWARDED
from warmroute.prompt.multipart import form_fields

TRANSFER = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1, "remote_block_ids": [1, 2]}
BOUNDARY = "x7"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def body_of(path: str = "", **fields: Any) -> bytes:
    prompts: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "hi"}, "/v1/embeddings": {"input": "hi"}, "/v1/completions": {"prompt": "hi"},
    }  # fmt: skip
    prompt = prompts.get(path, {"messages": [{"role": "user", "content": "hi"}]})
    return json.dumps({"model": "m", "max_tokens": 1, **prompt, **fields}).encode()


def form_of(**fields: str) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in {"model": "m", **fields}.items()
    ]
    audio = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.mp3"\r\n\r\nID3\r\n'
    return "".join([*parts, audio, f"--{BOUNDARY}--\r\n"]).encode()


def refused(response: Response, engine: ScriptedEngine, name: str) -> None:
    error = response.json["error"]
    assert response.status == 400 and f"`{name}`" in error["message"], response.body
    if response.json.get("type") == "error":  # as Anthropic's API writes it
        assert error["type"] == "invalid_request_error"
    else:
        assert (error["code"], error["param"]) == ("engine_field_not_allowed", name)
    assert "10.0.0.9" not in response.body.decode() and engine.seen == []


async def send(r: RunningRouter, body: bytes, path: str = "/v1/chat/completions", form: bool = False) -> Response:
    return await r.request(post(body, path, content_type=FORM if form else "application/json"))


@pytest.mark.parametrize("name", ENGINE_FIELDS)
async def test_an_engine_never_gets_such_a_field(name: str) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    async with engines() as [engine], router(engine) as r:
        for path in (*sorted(one.decode() for one in FORWARDED), "/v1/anything", "/v1/chat/completions?a=b"):
            for body in (
                body_of(path, **{name: TRANSFER}),
                body_of(path, **{name: 0}),
                body_of(path, other="x" * 300_000, **{name: "10.0.0.9"}),  # scanned in a thread
                body_of(path)[:-1] + b',"%b":"10.0.0.9"}' % escaped.encode(),
                body_of(path)[:-1] + b',"%b\\u%04x":1}' % (name[:-1].encode(), ord(name[-1])),
                body_of(path)[:-1] + b',"%b":{},"%b":null}' % (name.encode(), name.encode()),
                body_of(path)[:-1] + b',"%b":null,"%b":7}' % (name.encode(), escaped.encode()),
                *(body_of(path, **{options: {name: TRANSFER}}) for options in ENGINE_OPTIONS),
                body_of(path, vllm_xargs=[{"a": [1, "b"], "c": {"d": {name: "10.0.0.9"}}}]),
                body_of(path)[:-1] + b',"vllm\\u005fxargs" : { "a":1 , "%b" : [] } }' % escaped.encode(),
            ):
                refused(await send(r, body, path), engine, name)
        for fields in (
            {name: "10.0.0.9"}, {f"{name}[remote_host]": "10.0.0.9"}, {f"vllm_xargs[{name}]": "1"},
            {f"vllm_xargs.{name}.remote_host": "10.0.0.9"}, {"vllm_xargs": json.dumps({name: TRANSFER})},
            {"vllm_xargs": f'{{"{escaped}": 5}}'}, {"vllm_xargs[]": f'{{"{name}": 5}}'},
            {"[extra_body]": f'{{"a": [{{"{name}": 5}}]}}'},
        ):  # fmt: skip
            refused(await send(r, form_of(**fields), "/v1/audio/transcriptions", form=True), engine, name)
        assert r.inflight() == 0


async def test_other_fields_and_nulls_pass() -> None:
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in ENGINE_FIELDS}}
    nulls: dict[str, Any] = dict.fromkeys(ENGINE_FIELDS)
    bodies = [
        body_of(**nulls),
        body_of(
            vllm_xargs=None, extra_args={"kv_transfer_params": None, "a": "bootstrap_host", "b": ["bootstrap_port"]}
        ),
        body_of(vllm_xargs={"ngram_size": 30, "kv_transfer_params_": 1, "xkv_transfer_params": 1}),
        body_of(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}),
        body_of(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]),
        body_of(metadata={"bootstrap_host": "a"}, KV_transfer_params=1, kv_transfer_param=1, kv_transfer_paramss=1),
    ]
    async with engines() as [engine], router(engine) as r:
        for body in bodies:
            assert (await send(r, body)).status == 200
            assert engine.seen[-1].body == body
        for fields in (
            {"vllm_xargs": '{"a": 1}'},
            {"vllm_xargs": ""},
            {"vllm_xargs": "null"},
            {"prompt": "bootstrap_host"},
        ):
            body = form_of(**fields)
            assert (await send(r, body, "/v1/audio/transcriptions", form=True)).status == 200
            assert engine.seen[-1].body == body


@pytest.mark.parametrize("value", ["{", "kv_transfer_params", "{'kv_transfer_params': 1}", '{"a":1} {}'])
async def test_options_in_a_form_are_json(value: str) -> None:
    """What one parser makes of other text is not known."""
    async with engines() as [engine], router(engine) as r:
        response = await send(r, form_of(vllm_xargs=value), "/v1/audio/transcriptions", form=True)
        assert response.status == 400 and response.error["code"] == "malformed_form" and engine.seen == []


async def test_a_route_may_allow_them() -> None:
    routes = [{"name": "pairs", "path": "/v1/chat/completions", "header": "X-Pairs=yes", "allow_engine_fields": True}]
    async with engines() as [engine], router(engine, routes=routes) as r:
        body = body_of(kv_transfer_params=TRANSFER, vllm_xargs={"bootstrap_host": "10.0.0.9"})
        response = await r.request(post(body, headers=["X-Pairs: yes"]))
        assert response.status == 200 and engine.seen.pop().body == body
        refused(await send(r, body), engine, "kv_transfer_params")
        refused(
            await send(r, body_of("/v1/completions", bootstrap_host="h"), "/v1/completions"), engine, "bootstrap_host"
        )


async def test_a_dry_run_says_so() -> None:
    async with engines() as [engine], router(engine) as r:
        question = {"body": json.loads(body_of(bootstrap_room=5))}
        response = await r.admin("POST", "/admin/explain", json.dumps(question).encode())
        refused(response, engine, "bootstrap_room")


@pytest.mark.parametrize("mode", ["buffered", "duplex", "streamed"])
async def test_the_picker_refuses_them(mode: str) -> None:
    routes = [{"name": "pairs", "header": "X-Pairs=yes", "allow_engine_fields": True}]
    async with engines() as [engine], picker(engine, routes=routes) as p:
        for body in (body_of(kv_transfer_params=TRANSFER), body_of(vllm_xargs={"kv_transfer_params": "{}"})):
            answer = await p.ask(body, mode)
            assert (answer.status, answer.error["code"]) == (400, "engine_field_not_allowed")
            assert answer.error["param"] == "kv_transfer_params" and not answer.endpoints
        answer = await p.ask(body_of(kv_transfer_params=TRANSFER), mode, x_pairs="yes")
        assert answer.endpoints == [f"127.0.0.1:{engine.port}"]


def test_the_search_in_options_takes_time_that_grows_with_the_body() -> None:
    deep = b'{"a":' * 250 + b'"' + b"x" * 5_000_000 + b'"' + b"}" * 250
    assert outline_body(b'{"vllm_xargs":%b}' % deep).engine_field is None
    many = b"{" + b",".join(b'"%d":{"a":[]}' % n for n in range(200_000)) + b',"bootstrap_host":1}'
    assert outline_body(b'{"vllm_xargs":%b}' % many).engine_field == "bootstrap_host"
    assert form_fields(BOUNDARY.encode(), form_of(vllm_xargs=many.decode())) == ("m", "bootstrap_host")
