"""Alerts of the hit rate in virtual time: planted faults are told apart, logged once, and end."""

from __future__ import annotations

import logging
import re
from random import Random

import pytest

from warmroute._kernel import RouteTraffic
from warmroute.app.alerts import ActiveAlerts, Alert
from warmroute.app.hit_rate import CacheChanges, Causes, HitRateAlerts
from warmroute.app.metrics.page import HitRateMetrics, MetricsPage
from warmroute.app.prompt_doctor import PromptComparison, RouteReport
from warmroute.app.prompt_doctor.findings import Excerpt, Finding, PromptChange
from warmroute.config import Health, Index, NodeConfig
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Lookup
from warmroute.core.traffic import Counters, Traffic

KEY = ("m", "chat")
CAPACITY = 64_000


def finding(kind: str = "time", part: str = "message", since_s: float = 0.0, could: float = 0.95) -> Finding:
    return Finding(
        model=KEY[0], route=KEY[1], kind=kind, part=part, number=0, role="system" if part == "message" else "",  # type: ignore[arg-type]
        character=14, token=5, share=0.9, prompts=40, values=40, more_places=0, cached_share=0.1, could_share=could,
        lost_tokens=800.0, lost_ms=160.0, excerpt=Excerpt("Time: ", ("1", "2"), " x"), losses={}, since_s=since_s,
        lost_gpu_s=12.5, gpus=1.5,
    )  # fmt: skip


