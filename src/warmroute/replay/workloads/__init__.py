"""Workloads: traces of real traffic and generators, one small file each."""

from warmroute.replay.workloads.choose import GENERATORS, BadWorkload, Generated, Trace, Workload, choose
from warmroute.replay.workloads.prompt import Blocks, FollowUp, Prompt
from warmroute.replay.workloads.segments import Segments
from warmroute.replay.workloads.trace import BadTrace

__all__ = [
    "GENERATORS",
    "BadTrace",
    "BadWorkload",
    "Blocks",
    "FollowUp",
    "Generated",
    "Prompt",
    "Segments",
    "Trace",
    "Workload",
    "choose",
]
