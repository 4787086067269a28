"""Requests that one engine prefills and another one decodes, over real sockets with simulated engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engine_scripts import CLOSE, SSE_HEAD, Behaviour, chunk, hanging, http_response, script
from support.polling import until
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.lab.engine.rank import KvTransfers
from warmroute.lab.engine.server import EngineServer, ServerConfig
from warmroute.lab.engine.timing import profile
from warmroute.lab.engine.tokenizers import FakeTokenizer
from warmroute.lab.engine.values import EngineConfig

ALWAYS: dict[str, Any] = {
    "routing": {"policy": "price", "seed": 7}, "price": {"split": "always"}, "journal": {"response_headers": "always"},
}  # fmt: skip
LONG = "word " * 800
PARAMS = {"do_remote_prefill": True, "remote_host": "h"}
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


class Engines:
    """Simulated engines with a KV connector: the prefill engine, then decode engines, and one mixed engine."""

    def __init__(self, servers: list[EngineServer], r: RunningRouter) -> None:
        self.prefill, *self.decode = servers
        self.router = r

    async def ask(self, content: str = LONG, **fields: Any) -> Response:
        return await self.router.request(post(chat(content, **{"max_tokens": 8, **fields})))

    def transfers(self, server: EngineServer) -> KvTransfers:
        assert server.kv_transfers is not None
        return server.kv_transfers

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self.router.service.counters.split_requests)


def engine(kv_connector: bool = True, speed: float = 50.0) -> EngineServer:
    config = EngineConfig(num_blocks=4000, block_size=16, max_model_len=32_768, every_token=True)
    settings = ServerConfig(
        engine=config, timing=profile("h200-1.5b").timing, profile="h200-1.5b", tokenizer=FakeTokenizer(), port=0,
        model="m", speed=speed, kv_connector=kv_connector,
    )  # fmt: skip
    return EngineServer(settings)


@asynccontextmanager
async def split_fleet(decode: int = 1, prefill_connector: bool = True, **tables: Any) -> AsyncIterator[Engines]:
    servers = [engine(prefill_connector), *(engine() for _ in range(decode))]
    for server in servers:
        await server.start()
    roles = ["prefill", *["decode"] * decode]
    nodes = [
        {"url": f"http://127.0.0.1:{server.port}", "role": role} for server, role in zip(servers, roles, strict=True)
    ]
    try:
        async with router(*nodes, **{**ALWAYS, **tables}) as r:
            yield Engines(servers, r)
    finally:
        for server in servers:
            await server.stop()


def text(response: Response) -> str:
    """Return the answer's text, streamed or not."""
    assert response.status == 200 and response.complete, response.body
    if b"data:" not in response.body:
        answer: str = response.json["choices"][0]["message"]["content"]
        return answer
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    assert not any("error" in event for event in events)
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_of_one_engine(stream: bool) -> None:
    alone = engine(kv_connector=False)
    await alone.start()
    async with split_fleet() as fleet, router({"url": f"http://127.0.0.1:{alone.port}"}) as other:
        for number in range(3):
            content = f"{number} {LONG}"
            expected = text(await other.request(post(chat(content, max_tokens=8, stream=stream))))
            response = await fleet.ask(
                content, stream=stream, stream_options={"include_usage": True} if stream else None
            )
            assert text(response) == expected
            assert response.get("x-warmroute-node") == "node1" and response.get("x-warmroute-prefill-node") == "node0"
        assert fleet.outcomes == {"transferred": 3}
        assert fleet.transfers(fleet.decode[0]).transfers == 3
        assert fleet.decode[0].ranks[0].core.stats.prompt_tokens_computed == 3, "one token of each prompt"
    await alone.stop()


