"""Clients that disconnect, faults on command, and sleep."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.engine_processes import FakeEngine, StartEngine, wait_until


def open_stream(
    engine: FakeEngine, tokens: int = 5000, stream: bool = True
) -> tuple[socket.socket, http.client.HTTPResponse]:
    """Start a long response. Return its socket and its reader."""
    url = urlsplit(engine.url)
    assert url.hostname is not None
    assert url.port is not None
    raw = socket.create_connection((url.hostname, url.port), timeout=5)
    body = json.dumps({"prompt": [5] * 1000, "max_tokens": tokens, "stream": stream}).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return raw, http.client.HTTPResponse(raw)


def disconnect(raw: socket.socket) -> None:
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_blocks_of_the_request_at_once(start_engine: StartEngine, stream: bool) -> None:
    engine = start_engine(speed=1)
    raw, _ = open_stream(engine, stream=stream)
    wait_until(lambda: engine.metric("vllm:num_requests_running") == 1)
    assert engine.metric("vllm:kv_cache_usage_perc") > 0.05
    disconnect(raw)
    assert wait_until(lambda: engine.metric("vllm:num_requests_running") == 0) < 0.3
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    _, page = engine.request("/metrics")
    assert 'finished_reason="abort",model_name="sim"} 1.0' in page


def test_a_disconnect_removes_a_waiting_request(start_engine: StartEngine) -> None:
    engine = start_engine("--max-num-seqs", "1", speed=1)
    running, _ = open_stream(engine)
    wait_until(lambda: engine.metric("vllm:num_requests_running") == 1)
    waiting, _ = open_stream(engine)
    wait_until(lambda: engine.metric("vllm:num_requests_waiting") == 1)
    disconnect(waiting)
    assert wait_until(lambda: engine.metric("vllm:num_requests_waiting") == 0) < 0.3
    assert engine.metric("vllm:num_requests_running") == 1
    running.close()


def test_the_fault_die_ends_the_process(start_engine: StartEngine) -> None:
    engine = start_engine()
    with pytest.raises(OSError):
        engine.request("/_sim/fail", {"mode": "die"})
    assert engine.child.process.wait(2) == 137


def test_a_hanging_engine_answers_nothing_until_the_fault_ends(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    raw, response = open_stream(engine, tokens=100)
    response.begin()
    response.readline()
    engine.fail("hang")
    assert engine.request("/_sim/fail")[1] == {"mode": "hang"}
    with pytest.raises(TimeoutError):
        engine.request("/health", timeout=0.3)
    completed: list[Any] = []
    thread = threading.Thread(target=lambda: completed.append(engine.complete("x")))
    thread.start()
    time.sleep(0.2)
    assert not completed
    engine.fail("hang", health=True)
    assert engine.request("/health")[0] == 200
    engine.fail("none")
    thread.join(5)
    assert completed
    assert response.read().endswith(b"data: [DONE]\n\n")
    raw.close()


def test_the_error_faults_fail_generations_but_not_health_checks(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.fail("error500")
    status, body = engine.request("/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["type"]) == (500, "InternalServerError")
    assert engine.request("/health")[0] == 200
    engine.fail("busy503")
    assert engine.request("/v1/completions", {"prompt": "x"})[0] == 503
    engine.fail("error500", share=0.5)
    assert {engine.request("/v1/completions", {"prompt": "x"})[0] for _ in range(20)} == {200, 500}
    engine.fail("none")
    assert engine.complete("x")
    assert engine.request("/_sim/fail", {"mode": "explode"})[0] == 400


def test_a_slow_engine_takes_longer_by_its_factor(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)

    def seconds() -> float:
        started = time.monotonic()
        engine.complete("x", max_tokens=150)
        return time.monotonic() - started

    normal = seconds()
    engine.fail("slow", factor=4)
    assert 2.5 < seconds() / normal < 6
    engine.fail("none")
    assert seconds() / normal < 1.5


def test_a_restart_breaks_off_running_responses(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    raw, response = open_stream(engine)
    response.begin()
    response.readline()
    engine.fail("restart")
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    raw.close()
    assert engine.metric("vllm:num_requests_running") == 0
    assert engine.complete("x")


def test_sleep_aborts_running_requests_and_queues_new_ones(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    raw, response = open_stream(engine)
    response.begin()
    response.readline()
    assert engine.request("/sleep?level=1", b"", "POST")[0] == 200
    assert b'"finish_reason":"abort"' in response.read()
    raw.close()
    assert engine.request("/is_sleeping") == (200, {"is_sleeping": True})
    assert engine.request("/health")[0] == 200
    assert engine.metric("vllm:engine_sleep_state") == 1
    completed: list[Any] = []
    thread = threading.Thread(target=lambda: completed.append(engine.complete("x")))
    thread.start()
    time.sleep(0.3)
    assert not completed
    assert engine.request("/wake_up", b"", "POST")[0] == 200
    thread.join(5)
    assert completed


def test_an_idle_engine_uses_no_cpu(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.complete("x", max_tokens=20)
    before = engine.metric("process_cpu_seconds_total")
    time.sleep(1)
    assert engine.metric("process_cpu_seconds_total") - before < 0.03


@pytest.mark.parametrize("mode", ["early_role", "early_comment"])
def test_a_stream_may_send_something_before_its_first_token(start_engine: StartEngine, mode: str) -> None:
    engine = start_engine(speed=0.01)
    engine.fail(mode)
    url = urlsplit(engine.url)
    connection = http.client.HTTPConnection(f"{url.hostname}:{url.port}", timeout=5)
    body = {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 3, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    first = connection.getresponse().readline()
    assert first == b": ping\n" if mode == "early_comment" else b'"delta":{"role":"assistant","content":""}' in first
    assert engine.metric("vllm:generation_tokens_total") == 0, "the prefill takes seconds"
    connection.close()


def test_an_early_role_is_sent_once(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.fail("early_role")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    status, text = engine.request("/v1/chat/completions", body)
    assert status == 200 and text.count('"role"') == 1 and text.count('"content"') == 4
