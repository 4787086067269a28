"""Notices when files change: the configuration, certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FILE_CHECK_S: Final = 0.5

Version = tuple[tuple[int, int, int] | None, ...]


async def watch_files(files: Callable[[], Sequence[Path]], changed: Callable[[], object]) -> None:
    """Call `changed` when a file has changed and all then stayed the same for FILE_CHECK_S: they may be half written
    before."""
    known = previous = _version(files())
    while True:
        await asyncio.sleep(FILE_CHECK_S)
        version = _version(files())
        settled, previous = version == previous, version
        if version != known and settled:
            known = version
            changed()


def _version(files: Sequence[Path]) -> Version:
    return tuple(map(_file_version, files))


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
