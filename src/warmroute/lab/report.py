"""The columns of a report of replays, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from warmroute.lab.summary import Run

# The columns of a report: what `warmroute replay` prints, and what is on its page.

LOAD_COLUMNS: Final = ("offered req/s", "clients", "threshold")
KEY_COLUMNS: Final = ("policy", *LOAD_COLUMNS)
"""Columns that name a run."""
TAILS: Final = (("longest_1_percent", "long 1% p99"), ("longest_10_percent", "long 10% p99"), ("others", "others p99"))
"""Classes of requests by prefill work, and the columns of their TTFT p99."""
NO_POLICY: Final = ("oracle", "measured")


def ms(value: float | None) -> str:
    """Format a time in milliseconds, or in seconds from 1 s on."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    return f"{value / 1000:.2f} s" if value < 100_000 else f"{value / 1000:,.0f} s"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


class Column(msgspec.Struct, frozen=True):
    head: str
    text: Callable[[Run], str]
    value: Callable[[Run], float | None] | None = None
    """The value to compare; None if the column has no best value."""
    more_is_better: bool = False


def columns(runs: Sequence[Run]) -> list[Column]:
    found = [Column("policy", lambda run: str(run["policy"]))]
    for key, head in (("rate", "offered req/s"), ("concurrency", "clients"), ("queue_threshold", "threshold")):
        if len({run[key] for run in runs}) > 1:
            found.append(_count(key, head))
    if any("tenants" in run for run in runs):
        found.append(_count("tenants", "tenants"))
        found.append(Column("most on a node", _largest_share))
    found.append(Column("hit rate", lambda run: f"{run['hit_rate']:.1%}", lambda run: run["hit_rate"], True))
    found.extend(_time("ttft_ms", percent, "TTFT") for percent in ("p50", "p90", "p99"))
    if any("ttft_ms_by_work" in run for run in runs):
        found.extend(_tail(name, head) for name, head in TAILS)
    if any(run.get("queue", {}).get("longest_wait_ratio") for run in runs):
        found.append(Column("wait / guarantee", lambda run: _fixed(run.get("queue", {}).get("longest_wait_ratio"))))
    found.extend(_time("inter_token_ms", percent, "per token") for percent in ("p50", "p99"))
    found.append(_amount("output_tokens_per_s", "tokens/s", number, more_is_better=True))
    found.append(_amount("requests_per_s", "req/s", number, more_is_better=True))
    found.append(_amount("load_variation", "load CV", _fixed))
    found.append(_amount("gpu_seconds", "GPU s", number))
    if any("scaling" in run or "usd" in run for run in runs):
        found.append(Column("nodes", _nodes))
        found.append(Column("GPU h paid", lambda run: number(paid_gpu_hours(run)), paid_gpu_hours))
        if any(paid_usd(run) for run in runs):
            found.append(Column("USD", lambda run: number(paid_usd(run))))
    if any("ceiling" in run for run in runs):
        found.append(Column("s over ceiling", lambda run: number(run.get("ceiling", {}).get("seconds_over"))))
    found.extend(_count(key, key) for key in ("preemptions", "rejected", "failed"))
    found.extend(_count(key, key) for key in ("left", "retries") if any(run.get(key) for run in runs))
    return found


def loop_name(runs: Sequence[Run]) -> str:
    """Return whether the clients waited for answers before they sent their next request."""
    loops = sorted({run["loop"] for run in runs if "loop" in run})
    return f"{' and '.join(loops) or 'open'} loop{'s' if len(loops) > 1 else ''}"


def paid_gpu_hours(run: Run) -> float | None:
    """Return the GPU hours paid. In a scaled fleet a node is paid for from its request on."""
    if "scaling" in run:
        return float(run["scaling"]["gpu_hours"])
    held = run.get("gpu_seconds_held")
    return None if held is None else held / 3600.0


def paid_usd(run: Run) -> float | None:
    """Return the price of the paid GPU hours."""
    paid: float | None = run["scaling"]["usd"] if "scaling" in run else run.get("usd")
    return paid


def _largest_share(run: Run) -> str:
    """Return the largest share of the requests that one node got."""
    requests = [row["requests"] for row in run.get("nodes", ())]
    return f"{max(requests) / sum(requests):.1%}" if sum(requests) else "–"


def _nodes(run: Run) -> str:
    scaling = run.get("scaling")
    if scaling is None:
        return str(run["node_count"])
    return f"{scaling['least_nodes']}–{scaling['most_nodes']}"


def _time(key: str, percent: str, head: str) -> Column:
    def value(run: Run) -> float | None:
        return (run.get(key) or {}).get(percent)

    return Column(f"{head} {percent}", lambda run: ms(value(run)), value)


def _tail(name: str, head: str) -> Column:
    def value(run: Run) -> float | None:
        found: float | None = run.get("ttft_ms_by_work", {}).get(name, {}).get("p99")
        return found

    return Column(head, lambda run: ms(value(run)), value)


def _amount(key: str, head: str, text: Callable[[float | None], str], more_is_better: bool = False) -> Column:
    return Column(head, lambda run: text(run.get(key)), lambda run: run.get(key), more_is_better)


def _count(key: str, head: str) -> Column:
    return Column(head, lambda run: number(run.get(key)))


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def by_load(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs by load: only runs with the same load can be compared."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["rate"], run["concurrency"], run["queue_threshold"]), []).append(run)
    return list(groups.values())


def best_of(group: Sequence[Run], column: Column) -> float | None:
    if column.value is None or len(group) < 2:
        return None
    # The oracle is an upper bound, and what was measured is the past: neither is a policy.
    known = [value for run in group if run["policy"] not in NO_POLICY and (value := column.value(run)) is not None]
    return (max if column.more_is_better else min)(known, default=None)
