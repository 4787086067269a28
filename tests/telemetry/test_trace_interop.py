"""One trace: a client with OpenTelemetry's own instrumentation, the router, and an engine that uses the SDK."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from support.engine_scripts import http_response, script
from support.otlp_collector import Collector, otlp_collector
from support.running_router import router
from support.scripted_engine import ReceivedRequest, ScriptedEngine, engines

ANSWER = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"Hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":1,'
    b'"total_tokens":4}}'
)


def sdk(name: str, collector: Collector, sampler: Sampler | None = None) -> TracerProvider:
    provider = TracerProvider(resource=Resource.create({"service.name": name}), sampler=sampler)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces")))
    return provider


async def ask_through(collector: Collector, client_sampler: Sampler | None, sample_ratio: float) -> None:
    """The openai client asks the router, instrumented if it has a sampler. The engine starts a span as vLLM does."""
    of_client, of_engine = sdk("client", collector, client_sampler), sdk("engine", collector)

    async def serve(engine: ScriptedEngine, received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        carrier = {name.decode(): value.decode() for name, value in received.fields}
        context = TraceContextTextMapPropagator().extract(carrier)
        with of_engine.get_tracer("engine").start_as_current_span("llm_request", context, trace.SpanKind.SERVER):
            await script(http_response(ANSWER))(engine, received, writer)

    settings = {"enabled": True, "endpoint": collector.url, "sample_ratio": sample_ratio}
    async with engines() as [engine], router(engine, tracing=settings) as r:
        engine.behave = serve
        async with httpx2.AsyncClient() as http:
            if client_sampler is not None:
                HTTPX2ClientInstrumentor.instrument_client(http, tracer_provider=of_client)
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.port}/v1", api_key="k", http_client=http)
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "Hi"
    for provider in (of_client, of_engine):
        await asyncio.to_thread(provider.shutdown)


async def test_client_router_and_engine_share_one_trace() -> None:
    with otlp_collector() as collector:
        await ask_through(collector, ALWAYS_ON, sample_ratio=0.0)
    by_service = {(span.resource["service.name"], span.name): span for span in collector.spans}
    sent = by_service["client", "POST"]
    request = by_service["warmroute", "POST /v1/chat/completions"]
    attempt = by_service["warmroute", "attempt"]
    served = by_service["engine", "llm_request"]
    assert len({span.trace_id for span in collector.spans}) == 1
    assert [request.parent_id, attempt.parent_id, served.parent_id] == [sent.span_id, request.span_id, attempt.span_id]
    assert sent.start_s <= request.start_s <= attempt.start_s <= served.start_s + 1e-3
    assert request.attributes["gen_ai.usage.input_tokens"] == 3


async def test_a_client_that_does_not_sample_decides_for_the_router_and_the_engine() -> None:
    with otlp_collector() as collector:
        await ask_through(collector, ALWAYS_OFF, sample_ratio=1.0)
    assert collector.spans == []


@pytest.mark.parametrize("sample_ratio", [0.0, 1.0])
async def test_without_a_clients_context_the_router_decides_for_the_engine(sample_ratio: float) -> None:
    with otlp_collector() as collector:
        await ask_through(collector, None, sample_ratio)
    services = {span.resource["service.name"] for span in collector.spans}
    assert services == ({"warmroute", "engine"} if sample_ratio else set())
