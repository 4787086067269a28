"""What happens to a fleet in the course of a run, said in a line: `60 fail node-3`, `90 restart node-3`, `120 drain
node-1`, `60 hang node-2`, `60 slow node-2 5` (all it does takes 5 times as long), `30 provision node-9 120` (asked for
at 30 s, joins 120 s later, like the first node).
"""

from __future__ import annotations

import msgspec

from warmroute.replay.world.conditions import NodeSpec
from warmroute.replay.world.world import World

VERBS = ("fail", "hang", "restart", "drain", "remove", "slow", "provision")


class BadHappening(ValueError):
    """What is wrong with the line."""


class Happening(msgspec.Struct, frozen=True):
    at_s: float
    verb: str
    node: str
    number: float = 0.0
    """Of provision: seconds; of slow: times."""


def parse(line: str) -> Happening:
    words = line.split()
    try:
        if not 3 <= len(words) <= 4 or words[1] not in VERBS:
            raise ValueError
        return Happening(float(words[0]), words[1], words[2], float(words[3]) if len(words) == 4 else 0.0)
    except ValueError:
        raise BadHappening(f"{line!r} is not like '60 fail node-3'; there are {', '.join(VERBS)}") from None


def enter(world: World, happening: Happening, like: NodeSpec) -> None:
    """Puts it into the world's calendar."""
    at_ms = happening.at_s * 1000.0
    if happening.verb == "provision":
        spec = msgspec.structs.replace(like, name=happening.node)
        world.calendar.at(at_ms, world.provision, spec, happening.number)
    elif happening.node not in world.nodes:
        raise BadHappening(f"there is no node {happening.node}: they are {', '.join(list(world.nodes)[:8])}…")
    elif happening.verb == "slow":
        world.calendar.at(at_ms, world.slow, happening.node, happening.number)
    else:
        world.calendar.at(at_ms, getattr(world, happening.verb), happening.node)
