"""Outlier detection: nodes that answer far worse than their peers are ejected, and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig, OutlierDetection
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import DecodeSpeed

OK, FAILED = Outcome.OK, Outcome.FAILED
THREE_OF_FOUR = (FAILED, FAILED, FAILED, OK)


class OutlierHarness:
    """Nodes n0, n1… that serve one model, checked once a second."""

    def __init__(self, count: int, gpus: Sequence[str] = (), **config: Any) -> None:
        self.now_s = 1000.0
        self.fleet = Fleet(HealthConfig(), lambda _node, _before: None, OutlierDetection(**config))
        for number in range(count):
            gpu = gpus[number] if gpus else ""
            node = self.fleet.add(
                NodeConfig(url=f"http://n{number}:1", name=f"n{number}", models=("m", "adapter"), gpu=gpu)
            )
            self.fleet.check_passed(node, self.now_s)

    def node(self, number: int) -> Node:
        return self.fleet.node(f"n{number}")

    def states(self) -> list[str]:
        return [node.health.state.value for node in self.fleet]

    def second(self, outcomes: dict[int, Sequence[Outcome]] | None = None, ms_per_token: Sequence[float] = ()) -> None:
        """Let a second pass in which requests end, and check every node."""
        for number, ended in (outcomes or {}).items():
            for outcome in ended:
                self.fleet.close_ticket(Ticket(self.node(number), self.now_s), outcome, self.now_s, "HTTP status 500")
        for number, speed in enumerate(ms_per_token):
            for _ in range(20):
                self.first_token(self.node(number), speed)
        self.now_s += 1.0
        for node in self.fleet:
            self.fleet.check_passed(node, self.now_s)

    def first_token(self, node: Node, ms_per_token: float) -> None:
        """The node prefills 10,000 tokens at this speed."""
        ticket = Ticket.__new__(Ticket)
        ticket.open(node, self.now_s, DecodeSpeed(), True, 10_000, 10_000, 10_000.0)
        node.speed._last_first_token_s = 0.0
        ticket.first_token(self.now_s + ms_per_token * 10.0)
        ticket.release(OK, self.now_s)


def test_a_node_that_fails_three_of_four_requests_is_ejected() -> None:
    harness = OutlierHarness(4)
    for _ in range(3):
        harness.second({0: THREE_OF_FOUR, 1: (OK,) * 4, 2: (OK,) * 4, 3: (OK,) * 4})
    assert harness.states() == ["ejected", "up", "up", "up"]
    assert harness.node(0).health.reason == "9 of its last 12 requests failed"
    assert harness.node(0).recent_requests.ejections == {"failures": 1, "slow": 0}
    group = harness.fleet.group("m")
    assert group is not None and harness.node(0) not in group.up.nodes and harness.node(0) in group.last_resort.nodes


def test_too_few_requests_or_a_small_share_of_failures_eject_nobody() -> None:
    harness = OutlierHarness(4)
    for _ in range(30):
        harness.second({0: (FAILED, FAILED, OK), 1: (FAILED, OK, OK) * 2, 2: (OK,)})
        harness.second()
        harness.second()
    assert harness.states() == ["up"] * 4


def test_an_ejected_node_returns_with_slow_start_and_repeats_take_longer() -> None:
    harness = OutlierHarness(4, ejection_s=5.0)
    node, lasted = harness.node(0), []
    for _ in range(3):
        while node.health.state is HealthState.UP:
            harness.second({0: THREE_OF_FOUR})
        since_s = harness.now_s
        while node.health.state is HealthState.EJECTED:
            harness.second()
        assert node.health.traffic_share(harness.now_s) == pytest.approx(0.1)
        lasted.append(harness.now_s - since_s)
    assert lasted == [5.0, 10.0, 15.0]


def test_ejections_are_forgiven_after_a_long_time_without_one_and_bounded() -> None:
    harness = OutlierHarness(4, ejection_s=200.0)
    node = harness.node(0)
    lasted = []
    for pause_s in (0, 0, 700):
        harness.now_s += pause_s
        harness.second()
        while node.health.state is HealthState.UP:
            harness.second({0: THREE_OF_FOUR})
        lasted.append(node.health.ejection_s)
        harness.now_s = node.health.ejected_until_s
        harness.second()
    assert lasted == [200.0, 300.0, 200.0]


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (5, 2)])
def test_at_most_half_of_the_nodes_are_ejected(count: int, most: int) -> None:
    harness = OutlierHarness(count)
    for _ in range(5):
        harness.second(dict.fromkeys(range(count), THREE_OF_FOUR))
    assert harness.states().count("ejected") == most


def test_a_node_is_not_ejected_while_half_of_the_others_are_down() -> None:
    harness = OutlierHarness(4)
    for number in (2, 3):
        harness.fleet.check_failed(harness.node(number), harness.now_s + 1000.0, "connection refused")
    for _ in range(5):
        harness.second({0: THREE_OF_FOUR, 1: (OK,) * 4})
    assert harness.states() == ["up", "up", "down", "down"]


def test_failures_before_a_restart_do_not_count() -> None:
    harness = OutlierHarness(4)
    harness.second({0: THREE_OF_FOUR * 2})
    harness.fleet.check_failed(harness.node(0), harness.now_s, "connection refused")
    harness.second({0: (FAILED,) * 20})
    harness.second({0: (OK,)})
    assert harness.states() == ["up"] * 4


def test_requests_that_failed_on_every_node_do_not_count() -> None:
    harness = OutlierHarness(4)
    for _ in range(5):
        for node in harness.fleet:
            node.excused_failures += 3
        harness.second(dict.fromkeys(range(4), THREE_OF_FOUR))
    assert harness.states() == ["up"] * 4


def test_a_dead_ejected_node_is_down_and_comes_up_when_it_is_back() -> None:
    harness = OutlierHarness(4)
    for _ in range(3):
        harness.second({0: THREE_OF_FOUR})
    assert harness.states()[0] == "ejected"
    harness.fleet.check_failed(harness.node(0), harness.now_s, "connection refused")
    assert harness.states()[0] == "down"
    harness.second()
    assert harness.states()[0] == "up"


def test_a_node_that_becomes_far_slower_than_its_peers_is_ejected() -> None:
    harness = OutlierHarness(4)
    for _ in range(20):
        harness.second(ms_per_token=(0.1, 0.1, 0.11, 0.09))
    for _ in range(20):
        harness.second(ms_per_token=(1.0, 0.1, 0.11, 0.09))
    assert harness.states() == ["ejected", "up", "up", "up"]
    assert "times as long as before; other nodes keep up" in harness.node(0).health.reason


@pytest.mark.parametrize("gpus", [(), ("H100",) * 4])
def test_a_single_stall_ejects_nobody(gpus: Sequence[str]) -> None:
    harness = OutlierHarness(4, gpus)
    for _ in range(20):
        harness.second(ms_per_token=(0.1,) * 4)
    harness.second(ms_per_token=(5.0, 0.1, 0.1, 0.1))
    for _ in range(30):
        harness.second(ms_per_token=(0.1,) * 4)
        assert harness.states() == ["up"] * 4


def test_an_idle_peer_does_not_show_that_peers_keep_up() -> None:
    """Both may run on one machine that has become busy."""
    harness = OutlierHarness(2)
    for _ in range(20):
        harness.second(ms_per_token=(0.1, 0.1))
    for _ in range(11):
        harness.second()
    for _ in range(30):
        harness.second(ms_per_token=(1.0,))
    assert harness.states() == ["up"] * 2


def test_a_slow_node_with_few_requests_is_ejected_too() -> None:
    harness = OutlierHarness(4, min_requests=150)  # which have come only after some seconds of each half interval
    for _ in range(40):
        harness.second(ms_per_token=(0.1,) * 4)
    for _ in range(30):
        harness.second(ms_per_token=(1.0, 0.1, 0.1, 0.1))
    assert harness.states() == ["ejected", "up", "up", "up"]


def test_a_slower_gpu_is_not_an_outlier() -> None:
    for gpus in (("L4", "H100", "H100", "H100"), ()):
        harness = OutlierHarness(4, gpus)
        for _ in range(20):
            harness.second(ms_per_token=(1.5, 0.1, 0.1, 0.1))
        assert harness.states() == ["up"] * 4


def test_a_node_that_is_far_slower_than_others_with_the_same_gpu_is_ejected() -> None:
    harness = OutlierHarness(4, ("H100",) * 4)
    for _ in range(15):
        harness.second(ms_per_token=(1.5, 0.1, 0.1, 0.1))
    assert harness.states() == ["ejected", "up", "up", "up"]
    assert "other nodes with H100" in harness.node(0).health.reason


def test_when_all_nodes_slow_down_none_is_an_outlier() -> None:
    harness = OutlierHarness(4, ("H100",) * 4)
    for _ in range(20):
        harness.second(ms_per_token=(0.1,) * 4)
    for _ in range(20):
        harness.second(ms_per_token=(1.0,) * 4)
    assert harness.states() == ["up"] * 4


def test_zero_turns_a_rule_off() -> None:
    harness = OutlierHarness(4, ("H100",) * 4, failure_ratio=0.0, slow_factor=0.0)
    for _ in range(5):
        harness.second({0: THREE_OF_FOUR}, ms_per_token=(1.5, 0.1, 0.1, 0.1))
    assert harness.states() == ["up"] * 4
