"""The history of the live page: points, windows, bounds; and alerts."""

from __future__ import annotations

import pytest

from warmroute._kernel import RouteTraffic
from warmroute.app.alerts import (
    KEEP_ENDED_S,
    LASTING_S,
    MAX_DOWN,
    MAX_ENDED,
    MIN_ANSWERS,
    ActiveAlerts,
    Alert,
    FleetAlerts,
)
from warmroute.app.history import COARSE_POINTS, FINE_POINTS, WINDOW_S, History, ScalingChange
from warmroute.config import Health, Index, NodeConfig
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.traffic import Counters, Traffic


class Setting:
    def __init__(self, nodes: int = 3) -> None:
        self.fleet = Fleet(Health())
        self.cache_view = CacheView(Index())
        for number in range(nodes):
            node = self.fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=("m",)))
            self.fleet.check_passed(node, 0.0)
            self.cache_view.add_node(node.name, ["m"])
        self.traffic, self.counters = Traffic(), Counters()
        self.scaling: ScalingChange | None = None
        self.history = History(self.traffic, self.counters, self.fleet, lambda: 4, lambda: self.scaling)
        self.alerts = ActiveAlerts(FleetAlerts(self.fleet, self.cache_view))

    def serve(self, requests: int, cached: int = 60) -> None:
        """Count requests with prompts of 100 tokens."""
        sums = self.traffic.by_route.setdefault(("m", "r"), RouteTraffic())
        sums.requests += requests
        sums.prompt_tokens += 100 * requests
        sums.cached_tokens += cached * requests
        sums.round_robin_tokens += 20.0 * requests
        sums.saved_gpu_ms += 500.0 * requests
        for _ in range(requests):
            sums.ttft.observe(100.0)

    def alert_ids(self, now_s: float) -> list[str]:
        self.alerts.update(now_s)
        return [alert.id for alert in self.alerts.current]


def test_a_point_has_rates_of_its_interval_and_gauges_of_its_end() -> None:
    setting = Setting()
    setting.history.sample(0.0)
    setting.serve(10)
    setting.counters.rejected["queue_full", 1] += 4
    setting.counters.errors[503, "no_node"] += 2
    setting.history.sample(2.0)
    [point] = setting.history.fine
    assert point.requests_per_s == 5.0 and point.rejected_per_s == 2.0 and point.failed_per_s == 1.0
    assert point.hit_ratio == 0.6 and point.round_robin_hit_ratio == 0.2
    assert point.saved_gpus == 2.5 and point.waiting == 4 and point.nodes_up == 3
    assert point.ttft_p50_ms is not None
    setting.history.sample(3.0)
    assert setting.history.fine[-1].hit_ratio is None and setting.history.fine[-1].ttft_p50_ms is None


def test_history_keeps_two_fine_minutes_and_an_hour_and_no_more() -> None:
    setting = Setting()
    for second in range(2 * 3600):
        setting.history.sample(float(second))
    fine, coarse = setting.history.fine, setting.history.coarse
    assert len(fine) == FINE_POINTS and len(coarse) == COARSE_POINTS
    assert fine[-1].at_s - fine[0].at_s == pytest.approx(119.0)
    assert coarse[-1].at_s - coarse[0].at_s == pytest.approx(3590.0)


def test_the_window_has_the_sums_of_the_last_five_minutes() -> None:
    setting = Setting()
    for second in range(700):
        setting.serve(1)
        if second == 650:
            setting.counters.rejected_by_tenant["batch", 2, "queue_full"] += 3
        setting.history.sample(float(second))
    window = setting.history.window(700.0)
    assert window.seconds == pytest.approx(WINDOW_S, abs=15)
    assert window.total.requests == pytest.approx(WINDOW_S, abs=15)
    assert window.routes["m", "r"].hit_ratio == pytest.approx(0.6)
    assert window.rejected == {("batch", 2, "queue_full"): 3}


