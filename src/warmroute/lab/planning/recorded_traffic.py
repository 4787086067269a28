"""Recorded traffic as a sample that fits into a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from warmroute.lab.engine.blocks import mix64
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.fleet_plan import RECENT_SHARE

# One request of the recorded traffic.


class RecordedRequest(msgspec.Struct, gc=False):
    prompt: WorkloadPrompt
    at_ms: float
    conversation: int
    """The same number for all turns of a conversation."""


# Cuts recorded traffic by time if it has too many requests for a replay, with caches as warm as they were at the cut.
#
#     before the cut   the last turn of each conversation: its prompt has all turns before it, so it fills the caches
#                      with what they held. Those of conversations that go on come first, then the latest ones. They
#                      come in their order at equal distances: each prefills a whole prompt, and most came shortly
#                      before the cut.
#     after the cut    every request
#
# A cut alone would begin with empty caches: a conversation that has lasted for minutes would have its whole prompt
# prefilled again, and the fleet would look too small.

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


# The recorded traffic of the last minutes as a sample that can be replayed.
#
# Replays are measured in the last part of the recorded time (MEASURED_SHARE). The requests before it fill the caches.
#
# A router with much traffic replays a part of it on a part of the fleet: the conversations whose hash is below a
# threshold. Whole conversations are kept or left out, so caches work as in the whole. For k nodes and a sample with the
# fraction f of all requests, round(k · f) nodes are simulated, and the load is scaled so that each simulated node gets
# as many requests as a real one (fleet_replay.py).
#
# The sample has work for at least MIN_SIMULATED_NODES nodes if it can. If that is still too many requests, it has only
# the last part of the recorded time, with caches as warm as they were. If less than
# MIN_MEASURED_SHARE of the recorded time could be measured, it has work for fewer nodes, at last for one.

MEASURED_SHARE: Final = 0.6
"""The last part of the recorded time is measured. The first 40 % fill the caches and build up queues."""
MEASURED_AFTER_CUT: Final = 0.8
"""The measured part of the time after a cut. Caches are warm there, and only queues have to build up."""
MIN_MEASURED_SHARE: Final = 0.2
"""A shorter part of the recorded time says too little: answers may take minutes, and chance makes the load uneven."""
MIN_SIMULATED_NODES: Final = (4, 3, 2, 1)
"""The sample has work for as many nodes, or for fewer if it would be too short: a small fleet queues more than a large
one."""
TREND_SPANS: Final = 10
"""The arrivals are counted in this many parts of the window. A line through them is the trend."""
TREND_ERRORS: Final = 1.0
"""A trend counts minus this many standard errors, so that noise is no trend."""
MAX_LEAD_SHARE: Final = 0.5
"""How far ahead the trend counts, as a share of the recorded time: a line says nothing about later times."""
MAX_GROWTH: Final = 2.0
"""The trend counts up to twice the recorded load."""
MAX_CHANCE: Final = 0.3
"""Few long conversations would ask for a fleet of any size: no more than this is allowed for chance."""
MIN_KEPT: Final = 50
"""A sample by conversations has at least this many requests."""
ENDED_SHARE: Final = 0.9
"""The recorded traffic ends where this fraction of the requests had ended when it was recorded."""
_HASHES: Final = 1 << 64


class Sample(msgspec.Struct, kw_only=True):
    """A part of the recorded traffic."""

    requests: Sequence[RecordedRequest]
    """The requests of the sample in the order of their arrival."""
    share: float
    """The fraction of all requests of the fleet that it has, in the measured part."""
    warm_up: int
    """Requests before the measured part."""
    complete_from_ms: float
    """From this time on, the sample has all requests of its conversations. Before, it has those that fill the
    caches."""
    from_ms: float
    """The measured part begins."""
    until_ms: float
    measured_s: float
    arrivals_per_s: float
    """Arrivals per second of the whole fleet, in the measured part."""
    tokens_per_s: float
    """Tokens per second of prompts and answers of the whole fleet, in the measured part."""


def recorded_until(now_ms: float, durations_ms: Sequence[float]) -> float:
    """Return until when most requests are recorded: they are when they have ended. `durations_ms`: of recorded ones."""
    return now_ms - (sorted(durations_ms)[int(ENDED_SHARE * (len(durations_ms) - 1))] if durations_ms else 0.0)


def thinned(requests: Sequence[RecordedRequest], until_ms: float, nodes: int, share: float, most: int) -> Sample:
    """Return a sample of at most `most` requests for a fleet of about `nodes` nodes. `until_ms`: the end of the
    recorded time. `share`: the fraction of the fleet's requests that was recorded."""
    first_ms = requests[0].at_ms
    if len(requests) <= most:
        return _sample(requests, requests, until_ms, share, first_ms)
    least_s = MIN_MEASURED_SHARE * (until_ms - first_ms) / 1000.0
    longest: Sample | None = None
    for simulated in MIN_SIMULATED_NODES:
        kept = _some_conversations(requests, most, simulated / max(1.0, nodes * share))
        complete_from_ms = kept[0].at_ms
        if len(kept) > most:
            kept, complete_from_ms = cut(kept, most)
        sample = _sample(kept, requests, until_ms, share, complete_from_ms)
        if longest is None or sample.measured_s > longest.measured_s:
            longest = sample
        if sample.measured_s >= least_s:
            break
    assert longest is not None
    return longest


