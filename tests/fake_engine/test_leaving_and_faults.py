"""Clients that leave, engines that fail on command, and sleep."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from engine_processes import Engine, StartEngine, until


def open_stream(
    engine: Engine, tokens: int = 5000, stream: bool = True
) -> tuple[socket.socket, http.client.HTTPResponse]:
    """A long answer under way, and the socket it comes by."""
    at = urlsplit(engine.url)
    assert at.hostname is not None
    assert at.port is not None
    raw = socket.create_connection((at.hostname, at.port), timeout=5)
    body = json.dumps({"prompt": [5] * 1000, "max_tokens": tokens, "stream": stream}).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return raw, http.client.HTTPResponse(raw)


def leave(raw: socket.socket) -> None:
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_at_once(start_engine: StartEngine, stream: bool) -> None:
    engine = start_engine(speed=1)
    raw, _ = open_stream(engine, stream=stream)
    until(lambda: engine.metric("vllm:num_requests_running") == 1)
    assert engine.metric("vllm:kv_cache_usage_perc") > 0.05
    leave(raw)
    assert until(lambda: engine.metric("vllm:num_requests_running") == 0) < 0.3
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    _, page = engine.ask("/metrics")
    assert 'finished_reason="abort",model_name="sim"} 1.0' in page


def test_a_client_that_leaves_while_it_waits_is_forgotten(start_engine: StartEngine) -> None:
    engine = start_engine("--max-num-seqs", "1", speed=1)
    running, _ = open_stream(engine)
    until(lambda: engine.metric("vllm:num_requests_running") == 1)
    waiting, _ = open_stream(engine)
    until(lambda: engine.metric("vllm:num_requests_waiting") == 1)
    leave(waiting)
    assert until(lambda: engine.metric("vllm:num_requests_waiting") == 0) < 0.3
    assert engine.metric("vllm:num_requests_running") == 1
    running.close()


def test_a_dead_engine_is_gone(start_engine: StartEngine) -> None:
    engine = start_engine()
    with pytest.raises(OSError):
        engine.ask("/_sim/fail", {"mode": "die"})
    assert engine.child.process.wait(2) == 137


def test_a_hanging_engine_answers_nothing_until_it_is_well(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    raw, response = open_stream(engine, tokens=100)
    response.begin()
    response.readline()
    engine.fail("hang")
    running = engine.ask("/_sim/fail")[1]
    assert running == {"mode": "hang"}
    with pytest.raises(TimeoutError):
        engine.ask("/health", timeout=0.3)
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(engine.complete("x")))
    thread.start()
    time.sleep(0.2)
    assert not late
    engine.fail("hang", health=True)
    assert engine.ask("/health")[0] == 200
    engine.fail("none")
    thread.join(5)
    assert late
    assert response.read().endswith(b"data: [DONE]\n\n")
    raw.close()


def test_errors_on_command(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.fail("error500")
    status, answer = engine.ask("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert engine.ask("/health")[0] == 200
    engine.fail("busy503")
    assert engine.ask("/v1/completions", {"prompt": "x"})[0] == 503
    engine.fail("error500", share=0.5)
    assert {engine.ask("/v1/completions", {"prompt": "x"})[0] for _ in range(20)} == {200, 500}
    engine.fail("none")
    assert engine.complete("x")
    assert engine.ask("/_sim/fail", {"mode": "explode"})[0] == 400


def test_a_slow_engine_takes_its_factor_longer(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)

    def seconds() -> float:
        began = time.monotonic()
        engine.complete("x", max_tokens=150)
        return time.monotonic() - began

    well = seconds()
    engine.fail("slow", factor=4)
    assert 2.5 < seconds() / well < 6
    engine.fail("none")
    assert seconds() / well < 1.5


def test_a_restart_cuts_what_runs_visibly(start_engine: StartEngine) -> None:
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


def test_sleep_ends_what_runs_and_lets_new_requests_hang(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    raw, response = open_stream(engine)
    response.begin()
    response.readline()
    assert engine.ask("/sleep?level=1", b"", "POST")[0] == 200
    assert b'"finish_reason":"abort"' in response.read()
    raw.close()
    assert engine.ask("/is_sleeping") == (200, {"is_sleeping": True})
    assert engine.ask("/health")[0] == 200
    assert engine.metric("vllm:engine_sleep_state") == 1
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(engine.complete("x")))
    thread.start()
    time.sleep(0.3)
    assert not late
    assert engine.ask("/wake_up", b"", "POST")[0] == 200
    thread.join(5)
    assert late


def test_an_engine_that_rests_uses_no_cpu(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.complete("x", max_tokens=20)
    before = engine.metric("process_cpu_seconds_total")
    time.sleep(1)
    assert engine.metric("process_cpu_seconds_total") - before < 0.03
