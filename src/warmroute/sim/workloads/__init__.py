"""Workloads: traces of real traffic and generators, one small file each."""

from warmroute.sim.workloads.choose import GENERATORS, BadWorkload, Generated, Trace, Workload, choose
from warmroute.sim.workloads.prompt import Blocks, FollowUp, Prompt
from warmroute.sim.workloads.segments import Segments
from warmroute.sim.workloads.trace import BadTrace

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
