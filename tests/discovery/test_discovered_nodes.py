"""How targets of several sources become nodes of the fleet."""

from __future__ import annotations

from warmroute.config import DiscoveryConfig, Health, NodeConfig
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node
from warmroute.engines.discovery.sync import DiscoveredNodes
from warmroute.engines.discovery.target import MAX_TARGETS, Target, create_target

FILE = DiscoveryConfig(kind="file", file="f")


class Registry:
    """What the service does, without its watchers."""

    def __init__(self) -> None:
        self.fleet = Fleet(Health())

    def add_node(self, config: NodeConfig) -> Node:
        return self.fleet.add(config)

    def remove_node(self, name: str) -> Node:
        return self.fleet.remove(name)

    def drain_node(self, name: str, draining: bool) -> Node:
        return self.fleet.drain(name, draining)

    def states(self) -> dict[str, bool]:
        """Return which nodes there are, and whether they get requests."""
        return {node.name: not node.draining for node in self.fleet}


def started() -> tuple[Registry, DiscoveredNodes]:
    registry = Registry()
    return registry, DiscoveredNodes(registry.fleet, registry)


def target(host: str, *, name: str = "", ready: bool = True, **labels: str) -> Target:
    found = create_target(FILE, host, 8000, labels, [], name=name, ready=ready)
    assert found is not None
    return found


async def test_nodes_come_and_go_with_their_targets() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2", name="two", ready=False)])
    await nodes.apply()
    assert registry.states() == {"10.0.0.1:8000": True}, "a node that was never ready does not join"
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2", name="two")])
    await nodes.apply()
    assert registry.states() == {"10.0.0.1:8000": True, "two": True}
    nodes.update("a", [target("10.0.0.2", name="two", ready=False)])
    await nodes.apply()
    assert registry.states() == {"two": False}
    nodes.update("a", [target("10.0.0.2", name="two")])
    await nodes.apply()
    assert registry.states() == {"two": True}
    assert nodes.changes == {("a", "added"): 2, ("a", "removed"): 1, ("a", "drained"): 1}


async def test_a_node_leaves_after_its_last_request() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2")])
    await nodes.apply()
    leaving = registry.fleet.node("10.0.0.1:8000")
    leaving.inflight = 1
    nodes.update("a", [target("10.0.0.2")])
    await nodes.apply()
    assert registry.states() == {"10.0.0.1:8000": False, "10.0.0.2:8000": True}
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2")])
    await nodes.apply()
    assert registry.states()["10.0.0.1:8000"], "listed again, it gets requests again"
    nodes.update("a", [target("10.0.0.2")])
    await nodes.apply()
    leaving.inflight = 0
    await nodes.apply()
    assert registry.states() == {"10.0.0.2:8000": True}


async def test_an_operators_drain_outlasts_a_flapping_pod() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1")])
    await nodes.apply()
    registry.drain_node("10.0.0.1:8000", True)
    for ready in (False, True):
        nodes.update("a", [target("10.0.0.1", ready=ready)])
        await nodes.apply()
    assert registry.states() == {"10.0.0.1:8000": False}


async def test_duplicates_merge() -> None:
    registry, nodes = started()
    registry.add_node(NodeConfig(url="http://localhost:8000", name="configured"))
    nodes.update("a", [target("127.0.0.1"), target("10.0.0.1", gpu="L4"), target("10.0.0.1", gpu="L40")])
    nodes.update("b", [target("10.0.0.1", name="pod"), target("10.0.0.2")])
    await nodes.apply()
    assert registry.states() == {"configured": True, "10.0.0.1:8000": True, "10.0.0.2:8000": True}
    assert registry.fleet.node("10.0.0.1:8000").config.gpu == "L4", "the first source counts"
    nodes.update("b", [target("10.0.0.1", name="pod", ready=False), target("10.0.0.2")])
    await nodes.apply()
    assert not registry.states()["10.0.0.1:8000"], "not ready for one source is not ready"
    nodes.update("b", [target("10.0.0.2")])
    nodes.update("a", [target("10.0.0.1")])
    await nodes.apply()
    assert registry.states() == {"configured": True, "10.0.0.1:8000": True, "10.0.0.2:8000": True}