async def test_the_second_turn_finds_its_first_on_both_nodes() -> None:
    async with split_fleet() as fleet:
        await fleet.ask(LONG)
        response = await fleet.ask(LONG)
        hit, _, tokens = (response.get("x-warmroute-hit") or "").partition("/")
        assert int(hit) > 0.9 * int(tokens), "as the prefill node holds it; the prompt is matched by its text"
        entry = (await fleet.router.admin("GET", "/admin/decisions?limit=1")).json["decisions"][0]
        assert entry["prefill_node"] == "node0" and entry["node"] == "node1" and entry["transfer_tokens"] <= 16
        assert entry["reported"]["cached_tokens"] > 700 and "node0 prefills" in entry["explanation"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["error500", "busy503", "die"])
async def test_a_prefill_node_that_fails_is_invisible(fault: str, stream: bool) -> None:
    async with split_fleet(health={"consecutive_failures": 100}) as fleet:
        if fault == "die":
            await fleet.prefill.stop()
        else:
            fleet.prefill.faults.set(type(fleet.prefill.faults.fault)(mode=fault))  # type: ignore[arg-type]
        assert text(await fleet.ask(stream=stream))
        assert fleet.outcomes in ({"prefill_failed": 1}, {})  # {}: it was down before the request came


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kv_cache_that_is_gone_is_invisible(stream: bool) -> None:
    async with split_fleet() as fleet:
        fleet.transfers(fleet.prefill).release = lambda request_id: False  # type: ignore[method-assign]
        response = await fleet.ask(stream=stream)
        assert text(response) and response.get("x-warmroute-prefill-node") is None
        assert fleet.outcomes == {"transfer_failed": 1}
        assert fleet.router.node(1).outcomes[3] == 0, "not the decode node's failure"


async def test_a_prefill_node_without_a_connector_is_not_asked_again() -> None:
    async with split_fleet(prefill_connector=False) as fleet:
        for _ in range(3):
            assert text(await fleet.ask())
        assert fleet.outcomes == {"not_supported": 1}


async def test_a_decode_node_that_dies_is_replaced() -> None:
    async with split_fleet(decode=2) as fleet:
        await fleet.decode[0].stop()
        for number in range(4):
            assert text(await fleet.ask(f"{number} {LONG}", stream=True))
        assert fleet.transfers(fleet.decode[1]).transfers == 4


async def test_requests_that_cannot_be_split_go_to_the_decode_node() -> None:
    async with split_fleet() as fleet:
        assert (await fleet.ask(tool_choice="required")).get("x-warmroute-prefill-node") is None
        completion = json.dumps({"model": "m", "prompt": LONG, "max_tokens": 4}).encode()
        response = await fleet.router.request(post(completion, "/v1/completions"))
        assert response.status == 200 and response.get("x-warmroute-prefill-node") == "node0"


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_host", "disaggregated_params"])
async def test_clients_name_no_kv_cache_of_others(field: str) -> None:
    """An engine would connect to any address in these fields, and read any blocks."""
    value: Any = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1, "remote_block_ids": [1, 2]}
    async with split_fleet() as fleet:
        response = await fleet.ask(LONG, **{field: value})
        assert response.status == 400 and response.error["code"] == "engine_field_not_allowed"
        assert response.error["param"] == field
        assert fleet.router.inflight() == 0
        value = None
        assert (await fleet.ask(LONG, **{field: value})).status == 200


@pytest.mark.parametrize("fields", [{"kv_transfer_params": {"a": 1}}, {"vllm_xargs": {"bootstrap_room": 1}}])
async def test_a_request_that_may_set_these_fields_is_not_split(fields: dict[str, Any]) -> None:
    routes = [{"name": "pairs", "allow_engine_fields": True}]
    async with scripted_fleet(routes=routes) as (r, prefill, decode):
        body = chat(LONG, **fields)
        assert (await r.request(post(body))).status == 200
        assert [one.body for one in (*prefill.seen, *decode.seen)] == [body]


# With engines that follow a script.


def prefilled(params: Any = PARAMS) -> Behaviour:
    return script(http_response(json.dumps({"choices": [], "kv_transfer_params": params}).encode()))


