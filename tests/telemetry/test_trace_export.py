"""A collector that is down, slow or broken costs traces, never requests. Off, tracing changes and imports nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.otlp_collector import Collector, otlp_collector
from support.polling import until
from support.raw_client import post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app import tracing as trace_exporter
from warmroute.app.startup import check_startup
from warmroute.app.tracing import MAX_QUEUED, EndedTrace, TraceExporter, create_tracing
from warmroute.config import ConfigError, from_table, keys_needing_restart
from warmroute.core.traffic import Counters

CLIENT_CONTEXT = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "EXPORT_INTERVAL_S", 0.02)
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as started:
        yield started


def tracing(url: str = "", **more: Any) -> dict[str, Any]:
    return {"enabled": True, "endpoint": url, "sample_ratio": 1.0, **more}


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split()[0] for record in caplog.records if record.name == "warmroute.tracing"]


async def served(r: RunningRouter, count: int) -> None:
    for _ in range(count):
        assert (await r.request()).status == 200


async def test_a_collector_that_is_down_costs_only_traces(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    async with engines() as [engine], router(engine, tracing=tracing("http://127.0.0.1:9")) as r:
        await served(r, 5)
        counters = r.service.counters
        await until(lambda: counters.traces_dropped["export_failed"] >= 1)
        await served(r, 2)
        await until(lambda: counters.traces_dropped["export_failed"] == 7)
        await until(lambda: events(caplog))
        assert counters.traces_exported == 0 and events(caplog) == ["trace_export_failed"], "logged once"
        page = (await r.admin("GET", "/metrics")).body
        assert b'warmroute_traces_dropped_total{reason="export_failed"} 7' in page


@pytest.mark.parametrize("status", [200, 400, 404, 500])
async def test_a_collector_may_answer_with_garbage(
    collector: Collector, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level("INFO", "warmroute.tracing")
    collector.status, collector.body = status, b"\xff\x00<html>" * 1000
    failed = status != 200
    async with engines() as [engine], router(engine, tracing=tracing(collector.url)) as r:
        await served(r, 3)
        counters = r.service.counters
        await until(lambda: counters.traces_exported + counters.traces_dropped["export_failed"] == 3)
        await until(lambda: events(caplog) == ["trace_export_failed"][: int(failed)])
        collector.status = 200
        await served(r, 1)
        await until(lambda: counters.traces_exported == (1 if failed else 4))
        await until(lambda: events(caplog) == ["trace_export_failed", "trace_export_recovered"][: 2 * failed])
    assert len(caplog.text) < 20_000 and "opentelemetry" not in {record.name for record in caplog.records}


class StuckSender:
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.stopped = False
        self.sent = 0

    def send(self, traces: Sequence[EndedTrace]) -> str:
        self.released.wait()
        self.sent += len(traces)
        return ""

    def stop(self) -> None:
        self.stopped = True
        self.released.set()


async def test_the_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    sender, counters = StuckSender(), Counters()
    exporter = TraceExporter(lambda: sender, counters)
    for _ in range(MAX_QUEUED + 100):
        exporter.add(None)  # type: ignore[arg-type]
    assert counters.traces_dropped["queue_full"] == 100
    sender.released.set()
    exporter.start()
    await exporter.close()
    assert sender.sent == counters.traces_exported == MAX_QUEUED and not sender.stopped


async def test_the_shutdown_does_not_wait_for_a_stuck_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_exporter, "CLOSE_TIMEOUT_S", 0.1)
    sender, counters = StuckSender(), Counters()
    exporter = TraceExporter(lambda: sender, counters)
    exporter.start()
    for _ in range(200):
        exporter.add(None)  # type: ignore[arg-type]
    started_s = time.monotonic()
    await exporter.close()
    assert time.monotonic() - started_s < 5 and sender.stopped
    assert counters.traces_dropped["shutdown"] and events(caplog) == ["trace_export_timed_out"]


async def test_a_failing_sender_does_not_end_the_thread() -> None:
    class Broken(StuckSender):
        def send(self, traces: Sequence[EndedTrace]) -> str:
            raise ValueError("secret")

    counters = Counters()
    exporter = TraceExporter(Broken, counters)
    exporter.start()
    for count in (1, 2):
        exporter.add(None)  # type: ignore[arg-type]
        await until(lambda count=count: counters.traces_dropped["export_failed"] == count)
    await exporter.close()


async def test_the_shutdown_sends_what_is_left(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "EXPORT_INTERVAL_S", 60.0)
    async with engines() as [engine], router(engine, tracing=tracing(collector.url)) as r:
        await served(r, 3)
        assert not collector.spans
    assert len(collector.requests_spans()) == 3


async def test_a_slow_collector_delays_no_request(collector: Collector) -> None:
    collector.delay_s = 1.0
    async with engines() as [engine], router(engine, tracing=tracing(collector.url), check_leaks=False) as r:
        started_s = time.monotonic()
        await served(r, 20)
        assert time.monotonic() - started_s < 1.0 or r.service.counters.traces_exported <= 64
        collector.closing.set()


# Settings.


async def test_headers_come_from_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTOR_HEADERS", "api-key=s3cret,x-team=routing")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    settings = tracing(collector.url, headers_env="COLLECTOR_HEADERS", service_name="gateway")
    async with engines() as [engine], router(engine, tracing=settings) as r:
        await served(r, 1)
    [(path, headers)] = collector.requests
    assert path == "/v1/traces" and headers["api-key"] == "s3cret" and headers["x-team"] == "routing"
    assert headers["content-type"] == "application/x-protobuf"
    resource = collector.spans[0].resource
    assert resource["service.name"] == "gateway" and resource["deployment.environment"] == "test"
    assert resource["service.instance.id"] and resource["service.version"]


async def test_the_standard_variables_apply(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    async with engines() as [engine], router(engine, tracing=tracing()) as r:
        await served(r, 1)
    [(path, headers)] = collector.requests
    assert path == "/v1/traces" and headers["authorization"] == "Bearer t" and headers["content-encoding"] == "gzip"
    assert collector.spans[0].resource["service.name"] == "named"


async def test_a_path_in_the_endpoint_is_kept(collector: Collector) -> None:
    async with engines() as [engine], router(engine, tracing=tracing(f"{collector.url}/otlp/v1/traces")) as r:
        await served(r, 1)
    assert [path for path, _ in collector.requests] == ["/otlp/v1/traces"]


def test_otel_sdk_disabled_turns_tracing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracing(from_table({"tracing": {"enabled": True}}, experiment=True).tracing, Counters()) is None


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "http://a b:1", "http://c:x"])
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        from_table({"tracing": {"endpoint": endpoint}})


def test_unset_headers_are_a_problem_at_the_start() -> None:
    config = from_table({"tracing": {"enabled": True, "headers_env": "NOT_SET_ANYWHERE"}}, experiment=True)
    assert any(
        "tracing.headers_env: the environment variable NOT_SET_ANYWHERE" in one
        for one in check_startup(config).problems
    )


def test_what_a_reload_changes() -> None:
    before = from_table({"tracing": {"sample_ratio": 0.1}}, experiment=True)
    after = from_table({"tracing": {"enabled": True, "sample_ratio": 0.5}}, experiment=True)
    assert keys_needing_restart(before, after) == ["tracing.enabled"]


# Off.


async def test_off_the_context_passes_unchanged() -> None:
    async with engines() as [engine], router(engine) as r:
        headers = [CLIENT_CONTEXT, "traceparent: rubbish", "tracestate: a=b"]
        assert (await r.request(post(headers=headers))).status == 200
        assert (await r.request()).status == 200
    with_context, without = engine.seen
    assert with_context.get(b"traceparent") == [CLIENT_CONTEXT.partition(": ")[2].encode(), b"rubbish"]
    assert with_context.get(b"tracestate") == [b"a=b"] and not without.get(b"traceparent")


def _python(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return found.stdout + found.stderr


def test_off_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys; from warmroute.config import Config; from warmroute.app.service import Service; "
        "from warmroute.app.startup import check_startup; check_startup(Config()); Service(Config); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert _python(code).strip() == "[]"


def test_a_missing_extra_is_named_with_the_command(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[tracing]\nenabled = true\n")
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; sys.modules['opentelemetry.exporter'] = None; "
        f"from warmroute.app.main import main; sys.exit(main(['serve', '--config', {str(file)!r}]))"
    )
    assert "pip install '.[otel]'" in _python(code)