def test_scaling_changes_are_kept_once() -> None:
    setting = Setting()
    setting.scaling = ScalingChange(1.0, 2, 3, ("queue is long",))
    for second in range(5):
        setting.history.sample(float(second))
    setting.scaling = ScalingChange(5.0, 3, 3, ())
    setting.history.sample(6.0)
    assert [change.nodes for change in setting.history.scaling_changes] == [2, 3]


# Alerts.


def test_a_healthy_fleet_has_no_alerts() -> None:
    assert Setting().alert_ids(0.0) == []


def test_a_node_that_is_down_is_an_alert_with_its_reason_until_it_is_up_again() -> None:
    setting = Setting()
    node = setting.fleet.node("n1")
    setting.fleet.check_failed(node, 10.0, "connection refused")
    setting.alert_ids(10.0)
    assert setting.alert_ids(25.0) == ["node_down n1"]
    [alert] = setting.alerts.current
    assert alert.title == "n1 is down" and "Connection refused." in alert.cause and alert.nodes == ("n1",)
    assert alert.since_s == 10.0 and alert.what_to_do
    setting.fleet.check_passed(node, 30.0)
    assert setting.alert_ids(30.0) == []


def test_each_node_that_is_down_has_an_alert_of_its_own_and_a_half_open_one_is_a_warning() -> None:
    setting = Setting(2)
    first, second = setting.fleet
    for _ in range(first.health.config.consecutive_failures):
        first.health.request_failed(10.0, "HTTP status 500")
    assert setting.alert_ids(10.0) == ["node_down n0"] and setting.alerts.current[0].severity == "critical"
    setting.fleet.check_passed(first, 1000.0)
    setting.fleet.check_failed(second, 1000.0, "connection refused")
    assert setting.alert_ids(1000.0)[-2:] == ["node_down n1", "node_down n0"]
    refused, waiting = setting.alerts.current[-2:]
    assert (refused.since_s, waiting.since_s) == (1000.0, 10.0)
    assert (waiting.severity, waiting.cause) == ("warning", "HTTP status 500.")
    assert waiting.title == "n0 waits for a trial request" and refused.title == "n1 is down"


def test_of_many_nodes_that_are_down_the_last_ones_share_an_alert() -> None:
    setting = Setting(MAX_DOWN + 2)
    for node in setting.fleet:
        setting.fleet.check_failed(node, 10.0, "connection refused")
    assert len(setting.alert_ids(10.0)) == 1 + MAX_DOWN + 1
    [shared] = [alert for alert in setting.alerts.current if alert.id == "node_down"]
    assert shared.nodes == (f"n{MAX_DOWN}", f"n{MAX_DOWN + 1}") and shared.cause == "Connection refused."


def test_an_ejected_node_is_an_alert() -> None:
    setting = Setting()
    setting.fleet.node("n1").health.eject(10.0, 30.0, "9 of its last 12 requests failed")
    assert setting.alert_ids(10.0) == ["node_ejected"]


def test_a_fleet_that_cannot_serve_is_critical_and_comes_first() -> None:
    setting = Setting()
    for node in setting.fleet:
        setting.fleet.check_failed(node, 10.0, "connection refused")
    assert setting.alert_ids(10.0) == ["no_node", "node_down n0", "node_down n1", "node_down n2"]
    assert setting.alerts.current[0].severity == "critical"


def test_a_slow_node_is_an_alert_once_it_stays_slow() -> None:
    setting = Setting(5)
    for node in setting.fleet:
        node.speed.answers = MIN_ANSWERS
    setting.fleet.node("n3").speed.ms_per_token *= 3.0
    assert setting.alert_ids(0.0) == []
    assert setting.alert_ids(LASTING_S) == ["slow_node"]
    assert "3.0 times as slow" in setting.alerts.current[0].title


