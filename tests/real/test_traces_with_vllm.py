"""A real vLLM continues the router's traces: its span of a request is a child of the router's attempt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_engine import RealEngine, make_tiny_model
from support import running_router
from support.otlp_collector import Collector, otlp_collector
from support.polling import until
from support.raw_client import post

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with otlp_collector() as started:
        yield started


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RealEngine]:  # fmt: skip
    folder = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_SERVICE_NAME", "vllm")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        flags = ["--otlp-traces-endpoint", f"{collector.url}/v1/traces"]
        started = RealEngine("traced", make_tiny_model(folder), folder, flags=flags)
        try:
            started.start()
            started.wait_until_ready()
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("sample_ratio", [1.0, 0.0])
async def test_vllms_span_is_a_child_of_the_attempt(
    engine: RealEngine, collector: Collector, sample_ratio: float
) -> None:
    collector.spans.clear()
    settings = {
        "enabled": True, "endpoint": collector.url, "sample_ratio": sample_ratio, "service_name": "router",
    }  # fmt: skip
    body = b'{"model":"tiny","prompt":"the router sends each request","max_tokens":5}'
    async with running_router.router(
        {"url": engine.url}, wait=0, check_leaks=False, tracing=settings, health={"timeout_s": 5.0}
    ) as r:
        await until(lambda: running_router.count_up(r.service) == 1, "the node is up", 60)
        assert (await r.request(post(body, path="/v1/completions"))).status == 200
        if sample_ratio:
            await until(lambda: len({span.resource["service.name"] for span in collector.spans}) == 2, "spans", 20)
    attempts = [span for span in collector.spans if span.name == "attempt"]
    of_vllm = [span for span in collector.spans if span.resource["service.name"] == "vllm"]
    if not sample_ratio:
        assert not attempts and not [span for span in of_vllm if span.name == "llm_request"]
        return
    [attempt], [request] = attempts, [span for span in of_vllm if span.name == "llm_request"]
    assert (request.trace_id, request.parent_id) == (attempt.trace_id, attempt.span_id)
    assert attempt.start_s - 0.01 < request.start_s < request.end_s < attempt.end_s + 0.01
    assert request.attributes["gen_ai.usage.completion_tokens"] == 5
