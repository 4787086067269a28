"""What the process takes from the system: memory and file descriptors.

By default glibc gives the end of its heap back as soon as 128 KiB of it are free and takes it anew for the next large
body: a page fault for every 4 KiB of every prompt. Keeping a little costs nothing and saves that.
"""

from __future__ import annotations

import ctypes
import resource
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Free memory that stays with the process."""
MAPPED_BYTES: Final = 8 * 1024 * 1024
"""Above this a body gets pages of its own, which go back when it is freed."""


def keep_freed_memory() -> None:
    """Does nothing where the C library is another one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def raise_file_limit() -> int:
    """Lets the process hold as many connections as the system allows it; returns how many files that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass
    return soft
