"""Changes of nodes at run time: all processes end with the same nodes, in whatever order messages arrive."""

from __future__ import annotations

from random import Random
from typing import get_args

import msgspec
import pytest

from warmroute.config import Health, NodeConfig
from warmroute.config.nodes import Role
from warmroute.core.cluster.messages import MAX_CHANGES, NodeChange
from warmroute.core.cluster.shared_nodes import SharedNodes, encode_change
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node


class Router:
    def __init__(self, name: str) -> None:
        self.fleet = Fleet(Health())
        self.shared = SharedNodes(self.fleet, self)
        self.stored: dict[str, bytes] = {}
        self.shared.join(name, lambda change: self.stored.update({change.name: encode_change(change)}))
        self.fleet.reconfigure([NodeConfig(url="http://c0:1", name="c0")], Health())

    def add_node(self, config: NodeConfig) -> Node:
        return self.fleet.add(config)

    def remove_node(self, name: str) -> Node:
        return self.fleet.remove(name)

    def drain_node(self, name: str, draining: bool, by_hand: bool = False) -> Node:
        return self.fleet.drain(name, draining, by_hand)

    def set_role(self, name: str, role: Role) -> Node:
        return self.fleet.set_role(name, role)

    @property
    def nodes(self) -> dict[str, bool]:
        return {node.name: node.draining for node in self.fleet}

    @property
    def roles(self) -> dict[str, str]:
        return {node.name: node.role for node in self.fleet}


