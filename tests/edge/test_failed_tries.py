"""What the router keeps of a failed try, and logs of it: status, type, code and class of the error, not its text."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest
from support.engine_scripts import (
    CLOSE,
    HANG,
    SSE_HEAD,
    Behaviour,
    chunk,
    failing,
    http_response,
    normal,
    script,
    sse_event,
)
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

SECRET = "xyzzy-plugh"
PATIENT = {"consecutive_failures": 1_000_000}


def error_body(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, **more}}).encode()


OUT_OF_MEMORY = error_body(
    f"CUDA out of memory. Tried to allocate 2 GiB. Prompt: {SECRET}", type="InternalServerError", code=500
)


async def send(r: RunningRouter, request_id: str = "one", content: str = "Hi") -> int:
    return (await r.request(post(chat(content), headers=[f"X-Request-Id: {request_id}"]))).status


async def decision(r: RunningRouter, request_id: str = "one") -> dict[str, Any]:
    found: dict[str, Any] = (await r.admin("GET", f"/admin/decisions/{request_id}")).json
    return found


async def errors_read(r: RunningRouter) -> None:
    pools = list(r.service.pools.by_number.values())
    await until(lambda: not any(pool.reading_errors for pool in pools), "the bodies of errors are read")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        vars(record)["fields"] for record in caplog.records if getattr(record, "event", "") == "try_failed"
    ]  # fmt: skip


CLASSES = {
    "out of memory": ("out_of_memory", 500, OUT_OF_MEMORY),
    "torch": ("out_of_memory", 500, error_body("torch.OutOfMemoryError: HIP")),
    "a template": ("bad_template", 500, error_body("jinja2.exceptions.UndefinedError: 'tools' is undefined")),
    "no template": ("bad_template", 500, error_body("As of transformers v4.44, default chat template is no longer")),
    "a model": ("unknown_model", 502, error_body("The model `x` does not exist.", type="NotFoundError", code=404)),
    "a code": ("unknown_model", 500, error_body("?", code="model_not_found")),
    "a timeout": ("timeout", 500, b'{"detail": "Engine loop timed out"}'),
    "504": ("timeout", 504, b""),
    "other": ("other", 500, error_body("EngineCore encountered an issue.")),
    "HTML": ("other", 502, b"<html><body>Bad Gateway</body></html>"),
    "not JSON": ("other", 500, b'{"error": {"type": '),
    "deep": ("other", 500, b"[" * 5000),
    "empty": ("other", 500, b""),
    "not UTF-8": ("other", 500, b"\xff\xfe\x00"),
}


@pytest.mark.parametrize(("kind", "status", "body"), CLASSES.values(), ids=CLASSES)
async def test_the_decision_keeps_the_class_of_an_error(kind: str, status: int, body: bytes) -> None:
    async with engines(2) as [bad, good], router(bad, good, health=PATIENT) as r:
        bad.behave = script(http_response(body, status))
        while not bad.seen:
            assert await send(r) == 200
        await errors_read(r)
        [failed] = (await decision(r))["failed_tries"]
        assert (failed["node"], failed["status"], failed["outcome"]) == ("node0", status, "failed")
        assert failed["reason"] == f"HTTP status {status}" and failed["role"] == "whole"
        assert failed["duration_ms"] >= 0.0
        assert (failed["error"]["class"], failed["error"]["length"]) == (kind, len(body))
        assert "text" not in failed["error"]


NAMES = {
    "OpenAI": (error_body("no", type="server_error", code="e-1.x_Y"), "server_error", "e-1.x_Y"),
    "beside": (b'{"object":"error","message":"no","type":"BadThing","code":42}', "BadThing", "42"),
    "Anthropic": (b'{"type":"error","error":{"type":"api_error","message":"no"}}', "api_error", ""),
    "long": (error_body("no", type="x" * 3000, code="y" * 65), "x" * 64, "y" * 64),
    "a sentence": (error_body("no", type="my bad\n<b>", code="ä"), "mybadb", ""),
    "other values": (error_body("no", type=["a"], code=True), "", ""),
    "a large number": (error_body("no", type=None, code=10**300), "", ""),
}


@pytest.mark.parametrize(("body", "kind", "code"), NAMES.values(), ids=NAMES)
async def test_type_and_code_are_short_names(body: bytes, kind: str, code: str) -> None:
    async with engines() as [bad], router(bad, health=PATIENT) as r:
        bad.behave = script(http_response(body, 500))
        assert await send(r) == 502
        await errors_read(r)
        [failed] = (await decision(r))["failed_tries"]
        assert (failed["error"]["type"], failed["error"]["code"]) == (kind, code)


async def test_the_text_is_kept_only_with_error_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute")
    for kept in (False, True):
        async with engines() as [bad], router(bad, health=PATIENT, journal={"error_text": kept}) as r:
            bad.behave = script(http_response(OUT_OF_MEMORY, 500))
            assert await send(r) == 502
            [error] = [failed["error"] for failed in (await decision(r))["failed_tries"]]
            listed = (await r.admin("GET", "/admin/decisions?failed=1")).body
            assert (SECRET in listed.decode()) == kept
            assert (error.get("text") == OUT_OF_MEMORY.decode()) == kept
    assert len(lines(caplog)) == 2
    assert SECRET not in caplog.text


async def test_kept_text_is_short_and_has_no_control_characters() -> None:
    async with engines() as [bad], router(bad, health=PATIENT, journal={"error_text": True}) as r:
        bad.behave = script(http_response(b"\x1b[31m\r\n" + b"x" * 100_000, 500))
        assert await send(r) == 502
        await errors_read(r)
        [failed] = (await decision(r))["failed_tries"]
        assert failed["error"]["length"] == 100_007
        assert failed["error"]["text"] == " [31m  " + "x" * 993


BODIES: dict[str, Behaviour] = {
    "later": script(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(OUT_OF_MEMORY), 0.1, OUT_OF_MEMORY),
    "in pieces": script(
        b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(OUT_OF_MEMORY),
        OUT_OF_MEMORY[:9], 0.05, OUT_OF_MEMORY[9:20], 0.05, OUT_OF_MEMORY[20:],
    ),
    "in chunks": script(
        b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n", 0.05, chunk(OUT_OF_MEMORY[:30]), 0.05,
        chunk(OUT_OF_MEMORY[30:]), b"0\r\n\r\n",
    ),
    "until close": script(b"HTTP/1.1 500 X\r\n\r\n", 0.05, OUT_OF_MEMORY, CLOSE),
    "unfinished": script(b"HTTP/1.1 500 X\r\nContent-Length: 9999\r\n\r\n", 0.05, OUT_OF_MEMORY, HANG),
    "broken off": script(b"HTTP/1.1 500 X\r\nContent-Length: 9999\r\n\r\n", 0.05, OUT_OF_MEMORY, CLOSE),
    "busy": script(
        b"HTTP/1.1 503 X\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n" % len(OUT_OF_MEMORY), 0.05, OUT_OF_MEMORY
    ),
}  # fmt: skip


@pytest.mark.parametrize("behaviour", BODIES.values(), ids=BODIES)
async def test_a_body_that_arrives_later_is_read_while_the_next_node_has_the_request(behaviour: Behaviour) -> None:
    release = asyncio.Event()
    async with engines(2) as [bad, good], router(bad, good, health=PATIENT) as r:
        bad.behave = behaviour
        good.behave = script(release, http_response())
        sent = [asyncio.ensure_future(send(r, f"r{number}")) for number in range(2)]  # one for each node
        await until(lambda: len(bad.seen) == 1 and len(good.seen) == 2, "the retry")
        await errors_read(r)
        release.set()
        assert await asyncio.gather(*sent) == [200, 200]
        [failed] = [one for number in range(2) for one in (await decision(r, f"r{number}"))["failed_tries"]]
        assert failed["error"]["class"] == "out_of_memory"


async def test_the_retry_does_not_wait_for_the_body_of_the_error() -> None:
    """The engine sends the body only once the retry is there."""
    retried = asyncio.Event()
    async with engines(2) as [bad, good], router(bad, good, health=PATIENT) as r:
        bad.behave = script(
            b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(OUT_OF_MEMORY), retried, OUT_OF_MEMORY
        )
        while not bad.seen:
            assert await asyncio.wait_for(send(r), 10) == 200
        retried.set()
        await errors_read(r)
        assert (await decision(r))["failed_tries"][0]["error"]["class"] == "out_of_memory"
        assert bad.connections - len(r.service.pools.for_node(r.node(0)).busy) >= 1, "the connection is used again"


async def test_bodies_without_an_end_hold_few_connections_and_not_for_long() -> None:
    async with engines(2) as [bad, good], router(bad, good, health=PATIENT) as r:
        drips: list[Any] = [b"HTTP/1.1 500 X\r\nContent-Length: 9999\r\n\r\n", *[b"x", 0.2] * 1000]
        bad.behave = script(*drips)
        await asyncio.gather(*(send(r, f"r{number}") for number in range(200)))
        pool = r.service.pools.for_node(r.node(0))
        assert len(pool.busy) <= 32
        started_s = asyncio.get_running_loop().time()
        await errors_read(r)
        assert asyncio.get_running_loop().time() - started_s < 5.0


async def test_what_does_not_answer_is_kept_and_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute")
    async with engines() as [bad], router(bad, health=PATIENT) as r:
        bad.behave = script(CLOSE)
        assert await send(r) == 502
        [failed] = (await decision(r))["failed_tries"]
        assert (failed["status"], failed["error"]) == (None, None)
        assert failed["reason"] == "the node closed the connection before its response"
        await until(lambda: len(lines(caplog)) == 1, "the log")
        assert lines(caplog)[0] == {
            "node": "node0", "reason": "the node closed the connection before its response",
            "role": "whole", "request_id": "one", "left_out": 0,
        }  # fmt: skip


async def test_a_compressed_body_is_not_read() -> None:
    async with engines() as [bad], router(bad, health=PATIENT, journal={"error_text": True}) as r:
        bad.behave = script(http_response(OUT_OF_MEMORY, 500, headers=b"Content-Encoding: gzip\r\n"))
        assert await send(r) == 502
        [failed] = (await decision(r))["failed_tries"]
        assert failed["error"] == {"class": "other", "type": "", "code": "", "length": len(OUT_OF_MEMORY)}


async def test_a_broken_stream_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute")
    async with engines() as [bad], router(bad, health=PATIENT) as r:
        bad.behave = script(SSE_HEAD, chunk(sse_event(0)), chunk(sse_event(1)), CLOSE)
        assert await send(r) == 200
        found = await decision(r)
        assert (found["outcome"], found["status"]) == ("broken", 200)
        [failed] = found["failed_tries"]
        assert failed["outcome"] == "broken" and failed["reason"].endswith("in the middle of its response")
        await until(lambda: len(lines(caplog)) == 1, "the log")
        assert lines(caplog)[0]["status"] == 200


async def test_an_error_that_goes_to_the_client_is_kept_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute")
    body = error_body("Conversation roles must alternate (jinja2)", type="BadRequestError", code=400)
    async with engines() as [bad], router(bad) as r:
        for behaviour in (
            script(http_response(body, 400)),
            script(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n" % len(body), 0.05, body),
            script(b"HTTP/1.1 400 X\r\nTransfer-Encoding: chunked\r\n\r\n", 0.05, chunk(body), b"0\r\n\r\n"),
        ):
            bad.behave = behaviour
            assert await send(r) == 400
            found = await decision(r)
            assert found["outcome"] == "rejected"
            [failed] = found["failed_tries"]
            assert failed["error"] == {
                "class": "bad_template", "type": "BadRequestError", "code": "400", "length": len(body)
            }  # fmt: skip
        await asyncio.sleep(0.3)
        assert not lines(caplog)
        assert (await r.admin("GET", "/admin/nodes/node0")).json["last_failure"] is None


async def test_a_flood_of_failures_is_one_line_a_second_for_each_node(caplog: pytest.LogCaptureFixture) -> None:
    """And no failure is missing from their counts."""
    caplog.set_level(logging.WARNING, "warmroute")
    loop = asyncio.get_running_loop()
    async with engines(2) as both, router(*both, health=PATIENT) as r:
        for engine in both:
            engine.behave = script(http_response(OUT_OF_MEMORY, 500))
        started_s, sent = loop.time(), 0
        while loop.time() - started_s < 2.5:
            await asyncio.gather(*(send(r) for _ in range(20)))
            sent += 20
        took_s = loop.time() - started_s
        for node in ("node0", "node1"):
            await until(
                lambda node=node: sum(1 + line["left_out"] for line in lines(caplog) if line["node"] == node) == sent,
                "all failures are counted", 10,
            )  # fmt: skip
            logged = [line for line in lines(caplog) if line["node"] == node]
            assert 2 <= len(logged) <= took_s + 2
            assert logged[0]["class"] == "out_of_memory" and logged[0]["type"] == "InternalServerError"


async def test_the_list_of_failed_requests_outlives_newer_decisions() -> None:
    async with engines() as [engine], router(engine, health=PATIENT, journal={"max_decisions": 5}) as r:
        engine.behave = failing(500)
        assert await send(r, "bad") == 502
        engine.behave = failing(404)
        assert await send(r, "gone") == 404
        engine.behave = normal()
        for number in range(8):
            assert await send(r, f"good{number}") == 200

        async def ids(query: str) -> list[str]:
            found = (await r.admin("GET", f"/admin/decisions?{query}")).json["decisions"]
            return [one["request_id"] for one in found]

        assert await ids("limit=100") == ["good7", "good6", "good5", "good4", "good3"]
        assert await ids("failed=1") == ["gone", "bad"]
        assert await ids("failed=1&limit=1") == ["gone"]
        assert await ids("status=502") == ["bad"]
        assert await ids("failed=1&status=404") == ["gone"]
        assert await ids("status=200") == ["good7", "good6", "good5", "good4", "good3"]
        assert await ids("request_id=bad") == ["bad"]
        assert await ids("request_id=none") == []
        assert await ids("tenant=") == ["good7", "good6", "good5", "good4", "good3", "gone", "bad"]
        assert await ids("tenant=other") == []
        assert (await decision(r, "bad"))["status"] == 502
        for wrong in ("failed=x", "status=0", "status=600", "status=abc", "status=", "limit=0"):
            assert (await r.admin("GET", f"/admin/decisions?{wrong}")).status == 400, wrong


async def test_the_live_feed_has_the_failed_requests_and_what_failed_last_on_a_node() -> None:
    async with engines(2) as [bad, good], router(bad, good, health=PATIENT) as r:
        bad.behave = good.behave = script(http_response(OUT_OF_MEMORY, 500))
        assert await send(r) == 502
        await errors_read(r)
        snapshot = r.service.live_feed._snapshot
        sections: Any = snapshot.sections(snapshot.read_on_loop())
        [failed] = sections["failed_requests"]
        assert (failed["request_id"], failed["status"], failed["attempts"]) == ("one", 502, 2)
        assert [one["error"]["class"] for one in failed["failed_tries"]] == ["out_of_memory"] * 2
        assert {node["name"]: node["last_failure"]["status"] for node in sections["nodes"]} == {
            "node0": 500, "node1": 500
        }  # fmt: skip


async def test_explain_lists_failed_requests_and_shows_why_each_node_failed() -> None:
    async with engines(2) as [bad, closing], router(bad, closing, health=PATIENT) as r:
        bad.behave = script(http_response(OUT_OF_MEMORY, 500))
        closing.behave = script(CLOSE)
        assert await send(r, "lost") == 502
        bad.behave = closing.behave = normal()
        assert await send(r, "fine") == 200

        async def explain(*arguments: str) -> tuple[int, str]:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "warmroute", "explain",
                "--admin", f"http://127.0.0.1:{r.service.admin_port}", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output, _ = await process.communicate()
            return process.returncode or 0, output.decode()

        for arguments in (["--failed"], ["--status", "502"], ["--failed", "--tenant", "", "--limit", "5"], ["lost"]):
            status, output = await explain(*arguments)
            assert status == 0, output
            assert "HTTP status 500 after" in output and "no node answered (2 nodes tried)" in output
            size = len(OUT_OF_MEMORY)
            assert f"the engine says: out of memory (type InternalServerError, code 500, {size} bytes)" in output
            assert "the node closed the connection before its response" in output
            assert "fine" not in output and SECRET not in output
        assert "fine" in (await explain())[1]
        assert (await explain("--tenant", "nobody")) == (0, "no matching requests\n")
        assert json.loads((await explain("--failed", "--json"))[1])[0]["request_id"] == "lost"
        assert (await explain("lost", "--failed"))[0] != 0
        assert (await explain("--status", "9999"))[0] != 0
