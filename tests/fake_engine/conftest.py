"""Fixtures that start simulated engines and subscribe to their KV events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_processes import FakeEngine, StartEngine, Subscribe, Subscriber

from warmroute.lab.demo.processes import Children

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[FakeEngine]:
    """One engine for the tests of a file that do not disturb each other."""
    with Children() as children:
        yield FakeEngine(children)


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with Children() as children:

        def start(*flags: str, speed: float = 20, blocks: int = 1000) -> FakeEngine:
            return FakeEngine(children, *flags, speed=speed, blocks=blocks)

        yield start


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    subscribers: list[Subscriber] = []

    def start(port: int) -> Subscriber:
        subscribers.append(Subscriber(port))
        return subscribers[-1]

    yield start
    for subscriber in subscribers:
        subscriber.close()
