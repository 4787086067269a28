"""Work that the router does apart from requests."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from support.polling import until

from warmroute.app import process


class Subscription:
    """Refers to itself, as a connection and its task do."""

    def __init__(self) -> None:
        self.own = self


async def test_what_refers_to_itself_is_freed_without_many_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COLLECT_S", 0.0)
    left = weakref.ref(Subscription())
    gc.disable()
    running = asyncio.ensure_future(process.run_garbage_collection())
    try:
        await until(lambda: left() is None)
    finally:
        gc.enable()
        running.cancel()
