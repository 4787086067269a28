"""The context windows of a group's nodes."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from warmroute.config import Health, NodeConfig
from warmroute.core.context_windows import ContextWindows, windows_by_model
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node


def fleet_of(*windows: object) -> tuple[Fleet, list[Node]]:
    fleet = Fleet(Health())
    nodes = []
    for number, window in enumerate(windows):
        node = fleet.add(NodeConfig(url=f"http://n{number}:1", name=f"n{number}"))
        fleet.check_passed(node, 0.0)
        fleet.update_models(node, ["m"], [{"id": "m", "max_model_len": window}])
        nodes.append(node)
    return fleet, nodes


def windows_of(fleet: Fleet) -> ContextWindows:
    group = fleet.group("m")
    assert group is not None and group.windows is not None
    return group.windows


@pytest.mark.parametrize("windows", [(2048,), (2048, 2048, 2048), (None, None), ("many", -5, True)])
def test_a_group_with_one_window_has_nothing_to_check(windows: tuple[object, ...]) -> None:
    fleet, _ = fleet_of(*windows)
    group = fleet.group("m")
    assert group is not None and group.windows is None


def test_candidates_are_those_whose_window_is_long_enough() -> None:
    fleet, _ = fleet_of(2048, 32_000, None, 2048)
    group, windows = fleet.group("m"), windows_of(fleet)
    assert group is not None

    def fitting(tokens: float) -> str:
        return "".join(node.name[1] for node in windows.fitting(group.up, tokens).nodes)

    assert windows.fitting(group.up, 2048) is group.up, "no copy where all nodes fit"
    assert [fitting(tokens) for tokens in (1, 2049, 32_000, 32_001, 1e15)] == ["0123", "12", "12", "2", "2"]
    assert windows.fitting(group.up, 3000) is windows.fitting(group.up, 4000), "computed once"
    assert [node.name for node in windows.widest(group.up).nodes] == ["n2"], "an unknown window holds everything"
    assert windows.largest > 1 << 60


def test_a_prompt_longer_than_every_window_has_no_candidates() -> None:
    fleet, nodes = fleet_of(2048, 32_000)
    group, windows = fleet.group("m"), windows_of(fleet)
    assert group is not None and not windows.fitting(group.up, 32_001).nodes
    assert windows.widest(group.up).nodes == (nodes[1],) and windows.largest == 32_000


def test_windows_follow_health_drains_and_restarts() -> None:
    fleet, nodes = fleet_of(2048, 32_000)
    group = fleet.group("m")
    assert group is not None
    fleet.check_failed(nodes[1], 1.0, "refused")
    assert windows_of(fleet).largest == 32_000, "a node that is down may come back"
    assert not windows_of(fleet).fitting(group.up, 3000).nodes
    fleet.check_passed(nodes[1], 2.0)
    assert windows_of(fleet).fitting(group.up, 3000).nodes == (nodes[1],)
    fleet.drain("n1")
    assert group.windows is None
    fleet.drain("n1", False)
    fleet.update_models(nodes[1], ["m"], [{"id": "m", "max_model_len": 2048}])
    assert group.windows is None, "it was restarted with the same window"


def test_a_configured_window_replaces_what_the_engine_reports_or_does_not() -> None:
    fleet = Fleet(Health())
    silent, other = (
        fleet.add(NodeConfig(url=f"http://{name}:1", name=name, max_model_len=window))
        for name, window in (("silent", 4096), ("other", 0))
    )
    for node, reported in ((silent, None), (other, 8192)):
        fleet.check_passed(node, 0.0)
        card: dict[str, object] = {"id": "m"} | ({"max_model_len": reported} if reported else {})
        fleet.update_models(node, ["m"], [card])
    group = fleet.group("m")
    assert group is not None and group.windows is not None and group.windows.sizes == [4096, 8192]
    fleet.update_models(silent, ["m"], [{"id": "m", "max_model_len": 16_384}])
    assert silent.context_window("m") == 4096
    fleet.update_config(silent, NodeConfig(url="http://silent:1", name="silent"))
    assert silent.context_window("m") == 16_384 and group.windows.sizes == [8192, 16_384]


def test_adapters_and_configured_names_have_the_window_of_their_base_model() -> None:
    cards: list[dict[str, Any]] = [
        {"id": "base", "max_model_len": 4096},
        {"id": "ad1", "parent": "base"},
        {"id": "ad2", "parent": "unknown", "max_model_len": None},
        {"id": "other", "max_model_len": 1 << 20},
        {"id": 5, "max_model_len": 7},
    ]
    assert windows_by_model(cards) == {"": 4096, "base": 4096, "ad1": 4096, "ad2": 4096, "other": 1 << 20}
    fleet = Fleet(Health())
    node = fleet.add(NodeConfig(url="http://n:1", models=("alias",)))
    fleet.update_models(node, ["base"], cards)
    assert [node.context_window(name) for name in ("alias", "ad1", "other")] == [4096, 4096, 1 << 20]
    assert windows_by_model([{"id": "a", "parent": "b"}]) == {}


# Keeping long windows free.


def rates(fleet: Fleet, tokens: float, now_s: float) -> list[float]:
    group = fleet.group("m")
    assert group is not None
    packed = windows_of(fleet).reserved_rates(group.up, tokens, now_s)
    return list(struct.unpack(f"{len(group.up)}d", packed))


def test_long_windows_are_reserved_for_as_many_requests_as_need_them() -> None:
    fleet, nodes = fleet_of(2048, 32_000, 32_000, 128_000)
    for at in range(50):  # ten a second
        windows_of(fleet).record(30_000, 100.0 + 0.1 * at)
        windows_of(fleet).record(100_000 if at % 5 == 0 else 10, 100.0 + 0.1 * at)
    short = rates(fleet, 500, 105.0)
    assert short[0] == 0.0 and short[1] == short[2] > 0.0 and short[3] > short[1]
    assert short[3] - short[1] == pytest.approx(0.2 * 3 * short[1], rel=0.05), "a fifth as many, on one node not three"
    long = rates(fleet, 30_000, 105.0)
    assert long[:3] == [0.0] * 3 and long[3] == pytest.approx(short[3] - short[1])
    assert rates(fleet, 100_000, 105.0) == [0.0] * 4
    assert rates(fleet, 500, 105.5) == short, "computed once a second"
    assert max(rates(fleet, 500, 305.0)) < 1e-9, "they fade"
    fleet.check_failed(nodes[0], 105.0, "refused")
    assert rates(fleet, 500, 105.0)[0] == short[1], "what was counted survives a change of the group"


def test_the_tightest_window_is_preferred() -> None:
    fleet, nodes = fleet_of(32_000, 2048, None, 2048)
    windows = windows_of(fleet)
    assert windows.tightest(nodes, [0, 1, 2, 3]) == [1, 3] and windows.tightest(nodes, [2, 0]) == [0]
