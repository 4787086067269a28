"""Lets the tests here import their shared modules, however pytest was started, and defines shared fixtures."""

import sys
from pathlib import Path

import pytest

from warmroute.scaling import control_loop

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fake_engine")]


@pytest.fixture
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait for no real time, because the tests' clock is a number."""
    monkeypatch.setattr(control_loop, "RETRY_S", 0.0)
