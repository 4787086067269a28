"""Other routers' rules give what their own tests and sources state. Each case names the version and the source.

A score of the other router cannot be read here, but its sum with another score can be made equal on all nodes: then any
node may be chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from peer_fleet import Fleet, stored
from small_worlds import specs

from warmroute.lab.peers.cache_rules import Sglang, Smg
from warmroute.lab.peers.dynamo import Dynamo
from warmroute.lab.peers.llm_d import SPECULATIVE_S, LlmD, LlmDAffinity, LlmDPrecise
from warmroute.lab.replay_setup import PEERS, parse_policy
from warmroute.lab.run import Setup, replay
from warmroute.lab.workloads import parse_workload

# The files of each router, at the commit where they were read. https://github.com/ comes before each.
LLM_D = "llm-d/llm-d-router/blob/ebab687927f5331c1b39defcb579a07951bce56c/"  # 0.10, August 2026
LLM_D_SCORERS = LLM_D + "pkg/epp/framework/plugins/scheduling/scorer/"
LLM_D_FILTERS = LLM_D + "pkg/epp/framework/plugins/scheduling/filter/"
LLM_D_GUIDES = "llm-d/llm-d/blob/"
SGLANG = "sgl-project/sglang/blob/cce0a1244b5a3ee60411fb403f65f856a1d012f0/sgl-model-gateway/"  # 0.5.18 + 1 month
SMG = "smg-project/smg/blob/v1.9.0/"
VLLM_ROUTER = "vllm-project/router/blob/16917f49522f1ef27770cd7994626eaed8b9f793/"  # main, 2026
DYNAMO = "ai-dynamo/dynamo/blob/bb3100e6114f6647494be27e1a8ba04dea410cb8/lib/kv-router/"  # 1.5 in development
DYNAMO_1_4 = "ai-dynamo/dynamo/blob/v1.4.1/lib/kv-router/"
LITELLM = "BerriAI/litellm/blob/b0fd3e1e3070ed5068837ffa4efb0e1afc0517e6/"  # 1.97.0


def source(*files: str) -> pytest.MarkDecorator:
    """Name the files that a test's numbers come from."""
    return pytest.mark.source(*(f"https://github.com/{file}" for file in files))


def defaults(peer: Any) -> dict[str, Any]:
    return {
        one.name: one.default
        for one in inspect.signature(peer).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }


def balance(fleet: Fleet, scores: Sequence[float]) -> None:
    """Give each node a free KV memory that makes up for its expected score, so that all sums are equal."""
    for node, score in zip(fleet.nodes, scores, strict=True):
        node.kv_usage = score


ALL = {0, 1, 2}


# llm-d


@source(LLM_D_SCORERS + "activerequest/active_request_test.go")
@pytest.mark.parametrize(
    ("loads", "scores"),
    [((0, 0, 0), (1.0, 1.0, 1.0)), ((3, 0, 6), (0.5, 1.0, 0.0)), ((4, 0, 1), (0.0, 1.0, 0.75))],
)
def test_llm_ds_active_request_scorer(loads: tuple[int, ...], scores: tuple[float, ...]) -> None:
    fleet = Fleet(LlmD(Random(1), prefix=0, kv=1, short_queue=0, active=1, no_hit_lru=0))
    fleet.load(*loads)
    balance(fleet, scores)
    assert fleet.choices("a") == ALL
    fleet.nodes[1].kv_usage += 0.01
    assert fleet.choices("a") == {0, 2}


@source(LLM_D_SCORERS + "queuedepth/queue_test.go", LLM_D_SCORERS + "kvcacheutilization/kvcache_utilization.go")
@pytest.mark.parametrize(
    ("queues", "scores"), [((10, 5, 0), (0.0, 0.5, 1.0)), ((5, 5, 5), (1.0, 1.0, 1.0)), ((0, 0, 0), (1.0, 1.0, 1.0))]
)
def test_llm_ds_queue_scorer(queues: tuple[int, ...], scores: tuple[float, ...]) -> None:
    fleet = Fleet(LlmD(Random(1), prefix=0, kv=1, short_queue=1, no_hit_lru=0))
    for node, queue in zip(fleet.nodes, queues, strict=True):
        node.waiting = queue
    balance(fleet, scores)
    assert fleet.choices("a") == ALL


