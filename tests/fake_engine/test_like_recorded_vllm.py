"""The simulated engine does what a real vLLM 0.32 was recorded doing: the same blocks stored, removed and hit.

Step by step and in order, over requests alone and together, late ones, evictions, preemptions, resets, chunked prefill
and priorities. The recordings are made by tests/real/test_engine_like_vllm.py (WARMROUTE_RECORD=1).
"""

from __future__ import annotations

import pytest
from recorded_run import RECORDED, Recording, differences, load, simulated

NAMES = ["chunked", "plain", "priority"]


@pytest.fixture(scope="module", params=NAMES)
def recording(request: pytest.FixtureRequest) -> Recording:
    return load(RECORDED / f"{request.param}.json.gz")


@pytest.mark.parametrize("settings", [{}, {"fast_forward": False}, {"every_token": True}], ids=["fast", "slow", "told"])
def test_the_same_blocks_are_stored_removed_and_hit(recording: Recording, settings: dict[str, bool]) -> None:
    assert differences(recording, simulated(recording, **settings)) == []


def test_the_recording_is_worth_comparing_with(recording: Recording) -> None:
    counts = recording.counts()
    assert counts["requests"] > 80 and counts["cached_tokens"] > 1000 and counts["cleared"]
    assert counts["removed"] > 5 * recording.config.num_blocks, "the cache was not filled many times over"
    assert counts["preemptions"] > 10
    assert any(one.late for one in recording.rounds)


def test_a_difference_is_found(recording: Recording) -> None:
    ours = simulated(recording)
    step = next(step for one in ours.rounds for step in one.steps if len(step) > 1)
    step[0], step[1] = step[1], step[0]
    ours.rounds[0].requests[0].cached_tokens += 32
    assert len(differences(recording, ours)) == 2
