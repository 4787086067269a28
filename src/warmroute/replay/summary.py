"""From what a world saw to the numbers of a report. Plain dictionaries, in the order in which they are written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from warmroute.replay.world.node import SimNode
from warmroute.replay.world.tally import Tally
from warmroute.replay.world.world import World

Run = dict[str, Any]
"""One line of a report; also one entry of `runs` in its JSON."""

MOST_NODES = 64
"""Fleets larger than this are not told node by node."""


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


def spread(values: array[float], *percents: int) -> dict[str, float | None]:
    """Percentiles by name, and the mean."""
    ordered = sorted(values)
    told = {f"p{percent}": rounded(percentile(ordered, percent / 100)) for percent in percents}
    return {**told, "mean": rounded(fmean(ordered)) if ordered else None}


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation by mean."""
    mean = fmean(values) if values else 0.0
    return pstdev(values) / mean if mean else 0.0


def rounded(value: float | None) -> float | None:
    """Six significant digits: enough for a reader, and short."""
    return None if value is None else float(f"{value:.6g}")


def summary(world: World) -> Run:
    tally = world.tally
    end_ms = tally.last_ms
    duration_s = max(1e-9, (end_ms - (tally.first_ms or 0.0)) / 1000.0)
    nodes = [*world.nodes.values(), *world.gone]
    books = [_books(sim, world, duration_s) for sim in nodes]
    gpus = [sim.spec.profile.gpus for sim in nodes]
    run: Run = {
        "requests": tally.total("arrived"),
        "finished": tally.total("finished"),
        "rejected": tally.total("rejected"),
        "failed": tally.total("failed"),
        "left": tally.total("left"),
        "retries": tally.retries,
        "hit_rate": rounded(tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0),
        "ttft_ms": spread(tally.ttft_ms, 50, 90, 99),
        "inter_token_ms": spread(tally.inter_token_ms, 50, 90, 99),
        "latency_ms": spread(tally.latency_ms, 50, 90, 99),
        "duration_s": rounded(duration_s),
        "requests_per_s": rounded(tally.total("finished") / duration_s),
        "good_per_s": rounded(tally.good / duration_s),
        "output_tokens_per_s": rounded(tally.output_tokens / duration_s),
        "prompt_tokens_per_s": rounded(tally.prompt_tokens / duration_s),
        "load_variation": rounded(variation([book["mean_in_flight"] for book in books])),
        "busy_variation": rounded(variation([book["busy_s"] for book in books])),
        "gpu_seconds": rounded(sum(book["busy_s"] * count for book, count in zip(books, gpus, strict=True))),
        "gpu_seconds_held": rounded(sum(book["held_s"] * count for book, count in zip(books, gpus, strict=True))),
        "preemptions": sum(book["preemptions"] for book in books),
    }
    if len(tally.classes) > 1:
        run["by_priority"] = {name: _class(tally, name) for name in ("high", "normal", "low") if name in tally.classes}
    if len(nodes) <= MOST_NODES:
        run["nodes"] = books
    run["timeline"] = _timeline(tally)
    return run


def _class(tally: Tally, name: str) -> Run:
    one = tally.classes[name]
    return {
        "requests": one.arrived,
        "finished": one.finished,
        "rejected": one.rejected,
        "failed": one.failed,
        "left": one.left,
        "ttft_ms": spread(one.ttft_ms, 50, 90, 99),
    }


def _books(sim: SimNode, world: World, duration_s: float) -> Run:
    now_ms = world.calendar.now_ms
    held_ms = sim.held_ms + (now_ms - sim.joined_ms if sim.node.name in world.nodes else 0.0)
    totals = sim.totals
    return {
        "node": sim.node.name,
        "requests": sim.requests,
        "mean_in_flight": rounded(sim.inflight_ms / 1000.0 / duration_s),
        "busy_s": rounded(totals.busy_ms / 1000.0),
        "held_s": rounded(held_ms / 1000.0),
        "hit_rate": rounded(totals.hit_tokens / totals.queried_tokens if totals.queried_tokens else 0.0),
        "prefilled_tokens": totals.prefilled_tokens,
        "preemptions": totals.preemptions,
    }


def _timeline(tally: Tally) -> Run:
    spans = tally.timeline
    return {
        "span_s": spans.span_ms / 1000.0,
        "arrived": [int(span[0]) for span in spans.sums],
        "hit_rate": [rounded(span[2] / span[1]) if span[1] else None for span in spans.sums],
        "ttft_ms": [rounded(span[3] / span[4]) if span[4] else None for span in spans.sums],
    }
