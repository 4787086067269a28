"""GET /metrics has the names, types and labels of vLLM."""

from __future__ import annotations

import re

from support.engine_processes import FakeEngine, StartEngine
from support.vllm_recordings import RECORDINGS

NOT_SIMULATED = re.compile(r"python_gc_|http_request_size|http_response_size|http_request_duration")
"""Metrics of the HTTP framework and the Python interpreter."""


def families(page: str) -> dict[str, tuple[str, str, frozenset[str]]]:
    """Return name → (type, help, label names)."""
    found: dict[str, tuple[str, str, frozenset[str]]] = {}
    for name, text, kind, rest in re.findall(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\w+)\n((?:[^#].*\n?)*)", page, re.M):
        labels = frozenset(re.findall(r'[{,](\w+)="', rest))
        found[name] = (kind, text, labels)
    return found


def test_every_metric_of_vllm_is_there_with_its_type_help_and_labels(shared_engine: FakeEngine) -> None:
    shared_engine.complete("x")
    _, page = shared_engine.request("/metrics")
    simulated, recorded = families(page), families((RECORDINGS / "metrics.txt").read_text())
    expected = {name: family for name, family in recorded.items() if not NOT_SIMULATED.match(name)}
    assert len(expected) > 80
    assert {name: simulated.get(name) for name in expected} == expected


def test_counters_and_times_are_those_of_the_requests(start_engine: StartEngine) -> None:
    engine = start_engine(speed=1)
    engine.complete([7] * 100, max_tokens=11)
    engine.complete([7] * 100, max_tokens=11)
    assert engine.metric("vllm:prefix_cache_queries_total") == 200
    assert engine.metric("vllm:prefix_cache_hits_total") == 96
    assert engine.metric("vllm:generation_tokens_total") == 22
    assert engine.metric("vllm:time_to_first_token_seconds_count") == 2
    assert engine.metric("vllm:inter_token_latency_seconds_count") == 20
    assert 0.0015 < engine.metric("vllm:inter_token_latency_seconds_sum") / 20 < 0.004  # 1.7 ms on an H200
    assert engine.metric("vllm:num_requests_running") == 0
    _, page = engine.request("/metrics")
    assert 'finished_reason="length",model_name="sim"} 2.0' in page
    assert 'kv_cache_size_tokens="16000"' in page
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 2.0' in page


def test_the_router_reads_the_load_from_the_page(shared_engine: FakeEngine) -> None:
    from warmroute.engines import detect_engine, engine_of

    _, page = shared_engine.request("/metrics")
    assert detect_engine(page.encode()) == "vllm"
    report = engine_of("vllm").parse_load(page.encode())
    assert report is not None
    assert (report.running, report.waiting) == (0, 0)
    assert report.incarnation > 1e9
