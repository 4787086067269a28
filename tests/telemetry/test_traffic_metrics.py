"""The metrics page of a running router: tokens, times, decisions, reloads, the process; hostile nodes and scrapers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import time
import zlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.engine_scripts import DONE, SSE_HEAD, chunk, http_response, normal, script, sse_event
from support.polling import until
from support.raw_client import Response, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute._kernel import RouteTraffic, TokenTraffic
from warmroute.core.node import EngineCounters, EngineRates
from warmroute.edge.arrival import hash_key

LONG = chat(content="word " * 2000)
USAGE = {"prompt_tokens": 2000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 1500}}
ANSWER = json.dumps({"choices": [], "usage": USAGE}).encode()
PRICE = {"policy": "price"}
KEY = ["Authorization: Bearer k"]
STRANGE = 'te"na\\nt\nnew \u00e9\u4e2d\u202e\r{a="b"} 1'

Samples = dict[tuple[Any, ...], float]


def samples_of(text: str) -> Samples:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(r: RunningRouter) -> Samples:
    return samples_of((await r.admin("GET", "/metrics")).body.decode())


# What is counted.


async def test_the_page_has_tokens_by_route_tenant_and_node() -> None:
    routes = [{"name": "chat", "model": "m"}]
    keys = [{"sha256": hash_key("k"), "tenant": "search"}]
    async with engines() as [engine], router(engine, routing=PRICE, routes=routes, keys=keys) as r:
        engine.behave = normal(ANSWER)
        for _ in range(2):
            assert (await r.request(post(LONG, headers=KEY))).status == 200
        found = await scrape(r)
        for prefix, label in (("", "chat"), ("tenant_", "search"), ("node_", "node0")):
            for kind, tokens in (("prompt", 4000), ("cached", 3000), ("reported_cached", 3000), ("output", 100)):
                assert found[f"warmroute_{prefix}{kind}_tokens_total", *sorted(("m", label))] == tokens
            assert found[f"warmroute_{prefix}predicted_cached_tokens_total", *sorted(("m", label))] > 1000
        assert found["warmroute_tenant_requests_total", "m", "search"] == 2
        for name in ("queue_wait", "request_duration"):
            assert found[f"warmroute_{name}_seconds_count", "chat", "m"] == 2
        assert found["warmroute_estimated_saved_gpu_seconds_total", "chat", "m"] > 0.0
        assert found["warmroute_estimated_round_robin_saved_gpu_seconds_total", "chat", "m"] > 0.0
        assert found["warmroute_decisions_total", "cheapest", "price"] == 2


async def test_counters_begin_at_zero_with_every_common_error() -> None:
    """Prometheus sees no rate of a counter whose first sample is that of a storm."""
    async with engines() as [engine], router(engine) as r:
        found = await scrape(r)
        errors = {name[1:]: count for name, count in found.items() if name[0] == "warmroute_errors_total"}
        assert errors == dict.fromkeys(
            (
                ("400", "bad_request"), ("400", "http_on_tls_port"), ("400", "malformed_json"),
                ("400", "tls_on_plain_port"), ("401", "invalid_api_key"), ("401", "invalid_token"),
                ("404", "model_not_found"), ("404", "not_found"), ("413", "request_too_large"),
                ("415", "unsupported_content_encoding"), ("415", "unsupported_media_type"),
            ),
            0,
        )  # fmt: skip
        for name, count in found.items():
            if name[0].startswith("warmroute_traces_") or name[0].startswith("warmroute_capture_"):
                assert count == 0, name


async def test_tokens_count_under_every_policy_and_for_short_prompts() -> None:
    async with engines() as [engine], router(engine) as r:
        engine.behave = normal(ANSWER)
        await r.request(post(chat(content="hi")))
        found = await scrape(r)
        assert found["warmroute_output_tokens_total", "", "m"] == 50
        assert found["warmroute_cached_tokens_total", "", "m"] == 1500
        assert found["warmroute_decisions_total", "next in turn", "round_robin"] == 1


async def test_a_stream_has_times_to_its_first_token_and_between_tokens() -> None:
    async with engines() as [engine], router(engine) as r:
        usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
        engine.behave = script(SSE_HEAD, chunk(sse_event(0)), 0.05, chunk(usage), DONE)
        await r.request(post(chat(stream=True)))
        found = await scrape(r)
        assert found["warmroute_time_to_first_token_seconds_count", "", "m"] == 1
        assert found["warmroute_inter_token_latency_seconds_count", "", "m"] == 1
        assert 0.04 / 49 <= found["warmroute_inter_token_latency_seconds_sum", "", "m"] < 1.0


async def test_reloads_are_counted_and_the_last_one_has_a_result() -> None:
    async with engines() as [engine], router(engine) as r:
        started_s = (await scrape(r))["warmroute_config_last_reload_success_timestamp_seconds",]
        assert abs(time.time() - started_s) < 60
        assert (await r.admin("POST", "/admin/reload")).status == 200
        r.service.certificates.reload = lambda: "no such file"  # type: ignore[method-assign]
        assert (await r.admin("POST", "/admin/reload")).status == 400
        found = await scrape(r)
        assert [found["warmroute_config_reloads_total", result] for result in ("success", "failure")] == [1, 1]
        assert found["warmroute_config_last_reload_successful",] == 0
        assert found["warmroute_config_last_reload_success_timestamp_seconds",] >= started_s


async def test_the_page_has_the_process_and_the_event_loop() -> None:
    async with engines() as [engine], router(engine) as r:
        await until(lambda: sum(r.service.loop_delay.histogram.counts))
        found = await scrape(r)
        assert found["process_cpu_seconds_total",] > 0
        assert 10e6 < found["process_resident_memory_bytes",] < found["process_virtual_memory_bytes",]
        assert 3 < found["process_open_fds",] <= found["process_max_fds",]
        age_s = time.time() - found["process_start_time_seconds",]
        assert 0 < age_s < os.times().elapsed
        assert found["warmroute_event_loop_delay_seconds_count",] >= 1


async def test_an_alert_of_the_live_page_is_a_metric() -> None:
    async with engines() as [engine], router(engine) as r:
        r.service.fleet.check_failed(r.node(0), time.monotonic(), "connection refused")
        r.service.alerts.update(time.monotonic())
        assert (await scrape(r))["warmroute_alerts", "critical", "no_node"] == 1


# Formats.


async def fetch(r: RunningRouter, *headers: str) -> Response:
    return await r.admin("GET", "/metrics", b"", *headers)


async def test_openmetrics_and_gzip_are_sent_to_those_who_ask() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        await r.request(post(LONG))
        accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
        page = await fetch(r, accept, "Accept-Encoding: gzip")
        assert page.get("content-type") == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert page.get("content-encoding") == "gzip"
        text = zlib.decompress(page.body, 16 + zlib.MAX_WBITS).decode()
        parse: Any = openmetrics.text_string_to_metric_families
        families = {family.name: family for family in parse(text)}
        assert families["warmroute_prompt_tokens"].type == "counter"
        assert families["warmroute_request_duration_seconds"].type == "histogram"
        for refused in ("gzip;q=0", "identity", "br"):
            page = await fetch(r, f"Accept-Encoding: {refused}")
            assert page.get("content-encoding") is None and b"warmroute_build_info" in page.body


async def test_a_tenant_and_a_model_may_have_any_name() -> None:
    keys = [{"sha256": hash_key("k"), "tenant": STRANGE}]
    model = 'm"\\n {é中}'
    async with engines(1, model) as [engine], router(engine, keys=keys) as r:
        engine.behave = normal(ANSWER)
        assert (await r.request(post(chat(model=model), headers=KEY))).status == 200
        assert (await scrape(r))["warmroute_tenant_prompt_tokens_total", *sorted((model, STRANGE))] == 2000


async def test_a_name_that_is_no_text_does_not_break_the_page() -> None:
    async with engines() as [engine], router(engine) as r:
        r.service.traffic.by_tenant["half \ud800 a character", "t"] = TokenTraffic()
        assert (await fetch(r)).status == 200


# Scrapers.


async def test_twenty_scrapes_at_once_render_one_page() -> None:
    async with engines() as [engine], router(engine) as r:
        scrapes = r.service.scrapes
        rendered, render = [], scrapes._render

        def slow(openmetrics: bool) -> list[bytes]:
            rendered.append(openmetrics)
            time.sleep(0.2)
            return render(openmetrics)

        scrapes._render = slow
        leaves = await r.connect(r.service.admin_port)
        leaves.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await until(lambda: rendered)
        others = asyncio.gather(*(fetch(r) for _ in range(20)))
        await asyncio.sleep(0.05)
        leaves.disconnect()
        pages = await others
        assert [page.status for page in pages] == [200] * 20
        assert len(rendered) <= 2


async def test_tenants_that_appear_while_the_page_is_rendered_do_not_break_it() -> None:
    """The garbage collector may run in the middle of a loop over a dict; its finalizers let other threads run."""
    async with engines() as [engine], router(engine) as r:
        traffic, number = r.service.traffic, count()
        for _ in range(50):
            traffic.by_tenant["m", f"tenant-{next(number)}"] = TokenTraffic()

        def count_requests(phase: str, info: dict[str, int]) -> None:
            name = f"new-{next(number)}"
            traffic.by_tenant["m", name] = traffic.by_node["m", name] = TokenTraffic()
            traffic.by_route["m", name] = RouteTraffic()

        thresholds = gc.get_threshold()
        gc.callbacks.append(count_requests)
        gc.set_threshold(5)
        try:
            page = r.service.scrapes._render(False)
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(count_requests)
        assert len(traffic.by_tenant) > 60
        assert b'tenant="tenant-49"' in b"".join(page)


async def test_a_scraper_that_never_reads_is_disconnected_and_delays_nobody() -> None:
    async with engines() as [engine], router(engine, limits={"stall_timeout_s": 0.3}) as r:
        for number in range(2000):
            r.service.traffic.by_tenant["m" * 400, f"tenant-{number}"] = TokenTraffic()
        lazy = [socket.socket() for _ in range(3)]
        for client in lazy:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # else the page may fit into the buffers
            client.connect(("127.0.0.1", r.service.admin_port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await r.request()).status == 200
        assert len((await fetch(r)).body) > 4_000_000
        await until(lambda: not r.service.admin_listener.connections, patience_s=10)
        for client in lazy:
            client.close()


# Nodes that report absurd counters.

ABSURD = ("NaN", "-5", "1e308", "+Inf", "-Inf", "1e18", "0x10", "", "99999999999999999999999999")


def engine_page(value: str) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} 0\nvllm:num_requests_waiting{{engine="0"}} 0\n'
        f"vllm:prefix_cache_queries_total {value}\nvllm:prefix_cache_hits_total {value}\n"
        f"vllm:num_preemptions_total {value}\n"
    )


async def test_absurd_counters_of_an_engine_never_reach_the_page() -> None:
    values: Iterator[str] = iter(ABSURD * 1000)
    polls = 0

    async def metrics(_engine: ScriptedEngine, _received: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal polls
        polls += 1
        writer.write(http_response(engine_page(next(values)).encode(), content_type=b"text/plain"))

    async with engines() as [engine], router(engine, polling={"interval_s": 0.01}) as r:
        engine.metrics = metrics
        before: Samples = {}
        for _ in range(4):
            seen = polls
            await until(lambda seen=seen: polls >= seen + len(ABSURD))
            found = await scrape(r)
            for (name, *labels), value in found.items():
                assert value == value and abs(value) < 1e12, (name, labels, value)
                if name.endswith("_total"):
                    assert value >= before.get((name, *labels), 0.0), name
            before = found


@pytest.mark.parametrize("jump", [-1.0, 1e18])
def test_a_jump_of_an_engines_counter_is_no_growth(jump: float) -> None:
    rates = EngineRates()
    for second, total in enumerate((100.0, 200.0, jump, 500.0, 600.0)):
        counters = EngineCounters(queried_tokens=total, hit_tokens=total / 2, preemptions=total / 100)
        rates.update(counters, 0, float(second))
    assert rates.queries_total == pytest.approx(200.0) and rates.hits_total == pytest.approx(100.0)
    assert rates.preemptions_total == pytest.approx(2.0)
    rates.forget()
    assert rates.queries_total == pytest.approx(200.0), "a restart of the engine takes nothing back"


def test_an_engine_without_counters_has_none() -> None:
    rates = EngineRates()
    for second in range(3):
        rates.update(EngineCounters(hit_share=0.5), 0, float(second))
    assert rates.queries_total is rates.hits_total is rates.preemptions_total is None
