"""The log of failed tries: one line a second for each node, in which no failure is missing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from warmroute.core.failed_tries import LOG_INTERVAL_S, WHOLE, FailedTry, FailedTryLog
from warmroute.core.messages import Outcome

NODES = ["gpu-a", "gpu-b"]


def failed(node: str, at_s: float) -> FailedTry:
    return FailedTry(node, WHOLE, Outcome.FAILED, 500, "HTTP status 500", at_s - 0.1, at_s, None)


def written(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for record in caplog.records:
        fields: dict[str, Any] = vars(record)["fields"]
        found.append((fields["node"], fields["left_out"]))
    caplog.clear()
    return found


def test_a_flood_is_one_line_a_second_for_each_node(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tries, now_s, lines = FailedTryLog(), 1000.0, dict.fromkeys(NODES, 0)
    counted = dict(lines)
    for _tick in range(100):  # 20 s
        for _ in range(2000):  # 10,000 a second
            tries.add(failed(NODES[0], now_s), b"one")
        tries.add(failed(NODES[1], now_s), b"two")
        tries.write(now_s)
        for name, left_out in written(caplog):
            lines[name] += 1
            counted[name] += 1 + left_out
        now_s += 0.2
    assert set(lines.values()) <= {17, 18, 19, 20}, "within 20 s"
    tries.write()
    for name, left_out in written(caplog):
        counted[name] += 1 + left_out
    assert counted == {NODES[0]: 200_000, NODES[1]: 100}


def test_single_failures_are_written_at_once_and_silence_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tries = FailedTryLog()
    tries.add(failed(NODES[0], 5.0), b"one")
    tries.write(5.1)
    assert written(caplog) == [(NODES[0], 0)]
    tries.add(failed(NODES[0], 5.2), b"two")
    tries.add(failed(NODES[0], 5.3), b"three")
    for at_s in (5.3, 5.5, 6.0):
        tries.write(at_s)
        assert written(caplog) == []
    tries.write(5.1 + LOG_INTERVAL_S)
    assert written(caplog) == [(NODES[0], 1)]
    tries.write(60.0)
    assert written(caplog) == []