def _some_conversations(requests: Sequence[RecordedRequest], most: int, least: float) -> Sequence[RecordedRequest]:
    """Return the requests of at least the fraction `least` of the conversations, else of as many as make `most`."""
    fraction = max(most / len(requests), min(1.0, least))
    if fraction >= 1.0:
        return requests
    chosen = [one for one in requests if mix64(one.conversation, 1) % _HASHES < fraction * _HASHES]
    # Otherwise a few long conversations make up most of the traffic.
    return chosen if len(chosen) >= min(most, MIN_KEPT) else requests


def _sample(
    kept: Sequence[RecordedRequest], requests: Sequence[RecordedRequest], until_ms: float, share: float,
    complete_from_ms: float,
) -> Sample:  # fmt: skip
    is_cut = complete_from_ms > kept[0].at_ms
    from_ms = until_ms - (MEASURED_AFTER_CUT if is_cut else MEASURED_SHARE) * (until_ms - complete_from_ms)
    warm_up = sum(one.at_ms < from_ms for one in kept)
    measured_s = max(1e-3, (until_ms - from_ms) / 1000.0)
    tokens = sum(one.prompt.prompt_tokens + one.prompt.output_tokens for one in kept[warm_up:])
    if kept is not requests:
        share *= max(1, len(kept) - warm_up) / max(1, _arrivals_since(requests, from_ms))
    return Sample(
        requests=kept,
        share=share,
        warm_up=warm_up,
        complete_from_ms=complete_from_ms,
        from_ms=from_ms,
        until_ms=until_ms,
        measured_s=measured_s,
        arrivals_per_s=(len(kept) - warm_up) / measured_s / share,
        tokens_per_s=tokens / measured_s / share,
    )


class Forecast(msgspec.Struct, frozen=True):
    """The load to expect when a node that is requested now would serve."""

    growth: float = 1.0
    """Arrivals per second, relative to those of the measured part."""
    chance: float = 0.0
    """By which fraction chance alone makes the load of a few minutes differ: one standard deviation. A router with few
    conversations has a less even load than one with many. 0 while the load falls more than chance explains: the next
    minutes will have less."""
    rises: bool = False
    """Whether the load rises more than chance explains."""


