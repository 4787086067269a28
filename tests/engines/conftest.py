"""Engine processes for these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fake_engine")]

from engine_processes import Engine, StartEngine  # noqa: E402

from warmroute.demo.child_processes import Children  # noqa: E402


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with Children() as children:

        def start(*flags: str, speed: float = 20, blocks: int = 1000) -> Engine:
            return Engine(children, *flags, speed=speed, blocks=blocks)

        yield start
