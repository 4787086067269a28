"""The fault schedule: failures and fleet changes at given times of a run.

Each is one line: TIME_S ACTION NODE [NUMBER].

    60 fail node-3             the process dies
    60 hang node-2             the process accepts requests and answers nothing
    60 slow node-2 5           everything it does takes 5 times as long
    90 restart node-3          a new process with an empty cache
    120 drain node-1           no new requests; the node leaves when the running ones have finished
    120 remove node-1          the node leaves at once
    30 provision node-9 120    a node like the first one is requested, and joins 120 s later
"""

from __future__ import annotations

import math

import msgspec

from warmroute.replay.simulation.conditions import NodeSpec
from warmroute.replay.simulation.world import World

ACTIONS = ("fail", "hang", "restart", "drain", "remove", "slow", "provision")


class BadFault(ValueError):
    """What is wrong with a line of the fault schedule."""


class ScheduledFault(msgspec.Struct, frozen=True):
    at_s: float
    action: str
    node: str
    number: float = 0.0
    """For provision: the delay in seconds. For slow: the factor."""


def parse_fault(line: str) -> ScheduledFault:
    words = line.split()
    try:
        if not 3 <= len(words) <= 4 or words[1] not in ACTIONS:
            raise ValueError
        at_s, number = float(words[0]), float(words[3]) if len(words) == 4 else 0.0
        if not (math.isfinite(at_s) and math.isfinite(number) and at_s >= 0 and number >= 0):
            raise ValueError
        if words[1] == "slow" and not number:
            raise ValueError
        return ScheduledFault(at_s, words[1], words[2], number)
    except ValueError:
        raise BadFault(f"{line!r} is not like '60 fail node-3'; actions: {', '.join(ACTIONS)}") from None


def schedule_fault(world: World, fault: ScheduledFault, template: NodeSpec) -> None:
    """Put the fault into the world's calendar. A provisioned node is a copy of `template`."""
    at_ms = fault.at_s * 1000.0
    if fault.action == "provision":
        spec = msgspec.structs.replace(template, name=fault.node)
        world.calendar.at(at_ms, world.provision, spec, fault.number)
    elif fault.node not in world.nodes:
        raise BadFault(f"there is no node {fault.node}; the nodes are {', '.join(list(world.nodes)[:8])}…")
    elif fault.action == "slow":
        world.calendar.at(at_ms, world.slow, fault.node, fault.number)
    else:
        world.calendar.at(at_ms, getattr(world, fault.action), fault.node)
