"""The policies of other routers on hand-made cases."""

from __future__ import annotations

from random import Random

import pytest
from peer_fleet import Fleet, stored
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.lab.engine.blocks import BlockRemoved
from warmroute.lab.peers import Holders, RoutedBlocks
from warmroute.lab.peers.cache_rules import Aibrix, Kubeai, Sglang
from warmroute.lab.peers.dynamo import Dynamo
from warmroute.lab.peers.llm_d import LlmD, LlmDPrecise
from warmroute.lab.replay_setup import PEERS, parse_policy
from warmroute.lab.run import single_cache_hit_rate
from warmroute.lab.workloads import parse_workload
from warmroute.lab.world import World


def test_holders_count_leading_blocks_only() -> None:
    fleet = Fleet(Kubeai(Random(1)), 3)
    holders = Holders()
    a, b, c = fleet.nodes
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


def test_routed_blocks_evict_the_tail_of_the_least_recent_prompt_first() -> None:
    fleet = Fleet(Kubeai(Random(1)), 1)
    node = fleet.nodes[0]
    routed = RoutedBlocks(6)
    routed.add(node, [1, 2, 3])
    routed.add(node, [7, 8, 9])
    routed.add(node, [1, 2])
    assert routed.size(node) == 6
    routed.add(node, [20, 21])
    assert routed.size(node) == 6
    assert routed.depths([1, 2, 3], [node]) == [2]
    assert routed.depths([7, 8, 9], [node]) == [2]
    routed.clear(node)
    assert routed.size(node) == 0


def test_sglang_prefers_the_match_then_the_least_loaded_node_unless_out_of_balance() -> None:
    fleet = Fleet(Sglang(Random(1)))
    assert fleet.choices("cold") == {0, 1, 2}  # all are idle: a random node
    fleet.send(0, "a", tokens=320)
    fleet.send(2, "c", tokens=640)
    fleet.load(2, 3, 1)
    assert fleet.choices("cold") == {2}  # the least loaded, though its tree is the largest
    assert fleet.decide(fleet.request("a", "more", tokens=320)) == 0  # 20 of 40 blocks match
    assert fleet.decide(fleet.request("a", tokens=320)) == 0
    # more than 0.3 of the prompt is a match, a quarter is not
    fleet.send(0, "short", tokens=48)
    assert len(fleet.request("short", "x", "y", tokens=48).blocks(16)) == 9
    assert fleet.decide(fleet.request("short", "x", "y", tokens=48)) == 0  # 1/3
    assert fleet.decide(fleet.request("short", "x", "y", "z", tokens=48)) == 2  # 1/4
    # load decides only above both thresholds
    fleet.load(64, 0, 0)
    assert fleet.decide(fleet.request("a", tokens=320)) == 0
    fleet.load(65, 0, 3)
    assert fleet.decide(fleet.request("a", tokens=320)) == 1
    fleet.load(200, 135, 180)
    assert fleet.decide(fleet.request("a", tokens=320)) == 0  # 200 is not over 1.5 × 135


def test_sglang_with_the_older_rule_sends_a_miss_to_the_smallest_tree() -> None:
    fleet = Fleet(Sglang(Random(1), miss_by_tree=True))
    fleet.send(0, "a", tokens=320)
    fleet.send(1, "b", tokens=160)
    fleet.load(0, 0, 5)
    assert fleet.choices("cold") == {2}


def test_llm_d_weighs_match_kv_usage_and_queue() -> None:
    fleet = Fleet(LlmD(Random(1)))
    fleet.send(0, "a")
    a, b, c = fleet.nodes
    assert fleet.decide(fleet.request("a")) == 0
    a.waiting, b.waiting, c.waiting = 4, 2, 0
    a.kv_usage = 0.4
    # a: 3 + 2·0.6 + 0; b: 0 + 2 + 1; c: 0 + 2 + 2; no-hit-lru: 1 for all, since one of them has a match
    assert fleet.decide(fleet.request("a")) == 0
    a.kv_usage = 0.6
    # a: 3 + 0.8 = 3.8 against 4
    assert fleet.decide(fleet.request("a")) == 2


def test_llm_d_sends_cold_requests_to_the_node_that_got_none_for_the_longest_time() -> None:
    fleet = Fleet(LlmD(Random(1)))
    got = []
    for number in range(7):
        request = fleet.request(f"cold {number}")
        got.append(fleet.decide(request))
        fleet.peer.request_sent(request, fleet.nodes[got[-1]], 0.0)
    assert sorted(got[:3]) == [0, 1, 2]
    assert got[3:6] == got[:3]
    # a match changes nobody's turn
    fleet.peer.request_sent(fleet.request("cold 0", "more"), fleet.nodes[got[1]], 0.0)
    assert fleet.decide(fleet.request("cold 7")) == got[1]
    # the queue counts as much: 2 · 1 against 2 · 0.5
    fleet.nodes[got[1]].waiting = 3
    assert fleet.decide(fleet.request("cold 8")) == got[2]


