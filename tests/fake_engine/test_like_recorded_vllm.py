"""The simulated engine stores, evicts and hits the same blocks as a real vLLM 0.32, step by step.

The recordings have single and concurrent requests, requests that arrive later, evictions, preemptions, cache resets,
chunked prefill and priorities. tests/real/test_engine_like_vllm.py makes them (WARMROUTE_RECORD=1).
"""

from __future__ import annotations

import pytest
from recorded_run import RECORDED, Recording, differences, load, simulate

NAMES = ["chunked", "plain", "priority"]


@pytest.fixture(scope="module", params=NAMES)
def recording(request: pytest.FixtureRequest) -> Recording:
    return load(RECORDED / f"{request.param}.json.gz")


@pytest.mark.parametrize(
    "settings",
    [{}, {"fast_forward": False}, {"every_token": True}],
    ids=["fast_forward", "single_steps", "every_token"],
)
def test_the_same_blocks_are_stored_evicted_and_hit(recording: Recording, settings: dict[str, bool]) -> None:
    assert differences(recording, simulate(recording, **settings)) == []


def test_the_recording_covers_evictions_preemptions_and_late_requests(recording: Recording) -> None:
    counts = recording.counts()
    assert counts["requests"] > 80 and counts["cached_tokens"] > 1000 and counts["cleared"]
    assert counts["removed"] > 5 * recording.config.num_blocks, "the recording fills the cache too few times"
    assert counts["preemptions"] > 10
    assert any(one.late for one in recording.rounds)


def test_differences_are_detected(recording: Recording) -> None:
    simulated = simulate(recording)
    step = next(step for one in simulated.rounds for step in one.steps if len(step) > 1)
    step[0], step[1] = step[1], step[0]
    simulated.rounds[0].requests[0].cached_tokens += 32
    assert len(differences(recording, simulated)) == 2