@asynccontextmanager
async def scripted_fleet(**tables: Any) -> AsyncIterator[tuple[RunningRouter, ScriptedEngine, ScriptedEngine]]:
    async with (
        engines(2) as [prefill, decode],
        router(
            {"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}, **{**ALWAYS, **tables}
        ) as r,
    ):
        prefill.behave = prefilled()
        yield r, prefill, decode


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_frees_the_nodes_within_100_ms(phase: str) -> None:
    async with scripted_fleet() as (r, prefill, decode):
        hung = prefill if phase == "prefill" else decode
        hung.behave = hanging
        client = await r.connect()
        client.write(post(chat(LONG, stream=True)))
        await until(lambda: hung.seen)
        left_s = time.monotonic()
        client.disconnect()
        await asyncio.wait_for(hung.seen[0].left.wait(), 5)
        assert hung.seen[0].left_s - left_s < 0.1
        await until(lambda: r.inflight() == 0)


async def test_the_bodies_differ_from_the_clients_only_in_the_protocols_fields() -> None:
    async with scripted_fleet() as (r, prefill, decode):
        body = chat(LONG, max_tokens=100, unknown={"a": [1.50]})
        await r.request(post(body))
        assert json.loads(prefill.seen[0].body) == {
            **json.loads(body), "max_tokens": 1, "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }  # fmt: skip
        assert decode.seen[0].body == body[:-1] + b',"kv_transfer_params":%b}' % json.dumps(PARAMS).encode()
        assert prefill.seen[0].get(b"x-request-id") == decode.seen[0].get(b"x-request-id")


@pytest.mark.parametrize(
    ("path", "prompt", "answer", "one_token"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
         {"stop_reason": "max_tokens"}, {"max_tokens": 1}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 9}, {"status": "incomplete"},
         {"max_output_tokens": 1, "store": False}),
    ],
)  # fmt: skip
async def test_messages_and_responses_are_split_with_vllm(path: str, prompt: Any, answer: Any, one_token: Any) -> None:
    async with scripted_fleet() as (r, prefill, decode):
        prefill.behave = script(http_response(json.dumps({**answer, "kv_transfer_params": PARAMS}).encode()))
        body = json.dumps({"model": "m", **prompt}).encode()
        assert (await r.request(post(body, path))).status == 200
        assert json.loads(prefill.seen[0].body) == {
            **json.loads(body), "stream": False, **one_token,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }  # fmt: skip
        assert json.loads(decode.seen[0].body) == {**json.loads(body), "kv_transfer_params": PARAMS}
        assert prefill.seen[0].target == decode.seen[0].target == path.encode()
        prefill.behave = script(http_response(json.dumps({**answer, "kv_transfer_params": None}).encode()))
        assert (await r.request(post(body.replace(b"word", b"Word", 1), path))).status == 200
        assert r.service.fleet.node("node0").no_transfer_until_s > 0.0, "an answer that another node could continue"