async def test_a_node_that_the_configuration_names_later_replaces_the_discovered_one() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1", name="pod")])
    await nodes.apply()
    registry.add_node(NodeConfig(url="http://10.0.0.1:8000", name="configured"))
    await nodes.apply()
    assert registry.states() == {"configured": True}
    nodes.update("a", [target("10.0.0.2", name="other")])
    await nodes.apply()
    assert registry.states() == {"configured": True, "other": True}


async def test_a_node_that_an_operator_removes_stays_away_until_it_is_listed_anew() -> None:
    registry, nodes = started()
    both = [target("10.0.0.1"), target("10.0.0.2")]
    nodes.update("a", both)
    await nodes.apply()
    registry.remove_node("10.0.0.1:8000")
    for _ in range(3):
        await nodes.apply()
    assert registry.states() == {"10.0.0.2:8000": True} and nodes.node_at(both[0].address) == ""
    nodes.update("a", both[1:])
    await nodes.apply()
    nodes.update("a", both)
    await nodes.apply()
    assert registry.states() == {"10.0.0.2:8000": True, "10.0.0.1:8000": True}


async def test_another_pod_with_the_address_of_one_that_is_gone_is_another_node() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1", name="old")])
    await nodes.apply()
    first = registry.fleet.node("old")
    nodes.update("a", [target("10.0.0.1", name="new")])
    await nodes.apply()
    assert registry.states() == {"new": True} and registry.fleet.node("new") is not first


async def test_changed_labels_change_the_node() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1", model="m", island="x")])
    await nodes.apply()
    node = registry.fleet.node("10.0.0.1:8000")
    nodes.update("a", [target("10.0.0.1", model="m,n", island="y", role="decode")])
    await nodes.apply()
    assert registry.fleet.node("10.0.0.1:8000") is node
    assert (node.island, node.role, node.models) == ("y", "decode", ("m", "n"))


async def test_two_pods_of_the_same_name_are_two_nodes() -> None:
    registry, nodes = started()
    nodes.update("east", [target("10.0.0.1", name="vllm-0")])
    nodes.update("west", [target("10.1.0.1", name="vllm-0")])
    await nodes.apply()
    assert registry.states() == {"vllm-0": True, "west-vllm-0": True}


async def test_a_source_that_lists_nothing_keeps_its_nodes_except_those_that_drained() -> None:
    registry, nodes = started()
    assert nodes.update("a", []) == (False, 0), "it never listed any"
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2")])
    await nodes.apply()
    nodes.update("a", [target("10.0.0.1"), target("10.0.0.2", ready=False)])
    await nodes.apply()
    assert nodes.update("a", []) == (True, 0)
    assert nodes.update("a", []) == (True, 0)
    await nodes.apply()
    assert registry.states() == {"10.0.0.1:8000": True}
    nodes.update("a", [target("10.0.0.1", ready=False)])
    assert nodes.update("a", []) == (False, 0), "scaled to zero: each was seen terminating"
    await nodes.apply()
    assert registry.states() == {}


async def test_a_source_that_the_configuration_drops_takes_its_nodes_along() -> None:
    registry, nodes = started()
    nodes.update("a", [target("10.0.0.1")])
    await nodes.apply()
    nodes.forget("a")
    await nodes.apply()
    assert registry.states() == {}


async def test_ten_thousand_targets_displace_no_known_node() -> None:
    registry, nodes = started()
    known = [target("10.9.0.1"), target("10.9.0.2")]
    nodes.update("a", known)
    await nodes.apply()
    flood = [target(f"10.0.{number // 256}.{number % 256}") for number in range(10_000)]
    assert nodes.update("a", [*flood, *known]) == (False, 10_002 - MAX_TARGETS)
    await nodes.apply()
    states = registry.states()
    assert len(states) == MAX_TARGETS and {"10.9.0.1:8000", "10.9.0.2:8000"} <= states.keys()
