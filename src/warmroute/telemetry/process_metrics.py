"""Adds the router's own process to the metrics page: CPU time, memory, open files and start time."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from warmroute.telemetry import metric_definitions as metrics
from warmroute.telemetry.exposition import Page

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def add_process_metrics(page: Page) -> None:
    """Leaves out what /proc does not tell, for example in a sandbox without it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    page[metrics.PROCESS_CPU].add(usage.ru_utime + usage.ru_stime)
    page[metrics.PROCESS_MAX_FDS].add(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        # The second field, the command in parentheses, may contain anything.
        fields = (_PROC / "self" / "stat").read_text().rpartition(")")[2].split()
        page[metrics.PROCESS_VIRTUAL].add(int(fields[20]))
        page[metrics.PROCESS_RSS].add(int(fields[21]) * _PAGE_BYTES)
        page[metrics.PROCESS_START].add(_boot_time_s() + int(fields[19]) / _TICKS_PER_S)
        page[metrics.PROCESS_FDS].add(len(os.listdir(_PROC / "self" / "fd")))
    except (OSError, ValueError, IndexError):
        pass


def _boot_time_s() -> float:
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")