class Setting:
    """A fleet of three nodes whose route has a hit rate of 90 %, in virtual time."""

    def __init__(self) -> None:
        self.fleet, self.cache_view = Fleet(Health()), CacheView(Index())
        for number in range(3):
            node = self.fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=("m",)))
            node.incarnation = 100.0 + number
            self.fleet.check_passed(node, 0.0)
            self.cache_view.add_node(node.name, ["m"]).set_size(16, CAPACITY)
        self.traffic = Traffic()
        self.sums = self.traffic.by_route[KEY] = RouteTraffic()
        self.report: RouteReport | None = None
        self.findings: list[Finding] = []
        changes = CacheChanges(self.fleet, self.cache_view)
        causes = Causes(self.fleet, self.cache_view, changes, lambda _key: self.report)
        self.rates = HitRateAlerts(self.traffic, changes, causes, lambda: self.findings)
        self.alerts = ActiveAlerts(self.rates)
        self.now_s = 0.0
        self._random = Random(1)

    def run(self, seconds: float, share: float, known: float, requests: int = 20) -> None:
        """Complete `requests` every two seconds, of whose tokens these shares are cached, and known."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 2.0
            for _ in range(requests):
                own = share + self._random.uniform(-0.1, 0.1) * min(share, 1.0 - share)
                self.sums.requests += 1
                self.sums.counted_prompts += 1
                self.sums.prompt_tokens += 1000
                self.sums.cached_tokens += int(1000 * own)
                self.sums.hit_shares += own
                self.sums.hit_share_squares += own * own
                self.sums.saved_gpu_ms += 200.0 * own
                self.sums.prompt_gpu_ms += 200.0
                self.sums.sampled_blocks += 1
                self.sums.known_blocks += self._random.random() < known
            self.alerts.update(self.now_s)

    def warm(self) -> None:
        self.run(400, 0.9, 0.93)
        assert not self.alerts.current

    def fill(self) -> None:
        """Fill the caches with prompts."""
        for node in self.fleet:
            for number in range(9):
                prompt = Lookup(bytes([number, *node.name.encode()]) * 32_000, 8000 * 3, 8000 * 3)
                self.cache_view.record_routed("m", prompt, node.name, None, self.now_s)

    @property
    def alert(self) -> Alert:
        [alert] = self.alerts.current
        return alert

    @property
    def cause(self) -> str:
        return self.rates.causes[KEY].kind


def report(*findings: Finding, change: PromptChange | None = None) -> RouteReport:
    return RouteReport(64, "message 1 (user)", 0.9, findings, change)


def test_a_time_in_the_system_prompt_is_the_cause_within_a_minute() -> None:
    setting = Setting()
    setting.warm()
    setting.report = report(finding(since_s=setting.now_s + 10))
    setting.run(60, 0.0, 0.02)
    assert setting.cause == "prompts_changed"
    assert setting.alert.title == "m, route chat: hit rate fell from 90% to 0%"
    assert "a date or time at message 0 (system), character 14 (token 5)" in setting.alert.cause
    # 1,000 tokens × 10 requests/s × 60 s × 0.2 ms × 90 %
    assert setting.rates.lost_gpu_s(KEY) == pytest.approx(108, rel=0.1)


def test_an_id_inside_the_tools_is_the_cause() -> None:
    setting = Setting()
    setting.warm()
    setting.report = report(finding("id", "tool", setting.now_s + 10))
    setting.run(60, 0.5, 0.5)
    assert setting.cause == "prompts_changed" and "an id at tool 0, character 14" in setting.alert.cause


def test_a_smaller_cache_is_the_cause_although_the_engine_restarted() -> None:
    setting = Setting()
    setting.warm()
    for node in setting.fleet:
        node.incarnation += 1000.0
        cache = setting.cache_view.cache(node.name)
        assert cache is not None
        cache.set_size(16, CAPACITY // 2)
    setting.run(60, 0.4, 0.93)
    assert setting.cause == "cache_too_small"
    assert "64,000 tokens before, 32,000 now" in setting.alert.cause and len(setting.alert.nodes) == 3


def test_full_caches_are_the_cause_if_the_prompts_are_known() -> None:
    setting = Setting()
    setting.warm()
    setting.fill()
    setting.run(60, 0.4, 0.93)
    assert setting.cause == "cache_too_small" and "caches of its nodes are full" in setting.alert.cause


def test_lost_events_are_the_cause() -> None:
    setting = Setting()
    setting.warm()
    cache = setting.cache_view.cache("n1")
    assert cache is not None
    cache.gaps += 1
    setting.run(60, 0.4, 0.93)
    assert setting.cause == "kv_events_lost" and setting.alert.nodes == ("n1",)


def test_lost_events_are_an_alert_without_a_drop() -> None:
    setting = Setting()
    setting.warm()
    cache = setting.cache_view.cache("n1")
    assert cache is not None
    cache.gaps += 1
    setting.run(10, 0.9, 0.93)
    assert setting.alert.id == "kv_events_lost"
    setting.run(80, 0.9, 0.93)
    assert not setting.alerts.current


def test_a_restart_is_the_cause() -> None:
    setting = Setting()
    setting.warm()
    setting.fleet.node("n2").incarnation += 1000.0
    setting.run(60, 0.5, 0.93)
    assert setting.cause == "node_restarted" and "n2 restarted with an empty cache." in setting.alert.cause


def test_a_node_that_leaves_is_the_cause() -> None:
    setting = Setting()
    setting.warm()
    setting.fleet.remove("n0")
    setting.run(60, 0.5, 0.93)
    assert setting.cause == "node_restarted" and "n0 left with what it had cached." in setting.alert.cause


def test_new_traffic_is_the_cause_if_nothing_of_it_is_known() -> None:
    setting = Setting()
    setting.warm()
    setting.report = report(change=PromptChange(0.0, 0.1, 0.7, ""))
    setting.run(60, 0.3, 0.3)
    assert setting.cause == "new_traffic" and "70% of the prompts come from new tenants." in setting.alert.cause
    setting.report = None
    setting.run(10, 0.3, 0.3)
    assert setting.cause == "new_traffic"


def test_a_changed_system_prompt_is_the_cause() -> None:
    setting = Setting()
    setting.warm()
    setting.report = report(change=PromptChange(0.8, 0.0, 0.0, "message 0 (system), character 812"))
    setting.run(60, 0.2, 0.2)
    assert setting.cause == "prompts_changed" and "from message 0 (system), character 812 on" in setting.alert.cause


def test_an_old_finding_is_not_the_cause_of_a_new_drop() -> None:
    setting = Setting()
    setting.report = report(finding(since_s=5.0))
    setting.warm()
    setting.fleet.node("n2").incarnation += 1000.0
    setting.run(60, 0.5, 0.93)
    assert setting.cause == "node_restarted"


def test_a_drop_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting()
    setting.warm()
    setting.report = report(finding(since_s=setting.now_s + 10))
    setting.run(120, 0.0, 0.02)
    events = [record.message for record in caplog.records if "hit_rate" in record.message]
    assert len(events) == 1
    assert events[0].startswith("hit_rate_dropped model=m route=chat reason=prompts_changed hit_ratio=0.")
    setting.run(40, 0.9, 0.93)
    assert not setting.alerts.current and not setting.rates.causes
    events = [record.message for record in caplog.records if "hit_rate" in record.message]
    assert len(events) == 2 and events[1].startswith("hit_rate_recovered model=m route=chat reason=recovered")


def test_metrics_state_rate_baseline_and_drop() -> None:
    setting = Setting()
    setting.warm()
    setting.fleet.node("n2").incarnation += 1000.0
    setting.run(60, 0.5, 0.93)
    doctor = PromptComparison(lambda _key: 0, lambda _route: True)
    doctor.reports[KEY] = report(finding())
    page = MetricsPage(
        setting.fleet, setting.cache_view, Counters(), lambda: (0, 0), lambda: (0, 0), lambda: setting.now_s,
        more=(HitRateMetrics(setting.rates, doctor),),
    )  # fmt: skip
    text = b"".join(page.render()).decode()
    labels = 'model="m",route="chat"'
    assert f'warmroute_route_hit_ratio_dropped{{{labels},cause="node_restarted"}} 1' in text
    assert f'warmroute_route_hit_ratio_drops_total{{{labels},cause="node_restarted"}} 1' in text
    assert re.search(rf"warmroute_route_hit_ratio_baseline{{{labels}}} 0\.(90|89)", text)
    assert re.search(rf"warmroute_route_hit_ratio{{{labels}}} 0\.(50|49)", text)
    assert f'warmroute_prompt_doctor_lost_gpus{{{labels},kind="time"}} 1.5' in text


def test_prompts_that_always_prevented_reuse_are_an_alert_without_a_drop() -> None:
    setting = Setting()
    setting.findings = [finding()]
    setting.run(100, 0.9, 0.9)  # the compared prompts count, not the route's others
    assert setting.alert.id == "prompts_prevent_reuse m chat time"
    assert "10% of the prompt tokens are cached, 95% could be" in setting.alert.title
    setting.findings = [finding(could=0.1)]
    setting.run(10, 0.02, 0.02)
    assert not setting.alerts.current


def test_that_alert_stays_while_few_prompts_arrive() -> None:
    setting = Setting()
    setting.findings = [finding()]
    setting.run(34, 0.02, 0.02, requests=2)
    since_s = setting.alert.since_s
    for _ in range(20):
        setting.run(6, 0.02, 0.02, requests=1)
        assert setting.alert.since_s == since_s


def test_without_traffic_the_alert_stays_and_says_that_nothing_is_known() -> None:
    setting = Setting()
    setting.warm()
    setting.run(60, 0.0, 0.02)
    assert "No prompts" not in setting.alert.cause
    setting.run(600, 0.0, 0.0, requests=0)
    assert "No prompts came in the last 10 min, so nothing shows whether it has recovered." in setting.alert.cause
    assert setting.alert.title == "m, route chat: hit rate fell from 90% to 0%"
    setting.run(60, 0.9, 0.93)
    assert not setting.alerts.current