@pytest.mark.parametrize(
    "event", [b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n',
              b'event: response.failed\ndata: {"response":{"id":"r"},"type":"response.failed"}\n\n']
)  # fmt: skip
async def test_a_stream_of_messages_or_responses_that_begins_with_an_error_is_repeated(event: bytes) -> None:
    async with scripted_fleet() as (r, _prefill, decode):
        decode.behave = script(SSE_HEAD, chunk(event), b"0\r\n\r\n")
        body = json.dumps(
            {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": LONG}], "stream": True}
        )
        client = await r.connect()
        client.write(post(body.encode(), "/v1/messages"))
        await until(lambda: len(decode.seen) == 2)
        assert b"kv_transfer_params" in decode.seen[0].body and b"kv_transfer_params" not in decode.seen[1].body


async def test_messages_are_not_split_with_other_engines() -> None:
    async with scripted_fleet() as (r, prefill, decode):
        for node in r.service.fleet:
            node.engine = "trtllm"
            r.service.fleet.transfers_changed(node)
        body = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": LONG}]}).encode()
        assert (await r.request(post(body, "/v1/messages"))).status == 200
        assert not prefill.seen and decode.seen[0].body == body


async def test_the_beginning_of_a_stream_is_held_until_its_first_token() -> None:
    async with scripted_fleet() as (r, _prefill, decode):
        decode.behave = script(SSE_HEAD, chunk(ROLE), chunk(ERROR), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
        client = await r.connect()
        client.write(post(chat(LONG, stream=True)))
        await until(lambda: len(decode.seen) == 2)
        assert b"kv_transfer_params" in decode.seen[0].body and b"kv_transfer_params" not in decode.seen[1].body
        response = await client.response(False)
        assert response.status == 200 and b"error" in response.body, "alone, the node's own error passes"


async def test_a_decode_node_that_closes_before_its_first_token_is_retried_from_the_start() -> None:
    async with (
        engines(3) as [prefill, *decode],
        router(
            {"url": prefill.url, "role": "prefill"}, *({"url": one.url, "role": "decode"} for one in decode), **ALWAYS
        ) as r,
    ):
        prefill.behave = prefilled()
        for one in decode:
            one.behave = script(SSE_HEAD, chunk(ROLE), CLOSE)
        asking = asyncio.ensure_future(r.request(post(chat(LONG, stream=True))))
        await until(lambda: decode[0].seen and decode[1].seen)
        assert (await asking).status == 502 and len(prefill.seen) == 2


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_an_error_of_the_decode_node_alone_reaches_the_client(status: int) -> None:
    async with scripted_fleet() as (r, _prefill, decode):
        decode.behave = script(http_response(b'{"error":{}}', status=status))
        response = await r.request(post(chat(LONG)))
        assert response.status == (502 if status == 500 else status)
        assert len(decode.seen) == (1 if status in (429, 503) else 2)


@pytest.mark.parametrize("status", [400, 422])
async def test_parameters_that_the_decode_node_rejects_fail_no_request(status: int) -> None:
    async with scripted_fleet() as (r, _prefill, decode):
        rejecting, answering = script(http_response(b'{"error":{}}', status=status)), decode.behave

        async def behave(*args: Any) -> Any:
            return await (rejecting if b"kv_transfer_params" in decode.seen[-1].body else answering)(*args)

        decode.behave = behave
        assert (await r.request(post(chat(LONG)))).status == 200 and len(decode.seen) == 2
        assert r.service.counters.split_requests == {"transfer_failed": 1}


@pytest.mark.parametrize("answer", [b"", b"{", b"\xff" * 100, b'{"kv_transfer_params":' + b"[" * 5000])
async def test_a_hostile_prefill_node_fails_no_request(answer: bytes) -> None:
    async with scripted_fleet() as (r, prefill, decode):
        prefill.behave = script(http_response(answer))
        assert (await r.request(post(chat(LONG)))).status == 200
        assert b"kv_transfer_params" not in decode.seen[0].body


async def test_a_node_with_a_role_whose_engine_is_unknown_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(2) as [prefill, decode]:
        prefill.metrics = script(http_response(b"", content_type=b"text/plain"))
        nodes = {"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}
        async with router(*nodes, **ALWAYS, polling={"interval_s": 0.05}) as r:
            await until(lambda: "kv_transfer_engine_unknown" in caplog.text)
            await asyncio.sleep(0.2)
            assert caplog.text.count("kv_transfer_engine_unknown") == 1
            assert (await r.request(post(chat(LONG)))).status == 200 and not prefill.seen


@pytest.mark.parametrize("finish_reason", ["stop", "length", None, 5])
async def test_a_prefill_node_whose_answer_ends_with_its_first_token_is_asked_again(finish_reason: Any) -> None:
    async with scripted_fleet() as (r, prefill, _decode):
        body = {"choices": [{"index": 0, "finish_reason": finish_reason}], "kv_transfer_params": None}
        prefill.behave = script(http_response(json.dumps(body).encode()))
        for _ in range(2):
            assert (await r.request(post(chat(LONG)))).status == 200
        assert len(prefill.seen) == (2 if finish_reason == "stop" else 1)
