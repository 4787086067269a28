"""The process ends some time after a signal, even if Python cannot handle the signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import signal, time
from warmroute._kernel import exit_after_signal, set_exit_deadline
handled = []
signal.signal(signal.SIGTERM, lambda *_: handled.append(1))
set_exit_deadline(1)
exit_after_signal(signal.SIGTERM)
exit_after_signal(signal.SIGTERM)
print("ready", flush=True)
"""
STUCK_IN_C = "7 ** 200_000_000"
STOPS = "while not handled: time.sleep(0.01)\nraise SystemExit(7)"


def ended(then: str) -> tuple[int, float, str]:
    """Return the exit status, the time from SIGTERM to the end, and what the process wrote."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + then], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        return process.returncode, time.monotonic() - began_s, errors
    finally:
        process.kill()


def test_a_process_that_is_stuck_in_a_c_call_ends_at_the_deadline() -> None:
    status, took_s, errors = ended(STUCK_IN_C)
    assert status == 1 and took_s > 0.5 and "did not stop in time" in errors


def test_a_process_that_stops_in_time_is_not_disturbed() -> None:
    status, _, errors = ended(STOPS)
    assert status == 7 and not errors


def test_impossible_deadlines_are_rejected() -> None:
    from warmroute._kernel import exit_after_signal, set_exit_deadline

    for wrong in (-1, 2**40):
        with pytest.raises(ValueError):
            set_exit_deadline(wrong)
    with pytest.raises(ValueError):
        exit_after_signal(10_000)
