"""Lets the tests here import the helpers of tests/fake_engine and tests/replay."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "fake_engine"), str(TESTS / "replay")]
