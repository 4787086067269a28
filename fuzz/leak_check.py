"""A pytest plugin that asks LeakSanitizer for leaks when all tests have run. fuzz/sanitize.py loads it.

The check runs when Python begins to exit: everything that Python keeps is still reachable then, and no frame of pytest
is left. So what LeakSanitizer reports is lost for good, and CPython's own memory needs no exceptions.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys


@atexit.register
def check_leaks() -> None:
    gc.collect()
    if ctypes.CDLL(None).__lsan_do_recoverable_leak_check():
        print("LeakSanitizer found leaks", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
