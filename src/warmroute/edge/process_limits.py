"""Memory and file limits of the router's process.

By default glibc returns the end of its heap to the system as soon as 128 KiB of it are free, and takes it again for the
next large body, with a page fault for every 4 KiB of every prompt. Keeping some free memory saves these faults.
"""

from __future__ import annotations

import ctypes
import resource
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Free memory that the process keeps."""
MAPPED_BYTES: Final = 8 * 1024 * 1024
"""A larger body gets its own pages, which return to the system when it is freed."""


def keep_freed_memory() -> None:
    """Set glibc's limits. Does nothing with another C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def raise_file_limit() -> int:
    """Raise the limit of open files, and so of connections, as far as the system allows. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass
    return soft
