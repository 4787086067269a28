"""Workloads: trace files and synthetic generators, one file each."""

from warmroute.replay.workloads.catalog import GENERATORS, BadWorkload, Generated, Trace, Workload, parse_workload
from warmroute.replay.workloads.segments import Segments
from warmroute.replay.workloads.trace import BadTrace
from warmroute.replay.workloads.workload_prompt import Blocks, FollowUp, WorkloadPrompt

__all__ = [
    "GENERATORS",
    "BadTrace",
    "BadWorkload",
    "Blocks",
    "FollowUp",
    "Generated",
    "Segments",
    "Trace",
    "Workload",
    "WorkloadPrompt",
    "parse_workload",
]
