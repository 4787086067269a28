"""The fleet: models, health, reloads, and counters that return to zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.cpu_limit import cpu_limit

from warmroute.config import Health as HealthConfig
from warmroute.config import NodeConfig
from warmroute.core.fleet import MAX_PAST_MODELS, Fleet
from warmroute.core.group import Group
from warmroute.core.health import HealthState
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import NameTaken, UnknownNode
from warmroute.core.speeds import DEFAULT_MS_PER_TOKEN

HEALTH = HealthConfig()


def config(name: str, *models: str, role: str = "mixed", url: str = "") -> NodeConfig:
    url = url or f"http://{name}:1"
    return NodeConfig(url=url, name=name, models=models, role=role, engine="vllm")  # type: ignore[arg-type]


def fleet_of(*configs: NodeConfig) -> Fleet:
    fleet = Fleet(HEALTH)
    for each in configs:
        fleet.check_passed(fleet.add(each), 0)
    return fleet


def up(fleet: Fleet, model: str = "m") -> list[str]:
    group = fleet.group(model)
    return [node.name for node in group.up.nodes] if group else []


def test_nodes_are_grouped_by_model() -> None:
    fleet = fleet_of(config("a", "x", "y"), config("b", "y", "z"), config("c", "z"))
    assert {model: up(fleet, model) for model in fleet.models} == {"x": ["a"], "y": ["a", "b"], "z": ["b", "c"]}
    assert fleet.group("none") is None


def test_each_change_that_edges_have_to_know_raises_the_version() -> None:
    """Two changes between two looks must not cancel each other: what edges know is built anew if the number differs."""
    fleet = fleet_of(config("a", "m"))
    for change in (
        lambda: fleet.transfers_changed(fleet.node("a")),
        lambda: fleet.add(config("b", "m")),
        lambda: fleet.drain("b"),
        lambda: fleet.drain("b", False),
        lambda: fleet.set_role("b", "decode"),
        lambda: fleet.update_config(fleet.node("b"), config("b", "m", "n")),
        lambda: fleet.update_models(fleet.node("b"), ["m", "n"], [{"id": "m", "max_model_len": 100}]),
        lambda: fleet.check_passed(fleet.node("b"), 1),
        lambda: fleet.check_failed(fleet.node("b"), 2, "refused"),
        lambda: fleet.remove("b"),
    ):
        before = fleet.version
        change()
        assert fleet.version > before


def test_a_node_is_no_candidate_before_its_first_health_check() -> None:
    fleet = Fleet(HEALTH)
    fleet.add(config("a", "m"))
    assert up(fleet) == [] and not fleet.can_serve


def test_models_that_a_node_reports_are_used_and_updated() -> None:
    fleet = fleet_of(config("a"), config("b", "fixed"))
    node = fleet.node("a")
    assert not fleet.all_models_known
    fleet.update_models(node, ["m", "n", "m"], [{"id": "m"}])
    assert fleet.all_models_known and up(fleet, "m") == ["a"] and up(fleet, "n") == ["a"]
    fleet.update_models(node, ["n"], [])
    assert fleet.group("m") is None and up(fleet, "n") == ["a"]
    fleet.update_models(fleet.node("b"), ["other"], [])
    assert up(fleet, "fixed") == ["b"] and fleet.group("other") is None, "configured models take precedence"


def test_requests_go_to_mixed_and_decode_nodes_and_not_to_prefill_nodes() -> None:
    fleet = fleet_of(config("p", "m", role="prefill"), config("d", "m", role="decode"), config("x", "m"))
    assert up(fleet) == ["d", "x"] and fleet.has_roles
    group = fleet.group("m")
    assert group is not None and [node.name for node in group.prefill_nodes.nodes] == ["p"]
    fleet.drain("x")
    assert up(fleet) == ["d"]
    fleet.remove("d")
    assert up(fleet) == ["p"] and fleet.can_serve, "the last resort"
    fleet.drain("x", False)
    assert up(fleet) == ["x"]


def test_a_decode_node_that_cannot_prefill_serves_only_beside_a_prefill_node() -> None:
    fleet = fleet_of(config("p", "m", role="prefill"), config("d", "m", role="decode"))
    for node in fleet:
        node.engine = "sglang"
        fleet.transfers_changed(node)
    assert up(fleet) == ["d"]
    fleet.check_failed(fleet.node("p"), 1.0, "connection refused")
    assert up(fleet) == [] and not fleet.can_serve
    fleet.check_passed(fleet.node("p"), 2.0)
    assert up(fleet) == ["d"]


def test_pairs_are_only_of_vllm_again_once_the_other_engines_are_gone() -> None:
    nodes = [config("p", "m", role="prefill"), config("d", "m"), config("s", "other", role="prefill")]
    sglang = replace(nodes[-1], engine="sglang")
    fleet = fleet_of(*nodes[:-1], sglang)
    assert not fleet.pairs_only_with_vllm
    fleet.remove("s")
    assert fleet.pairs_only_with_vllm, "its group is gone"
    fleet.add(sglang)
    assert not fleet.pairs_only_with_vllm
    fleet.update_config(fleet.node("s"), replace(sglang, role="mixed"))
    assert fleet.pairs_only_with_vllm, "its group has no roles any more"


def test_a_mixed_node_with_a_kv_connector_can_prefill_for_others() -> None:
    fleet = fleet_of(config("d", "m", role="decode"), config("x", "m"))
    group, node = fleet.group("m"), fleet.node("x")
    assert group is not None and group.prefill_nodes.nodes == ()
    node.kv_connector = True
    fleet.transfers_changed(node)
    assert group.sort_if_changed().prefill_nodes.nodes == (node,)


def test_a_draining_node_gets_no_new_requests_and_keeps_its_running_ones() -> None:
    fleet = fleet_of(config("a", "m"), config("b", "m"))
    node = fleet.node("a")
    ticket = Ticket(node, 0)
    fleet.drain("a")
    assert up(fleet) == ["b"] and node.inflight == 1
    fleet.close_ticket(ticket, Outcome.OK, 1)
    assert node.inflight == 0
    fleet.drain("a", False)
    assert up(fleet) == ["a", "b"]


def test_the_last_node_is_still_used_if_it_is_slow() -> None:
    fleet = fleet_of(config("a", "m"))
    node = fleet.node("a")
    for second in range(0, 1000, 10):
        fleet.check_timed_out(node, second)
    group = fleet.group("m")
    assert group is not None and node.health.state is HealthState.DOWN
    assert group.last_resort.nodes == (node,) and fleet.can_serve


def test_a_node_that_refuses_connections_is_not_even_a_last_resort() -> None:
    fleet = fleet_of(config("a", "m"))
    fleet.check_failed(fleet.node("a"), 0, "refused")
    group = fleet.group("m")
    assert group is not None and not group.last_resort.nodes and not fleet.can_serve


def test_names_are_unique_and_unknown_names_raise_an_error() -> None:
    fleet = fleet_of(config("a", "m"))
    with pytest.raises(NameTaken):
        fleet.add(config("a", "m"))
    for call in (fleet.node, fleet.remove, fleet.drain):
        with pytest.raises(UnknownNode):
            call("none")


def test_each_change_of_health_is_reported_once() -> None:
    changes: list[tuple[str, str]] = []
    fleet = Fleet(HEALTH, lambda node, before: changes.append((before.value, node.health.state.value)))
    node = fleet.add(config("a", "m"))
    for _ in range(3):
        fleet.check_passed(node, 0)
    for _ in range(HEALTH.consecutive_failures + 3):
        fleet.close_ticket(Ticket(node, 0), Outcome.FAILED, 0, "x")
    for _ in range(3):
        fleet.check_passed(node, 50)
    fleet.close_ticket(Ticket(node, 50), Outcome.OK, 51)
    for _ in range(3):
        fleet.check_failed(node, 52, "gone")
    for _ in range(3):
        fleet.check_passed(node, 53)
    assert changes == [
        ("unknown", "up"), ("up", "down"), ("down", "half_open"), ("half_open", "up"), ("up", "down"), ("down", "up"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(Outcome.OK, "up"), (Outcome.REJECTED, "up"), (Outcome.BUSY, "half_open"), (Outcome.CANCELLED, "half_open"),
     (Outcome.FAILED, "down"), (Outcome.BROKEN, "down")],
)  # fmt: skip
def test_the_outcome_of_a_trial_request_decides_the_health(outcome: Outcome, state: str) -> None:
    fleet = fleet_of(config("a", "m"))
    node = fleet.node("a")
    for _ in range(HEALTH.consecutive_failures):
        fleet.close_ticket(Ticket(node, 0), Outcome.FAILED, 0, "x")
    fleet.check_passed(node, 10)
    assert node.health.state is HealthState.HALF_OPEN
    fleet.close_ticket(Ticket(node, 10), outcome, 11, "x")
    assert node.health.state.value == state and node.inflight == 0


def test_busy_responses_never_open_the_breaker() -> None:
    fleet = fleet_of(config("a", "m"))
    for _ in range(100):
        fleet.close_ticket(Ticket(fleet.node("a"), 0), Outcome.BUSY, 0)
    assert up(fleet) == ["a"]


# Reloading.


def test_a_reload_adds_and_removes_nodes_and_keeps_the_others() -> None:
    fleet = Fleet(HEALTH)
    added, removed = fleet.reconfigure([config("a", "m"), config("b", "m")], HEALTH)
    assert [node.name for node in added] == ["a", "b"] and removed == []
    kept = fleet.node("b")
    fleet.add(config("by-hand", "m"))
    added, removed = fleet.reconfigure([config("b", "m"), config("c", "m")], HEALTH)
    assert [node.name for node in added] == ["c"] and [node.name for node in removed] == ["a"]
    assert fleet.node("b") is kept and fleet.node("by-hand")


def test_a_node_with_a_new_url_is_another_node() -> None:
    fleet = Fleet(HEALTH)
    fleet.reconfigure([config("a", "m")], HEALTH)
    before = fleet.node("a")
    ticket = Ticket(before, 0)
    fleet.reconfigure([config("a", "m", url="http://other:1")], HEALTH)
    assert fleet.node("a") is not before and before.draining
    fleet.close_ticket(ticket, Outcome.OK, 1)
    assert before.inflight == 0 and fleet.node("a").inflight == 0


# Tickets.


def test_only_the_first_close_of_a_ticket_counts() -> None:
    fleet = fleet_of(config("a", "m", "n"))
    node = fleet.node("a")
    ticket = Ticket(node, 0)
    assert [group.inflight for group in node.groups] == [1, 1]
    for outcome in (Outcome.OK, Outcome.FAILED, Outcome.CANCELLED):
        ticket.close(outcome, 1)
    assert node.inflight == 0 and node.outcomes[Outcome.OK] == sum(node.outcomes) == 1
    assert [group.inflight for group in node.groups] == [0, 0]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["open", "close", "models", "drain", "remove", "add"])),
        max_size=60,
    )
)
def test_every_counter_returns_to_zero(steps: list[tuple[int, str]]) -> None:
    fleet = fleet_of(*(config(f"n{number}") for number in range(3)))
    for node in fleet:
        fleet.update_models(node, ["m"], [])
    tickets: list[Ticket] = []
    nodes: set[Node] = set(fleet)
    groups = {group for node in nodes for group in node.groups}
    for number, step in steps:
        name = f"n{number}"
        there = next((node for node in fleet if node.name == name), None)
        if step == "open" and there:
            tickets.append(Ticket(there, 0))
        elif step == "close" and tickets:
            fleet.close_ticket(tickets.pop(number % len(tickets)), Outcome(number), 1, "x")
        elif step == "models" and there:
            fleet.update_models(there, ["m", "n"][: number + 1], [])
        elif step == "drain" and there:
            fleet.drain(name, number % 2 == 0)
        elif step == "remove" and there:
            fleet.remove(name)
        elif step == "add" and not there:
            nodes.add(fleet.add(config(name, "m")))
        nodes |= set(fleet)
        groups |= {group for node in nodes for group in node.groups}
    assert sum(node.inflight for node in nodes) == len(tickets)
    for ticket in tickets:
        fleet.close_ticket(ticket, Outcome.FAILED, 2, "x")
    assert all(node.inflight == 0 for node in nodes) and all(group.inflight == 0 for group in groups)


# Load.


def test_load_is_exact_for_this_router_and_as_polled_for_others() -> None:
    node = fleet_of(config("a", "m")).node("a")
    tickets = [Ticket(node, 0) for _ in range(3)]
    node.update_load(running=4, waiting=3, kv_usage=0.5, now_s=1)
    assert (node.other_load, node.load) == (4, 7)
    tickets.append(Ticket(node, 1))
    assert node.load == 8, "this router's requests count at once"
    for ticket in tickets:
        ticket.close(Outcome.OK, 2)
    assert node.load == 4
    node.update_load(0, 0, 0.0, 3)
    assert node.load == 0


def test_the_load_is_at_least_that_of_this_router() -> None:
    node = fleet_of(config("a", "m")).node("a")
    tickets = [Ticket(node, 0) for _ in range(3)]
    node.update_load(1, 0, 0.1, 1)
    assert (node.other_load, node.load) == (0, 3)
    assert len(tickets) == 3


def test_outdated_metrics_are_cleared() -> None:
    node = fleet_of(config("a", "m")).node("a")
    node.update_load(5, 5, 0.9, 1)
    node.drop_stale_load(0.0, node.polled_s + 1.0)
    assert (node.load, node.waiting, node.kv_usage) == (0, 0, 0.0)


def test_latency_is_a_moving_average_of_complete_responses() -> None:
    node = fleet_of(config("a", "m")).node("a")
    Ticket(node, 0).close(Outcome.FAILED, 99)
    assert node.latency_ms == 0
    Ticket(node, 0).close(Outcome.OK, 1)
    assert node.latency_ms == 1000
    Ticket(node, 0).close(Outcome.OK, 2)
    assert node.latency_ms == pytest.approx(1100)


def test_first_tokens_are_counted_in_buckets() -> None:
    node = fleet_of(config("a", "m")).node("a")
    for ms in (1, 5, 6, 70_000):
        Ticket(node, 0).first_token(ms / 1000)
    assert sum(node.ttft_counts) == 4
    assert node.ttft_counts[0] == 2 and node.ttft_counts[1] == 1 and node.ttft_counts[-1] == 1


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("http://a", "a", 80), ("https://a/", "a", 443), ("http://[::1]:8000", "::1", 8000), ("http://a:1", "a", 1)],
)
def test_host_and_port_come_from_the_url(url: str, host: str, port: int) -> None:
    node = Node(NodeConfig(url=url), HEALTH)
    assert (node.host, node.port) == (host, port)


def test_a_new_node_starts_with_the_speed_of_its_peers() -> None:
    fleet = Fleet(HealthConfig())
    for number, ms_per_token in enumerate((0.2, 0.3, 0.9)):
        peer = fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",)))
        peer.speed.guess(ms_per_token)
        peer.speed.answers = 5
    assert fleet.add(NodeConfig(url="http://new:1", models=("m",))).speed.ms_per_token == 0.3
    other = fleet.add(NodeConfig(url="http://other:1", models=("another",)))
    assert other.speed.ms_per_token == DEFAULT_MS_PER_TOKEN


ADAPTERS: list[dict[str, object]] = [{"id": "base"}]
ADAPTERS += [{"id": f"adapter{number}", "parent": "base"} for number in range(400)]


def test_a_health_change_costs_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, names = Fleet(HEALTH), [str(card["id"]) for card in ADAPTERS]
    with cpu_limit(20.0):  # 64 nodes take 2 s; it took a minute while each group searched all nodes for its members
        nodes = [fleet.add(NodeConfig(url=f"http://127.0.0.1:{port}", name=f"n{port}")) for port in range(9000, 9064)]
        for node in nodes:
            fleet.update_models(node, names, ADAPTERS)
            fleet.check_passed(node, 1.0)
    assert all(len(group.sort_if_changed().up) == 64 for group in fleet.groups)
    sorted_groups: list[str] = []
    sort = Group._sort

    def note_and_sort(group: Group) -> None:
        sorted_groups.append(group.model)
        sort(group)

    monkeypatch.setattr(Group, "_sort", note_and_sort)
    fleet.check_failed(nodes[7], 2.0, "connection refused")
    assert not sorted_groups
    group = fleet.group("adapter7")
    assert group is not None and len(group.up) == 63 and nodes[7] not in group.up.nodes
    assert group.half_open == () and group.last_resort.nodes == () and sorted_groups == ["adapter7"]
    fleet.check_passed(nodes[7], 3.0)
    assert group.sort_if_changed().up.nodes == tuple(nodes), "the order stays"
    assert fleet.group("adapter7") is group and sorted_groups == ["adapter7"] * 2


def test_an_adapter_that_is_loaded_changes_its_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(HEALTH)
    first, second = (fleet.add(NodeConfig(url=f"http://127.0.0.1:{port}")) for port in (9000, 9001))
    for node in (second, first):
        fleet.update_models(node, ["base"], ADAPTERS[:1])
    base = fleet.group("base")
    assert base is not None and base.members == (first, second)
    changed: list[str] = []
    members_changed = Group.members_changed

    def note_and_change(group: Group, slow_start_s: float) -> None:
        changed.append(group.model)
        members_changed(group, slow_start_s)

    monkeypatch.setattr(Group, "members_changed", note_and_change)
    fleet.update_models(first, ["base", "adapter0"], ADAPTERS[:2])
    assert changed == ["adapter0"]
    adapter = fleet.group("adapter0")
    assert adapter is not None and adapter.members == (first,) and adapter.adapter is not None
    fleet.update_models(first, ["base"], ADAPTERS[:1])
    assert changed == ["adapter0", "adapter0"] and fleet.group("adapter0") is None and base.members == (first, second)


def test_models_that_were_served_once_are_remembered_up_to_a_limit() -> None:
    fleet = Fleet(HEALTH)
    changing, steady = (fleet.add(NodeConfig(url=f"http://127.0.0.1:{port}")) for port in (9000, 9001))
    fleet.update_models(steady, ["steady"], [])
    for turn in range(30):
        fleet.update_models(changing, [f"{turn}-{number}" for number in range(100)], [])
    ever = fleet.models_ever_served
    assert len(ever) <= MAX_PAST_MODELS + 101 and "steady" in ever and "29-0" in ever and "25-0" in ever
    assert "0-0" not in ever