def test_a_slow_node_is_noticed_by_a_few_long_prompts() -> None:
    """A node that is slow gets few requests, and the times of short prefills differ by chance."""
    setting = Setting(4)
    for number, node in enumerate(setting.fleet):
        node.speed.ms_per_token *= 1.0 + number
        for at in range(5):
            took_s = (0.8 if node.name == "n1" else 0.2) * (1.0 if at > 1 else 0.5)
            node.speed.learn(2000.0, 0.0, 10.0 * at, 10.0 * at + took_s, True)
    setting.alert_ids(0.0)
    assert setting.alert_ids(LASTING_S) == ["slow_node"]
    assert setting.alerts.current[0].nodes == ("n1",) and "4.0 times as slow" in setting.alerts.current[0].title


def test_full_kv_memory_missing_events_and_other_tokens_are_alerts() -> None:
    setting = Setting()
    setting.fleet.node("n0").kv_usage = 0.99
    cache = setting.cache_view.cache("n1")
    assert cache is not None
    cache.token_mismatch = True
    setting.alert_ids(0.0)
    assert setting.alert_ids(LASTING_S) == ["kv_memory_full", "token_mismatch"]


def test_many_nodes_are_named_in_part() -> None:
    setting = Setting(12)
    for node in list(setting.fleet)[:8]:
        node.health.eject(10.0, 30.0, "9 of its last 12 requests failed")
    setting.alert_ids(10.0)
    assert setting.alerts.current[0].title == "n0, n1, n2, n3 and 4 more nodes are ejected"


def test_a_source_that_fails_does_not_hide_the_others() -> None:
    def broken(_now_s: float) -> list[Alert]:
        raise RuntimeError("no")

    def working(_now_s: float) -> list[Alert]:
        return [Alert(id="a", severity="info", title="t", cause="c", what_to_do="w")]

    alerts = ActiveAlerts(broken, working)
    alerts.update(1.0)
    assert [alert.id for alert in alerts.current] == ["a"]


def test_alerts_that_ended_are_kept_for_an_hour_and_updates_return_what_changed() -> None:
    found: list[Alert] = []
    alerts = ActiveAlerts(lambda _now_s: found)
    assert alerts.update(0.0) == []
    found.append(Alert(id="hit_rate_dropped m chat", severity="info", title="t", cause="c", what_to_do="w"))
    [began] = alerts.update(10.0)
    assert (began.name, began.since_s, began.ended_s) == ("hit_rate_dropped", 10.0, 0.0)
    assert alerts.update(12.0) == [] and not alerts.ended
    found.clear()
    [ended] = alerts.update(20.0)
    assert (ended.id, ended.since_s, ended.ended_s) == (began.id, 10.0, 20.0)
    assert not alerts.current and list(alerts.ended) == [ended]
    assert alerts.update(20.0 + KEEP_ENDED_S - 1.0) == [] and list(alerts.ended) == [ended]
    assert alerts.update(20.0 + KEEP_ENDED_S) == [] and not alerts.ended


def test_the_list_of_ended_alerts_has_one_entry_for_each_id_and_a_limit() -> None:
    found: list[Alert] = []
    alerts = ActiveAlerts(lambda _now_s: found)
    for number in range(2 * MAX_ENDED):
        found[:] = [
            Alert(id=one, severity="info", title="t", cause="c", what_to_do="w") for one in ("flaps", f"a {number}")
        ]
        alerts.update(float(2 * number))
        found.clear()
        alerts.update(float(2 * number + 1))
    assert len(alerts.ended) == MAX_ENDED
    assert [alert.id for alert in alerts.ended].count("flaps") == 1
    assert alerts.ended[0].ended_s == 2.0 * 2 * MAX_ENDED - 1


def test_a_source_that_fails_ends_no_alert() -> None:
    fails = False

    def source(_now_s: float) -> list[Alert]:
        if fails:
            raise RuntimeError("no")
        return [Alert(id="a", severity="info", title="t", cause="c", what_to_do="w")]

    alerts = ActiveAlerts(source)
    alerts.update(1.0)
    fails = True
    assert alerts.update(2.0) == []
    assert [alert.id for alert in alerts.current] == ["a"]
