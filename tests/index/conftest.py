"""A fixture that makes allocations fail."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

Failing = Callable[[int, Callable[[], Any]], Any]


@pytest.fixture
def failing() -> Failing:
    """Return a function that calls something while its allocation with a given number fails. It returns None after a
    MemoryError.

    Only `_testcapi` makes allocations fail. Some distributions ship Python without it; the tests are skipped there.
    """
    testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi, which makes allocations fail")

    def call_failing(number: int, call: Callable[[], Any]) -> Any:
        gc.disable()
        testcapi.set_nomemory(number, number + 1)
        try:
            return call()
        except MemoryError:
            return None
        finally:
            testcapi.remove_mem_hooks()
            gc.enable()

    assert call_failing(0, lambda: bytes(1000)) is None, "allocations do not fail"
    return call_failing
