"""Engine processes for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine_processes import FakeEngine, StartEngine

from warmroute.lab.demo.processes import Children


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with Children() as children:

        def start(*flags: str, speed: float = 20, blocks: int = 1000) -> FakeEngine:
            return FakeEngine(children, *flags, speed=speed, blocks=blocks)

        yield start
