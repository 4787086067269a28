"""The doctor: samples on the request path, findings with their cost, and what it keeps of the text."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from prompt_examples import CHAT, SYSTEM, Examples

from warmroute.fleet.node_speed import work
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.prompt_doctor import prompt_samples
from warmroute.prompt_doctor.prompt_doctor import MAX_BYTES, PromptDoctor
from warmroute.prompt_doctor.prompt_samples import MAX_PENDING, MAX_RECENT, SAMPLE_S, PromptSamples
from warmroute.routing.attempts import Attempts, SampledPrompt

MS = 0.2


class FakeAttempts:
    """As much of a request's Attempts as a sample uses."""

    def __init__(self, request: RoutingRequest) -> None:
        self.request = request
        self.lookup = None
        self.sample: SampledPrompt | None = None


class Traffic:
    """Sends prompts to a doctor, one a second."""

    def __init__(self) -> None:
        self.requests = 0
        self.now_s = 1000.0
        self.doctor = PromptDoctor(lambda _key: self.requests, lambda: self.now_s)
        self.doctor.samples = PromptSamples(lambda: 0.5)

    def offer(self, body: bytes, tenant: str = "", route: str = "r", path: bytes = CHAT) -> FakeAttempts:
        attempts = FakeAttempts(RoutingRequest("m", tenant=tenant, route=route, arrived_s=self.now_s))
        self.doctor.samples.offer(_cast(attempts), path, body)
        self.now_s += SAMPLE_S
        return attempts

    def send(self, body: bytes, tokens: int = 1000, cached: int = 0, **more: Any) -> None:
        attempts = self.offer(body, **more)
        self.requests += 1
        if attempts.sample is not None:
            attempts.sample.completed(_cast(attempts), ("m", more.get("route", "r")), tokens, cached, MS)

    def examine(self) -> None:
        counts = {("m", "r"): self.requests}
        self.doctor.reports, _cpu_s = self.doctor.compare(self.doctor.samples.take(), counts, self.now_s)


def _cast(attempts: FakeAttempts) -> Attempts:
    return attempts  # type: ignore[return-value]


def test_a_finding_states_position_share_and_cost() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(30):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert (finding.kind, finding.place, finding.share) == ("time", "message 0 (system), character 6", 1.0)
    assert finding.lost_gpu_s == 0.0  # it counts from the first examination on
    for _ in range(30):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert finding.cached_share == pytest.approx(0.016)
    could = finding.could_share * 1000
    assert 850 < could < 990
    expected_s = 30 * MS * (work(could, 0) - work(16, 0)) / 1000
    assert finding.lost_gpu_s == pytest.approx(expected_s, rel=0.05)
    assert finding.gpus == pytest.approx(expected_s / 30, rel=0.05)


def test_text_is_hidden_unless_the_operator_asks() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"))
    traffic.examine()
    hidden = json.dumps(traffic.doctor.describe(0.0))
    assert "Time" not in hidden and "shop" not in hidden and "2026" not in hidden
    assert traffic.doctor.describe(0.0)["findings"][0]["excerpt"]["before"] == "xxxx: "
    shown = traffic.doctor.describe(0.0, show_text=True)["findings"][0]["excerpt"]
    assert shown["before"] == "Time: " and all(value.startswith("2026-11-16T") for value in shown["values"])


def test_a_difference_that_costs_nothing_is_no_finding() -> None:
    """A conversation keeps the time at which it began: everything is cached."""
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=980)
    traffic.examine()
    assert not traffic.doctor.findings


def test_healthy_prompts_have_no_finding() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat())
    traffic.examine()
    [report] = traffic.doctor.reports.values()
    assert not report.findings and report.agrees_until == "message 1 (user)" and report.common_share > 0.8


def test_a_changed_system_prompt_is_seen_against_earlier_samples() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(100):
        traffic.send(examples.chat())
    traffic.examine()
    changed = SYSTEM.replace("section 5 of the policy", "the new terms", 1)
    for _ in range(40):
        traffic.send(examples.chat(changed))
    traffic.examine()
    [report] = traffic.doctor.reports.values()
    assert report.change is not None and not report.findings
    assert report.change.changed_share > 0.5 and report.change.new_share == 0.0
    assert report.change.place.startswith("message 0 (system), character 4")


def test_new_prompts_and_tenants_are_seen() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(100):
        traffic.send(examples.chat(), tenant="old")
    for _ in range(40):
        traffic.send(examples.chat("Translate what follows into French. Keep names as they are. " * 9), tenant="new")
    traffic.examine()
    [report] = traffic.doctor.reports.values()
    assert report.change is not None
    assert report.change.new_share > 0.5 and report.change.new_tenant_share > 0.5


def test_a_client_that_sends_at_fixed_intervals_is_sampled_about_as_often_as_others() -> None:
    traffic, random = Traffic(), Random(5)
    traffic.doctor.samples = PromptSamples(Random(6).random)
    arrivals = [(0.5001 * number, b"fixed") for number in range(1000)]
    arrivals += [(random.uniform(0.0, 500.0), b"other") for _ in range(2000)]
    sampled: Counter[bytes] = Counter()
    for at_s, who in sorted(arrivals):
        traffic.now_s = at_s
        sampled[who] += traffic.offer(b"{}").sample is not None
    assert 0.25 < sampled[b"fixed"] / sampled.total() < 0.5, "a third of the requests"


def test_a_route_is_sampled_once_a_second() -> None:
    traffic, examples = Traffic(), Examples()
    body = examples.chat()
    first = traffic.offer(body)
    traffic.now_s -= SAMPLE_S / 2
    assert first.sample is not None and traffic.offer(body).sample is None
    assert traffic.offer(body, route="another").sample is not None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_samples, "MAX_PENDING_BYTES", 1 << 20)
    traffic = Traffic()
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    waiting = [traffic.offer(body) for _ in range(20)]
    samples = traffic.doctor.samples
    assert samples._pending_bytes <= 1 << 20
    for attempts in waiting:  # those that were dropped are not completed
        assert attempts.sample is not None
        attempts.sample.completed(_cast(attempts), ("m", "r"), 9, 0, MS)
    assert len(samples.take()) == 5 and samples._pending_bytes == 0
    for number in range(2 * MAX_PENDING):
        traffic.offer(b"{}", route=f"route {number % 7}")
    assert len(samples._pending) <= MAX_PENDING
    for number in range(10_000):
        traffic.now_s -= SAMPLE_S
        traffic.offer(b"{}", route=f"invented {number}")
    assert len(samples._due_s) <= prompt_samples.MAX_ROUTES + 1


def test_long_prompts_do_not_take_more_memory_than_allowed() -> None:
    traffic, examples = Traffic(), Examples()
    for number in range(2 * MAX_RECENT):
        traffic.send(examples.chat("é" * 90_000 + str(number)), route=f"route {number % 2}")
    traffic.doctor.compare(traffic.doctor.samples.take(), {}, traffic.now_s)
    assert sum(route.size_bytes for route in traffic.doctor._routes.values()) <= MAX_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b'{"messages": 3}', b'{"messages": [3, null, {"role": 5}]}', b'{"prompt": [[1, 2, 3]]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        b'{"tools": {"a": 1}, "messages": []}', b'{"input": [{"role": "user", "content": null}]}', b"\xff\xfe",
        b'{"messages": [{"role": "system", "content": "' + b"[" * 5000 + b'"}]}', b'{"system": 3, "messages": [[]]}',
    ],
)  # fmt: skip
def test_whatever_clients_send_is_read_or_left_out(body: bytes) -> None:
    traffic, examples = Traffic(), Examples()
    for path in (CHAT, b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/v1/embeddings", b"/other"):
        traffic.send(body, path=path)
        traffic.send(examples.chat())
    traffic.examine()
    assert not traffic.doctor.findings


def test_completions_responses_and_messages_are_compared_too() -> None:
    examples = Examples()
    makers: dict[bytes, Callable[[str], dict[str, Any]]] = {
        b"/v1/completions": lambda text: {"prompt": text + examples.question()},
        b"/v1/responses": lambda text: {"instructions": text, "input": examples.question()},
        b"/v1/messages": lambda text: {"system": text, "messages": [{"role": "user", "content": "Why?"}]},
    }
    for path, make in makers.items():
        traffic = Traffic()
        for _ in range(12):
            traffic.send(json.dumps(make(f"Time: {examples.stamp()}\n{SYSTEM}")).encode(), path=path)
        traffic.examine()
        [finding] = traffic.doctor.findings
        assert finding.kind == "time" and finding.character == 6


async def test_turning_the_doctor_off_during_a_comparison_forgets_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"))
    doctor, compare = traffic.doctor, traffic.doctor.compare
    loop = asyncio.get_running_loop()

    def compare_late(*given: Any) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.to_thread(lambda: None), loop).result()
        loop.call_soon_threadsafe(doctor.forget)
        return compare(*given)

    monkeypatch.setattr(doctor, "compare", compare_late)
    await doctor.examine()
    assert not doctor.reports and not doctor._routes


def test_turning_the_doctor_off_forgets_the_text() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"))
    traffic.examine()
    traffic.doctor.forget()
    assert not traffic.doctor.findings and not traffic.doctor._routes