@source(LLM_D_SCORERS + "nohitlru/no_hit_lru_test.go")
def test_llm_ds_no_hit_lru_scorer() -> None:
    fleet = Fleet(LlmD(Random(1), prefix=0, kv=1, short_queue=0, no_hit_lru=1))
    balance(fleet, (1.0, 0.5, 0.0))  # a cold request where no node has had one
    assert fleet.choices("cold") == ALL
    fleet.send(0, "a")
    balance(fleet, (0.5, 0.5, 0.5))  # a hit: the same for all
    assert fleet.choices("a") == ALL


@source(LLM_D_SCORERS + "prefix/plugin.go", LLM_D_SCORERS + "prefix/plugin_test.go")
def test_llm_ds_prefix_scorer_is_the_matched_fraction_of_the_blocks() -> None:
    fleet = Fleet(LlmDPrecise(Random(1), prefix=1, kv=1, short_queue=0, no_hit_lru=0))
    request = fleet.request("a", tokens=160)
    for node, blocks in zip(fleet.nodes, (10, 5, 0), strict=True):
        fleet.peer.kv_events(node, 1, 0, stored(request, blocks), 0.0)
    balance(fleet, (1.0, 0.5, 0.0))
    assert {fleet.decide(request) for _ in range(60)} == ALL


@source(
    LLM_D_GUIDES + "076e65dcd894907839be68cac7a4b235a1406166/guides/precise-prefix-cache-routing/router/"
    "precise-prefix-cache-routing.values.yaml",
    LLM_D_GUIDES
    + "126f65d65f425be25f9f23a8e495cc0070f24421/guides/precise-prefix-cache-aware/gaie-kv-events/values.yaml",
    LLM_D + "test/perf/config/router-configs/optimized-baseline.yaml",
    LLM_D + "pkg/epp/framework/plugins/requestcontrol/dataproducer/preciseprefixcache/prerequest.go",
)
def test_llm_ds_weights_are_those_of_its_guides() -> None:
    weights = {"prefix": 3.0, "kv": 2.0, "short_queue": 2.0, "active": 0.0, "no_hit_lru": 2.0}
    for peer in (LlmD, LlmDPrecise):
        assert weights.items() <= defaults(peer).items()
    assert SPECULATIVE_S == defaults(LlmDPrecise)["speculative_s"] == 2.0
    # January 2026: 3 : 2 : 2 alone, and no speculative entries.
    assert parse_policy("llm_d_precise:no_hit_lru=0,speculative_s=0").peer(1) is not None


def affinity(matches: Sequence[int], tokens: Sequence[int], **more: Any) -> set[int]:
    """Return the choices for a prompt of 100 blocks: of each node, its matched blocks and prompt tokens in flight."""
    fleet = Fleet(LlmDAffinity(Random(1), **more), len(matches))
    request = fleet.request("a", tokens=1600)
    for at, (node, blocks) in enumerate(zip(fleet.nodes, matches, strict=True)):
        fleet.peer.kv_events(node, 1, 0, stored(request, blocks), 0.0)
        if tokens[at]:
            fleet.send(at, f"other {at}", tokens=tokens[at])
    return {fleet.decide(request) for _ in range(60)}


