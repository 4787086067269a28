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

from warmroute.app.prompt_doctor import MAX_BYTES, PromptComparison
from warmroute.app.prompt_doctor import samples as prompt_samples
from warmroute.app.prompt_doctor.samples import MAX_PENDING, MAX_RECENT, SAMPLE_S, PromptSample, PromptSamples
from warmroute.core.messages import RoutingRequest
from warmroute.core.prefill_work import work

MS = 0.2


class Traffic:
    """Sends prompts to a doctor, one a second."""

    def __init__(self) -> None:
        self.requests = 0
        self.looks_up_caches = False
        self.step_ms = 0.0
        self.now_s = 1000.0
        self.doctor = PromptComparison(
            lambda _key: self.requests, lambda _route: self.looks_up_caches, lambda: self.now_s
        )
        self.doctor.samples = PromptSamples(lambda: 0.5)

    def offer(self, body: bytes, tenant: str = "", route: str = "r", path: bytes = CHAT) -> PromptSample | None:
        request = RoutingRequest("m", tenant=tenant, route=route, arrived_s=self.now_s)
        sample = self.doctor.samples.offer(request, path, body)
        self.now_s += SAMPLE_S
        return sample

    def send(self, body: bytes, tokens: int = 1000, cached: int | None = 0, **more: Any) -> None:
        sample = self.offer(body, **more)
        self.requests += 1
        if sample is not None:
            sample.completed(("m", more.get("route", "r")), b"", tokens, cached, MS, self.step_ms)

    def examine(self) -> None:
        counts = {("m", "r"): self.requests}
        self.doctor.reports, _cpu_s = self.doctor.compare(self.doctor.samples.take(self.now_s), counts, self.now_s)


def test_a_finding_states_position_share_and_cost() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(30):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert (finding.kind, finding.place, finding.share) == ("time", "message 0 (system), character 6", 1.0)
    first_s = finding.lost_gpu_s
    assert first_s == pytest.approx(30 * MS * (work(1000, 0) - work(60, 940)) / 1000, rel=0.1), "of all its samples"
    for _ in range(30):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert finding.cached_share == pytest.approx(0.016)
    could = finding.could_share * 1000
    assert 850 < could < 990
    expected_s = 30 * MS * (work(could, 0) - work(16, 0)) / 1000
    assert finding.lost_gpu_s - first_s == pytest.approx(expected_s, rel=0.05)
    assert finding.gpus == pytest.approx(expected_s / 30, rel=0.05)


def test_a_fault_that_has_just_begun_is_stated_at_its_full_share_and_cost() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(60):
        traffic.send(examples.chat(), tokens=1000, cached=960)
    traffic.examine()
    for _ in range(10):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert finding.share == 1.0 and finding.cached_share == pytest.approx(0.016) and finding.since_s == 1060.0
    assert finding.lost_gpu_s == pytest.approx(10 * MS * 930 / 1000, rel=0.1)
    for _ in range(10):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert finding.lost_gpu_s == pytest.approx(20 * MS * 930 / 1000, rel=0.1)


def test_a_prefill_takes_at_least_a_step_whatever_is_cached() -> None:
    """The engine would have taken the step in any case: a prompt that needs no more of it costs nothing more."""
    traffic, examples = Traffic(), Examples()
    traffic.step_ms = 100.0
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=1000, cached=16)
    traffic.examine()
    [finding] = traffic.doctor.findings
    assert finding.lost_ms == pytest.approx(MS * work(984, 16) - 100.0)


def test_prompts_whose_cached_tokens_nobody_counts_are_not_judged() -> None:
    traffic, examples = Traffic(), Examples()
    for _ in range(20):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), cached=None)
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"), tokens=0, cached=0)
    traffic.examine()
    [route] = traffic.doctor.describe(0.0)["routes"]
    assert route["samples"] == 0 and "routing.policy" in route["unavailable"] and not traffic.doctor.findings
    traffic.looks_up_caches = True
    [route] = traffic.doctor.describe(0.0)["routes"]
    assert "Set routing.policy" not in route["unavailable"] and "shorter than 200 tokens" in route["unavailable"]
    for _ in range(10):
        traffic.send(examples.chat(f"Time: {examples.stamp()}\n{SYSTEM}"))
    traffic.examine()
    [route] = traffic.doctor.describe(0.0)["routes"]
    assert route["samples"] == 10 and not route["unavailable"] and traffic.doctor.findings
    traffic.now_s += 1000.0
    traffic.examine()
    assert not traffic.doctor.reports


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


def test_samples_stand_for_all_requests_in_whatever_rhythm_clients_send() -> None:
    traffic, random = Traffic(), Random(5)
    traffic.doctor.samples = PromptSamples(Random(6).random)
    arrivals = [(0.5001 * number, "fixed") for number in range(2000)]
    arrivals += [(random.uniform(0.0, 1000.0), "other") for _ in range(3000)]
    arrivals += [(100.0 * burst + 0.001 * number, "burst") for burst in range(10) for number in range(100)]
    weights: Counter[str] = Counter()
    for at_s, who in sorted(arrivals):
        traffic.now_s = at_s
        traffic.send(b"{}", tenant=who)
        for _key, sample in traffic.doctor.samples.take(at_s):
            weights[sample.tenant] += sample.weight
    assert weights.total() == pytest.approx(6000, rel=0.01)
    assert weights["fixed"] == pytest.approx(2000, rel=0.1) and weights["other"] == pytest.approx(3000, rel=0.1)
    assert weights["burst"] == pytest.approx(1000, rel=0.15)


def test_a_route_has_one_sample_a_second_of_all_its_requests() -> None:
    traffic, examples = Traffic(), Examples()
    body = examples.chat()
    traffic.doctor.samples = PromptSamples(lambda: 0.4)  # the second request replaces the first, the third does not
    for _ in range(3):
        traffic.send(body, tenant="r")
        traffic.now_s -= 0.9 * SAMPLE_S
    assert traffic.doctor.samples.take(traffic.now_s) == [], "another request may still be drawn"
    traffic.now_s += SAMPLE_S
    [(_key, sample)] = traffic.doctor.samples.take(traffic.now_s)
    assert sample.weight == 3 and sample.arrived_s == pytest.approx(1000.1)
    assert traffic.offer(body, route="another") is not None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_samples, "MAX_PENDING_BYTES", 1 << 20)
    traffic = Traffic()
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
    waiting = [traffic.offer(body) for _ in range(20)]
    samples = traffic.doctor.samples
    assert samples._pending_bytes <= 1 << 20
    for sample in waiting:  # those that were dropped are not completed
        assert sample is not None
        sample.completed(("m", "r"), b"", 9, 0, MS, 0.0)
    assert len(samples.take(traffic.now_s)) == 5 and samples._pending_bytes == 0
    for number in range(2 * MAX_PENDING):
        traffic.offer(b"{}", route=f"route {number % 7}")
    assert len(samples._pending) <= MAX_PENDING
    for number in range(10_000):
        traffic.now_s -= SAMPLE_S
        traffic.offer(b"{}", route=f"invented {number}")
    assert len(samples._draws) <= prompt_samples.MAX_ROUTES


def test_a_request_that_fails_leaves_no_sample() -> None:
    traffic = Traffic()
    sample = traffic.offer(b"{}")
    assert sample is not None
    sample.drop()
    sample.completed(("m", "r"), b"", 9, 0, MS, 0.0)
    assert not sample.body and not traffic.doctor.samples._pending
    assert not traffic.doctor.samples.take(traffic.now_s)


def test_long_prompts_do_not_take_more_memory_than_allowed() -> None:
    traffic, examples = Traffic(), Examples()
    for number in range(2 * MAX_RECENT):
        traffic.send(examples.chat("é" * 90_000 + str(number)), route=f"route {number % 2}")
    traffic.doctor.compare(traffic.doctor.samples.take(traffic.now_s), {}, traffic.now_s)
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
