"""Each peer's rule on hand-made cases."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from small_worlds import NEAR, nodes_of, prompt, specs

from warmroute.fake_engine.core.events import BlockRemoved, BlockStored
from warmroute.replay.peers.aibrix import Aibrix
from warmroute.replay.peers.dynamo import Dynamo
from warmroute.replay.peers.holders import Holders, RoutedBlocks
from warmroute.replay.peers.kubeai import Kubeai
from warmroute.replay.peers.llm_d import LlmD
from warmroute.replay.peers.oracle import hit_rate
from warmroute.replay.peers.sglang import Sglang
from warmroute.replay.workloads import choose
from warmroute.replay.world import SimulatedRequest, World
from warmroute.routing.decision import Policy
from warmroute.routing.query import Query


class Table:
    """A peer at a table with a few nodes, whose books are written by hand."""

    def __init__(self, peer: Any, count: int = 3) -> None:
        self.peer = peer
        self.world = World(specs(count), NEAR, policy=peer, listener=peer)
        self.nodes = nodes_of(self.world)
        self._count = 0

    def request(self, *names: object, tokens: int = 160, **more: Any) -> SimulatedRequest:
        self._count += 1
        return SimulatedRequest(prompt(*names, tokens=tokens, **more), self._count)

    def decide(self, request: SimulatedRequest) -> int:
        policy: Policy = self.peer
        group = self.world.fleet.group("sim")
        assert group is not None
        return self.nodes.index(policy.decide(Query(request, group.up, group, 0.0, None, self.world.cache_view)).node)

    def send(self, at: int, *names: object, **more: Any) -> SimulatedRequest:
        request = self.request(*names, **more)
        self.peer.sent(request, self.nodes[at], 0.0)
        return request

    def choices(self, *names: object, times: int = 60) -> set[int]:
        return {self.decide(self.request(*names)) for _ in range(times)}

    def load(self, *loads: int) -> None:
        for node, load in zip(self.nodes, loads, strict=True):
            node.inflight = load


def stored(request: SimulatedRequest, count: int) -> list[Any]:
    return [BlockStored(request.blocks(16)[:count], None, [], 16, None, "GPU", None)]


def test_holders_count_leading_blocks_only() -> None:
    table = Table(Kubeai(Random(1)), 3)
    holders = Holders()
    a, b, c = table.nodes
    holders.store(a, [1, 2, 3])
    holders.store(b, [1, 3])
    assert holders.depths([1, 2, 3, 4], [a, b, c]) == [3, 1, 0]
    assert holders.depths([1, 2, 3, 4], [c, a]) == [0, 3]
    holders.remove(a, [2, 9])
    assert holders.depths([1, 2, 3], [a, b]) == [1, 1]
    holders.clear(b)
    assert holders.depths([1], [a, b]) == [1, 0]
    holders.clear(a)
    assert len(holders) == 0


def test_routed_blocks_forget_the_tail_of_the_least_recent_first() -> None:
    table = Table(Kubeai(Random(1)), 1)
    node = table.nodes[0]
    routed = RoutedBlocks(6)
    routed.routed(node, [1, 2, 3])
    routed.routed(node, [7, 8, 9])
    routed.routed(node, [1, 2])
    assert routed.size(node) == 6
    routed.routed(node, [20, 21])
    assert routed.size(node) == 6
    assert routed.depths([1, 2, 3], [node]) == [2]
    assert routed.depths([7, 8, 9], [node]) == [2]
    routed.forget(node)
    assert routed.size(node) == 0


def test_sglang_takes_the_match_then_the_smallest_tree_then_balance() -> None:
    table = Table(Sglang(Random(1)))
    assert table.choices("cold") == {0, 1, 2}  # empty trees: by chance
    table.send(0, "a", tokens=320)
    table.send(1, "b", tokens=160)
    assert table.choices("cold") == {2}  # the smallest tree
    table.send(2, "c", tokens=640)
    assert table.decide(table.request("a", "more", tokens=320)) == 0  # 20 of 40 blocks match
    assert table.decide(table.request("a", tokens=320)) == 0
    # over 0.3 is a match, a quarter is not
    table.send(0, "short", tokens=48)
    assert len(table.request("short", "x", "y", tokens=48).blocks(16)) == 9
    assert table.decide(table.request("short", "x", "y", tokens=48)) == 0  # 1/3
    assert table.decide(table.request("short", "x", "y", "z", tokens=48)) == 1  # 1/4
    # load decides only when both thresholds are passed
    table.load(64, 0, 0)
    assert table.decide(table.request("a", tokens=320)) == 0
    table.load(65, 0, 3)
    assert table.decide(table.request("a", tokens=320)) == 1
    table.load(200, 135, 180)
    assert table.decide(table.request("a", tokens=320)) == 0  # 200 is not over 1.5 × 135


def test_llm_d_weighs_match_kv_usage_and_queue() -> None:
    table = Table(LlmD(Random(1)))
    table.send(0, "a")
    a, b, c = table.nodes
    assert table.decide(table.request("a")) == 0
    a.waiting, b.waiting, c.waiting = 4, 2, 0
    a.kv_usage = 0.4
    # a: 3 + 2·0.6 + 0; b: 0 + 2 + 1; c: 0 + 2 + 2
    assert table.decide(table.request("a")) == 0
    a.kv_usage = 0.6
    # a: 3 + 0.8 = 3.8 against 4
    assert table.decide(table.request("a")) == 2
    assert table.choices("new") == {2}


def test_llm_d_precise_believes_events_only() -> None:
    table = Table(LlmD(Random(1), precise=True))
    request = table.send(0, "a")
    assert table.choices("a") == {0, 1, 2}
    table.peer.kv_events(table.nodes[1], 1, 0, stored(request, 10), 0.0)
    assert table.choices("a") == {1}
    table.peer.kv_events(table.nodes[1], 1, 1, [BlockRemoved(request.blocks(16)[:1], "GPU")], 0.0)
    assert table.choices("a") == {0, 1, 2}
    table.peer.kv_events(table.nodes[2], 1, 0, stored(request, 10), 0.0)
    table.peer.kv_events(table.nodes[2], 2, 0, stored(table.request("b"), 1), 0.0)  # another incarnation
    assert table.choices("a") == {0, 1, 2}


def test_dynamo_adds_prefill_in_flight_and_decode_blocks() -> None:
    table = Table(Dynamo(Random(1)))
    request = table.request("a")  # 10 blocks
    table.peer.kv_events(table.nodes[0], 1, 0, stored(request, 10), 0.0)
    # 0: 0 + 10; others: 10 + 10
    assert table.choices("a") == {0}
    first = table.send(0, "b")  # there: 10 blocks of prefill and 10 that decode
    # 0: max(0, 20 − 10) + 10 + 10 = 30; others 20
    assert table.choices("a") == {1, 2}
    table.peer.first_token(first, table.nodes[0], 0, 1.0)
    # 0: 0 + 10 + 10 = 20; others 20: a tie
    assert table.choices("a") == {0, 1, 2}
    table.peer.ended(first, table.nodes[0], 2.0)
    assert table.choices("a") == {0}
    shared = table.send(0, "a")
    table.peer.first_token(shared, table.nodes[0], 160, 1.0)
    # its blocks are there already: 0 + 10, none of them new
    assert table.choices("a") == {0}


def test_kubeai_keeps_a_key_home_until_home_is_over_its_share() -> None:
    table = Table(Kubeai(Random(1)), 4)
    home = table.decide(table.request("a", user="hello"))
    assert all(table.decide(table.request(f"x{n}", user="hello")) == home for n in range(20))
    assert len({table.decide(table.request("a", user=f"key {n}")) for n in range(60)}) == 4
    # 1.25 × (total + 1) / 4 with 3 each: 4.06, so 3 + 1 fits
    table.load(3, 3, 3, 3)
    assert table.decide(table.request("a", user="hello")) == home
    loads = [3, 3, 3, 3]
    loads[home] = 4  # 1.25 × 14 / 4 = 4.375 < 5
    table.load(*loads)
    away = table.decide(table.request("a", user="hello"))
    assert away != home
    assert table.decide(table.request("a", user="hello")) == away


def test_aibrix_leaves_the_match_for_balance() -> None:
    table = Table(Aibrix(Random(1)))
    table.send(0, "a")
    table.send(1, "a", "b")
    assert table.choices("a") == {0, 1}
    assert table.choices("a", "b") == {1}
    table.load(0, 1, 0)
    assert table.choices("a", times=20) == {0}  # the same match, fewer requests
    table.load(1, 8, 1)  # mean 3.3 + σ 3.3 < 8
    assert table.choices("a", "b", times=20) == {0}
    table.load(9, 9, 0)
    assert table.choices("a", times=20) == {2}
    table.load(1, 1, 0)
    assert table.choices("unseen", times=20) == {2}


def test_the_oracle_is_one_lru_over_everything() -> None:
    # three prompts of 10 blocks in turn: with room for all, every second visit hits all but the last block
    names = ["a", "b", "c"] * 4
    rate, count = hit_rate(iter([prompt(name, tokens=160, output=1) for name in names]), 100, 16)
    assert count == 12
    assert rate == pytest.approx(9 / 12 * 9 / 10)
    # with room for two of them, the classic: nothing is ever there when it is asked for
    rate, _ = hit_rate(iter([prompt(name, tokens=160, output=1) for name in names]), 20, 16)
    assert rate == 0
    words = ["multi_turn_chat", "turns=4", "spread=0", "think_s=1", "system_tokens=160", "message_tokens=80"]
    chat = choose([*words, "output_tokens=160"])
    rate, count = hit_rate(chat.arrive(1), 10_000, 16, limit=100)
    assert count == 100
    assert rate > 0.6


@pytest.mark.parametrize("name", ["sglang", "llm_d", "llm_d_precise", "dynamo", "kubeai", "aibrix"])
def test_no_peer_puts_a_cold_fleet_on_one_node(name: str) -> None:
    from warmroute.replay import contender

    peer = contender(name).peer(1)
    world = World(specs(4), NEAR, policy=peer, listener=peer)
    world.run(choose(["unique_batch", "prompt_tokens=200", "output_tokens=20", "rate=5"]).arrive(1), limit=100)
    assert all(sim.requests >= 10 for sim in world.nodes.values())
    assert world.tally.cached_tokens == 0