@source(LLM_D_FILTERS + "prefixcacheaffinity/plugin_test.go", LLM_D_SCORERS + "tokenload/token_load.go")
def test_llm_ds_affinity_filter() -> None:
    # None has 0.8: all stay, and the fewest uncached tokens win.
    assert affinity((10, 20, 50), (0, 0, 0)) == {2}
    assert affinity((10, 20, 50), (0, 0, 640)) == {1}
    # The nodes with 0.8 or more stay.
    assert affinity((90, 85, 10), (1600, 0, 0)) == {1}
    assert affinity((80, 79, 10), (3200, 0, 0)) == {0}
    # 500 against 50 ms of prefill: 100 ms more is too much, 1,000 ms is not. Tokens and speed are tenfold.
    slow = {"prefill_tokens_per_s": 10_000.0}
    assert affinity((90, 10), (5000, 500), max_penalty_s=0.1, **slow) == {1}
    assert affinity((90, 10), (5000, 500), max_penalty_s=1.0, **slow) == {0}


@source(
    LLM_D_FILTERS + "prefixcacheaffinity/plugin.go",
    LLM_D + "pkg/epp/framework/plugins/requestcontrol/dataproducer/inflightload/README.md",
    LLM_D_GUIDES + "8052f2209e2976ba5213e56bde50255fc73badce/guides/precise-prefix-cache-routing/router/"
    "precise-prefix-cache-routing.values.yaml",
)
def test_llm_ds_affinity_counts_uncached_tokens_until_the_first_token() -> None:
    assert defaults(LlmDAffinity) == {
        "kv_events": True, "threshold": 0.8, "max_penalty_s": 18.0, "prefill_tokens_per_s": 15928.0,
    }  # fmt: skip
    fleet = Fleet(LlmDAffinity(Random(1)))
    sent = [fleet.send(at, f"a{at}", tokens=160) for at in (0, 1)]
    assert fleet.choices("b") == {2}
    fleet.peer.first_token(sent[0], fleet.nodes[0], 0, 1.0)
    assert fleet.choices("b") == {0, 2}
    fleet.peer.request_ended(sent[0], fleet.nodes[0], 2.0)
    fleet.peer.request_ended(sent[1], fleet.nodes[1], 2.0)
    assert fleet.choices("b") == ALL


# SGLang's router, vllm-router and SMG


@source(
    SGLANG + "bindings/python/src/sglang_router/router_args.py",
    SMG + "bindings/python/src/smg/router_args.py",
)
def test_the_thresholds_of_cache_aware_are_the_launchers() -> None:
    shared = {"cache_threshold": 0.3, "balance_abs": 64, "balance_rel": 1.5}
    for peer in (Sglang, Smg):
        assert shared.items() <= defaults(peer).items()
    assert defaults(Sglang)["tree_tokens"] * 4 == 2**26


TIGHT = {"cache_threshold": 0.5, "balance_abs": 5, "balance_rel": 2.0}


@source(
    SGLANG + "src/policies/cache_aware.rs",
    VLLM_ROUTER + "src/policies/cache_aware.rs",
    SMG + "model_gateway/src/policies/cache_aware.rs",
)
@pytest.mark.parametrize("peer", [Sglang, Smg])
def test_an_unbalanced_fleet_gets_no_cache_affinity(peer: Any) -> None:
    fleet = Fleet(peer(Random(1), **TIGHT), 2)
    fleet.send(0, "test")
    fleet.load(20, 0)
    assert fleet.choices("test") == {1}
    fleet = Fleet(peer(Random(1), **TIGHT), 5)
    fleet.load(50, 0, 0, 0, 0)
    assert fleet.choices("same prompt") == {1, 2, 3, 4}


@source(SGLANG + "src/policies/cache_aware.rs", VLLM_ROUTER + "src/policies/cache_aware.rs")
def test_sglang_sends_a_prompt_and_its_beginning_to_the_same_node_and_spreads_cold_ones() -> None:
    fleet = Fleet(Sglang(Random(1)), 5)
    assert fleet.choices("never seen") == {0, 1, 2, 3, 4}
    fleet.send(3, "hello", "world")
    fleet.load(0, 0, 0, 9, 0)
    assert fleet.choices("hello", "world") == fleet.choices("hello") == {3}
    # A match of cache_threshold or less is a miss: the least loaded.
    fleet.load(1, 0, 1, 9, 1)
    assert fleet.choices("hello", "x", "y", "z") == {1}


