"""Virtual time and real time agree. bench/agreement.py holds the times to their bar too, on a quiet machine."""

from __future__ import annotations

import pytest
from agreement_trials import Both, Trial, both

RAG = "rag documents=20 topics=6 per_request=2 document_tokens=800 output_tokens=4 rate=1".split()  # noqa: SIM905
CHATS = "multi_turn_chat systems=3 system_tokens=600 turns=3 message_tokens=500 output_tokens=8 think_s=0".split()  # noqa: SIM905


def agrees(found: Both) -> None:
    assert found.live["errors"] == {}
    assert found.live["finished"] == found.virtual["finished"]
    assert found.hit_rate_points == pytest.approx(0.0, abs=1.0)
    # Machines that run tests are busy, and the engines are fast: never sooner, and not out of all proportion.
    assert -0.05 < found.ttft_off("p50") < 4.0


async def test_requests_in_order_go_the_same_way_in_real_time() -> None:
    agrees(await both(Trial(workload=tuple(RAG), policy="round_robin", limit=30, speed=10.0)))


@pytest.mark.parametrize("policy", ["prefix_hash", "session"])
async def test_conversations_find_their_node_and_its_cache_in_real_time(policy: str) -> None:
    found = await both(Trial(workload=tuple(CHATS), policy=policy, concurrency=1, limit=24, speed=10.0))
    agrees(found)
    assert found.virtual["hit_rate"] > 0.5


async def test_prices_by_kv_events_are_worth_as_much_in_real_time() -> None:
    """Conversations on engines too small to hold all of them each; who comes when is a matter of chance in both."""
    talks = "multi_turn_chat systems=2 system_tokens=64 turns=5 message_tokens=400 output_tokens=4 think_s=3".split()  # noqa: SIM905

    def trial(policy: str) -> Trial:
        return Trial(workload=tuple(talks), policy=policy, blocks=600, concurrency=6, limit=60, speed=10.0, events=True)

    turns, price = await both(trial("round_robin")), await both(trial("price"))
    assert turns.live["errors"] == price.live["errors"] == {}
    expected = price.virtual["hit_rate"] - turns.virtual["hit_rate"]
    assert expected > 0.1
    assert price.live["hit_rate"] - turns.live["hit_rate"] > 0.5 * expected
