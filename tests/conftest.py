"""Runs `async def` tests on uvloop, each on a loop of its own; lets tests import what they share."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import warnings
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "edge")]

settings.register_profile("quick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")

TEST_LIMIT_S = 60


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def within_limit() -> None:
        async with asyncio.timeout(TEST_LIMIT_S):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within_limit())
    return True


@pytest.fixture(autouse=True)
def _no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's environment says of proxies has no place in tests on loopback."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


warnings.filterwarnings("error", message="coroutine .* was never awaited")
