"""Work that the router does apart from requests."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from support.polling import until

from warmroute.service import periodic_tasks


class Subscription:
    """Refers to itself, as a connection and its task do."""

    def __init__(self) -> None:
        self.own = self


async def test_what_refers_to_itself_is_freed_without_many_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_tasks, "COLLECT_S", 0.0)
    left = weakref.ref(Subscription())
    gc.disable()
    running = asyncio.ensure_future(periodic_tasks.run_garbage_collection())
    try:
        await until(lambda: left() is None)
    finally:
        gc.enable()
        running.cancel()