def change_something(router: Router, random: Random) -> None:
    name = f"n{random.randrange(4)}"
    if name not in router.nodes:
        router.shared.add_node(NodeConfig(url=f"http://{name}:1", name=name))
    elif random.random() < 0.4:
        router.shared.remove_node(name)
    elif random.random() < 0.3:
        router.shared.set_role(name, random.choice(get_args(Role)))
    else:
        router.shared.drain_node(name, random.random() < 0.5)
    if random.random() < 0.2 and "c0" in router.nodes:
        router.shared.drain_node("c0", random.random() < 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_all_processes_end_with_the_same_nodes(seed: int) -> None:
    random = Random(seed)
    routers = [Router(name) for name in "abc"]
    waiting: list[tuple[Router, tuple[NodeChange, ...]]] = []
    for _ in range(60):
        sender = random.choice(routers)
        change_something(sender, random)
        changes = sender.shared.take_unpublished()
        waiting += [(router, changes) for router in routers if router is not sender and random.random() < 0.7]
        random.shuffle(waiting)
        while waiting and random.random() < 0.6:
            receiver, late = waiting.pop()
            receiver.shared.merge(late)
    for turn in range(4):  # digests differ, so all publish what they know
        for router in routers:
            for other in routers:
                router.shared.compare(other.shared.digest, 10.0 * turn)
        for router in routers:
            changes = router.shared.take_unpublished()
            for other in routers:
                if other is not router:
                    other.shared.merge(changes)
    assert len({router.shared.digest for router in routers}) == 1
    assert routers[0].nodes == routers[1].nodes == routers[2].nodes
    assert routers[0].roles == routers[1].roles == routers[2].roles
    late_router = Router("d")
    assert not late_router.shared.merge_stored([encode_change(one) for one in routers[0].shared.changes])
    assert late_router.nodes == routers[0].nodes


def test_a_change_counts_for_a_node_that_appears_later_or_again() -> None:
    a, b = Router("a"), Router("b")
    a.shared.drain("c0", True)
    a.fleet.reconfigure([NodeConfig(url="http://c0:1", name="c0"), NodeConfig(url="http://c1:1", name="c1")], Health())
    a.shared.remove_node("c1")
    b.shared.merge(a.shared.take_unpublished())
    assert b.nodes == {"c0": True}
    b.fleet.reconfigure([NodeConfig(url="http://c1:1", name="c1")], Health())  # c0 is gone, c1 is new
    b.shared.apply_again()
    assert b.nodes == {}
    b.fleet.add(NodeConfig(url="http://c0:1", name="c0"))
    b.shared.apply_again()
    assert b.nodes == {"c0": True}
    b.fleet.drain("c0", False)  # somebody on this machine alone, say its discovery: it stays
    b.shared.apply_again()
    assert b.nodes == {"c0": False}


def test_a_role_lasts_until_the_configured_role_changes() -> None:
    a, b = Router("a"), Router("b")
    a.shared.set_role("c0", "decode")
    b.shared.merge(a.shared.take_unpublished())
    configured = NodeConfig(url="http://c0:1", name="c0", usd_per_hour=2.0)
    for router in (a, b):
        router.fleet.reconfigure([configured], Health())
        router.shared.apply_again()
    assert a.roles == b.roles == {"c0": "decode"} and not a.shared.has_unpublished
    b.fleet.drain("c0", True)  # here alone: no other process learns of it
    for router in (b, a):
        router.fleet.reconfigure([msgspec.structs.replace(configured, role="prefill")], Health())
        router.shared.apply_again()
        router.shared.apply_again()
        assert router.roles == {"c0": "prefill"}
    for one, other in ((a, b), (b, a)):
        other.shared.merge(one.shared.take_unpublished())
    assert a.roles == b.roles == {"c0": "prefill"} and a.shared.digest == b.shared.digest
    assert not a.shared.has_unpublished and not b.shared.has_unpublished and not a.nodes["c0"]
    restarted = Router("c")
    restarted.fleet.reconfigure([msgspec.structs.replace(configured, role="prefill")], Health())
    restarted.shared.merge_stored(b.stored.values())
    assert restarted.roles == {"c0": "prefill"} and restarted.shared.digest == a.shared.digest


def test_a_role_ends_if_address_and_configured_role_change_at_once() -> None:
    a = Router("a")
    a.fleet.reconfigure([NodeConfig(url="http://c0:1", name="c0")], Health())
    a.shared.set_role("c0", "decode")
    a.shared.drain_node("c0", True)
    a.fleet.reconfigure([NodeConfig(url="http://c0:2", name="c0", role="prefill")], Health())
    a.shared.apply_again()
    assert a.roles == {"c0": "prefill"} and a.fleet.node("c0").draining
    a.fleet.reconfigure([NodeConfig(url="http://c0:3", name="c0", role="prefill")], Health())
    a.shared.apply_again()
    assert a.roles == {"c0": "prefill"}


def test_a_peer_that_still_has_the_former_configuration_does_not_bring_the_role_back() -> None:
    a, b = Router("a"), Router("b")
    b.shared.set_role("c0", "decode")
    a.shared.merge(b.shared.take_unpublished())
    configured = NodeConfig(url="http://c0:1", name="c0", role="prefill")
    a.fleet.reconfigure([configured], Health())
    a.shared.apply_again()
    b.shared.merge(a.shared.take_unpublished())
    assert a.roles == {"c0": "prefill"} and b.roles == {"c0": "mixed"}
    b.fleet.reconfigure([configured], Health())
    b.shared.apply_again()
    assert b.roles == {"c0": "prefill"} and not b.shared.has_unpublished


def test_the_server_gets_back_what_it_lost_and_nothing_that_it_has() -> None:
    a = Router("a")
    a.shared.add_node(NodeConfig(url="http://n0:1", name="n0"))
    a.shared.drain_node("n0", True)
    assert not a.shared.merge_stored(a.stored.values())
    assert [change.name for change in a.shared.merge_stored([])] == ["n0"]
    assert [change.name for change in a.shared.merge_stored([b"nonsense", b""])] == ["n0"]


def test_a_flood_of_changes_and_an_invalid_node_do_no_harm() -> None:
    a = Router("a")
    bad = [
        NodeChange("bad", 5, "x", b"no json", False, False),
        NodeChange("bad2", 5, "x", msgspec.json.encode({"url": "ftp://x"}), False, False),
        NodeChange("bad3", 5, "x", msgspec.json.encode({"nonsense": 1}), False, True),
        NodeChange("c0", 5, "x", b"", False, True),
    ]
    a.shared.merge(bad)
    assert a.nodes == {"c0": True}
    a.shared.merge(NodeChange(f"gone-{at}", at, "x", b"", True, False) for at in range(MAX_CHANGES + 100))
    assert len(a.shared.changes) <= MAX_CHANGES


def test_a_changed_configuration_reaches_all_processes_and_no_node_of_a_file() -> None:
    a, b, c = (Router(name) for name in "abc")
    a.shared.add_node(NodeConfig(url="http://n0:1", name="n0"))
    added = a.shared.take_unpublished()
    b.shared.merge(added)
    c.fleet.add(NodeConfig(url="http://n0:1", name="n0", gpu="own"))
    c.shared.merge(added)
    changed = NodeConfig(url="http://n0:1", name="n0", role="prefill", gpu="H200", usd_per_hour=2.0)
    a.shared.update_node("n0", changed)
    update = a.shared.take_unpublished()
    for router in (b, c):
        router.shared.merge(update)
    assert a.fleet.node("n0").config == b.fleet.node("n0").config == changed and b.roles["n0"] == "prefill"
    assert c.fleet.node("n0").config.gpu == "own"
    b.shared.set_role("n0", "decode")
    a.shared.merge(b.shared.take_unpublished())
    a.shared.update_node("n0", NodeConfig(url="http://n0:1", name="n0", role="prefill", gpu="B200"))
    b.shared.merge(a.shared.take_unpublished())
    assert a.roles["n0"] == b.roles["n0"] == "decode", "a role set at run time stays"
    assert b.fleet.node("n0").config.gpu == "B200"
    late = Router("d")
    late.shared.merge_stored(a.stored.values())
    assert late.fleet.node("n0").config.gpu == "B200"


def test_only_an_operator_ends_a_drain_by_hand() -> None:
    a, b = Router("a"), Router("b")
    a.shared.drain_node("c0", True)
    a.shared.drain("c0", True)
    b.shared.merge(a.shared.take_unpublished())
    for router in (a, b):
        router.shared.drain("c0", False)  # the autoscaler
        router.fleet.drain("c0", False)  # discovery
        assert router.nodes == {"c0": True}
    a.shared.merge(b.shared.take_unpublished())
    assert a.nodes == {"c0": True}
    b.shared.drain_node("c0", False)
    a.shared.merge(b.shared.take_unpublished())
    assert a.nodes == b.nodes == {"c0": False}


def test_a_register_without_what_the_autoscaler_did_becomes_whole_again() -> None:
    a, b = Router("a"), Router("b")
    a.shared.add_node(NodeConfig(url="http://n0:1", name="n0"))
    a.shared.drain_node("n0", True)
    b.shared.restore([msgspec.structs.replace(change, config=b"") for change in a.shared.changes])
    assert "n0" not in b.nodes and b.shared.digest != a.shared.digest
    a.shared.merge(b.shared.changes)
    b.shared.merge(a.shared.changes)
    assert b.shared.digest == a.shared.digest and b.nodes == a.nodes
