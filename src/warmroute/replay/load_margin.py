"""The load that a fleet has to hold to meet its limits in most minutes, not only on average: the autoscaler allows for
`scaling.replay.margin` and for what chance does to few conversations in ten minutes (planning/recorded_traffic.py), and
`warmroute plan --margin` does the same for a workload."""

from __future__ import annotations

from zlib import crc32

import msgspec

from warmroute.config import ScalingReplay
from warmroute.replay.expected_arrivals import expected_arrivals
from warmroute.replay.planning.recorded_request import RecordedRequest
from warmroute.replay.planning.recorded_traffic import MAX_CHANCE, chance_of
from warmroute.replay.run import Setup
from warmroute.replay.workloads.catalog import Trace
from warmroute.scaling.fleet_plan import RECENT_SHARE


class LoadMargin(msgspec.Struct, frozen=True):
    margin: float = 0.0
    chance: float = 0.0
    """By which fraction chance makes the load of ten minutes differ: one standard deviation."""

    @property
    def load(self) -> float:
        """Relative to the workload's own."""
        return 1.0 + self.margin + self.chance


def load_margin(setup: Setup, margin: float) -> LoadMargin:
    """Add the chance of the setup's workload to a margin."""
    requests = _recorded(setup)
    recorded_ms = requests[-1].at_ms - requests[0].at_ms if requests else 0.0
    if recorded_ms <= 0.0:
        return LoadMargin(margin)
    chance = chance_of(requests, requests[0].at_ms, recorded_ms)
    span_s = RECENT_SHARE * ScalingReplay().window_s
    chance *= (RECENT_SHARE * recorded_ms / (1000.0 * span_s)) ** 0.5  # of the autoscaler's span instead of this one's
    return LoadMargin(margin, min(MAX_CHANCE, chance))


def with_load(setup: Setup, load: float) -> Setup:
    """Return the setup with `load` times as many requests per second."""
    workload = setup.workload
    if not isinstance(workload, Trace):
        return msgspec.structs.replace(setup, rate=load * (setup.rate or workload.generator.rate))
    setup = msgspec.structs.replace(setup, warm_up_s=setup.warm_up_s / load)  # the same requests of the trace
    if setup.rate is not None:
        return msgspec.structs.replace(setup, rate=load * setup.rate)
    faster = msgspec.structs.replace(workload, speed=load * workload.speed)
    return msgspec.structs.replace(setup, workload=faster)


def _recorded(setup: Setup) -> list[RecordedRequest]:
    found: list[RecordedRequest] = []
    by_number: dict[int, int] = {}
    for at_ms, prompt in expected_arrivals(setup):
        conversation = crc32(prompt.session) if prompt.session else len(found)
        conversation = by_number.get(prompt.follows, conversation) if prompt.follows >= 0 else conversation
        if prompt.number >= 0:
            by_number[prompt.number] = conversation
        found.append(RecordedRequest(prompt, at_ms, conversation))
    return found
