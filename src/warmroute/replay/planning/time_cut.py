"""Cuts recorded traffic by time if it has too many requests for a replay, with caches as warm as they were at the cut.

    before the cut   the last turn of each conversation: its prompt has all turns before it, so it fills the caches with
                     what they held. Those of conversations that go on come first, then the latest ones. They come in
                     their order at equal distances: each prefills a whole prompt, and most came shortly before the cut.
    after the cut    every request

A cut alone would begin with empty caches: a conversation that has lasted for minutes would have its whole prompt
prefilled again, and the fleet would look too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warmroute.replay.planning.recorded_request import RecordedRequest

WARM_UP_SHARE: Final = 0.25
"""Of a replay's requests: at least as many fill the caches with conversations that have ended, if there are as many."""


def cut(requests: Sequence[RecordedRequest], most: int) -> tuple[list[RecordedRequest], float]:
    """Return at most `most` requests in the order of their arrival, and the time of the cut. `requests`: likewise."""
    count, ended_wanted = len(requests), int(WARM_UP_SHARE * most)
    begun = _distinct_before(requests)
    unfinished = _distinct_before(requests[::-1])[::-1]
    total = begun[count]
    first = next(
        at
        for at in range(count + 1)
        if (count - at) + (begun[at] + unfinished[at] - total) + min(total - unfinished[at], ended_wanted) <= most
    )
    going_on = {one.conversation for one in requests[first:]}
    last_turns = {one.conversation: one for one in requests[:first]}
    kept = [one for one in last_turns.values() if one.conversation in going_on]
    ended = [one for one in last_turns.values() if one.conversation not in going_on]
    ended.sort(key=lambda one: one.at_ms)
    room = max(0, most - (count - first) - len(kept))
    kept += ended[len(ended) - min(room, len(ended)) :]
    kept.sort(key=lambda one: one.at_ms)
    cut_ms, first_ms = requests[min(first, count - 1)].at_ms, requests[0].at_ms
    distance_ms = (cut_ms - first_ms) / max(1, len(kept))
    spread = [RecordedRequest(one.prompt, first_ms + at * distance_ms, one.conversation) for at, one in enumerate(kept)]
    return [*spread, *requests[first:]], cut_ms


def _distinct_before(requests: Sequence[RecordedRequest]) -> list[int]:
    """Return how many conversations the first 0, 1, 2, … requests have."""
    seen: set[int] = set()
    counts = [0]
    for one in requests:
        seen.add(one.conversation)
        counts.append(len(seen))
    return counts