@source(SMG + "model_gateway/src/policies/cache_aware.rs")
def test_smg_takes_the_longest_overlap_then_the_lower_load() -> None:
    fleet = Fleet(Smg(Random(1)))
    request = fleet.request("a", tokens=48)
    fleet.peer.kv_events(fleet.nodes[0], 1, 0, stored(request, 3), 0.0)
    fleet.peer.kv_events(fleet.nodes[1], 1, 0, stored(request, 1), 0.0)
    assert fleet.decide(request) == 0
    # Any overlap counts: 1 of 9 blocks.
    assert fleet.choices("b") == ALL
    long = fleet.request("a", "more", "and more", tokens=48)
    fleet.load(5, 0, 0)
    assert fleet.decide(long) == 0
    fleet.peer.kv_events(fleet.nodes[1], 1, 1, stored(request, 3), 0.0)
    assert fleet.decide(long) == 1
    # No overlap: the least loaded, then the one with the fewest requests so far.
    fleet.load(0, 0, 0)
    for at in (0, 0, 1):
        fleet.send(at, f"other {at}")
    assert fleet.choices("cold") == {2}


@source(SMG + "model_gateway/src/policies/cache_aware.rs")
def test_smg_without_kv_events_needs_a_match_of_the_threshold() -> None:
    fleet = Fleet(Smg(Random(1), kv_events=False))
    fleet.send(0, "a")
    fleet.load(3, 0, 1)
    assert fleet.choices("a", "x") == {0}
    assert fleet.choices("a", "x", "y", "z") == {1}


# Dynamo


@source(DYNAMO + "src/scheduling/selector/default.rs", DYNAMO_1_4 + "src/scheduling/selector.rs")
def test_dynamo_scales_prefill_after_the_overlap_and_adds_decode_blocks() -> None:
    # 4 blocks of prompt, 2 of them on node 0, which decodes 3 others: 2 · 2 + 3 against 2 · 4.
    for scale, chosen in ((2.0, {0}), (1.0, {1})):
        fleet = Fleet(Dynamo(Random(1), overlap_weight=scale), 2)
        fleet.peer.kv_events(fleet.nodes[0], 1, 0, stored(fleet.request("a", tokens=64), 2), 0.0)
        decoding = fleet.send(0, "other", tokens=48)
        fleet.peer.first_token(decoding, fleet.nodes[0], 0, 0.0)
        assert {fleet.decide(fleet.request("a", tokens=64)) for _ in range(60)} == chosen


@source(DYNAMO + "src/scheduling/selector/default.rs", DYNAMO_1_4 + "src/scheduling/config.rs")
def test_dynamo_breaks_ties_at_random_and_has_no_queue_by_default() -> None:
    fleet = Fleet(Dynamo(Random(1)))
    assert fleet.choices("a") == ALL
    assert defaults(Dynamo)["overlap_weight"] == 1.0
    assert not fleet.peer.queues(fleet.request("a"), 0.0)


# LiteLLM


@source(LITELLM + "litellm/router_strategy/simple_shuffle.py", LITELLM + "litellm/router_strategy/least_busy.py")
def test_litellms_default_is_a_random_choice_which_replay_has_as_random() -> None:
    """`simple-shuffle` without weights draws each deployment with the same chance; `least-busy` is `least_loaded`."""
    assert not any(name.startswith("litellm") for name in PEERS)
    workload, policy = parse_workload(["shared_system_prompts"]), parse_policy("random")
    run = replay(Setup(workload=workload, nodes=tuple(specs(3)), policy=policy, rate=20.0, limit=600))
    assert all(160 <= node["requests"] <= 240 for node in run["nodes"])  # 200 ± 3.5 σ
