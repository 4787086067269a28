"""A fixture that makes allocations fail. Its tests run in a child process, so that no other thread fails."""

from __future__ import annotations

import gc
import os
import traceback
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

    return call_failing


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "failing" not in pyfuncitem.fixturenames:
        return None
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            assert arguments["failing"](0, lambda: bytes(1000)) is None, "allocations do not fail"
            pyfuncitem.obj(**arguments)
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as report:
        failure = report.read()
    _, status = os.waitpid(child, 0)
    if status:
        pytest.fail(failure or f"the child process ended with status {status}", pytrace=False)
    return True