def test_llm_d_precise_uses_kv_events_and_what_was_sent_in_the_last_two_seconds() -> None:
    fleet = Fleet(LlmDPrecise(Random(1)))
    request = fleet.request("a")
    fleet.peer.kv_events(fleet.nodes[1], 1, 0, stored(request, 10), 0.0)
    assert fleet.choices("a") == {1}
    fleet.nodes[1].waiting = 8
    fleet.nodes[1].kv_usage = 0.5
    # 1: 3 · 1 + 2 · 0.5 + 2 · 0; others: 2 · 1 + 2 · 1: a tie
    assert fleet.choices("a") == {0, 1, 2}
    fleet.nodes[0].waiting = 4
    assert fleet.choices("a") == {1, 2}
    fleet.nodes[0].waiting = fleet.nodes[1].waiting = 0
    fleet.nodes[1].kv_usage = 0.0
    fleet.peer.kv_events(fleet.nodes[1], 1, 1, [BlockRemoved(request.blocks(16)[:1], "GPU")], 0.0)
    assert fleet.choices("a") == {0}  # a cold request: the first of the nodes that never got one
    fleet.peer.kv_events(fleet.nodes[2], 1, 0, stored(request, 10), 0.0)
    assert fleet.choices("a") == {2}
    fleet.peer.kv_events(fleet.nodes[2], 2, 0, stored(fleet.request("b"), 1), 0.0)  # another incarnation
    assert fleet.choices("a") == {0}
    fleet.peer.request_sent(fleet.request("x"), fleet.nodes[2], 0.0)
    assert fleet.choices("x", now_s=1.9) == {2}
    assert fleet.choices("x", now_s=2.1) == {0}


def test_dynamo_adds_prefill_in_flight_and_decode_blocks() -> None:
    fleet = Fleet(Dynamo(Random(1)))
    request = fleet.request("a")  # 10 blocks
    fleet.peer.kv_events(fleet.nodes[0], 1, 0, stored(request, 10), 0.0)
    # 0: 0 + 10; others: 10 + 10
    assert fleet.choices("a") == {0}
    first = fleet.send(0, "b")  # 10 blocks of prefill and 10 decode blocks on that node
    # 0: max(0, 20 − 10) + 10 + 10 = 30; others 20
    assert fleet.choices("a") == {1, 2}
    fleet.peer.first_token(first, fleet.nodes[0], 0, 1.0)
    # 0: 0 + 10 + 10 = 20; others 20: a tie
    assert fleet.choices("a") == {0, 1, 2}
    fleet.peer.request_ended(first, fleet.nodes[0], 2.0)
    assert fleet.choices("a") == {0}
    shared = fleet.send(0, "a")
    fleet.peer.first_token(shared, fleet.nodes[0], 160, 1.0)
    # its blocks are already there: 0 + 10, none is new
    assert fleet.choices("a") == {0}


@pytest.mark.parametrize(("policy", "order"), [("dynamo_fcfs", "long short"), ("dynamo_wspt", "short long")])
def test_dynamo_queues_requests_while_every_node_is_busy(policy: str, order: str) -> None:
    fleet = Fleet(parse_policy(f"{policy}:queue_threshold=0.01").peer(1), 2)  # 82 tokens
    first = fleet.send(0, "a")
    assert not fleet.peer.queues(fleet.request("new"), 0.0)  # the other node is idle
    fleet.send(1, "b")
    fleet.peer.kv_events(fleet.nodes[0], 1, 0, stored(fleet.request("short"), 9), 0.0)
    requests = {name: fleet.request(name) for name in ("long", "gone", "short", "longest")}
    for name in ("long", "gone", "short"):
        assert fleet.peer.queues(requests[name], 0.0)
    fleet.peer.client_left(requests["gone"])
    assert fleet.peer.next_queued(0.0) is None
    fleet.peer.first_token(first, fleet.nodes[0], 0, 1.0)
    requests["longest"] = fleet.request("longest", tokens=320)
    assert fleet.peer.queues(requests["longest"], 1.0)  # nobody overtakes the queue
    for name in (*order.split(), "longest"):
        assert fleet.peer.next_queued(1.0) is requests[name]
    assert fleet.peer.next_queued(1.0) is None
    assert not fleet.peer.queues(fleet.request("new"), 1.0)


@pytest.mark.parametrize("policy", ["dynamo_fcfs", "dynamo_wspt"])
def test_a_run_with_dynamos_queue_answers_every_request_or_sees_its_client_leave(policy: str) -> None:
    peer = parse_policy(f"{policy}:queue_threshold=0.1").peer(1)
    world = World(specs(2), NEAR, policy=peer, listener=peer)
    prompts = [prompt(f"p{n}", tokens=1600, at_ms=n, output=20) for n in range(40)]
    for impatient in prompts[20:25]:
        impatient.patience_ms = 1.0
    world.run(iter(prompts))
    assert (world.results.total("finished"), world.results.total("left")) == (35, 5)
    assert_all_requests_ended(world)


def test_kubeai_keeps_a_key_on_its_node_until_the_node_is_overloaded() -> None:
    fleet = Fleet(Kubeai(Random(1)), 4)
    home = fleet.decide(fleet.request("a", user="hello"))
    assert all(fleet.decide(fleet.request(f"x{n}", user="hello")) == home for n in range(20))
    assert len({fleet.decide(fleet.request("a", user=f"key {n}")) for n in range(60)}) == 4
    # 1.25 × (total + 1) / 4 with 3 each: 4.06, so 3 + 1 fits
    fleet.load(3, 3, 3, 3)
    assert fleet.decide(fleet.request("a", user="hello")) == home
    loads = [3, 3, 3, 3]
    loads[home] = 4  # 1.25 × 14 / 4 = 4.375 < 5
    fleet.load(*loads)
    away = fleet.decide(fleet.request("a", user="hello"))
    assert away != home
    assert fleet.decide(fleet.request("a", user="hello")) == away


def test_aibrix_prefers_balance_to_the_match() -> None:
    fleet = Fleet(Aibrix(Random(1)))
    fleet.send(0, "a")
    fleet.send(1, "a", "b")
    assert fleet.choices("a") == {0, 1}
    assert fleet.choices("a", "b") == {1}
    fleet.load(0, 1, 0)
    assert fleet.choices("a", times=20) == {0}  # the same match, fewer requests
    fleet.load(1, 17, 1)
    assert fleet.choices("a", "b", times=20) == {1}  # 17 − 1 is no imbalance, and 17 ≤ 6.3 + 2 · 9.2
    fleet.load(1, 18, 1)
    assert fleet.choices("a", "b", times=20) == {0}  # of the least loaded nodes, the one with a match
    fleet.load(18, 18, 1)
    assert fleet.choices("a", times=20) == {2}
    fleet.load(1, 1, 0)
    assert fleet.choices("unseen", times=20) == {2}


def test_aibrix_leaves_a_match_on_a_node_far_above_the_mean() -> None:
    fleet = Fleet(Aibrix(Random(1)), 8)
    fleet.send(0, "a")
    fleet.load(16, 0, 0, 0, 0, 0, 0, 0)  # 16 > mean 2 + 2 · σ 5.7
    assert 0 not in fleet.choices("a")
    fleet.load(16, 6, 6, 6, 6, 6, 6, 6)  # 16 > 7.25 + 2 · 3.5
    assert 0 not in fleet.choices("a")
    fleet.load(16, 0, 14, 0, 14, 0, 14, 0)
    assert fleet.choices("a") == {0}


def test_the_oracle_is_one_lru_cache() -> None:
    # three prompts of 10 blocks in turn: with room for all, each repetition hits all but the last block
    names = ["a", "b", "c"] * 4
    rate, count = single_cache_hit_rate(iter([prompt(name, tokens=160, output=1) for name in names]), 100, 16)
    assert count == 12
    assert rate == pytest.approx(9 / 12 * 9 / 10)
    # with room for two of them, LRU never hits
    rate, _ = single_cache_hit_rate(iter([prompt(name, tokens=160, output=1) for name in names]), 20, 16)
    assert rate == 0
    words = ["multi_turn_chat", "turns=4", "spread=0", "think_s=1", "system_tokens=160", "message_tokens=80"]
    chat = parse_workload([*words, "output_tokens=160"])
    rate, count = single_cache_hit_rate(chat.arrivals(1), 10_000, 16, limit=100)
    assert count == 100
    assert rate > 0.6


@pytest.mark.parametrize("name", sorted(PEERS))
def test_no_policy_sends_all_unique_prompts_to_one_node(name: str) -> None:
    peer = parse_policy(name).peer(1)
    world = World(specs(4), NEAR, policy=peer, listener=peer)
    world.run(
        parse_workload(["unique_batch", "prompt_tokens=200", "output_tokens=20", "rate=5"]).arrivals(1), limit=100
    )
    assert all(sim.requests >= 10 for sim in world.nodes.values())
    assert world.results.cached_tokens == 0
