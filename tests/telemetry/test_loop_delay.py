"""The delay of the event loop, and merged buckets of histograms."""

from __future__ import annotations

import asyncio

import pytest
from support.polling import until

from warmroute._kernel import TIME_BOUNDS_MS
from warmroute.app.metrics.exposition import PAUSE_LINES, MergedBuckets, MetricLines, Pauses, accepts_gzip
from warmroute.app.metrics.page import BUILD_INFO
from warmroute.app.process import WINDOW_S, LoopDelay


def test_the_longest_delay_is_kept_for_one_to_two_minutes_however_often_somebody_asks() -> None:
    delay = LoopDelay()
    delay.record(0.3, 0.0)
    assert delay.max_s == delay.max_s == 0.3
    for second in range(1, int(WINDOW_S)):
        delay.record(0.001, float(second))
    assert delay.max_s == 0.3
    delay.record(0.002, WINDOW_S)
    assert delay.max_s == 0.3, "of the last whole minute"
    delay.record(0.001, 2 * WINDOW_S)
    assert delay.max_s == 0.002
    assert sum(delay.histogram.counts) == int(WINDOW_S) + 2


async def test_the_delay_is_measured() -> None:
    delay = LoopDelay()
    task = asyncio.create_task(delay.run())
    await until(lambda: sum(delay.histogram.counts))
    task.cancel()
    assert 0.0 <= delay.max_s < 60.0


def test_merged_buckets_have_the_same_counts() -> None:
    counts = list(range(1, len(TIME_BOUNDS_MS) + 2))
    merged = MergedBuckets(TIME_BOUNDS_MS, (10, 1000))
    low, high = TIME_BOUNDS_MS.index(10), TIME_BOUNDS_MS.index(1000)
    assert merged.labels == ['le="0.01"', 'le="1.0"', 'le="+Inf"']
    assert merged.merge(counts) == [sum(counts[: low + 1]), sum(counts[low + 1 : high + 1]), sum(counts[high + 1 :])]
    with pytest.raises(ValueError):
        MergedBuckets(TIME_BOUNDS_MS, (11,))


def test_a_long_page_is_rendered_with_pauses() -> None:
    pauses = []
    lines = MetricLines(BUILD_INFO, lambda: pauses.append(1))
    for number in range(10 * PAUSE_LINES):
        lines.add(number)
    assert len(pauses) == 10
    pause = Pauses()
    for _ in range(3):
        pause()


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (b"", False), (b"gzip", True), (b"br, GZIP;q=0.5", True), (b"gzip;q=0", False), (b"gzip; q=0.000", False),
        (b"gzip;q=0.001", True), (b"identity", False), (b"gzippy", False), (b",;,", False), (b"*", False),
    ],
)  # fmt: skip
def test_only_clients_that_accept_gzip_get_it(header: bytes, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted
