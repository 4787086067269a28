"""Lets the tests here import what they share, however pytest was started; and what several of them need."""

import sys
from pathlib import Path

import pytest

from warmroute.scaling import driver

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sim_server")]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a number here: what waits for a moment of real time waits for none."""
    monkeypatch.setattr(driver, "RETRY_S", 0.0)
