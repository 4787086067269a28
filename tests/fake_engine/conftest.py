"""Engines for these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_processes import Engine, StartEngine, Subscribe, Subscriber

from warmroute.demo.child_processes import Children


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    """One engine for all tests of a file that do not mind each other's traffic."""
    with Children() as children:
        yield Engine(children)


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with Children() as children:

        def start(*flags: str, speed: float = 20, blocks: int = 1000) -> Engine:
            return Engine(children, *flags, speed=speed, blocks=blocks)

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
