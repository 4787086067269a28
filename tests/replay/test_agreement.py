"""Replay agrees with real processes. bench/agreement.py also checks the times, on an idle machine."""

from __future__ import annotations

import pytest
from agreement_trials import Comparison, Trial, run_both

RAG = "rag documents=20 topics=6 per_request=2 document_tokens=800 output_tokens=4 rate=1".split()  # noqa: SIM905
CHATS = "multi_turn_chat systems=3 system_tokens=600 turns=3 message_tokens=500 output_tokens=8 think_s=0".split()  # noqa: SIM905


def assert_agreement(found: Comparison) -> None:
    assert found.live["errors"] == {}
    assert found.live["finished"] == found.replay["finished"]
    assert found.hit_rate_points == pytest.approx(0.0, abs=1.0)
    # Machines that run tests are busy and the engines are fast, so the upper limit is loose.
    assert -0.05 < found.ttft_difference("p50") < 4.0


async def test_sequential_requests_have_the_same_hits_live_and_in_replay() -> None:
    assert_agreement(await run_both(Trial(workload=tuple(RAG), policy="round_robin", limit=30, speed=10.0)))


@pytest.mark.parametrize("policy", ["prefix_hash", "session"])
async def test_conversations_hit_their_cache_live_as_in_replay(policy: str) -> None:
    found = await run_both(Trial(workload=tuple(CHATS), policy=policy, concurrency=1, limit=24, speed=10.0))
    assert_agreement(found)
    assert found.replay["hit_rate"] > 0.5


async def test_price_with_kv_events_gains_hits_live_as_in_replay() -> None:
    """No engine can hold all conversations. The order of requests is random in both."""
    chats = "multi_turn_chat systems=2 system_tokens=64 turns=5 message_tokens=400 output_tokens=4 think_s=3".split()  # noqa: SIM905

    def trial(policy: str) -> Trial:
        return Trial(workload=tuple(chats), policy=policy, blocks=600, concurrency=6, limit=60, speed=10.0, events=True)

    round_robin, price = await run_both(trial("round_robin")), await run_both(trial("price"))
    assert round_robin.live["errors"] == price.live["errors"] == {}
    expected = price.replay["hit_rate"] - round_robin.replay["hit_rate"]
    assert expected > 0.1
    assert price.live["hit_rate"] - round_robin.live["hit_rate"] > 0.5 * expected
