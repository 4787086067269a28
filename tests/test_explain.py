"""`warmroute explain`, POST /admin/explain, and the response headers that name the node."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.engine_scripts import CLOSE, SSE_HEAD, chunk, failing, http_response, normal, script, sse_event, stream
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app.commands.explain import _outcome_line
from warmroute.edge.arrival import hash_key
from warmroute.lab.demo.processes import Children

HERE = Path(__file__).parent
sys.path.append(str(HERE / "fake_engine"))

from support.engine_processes import FakeEngine  # noqa: E402

SMALL_MODEL = HERE / "prompt" / "small-model"
SYSTEM = "You answer questions about the routing of requests to engines, whose caches hold what they have seen before. "
PRICE = {"policy": "price", "seed": 7}
ASK = ["X-Warmroute-Explain: 1"]


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


@asynccontextmanager
async def live(children: Children, count: int = 3, **tables: Any) -> AsyncIterator[RunningRouter]:
    """A router over simulated engines with KV events and a known tokenizer."""
    nodes = [FakeEngine(children, "--tokenizer", str(SMALL_MODEL), blocks=4000) for _ in range(count)]
    models = [{"name": "sim", "tokenizer": str(SMALL_MODEL)}]
    named = [{"url": node.url, "name": f"gpu-{number}"} for number, node in enumerate(nodes)]
    async with router(*named, routing=PRICE, index={"min_prompt_tokens": 32}, models=models, **tables) as r:
        caches = r.service.cache_view
        await until(lambda: all(cache.complete for cache in caches), "KV events of all nodes")
        await until(lambda: all(cache.capacity_blocks for cache in caches), "metrics of all nodes")
        yield r


def question(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM * 12}, {"role": "user", "content": text}]
    return {"model": "sim", "messages": messages, "max_tokens": 8, **more}


async def ask(r: RunningRouter, request_id: str, text: str = "What is a block?", **more: Any) -> Any:
    body = json.dumps(question(text, **more)).encode()
    found = await r.request(post(body, headers=[f"X-Request-Id: {request_id}"]))
    assert found.status == 200, found.body
    return found


async def wait_for_events(r: RunningRouter) -> None:
    index = r.service.cache_view.index
    places = [place for cache in r.service.cache_view for place in cache.ranks.values()]
    await until(lambda: any(index.pair_count(place) for place in places), "events")


async def explain(r: RunningRouter, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Run the command in its own process. Return its exit status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute", "explain", "--admin", f"http://127.0.0.1:{r.service.admin_port}",
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def state_of(r: RunningRouter) -> dict[str, Any]:
    """Return everything that a request would change."""
    service = r.service
    return {
        "arrivals": [(node.arrival_rate, node.arrival_s, node.last_ticket_s) for node in service.fleet],
        "index": service.cache_view.index.stats(),
        "inflight": [(node.name, node.inflight, node.pending_work, node.context_tokens) for node in service.fleet],
        "outcomes": [tuple(node.outcomes) for node in service.fleet],
        "ranks": [list(cache.ranks) for cache in service.cache_view],
        "reuse": bytes(service.cache_view.reuse.chances),
        "journal": len(service.last_decisions),
        "waiting": service.admission.queue.waiting,
        "responses": dict(service.counters.responses),
        "errors": dict(service.counters.errors),
    }


# The command.


async def test_explain_shows_a_past_decision(children: Children, tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    async with live(children, journal={"file": str(file)}) as r:
        await ask(r, "first")
        await wait_for_events(r)
        for node in r.service.fleet:
            node.speed.guess(0.05)  # what a busy machine made the router learn must not decide
        await ask(r, "second", "And what is a chain of them?")
        code, out, err = await explain(r, "second")
        assert (code, err) == (0, "")
        explanation, head, *rows = out.splitlines()
        entry = (await r.admin("GET", "/admin/decisions/second")).json
        home, cached, tokens = entry["node"], entry["cached_tokens"], entry["prompt_tokens"]
        assert explanation == entry["explanation"]
        assert explanation.startswith(f"{home}: {cached:,} of {tokens:,} tokens cached, saves ")
        assert cached > 100
        assert head.split()[:4] == ["node", "price,", "ms", "prefill"] or "prefill" in head
        assert len(rows) == 4 and rows[0].split()[:2] == ["→", home]
        assert {row.split()[0] for row in rows[1:3]} == {f"gpu-{number}" for number in range(3)} - {home}
        assert ": ok, status 200, " in rows[3] and "first token after" not in rows[3], "the response was not streamed"
        assert f"{entry['reported']['cached_tokens']:,} of {tokens:,} prompt tokens cached" in rows[3]
        assert entry["reported"]["cached_tokens"] == cached, "the prediction was right"

        code, out, _ = await explain(r, "second", "--json")
        assert code == 0 and json.loads(out) == entry
        await until(lambda: r.service.counters.journal_written == 2)
        code, out, _ = await explain(r, "second", "--journal", str(file))
        assert code == 0 and out.splitlines()[0] == explanation
        os.rename(file, tmp_path / "journal.jsonl.1")
        code, out, _ = await explain(r, "first", "--journal", str(file), "--json")
        assert code == 0 and json.loads(out)["request_id"] == "first"


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        (
            (11, 9),
            "9 of 11 prompt tokens cached, its node reports 11 prompt tokens, fewer than the 800 that were expected",
        ),
        ((11, 500), "11 of 11 prompt tokens cached, its node reports 11 prompt tokens"),
        ((1000, 800), "800 of 1,000 prompt tokens cached"),
        ((None, None), ": ok"),
    ],
)
def test_a_node_that_reports_too_few_prompt_tokens_is_named(
    reported: tuple[int | None, int | None], shown: str
) -> None:
    decision = {
        "time": "2026-11-19T05:00:00Z", "model": "m", "priority": "normal", "tenant": "", "outcome": "ok",
        "status": 200,
        "ttft_ms": 1.0, "duration_ms": 2.0, "cached_tokens": 800,
        "reported": {"prompt_tokens": reported[0], "cached_tokens": reported[1], "output_tokens": 1},
    }  # fmt: skip
    line = _outcome_line(decision)
    assert shown in line and ("its node reports" in line) is (reported[0] == 11)


def without_other(explanation: str) -> str:
    """Two idle nodes without the prompt are alike: the sentence may name either."""
    return re.sub(r"gpu-\d is idle", "another is idle", explanation)


async def test_explain_predicts_the_decision_for_a_request(children: Children, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(question("And what is a chain of them?")))
    async with live(children) as r:
        await ask(r, "first")
        await wait_for_events(r)
        home = (await r.admin("GET", "/admin/decisions/first")).json["node"]
        await until(lambda: r.inflight() == 0 and not r.service.cache_view._prefilled, "events of the first request")
        before = state_of(r)
        code, out, err = await explain(r, "--request", str(file), "--json")
        assert (code, err) == (0, "")
        would = json.loads(out)
        assert would["node"] == home and would["cached_tokens"] > 100 and "outcome" not in would
        for _ in range(3):
            code, out, _ = await explain(r, "--request", str(file))
            assert code == 0 and f"→ {home}" in out.replace("  ", " ")
            assert without_other(out.splitlines()[0]) == without_other(would["explanation"])
        assert state_of(r) == before, "nothing changes"
        await ask(r, "real", "And what is a chain of them?")
        real = (await r.admin("GET", "/admin/decisions/real")).json
        real["explanation"] = real["explanation"].partition("; queued for ")[0]  # a busy machine may let it wait
        assert without_other(real["explanation"]) == without_other(would["explanation"])
        for name in ("node", "prompt_tokens", "cached_tokens", "policy", "reason", "candidate_count"):
            assert real[name] == would[name], name


async def test_explain_reports_errors(children: Children, tmp_path: Path) -> None:
    token = "open sesame"
    admin = {"token_sha256": hashlib.sha256(token.encode()).hexdigest()}
    body, broken = tmp_path / "body.json", tmp_path / "broken.json"
    body.write_bytes(chat("hello"))
    broken.write_text("{")
    async with engines() as [engine], router(engine, admin=admin) as r:
        port = r.service.admin_port

        async def fails(*arguments: str, **env: str) -> str:
            code, out, err = await explain(r, *arguments, **env)
            assert code == 2 and out == "" and err.startswith("warmroute: ") and err.count("\n") == 1, err
            return err.removeprefix("warmroute: ").strip()

        good = {"WARMROUTE_ADMIN_TOKEN": token}
        assert await fails("x") == (
            f"the admin listener at http://127.0.0.1:{port} (--admin) requires its token: set WARMROUTE_ADMIN_TOKEN, "
            "or use another variable (--token-env)"
        )
        assert "the token in OTHER is wrong" in await fails("x", "--token-env", "OTHER", OTHER="wrong")
        assert "The journal has no request 'x'. It contains the last 1,000 requests" in await fails("x", **good)
        code, out, _ = await explain(r, "--request", str(body), **good)
        assert code == 0 and out.strip() == "node0: the only candidate"
        code, out, _ = await explain(r, **good)
        assert code == 0 and out.strip() == "no decisions yet"
        assert "--journal needs a REQUEST_ID" in await fails("--journal", str(body))
        assert "not both" in await fails("x", "--request", str(body))
        assert "require --request" in await fails("x", "--tenant", "t")
        assert "not JSON" in await fails("--request", str(broken), **good)
        assert "cannot read the file: No such file" in await fails("--request", str(tmp_path / "none"), **good)
        assert "expected 'Name: value'" in await fails("--request", str(body), "--header", "x", **good)
        assert "the file does not exist" in await fails("x", "--journal", str(tmp_path / "none"))
        (tmp_path / "journal").write_text('{"request_id": "y"}\n{"request_id": "x')
        assert "no request 'x' in " in await fails("x", "--journal", str(tmp_path / "journal"))
        unknown = tmp_path / "unknown.json"
        unknown.write_bytes(chat("hello", model="nope"))
        assert "nope" in await fails("--request", str(unknown), **good)
        assert await fails("x", "--admin", "127.0.0.1:1") == (
            "no router answers at http://127.0.0.1:1 (--admin): Connection refused. Name its admin listener with "
            "--admin URL, --config FILE or WARMROUTE_ADMIN_URL"
        )
        wrong = await fails("x", "--admin", engine.url)
        assert f"the server at {engine.url} (--admin) is not the admin listener of a router" in wrong


async def test_explain_considers_rate_limits_tenants_and_routes(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_bytes(chat("hello"))
    keys = [{"sha256": hash_key("one"), "tenant": "a", "requests_per_min": 2}]
    routes = [{"name": "plain", "cache_weight": 0.0}]
    async with engines(2) as both, router(*both, keys=keys, routes=routes, routing=PRICE) as r:
        arguments = ("--request", str(body), "--tenant", "a")
        for _ in range(4):
            code, out, _ = await explain(r, *arguments)
            assert code == 0 and "route: plain" in out, "explain does not count against the limit"
        for _ in range(2):
            assert (await r.request(post(headers=["Authorization: Bearer one"]))).status == 200
        code, out, err = await explain(r, *arguments)
        assert code == 2 and out == "" and "the router would reject this request with 429 now: " in err
        assert not r.service.counters.rejected
        _, _, err = await explain(r, "--request", str(body))
        assert "(--tenant NAME)" in err
        _, _, err = await explain(r, "--request", str(body), "--tenant", "b")
        assert "No API key has the tenant 'b'." in err


# POST /admin/explain.


async def test_explain_uses_tenant_and_headers() -> None:
    keys = [
        {"sha256": hash_key(name), "tenant": name, "max_priority": priority}
        for name, priority in (("a", "high"), ("b", "low"))
    ]
    async with engines(2) as both, router(*both, keys=keys) as r:

        async def explained(**more: Any) -> Any:
            return await r.admin("POST", "/admin/explain", json.dumps({"body": json.loads(chat()), **more}).encode())

        assert (await explained()).error["code"] == "missing_tenant"
        assert (await explained(tenant="nobody")).error["code"] == "unknown_tenant"
        assert (await explained(tenant="a")).json["tenant"] == "a"
        high = {"X-Priority": "high", "Content-Length": "7", "Host": "x"}
        assert (await explained(tenant="a", headers=high)).json["priority"] == "high"
        assert (await explained(tenant="b", headers=high)).json["priority"] == "low"
        assert (await explained(headers={"Authorization": "Bearer a"})).json["tenant"] == "a"
        assert not any(engine.seen for engine in both)


async def test_invalid_explain_requests_are_rejected() -> None:
    async with engines(2) as both, router(*both) as r:

        async def rejected(body: bytes) -> tuple[int, str]:
            found = await r.admin("POST", "/admin/explain", body)
            return found.status, found.error["code"]

        assert await rejected(b"") == (400, "bad_request")
        assert await rejected(b'{"body": {}, "bdy": 1}') == (400, "bad_request")
        assert await rejected(b'{"body": 7}') == (400, "malformed_json")
        assert await rejected(b'{"body": {"model": "nope", "prompt": "x"}, "path": "/v1/completions"}') == (
            404, "model_not_found",
        )  # fmt: skip
        assert await rejected(b'{"body": {}, "path": "/admin/nodes"}') == (404, "not_found")
        assert await rejected(b'{"body": {}, "path": "v1/completions"}') == (400, "bad_request")
        assert await rejected(b'{"body": {}, "path": "/v1/completions HTTP/1.1\\r\\nX: y"}') == (400, "bad_request")
        assert await rejected(b'{"body": {}, "headers": {"a": "b\\r\\nc: d"}}') == (400, "bad_request")
        assert await rejected(b'{"body": {}, "headers": {"a b": "c"}}') == (400, "bad_request")
        assert (await r.admin("GET", "/admin/explain")).status == 405
        # A dry run does not advance round robin.
        body = json.dumps({"body": json.loads(chat())}).encode()
        names = {(await r.admin("POST", "/admin/explain", body)).json["node"] for _ in range(3)}
        assert names == {"node0"}
        await r.request()
        assert len(both[0].seen) == 1 and not both[1].seen


# Response headers.


async def test_responses_do_not_name_the_node_by_default() -> None:
    async with engines() as [engine], router(engine) as r:
        found = await r.request(post(headers=ASK))
        assert b"warmroute" not in found.head.lower()
        assert engine.seen[0].get(b"x-warmroute-explain") == [b"1"]


async def test_the_headers_change_nothing_else_in_the_response() -> None:
    async with engines() as [engine], router(engine, journal={"response_headers": "on_request"}) as r:
        for behave in (normal(headers=b"X-Odd:  kept \r\n"), stream(3), failing(404)):
            engine.behave = behave
            plain = await r.request(post(headers=["X-Request-Id: 7"]))
            zero = await r.request(post(headers=["X-Request-Id: 7", "X-Warmroute-Explain: 0"]))
            explained = await r.request(post(headers=["X-Request-Id: 7", *ASK]))
            assert zero.head == plain.head and b"warmroute" not in plain.head.lower()
            assert explained.head.replace(b"X-Warmroute-Node: node0\r\n", b"") == plain.head
            assert (explained.body, explained.chunks) == (plain.body, plain.chunks)
            assert explained.all("x-request-id") == ["7"]
            assert explained.get("x-warmroute-hit") is None, "round robin does not look at prompts"


async def test_the_headers_name_the_node_of_the_retry() -> None:
    tables: dict[str, Any] = {"routing": PRICE, "journal": {"response_headers": "always"}}
    async with engines(2) as both, router(*both, **tables) as r:
        prompt = chat("the same beginning " * 300)
        first = await r.request(post(prompt))
        at = int((first.get("x-warmroute-node") or "").removeprefix("node"))
        tokens = int((first.get("x-warmroute-hit") or "").removeprefix("0/"))
        assert tokens > 1000
        again = await r.request(post(prompt))
        assert again.get("x-warmroute-node") == f"node{at}"
        warm = int((again.get("x-warmroute-hit") or "").partition("/")[0])
        assert again.get("x-warmroute-hit") == f"{warm}/{tokens}" and warm > 0.9 * tokens
        both[at].behave = failing(500)
        moved = await r.request(post(prompt))
        assert moved.status == 200
        assert moved.all("x-warmroute-node") == [f"node{1 - at}"] and moved.all("x-warmroute-hit") == [f"0/{tokens}"]


async def test_interrupted_streams_and_http_1_0_responses_have_the_headers() -> None:
    async with engines() as [engine], router(engine, journal={"response_headers": "always"}) as r:
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), CLOSE)
        assert (await r.request()).get("x-warmroute-node") == "node0"
        engine.behave = stream(2)
        peer = await r.connect()
        peer.write(post().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert (await peer.response()).get("x-warmroute-node") == "node0"
        engine.behave = script(http_response(b"", 204))
        assert (await r.request(without_body=True)).get("x-warmroute-node") == "node0"


async def test_special_characters_in_a_node_name_are_escaped_in_the_header() -> None:
    async with engines() as [engine]:
        node = {"url": engine.url, "name": "gpu é% X: y"}
        async with router(node, journal={"response_headers": "always"}) as r:
            found = await r.request()
            assert found.get("x-warmroute-node") == "gpu %C3%A9%25 X: y"


async def test_the_openai_client_can_read_the_headers(children: Children) -> None:
    async with (
        live(children, 2, journal={"response_headers": "on_request"}) as r,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="sk-none", max_retries=0) as client,
    ):
        explained = {"X-Warmroute-Explain": "1"}
        first = await client.chat.completions.with_raw_response.create(**question("Why?"), extra_headers=explained)
        node, hit = first.headers["x-warmroute-node"], first.headers["x-warmroute-hit"]
        assert node in ("gpu-0", "gpu-1") and hit.startswith("0/")
        await wait_for_events(r)
        usage = first.parse().usage
        assert usage is not None and hit == f"0/{usage.prompt_tokens}"
        streamed = await client.chat.completions.with_raw_response.create(
            **question("Why?"), stream=True, stream_options={"include_usage": True}, extra_headers=explained
        )
        assert streamed.headers["x-warmroute-node"] == node
        chunks = [chunk async for chunk in streamed.parse()]
        usage = chunks[-1].usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert streamed.headers["x-warmroute-hit"] == f"{cached}/{usage.prompt_tokens}" and cached
        plain = await client.chat.completions.with_raw_response.create(**question("Why?"))
        assert "x-warmroute-node" not in plain.headers and plain.headers["x-request-id"]
