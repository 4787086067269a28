"""A pytest plugin that asks LeakSanitizer for leaks when all tests have run. fuzz/sanitize.py loads it.

The check runs before Python shuts down. At that moment everything that Python keeps is still reachable, so what
LeakSanitizer reports is lost for good, and no list of exceptions for CPython's own memory is needed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.collect()
    if ctypes.CDLL(None).__lsan_do_recoverable_leak_check():
        sys.stdout.flush()
        print("LeakSanitizer found leaks", file=sys.stderr, flush=True)
        os._exit(1)