def forecast(
    requests: Sequence[RecordedRequest], until_ms: float, lead_s: float, share: float = 1.0,
    from_ms: float | None = None,
) -> Forecast:  # fmt: skip
    """Expect the arrivals of the last MEASURED_SHARE of the recorded time, and those of its last RECENT_SHARE as far as
    chance does not explain the difference; or those `lead_s` after it by a line through all of it, if it rises and they
    are more. So a rise counts before it has happened, a fall afterwards. `share`: the fraction of the fleet's requests
    that was recorded. `from_ms`: where the sample's measured part begins, if it does not have all of the recorded
    time."""
    first_ms = requests[0].at_ms
    if until_ms <= first_ms:
        return Forecast()
    recorded_ms = until_ms - first_ms
    usual = _arrivals_since(requests, until_ms - MEASURED_SHARE * recorded_ms) / (MEASURED_SHARE * recorded_ms)
    recent = _arrivals_since(requests, until_ms - RECENT_SHARE * recorded_ms) / (RECENT_SHARE * recorded_ms)
    by_chance = chance_of(requests, first_ms, recorded_ms)
    change = recent / usual - 1.0 if usual else 0.0
    if change:
        explained = by_chance * (1.0 - RECENT_SHARE / MEASURED_SHARE) ** 0.5
        change *= max(0.0, 1.0 - (explained / change) ** 2)
    line = _line(requests, until_ms, lead_s)
    growth = min(MAX_GROWTH, max(1.0 / MAX_GROWTH, 1.0 + change, line if line > 1.0 else 0.0))
    if from_ms is not None and usual:
        measured = _arrivals_since(requests, from_ms) / max(1.0, until_ms - from_ms)
        growth *= min(MAX_GROWTH, max(1.0 / MAX_GROWTH, usual / measured)) if measured else 1.0
    falls = line < 1.0 and change < 0.0
    return Forecast(growth, min(MAX_CHANCE, by_chance * share**0.5) if not falls else 0.0, line > 1.0)


def _arrivals_since(requests: Sequence[RecordedRequest], since_ms: float) -> int:
    return sum(one.at_ms >= since_ms for one in requests)


def chance_of(requests: Sequence[RecordedRequest], first_ms: float, recorded_ms: float) -> float:
    """Return the standard deviation of the work of RECENT_SHARE of the recorded time, relative to its mean, if
    conversations begin independently of each other. Work: the tokens that are new in a prompt, and those of its
    answer."""
    parts = round(1.0 / RECENT_SHARE)
    work: dict[tuple[int, int], float] = {}
    before: dict[int, int] = {}
    for one in requests:
        tokens, conversation = one.prompt.prompt_tokens, one.conversation
        earlier = before.get(conversation, 0)
        before[conversation] = tokens
        part = conversation, min(parts - 1, int(parts * (one.at_ms - first_ms) / recorded_ms))
        new = tokens - earlier if tokens > earlier else tokens  # else it is another prompt
        work[part] = work.get(part, 0.0) + new + one.prompt.output_tokens
    mean = sum(work.values()) / parts
    return float((sum(one * one for one in work.values()) / parts) ** 0.5 / mean) if mean else 0.0


def _line(requests: Sequence[RecordedRequest], until_ms: float, lead_s: float) -> float:
    """Return the arrivals per second `lead_s` after the recorded time, relative to those of its last MEASURED_SHARE:
    the value of a line through the arrivals of equal spans of time, as far as chance cannot explain it."""
    first_ms = requests[0].at_ms
    span_ms = (until_ms - first_ms) / TREND_SPANS
    counts = [0] * TREND_SPANS
    for one in requests:
        counts[min(TREND_SPANS - 1, int((one.at_ms - first_ms) / span_ms))] += 1
    mean = sum(counts) / TREND_SPANS
    middle = (TREND_SPANS - 1) / 2
    spread = sum((at - middle) ** 2 for at in range(TREND_SPANS))
    slope = sum((at - middle) * (count - mean) for at, count in enumerate(counts)) / spread
    residual = sum((count - mean - slope * (at - middle)) ** 2 for at, count in enumerate(counts))
    error = TREND_ERRORS * (residual / (TREND_SPANS - 2) / spread) ** 0.5
    certain = max(0.0, slope - error) if slope > 0 else min(0.0, slope + error)
    measured = TREND_SPANS * (1.0 - MEASURED_SHARE / 2) - 0.5  # the middle of the measured part
    level = mean + certain * (measured - middle)
    ahead = TREND_SPANS - 0.5 + min(lead_s * 1000.0 / span_ms, MAX_LEAD_SHARE * TREND_SPANS) - measured
    return 1.0 + certain * ahead / level if level > 0 else 1.0
