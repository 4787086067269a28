"""The files of a trace: one file, all captures in a directory, or the files that a pattern matches.

A capture has its requests in the order in which they ended. They are read in the order of their arrival: a first pass
reads the times, and the second one holds lines back until it is their turn, which are as many as requests ended while
the longest one ran. Other traces are read once, as they are.

Files of several captures follow each other as their names say when they started.
"""

from __future__ import annotations

import gzip
import time
import zlib
from array import array
from calendar import timegm
from collections.abc import Iterator
from glob import glob, has_magic
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

import msgspec

from warmroute.capture.capture_files import FILE_NAME, capture_files
from warmroute.capture.trace_row import TraceRow


class BadTrace(ValueError):
    """What is wrong with a trace file."""


class _Time(msgspec.Struct, gc=False):
    timestamp: float
    timestamp_us: int = 0


class _Kind(msgspec.Struct, gc=False):
    block_size: int = 0


class TraceFiles:
    def __init__(self, path: Path, model: str = "") -> None:
        """`model`: read only the requests for this model; empty for all."""
        self.path = path
        self._model = model

    def rows(self) -> Iterator[TraceRow]:
        """Return the requests in the order of their times. Raises BadTrace."""
        files = self._files()
        decoder = msgspec.json.Decoder(TraceRow)
        for file, number, line, offset_ms in self._in_order(files):
            try:
                row = decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise BadTrace(f"{file}, line {number}: {error}") from None
            if self._model and row.model != self._model:
                continue
            row.timestamp += offset_ms + row.timestamp_us / 1000.0
            yield row

    def times_ms(self) -> Iterator[float]:
        """Return the requests' times in their order. Raises BadTrace."""
        if self._model:
            yield from (row.timestamp for row in self.rows())
        else:
            files = self._files()
            times_ms = _times_ms(files)
            yield from sorted(times_ms) if _is_capture(files) else times_ms

    def _files(self) -> list[tuple[Path, float]]:
        """Return the files and how much later than the first one each capture began, in milliseconds."""
        if self.path.is_dir():
            files = capture_files(self.path)
            if not files:
                raise BadTrace(f"{self.path}: the directory has no files of a capture (capture-….jsonl)")
        elif has_magic(str(self.path)) and not self.path.exists():
            files = sorted(Path(name) for name in glob(str(self.path)))
            if not files:
                raise BadTrace(f"{self.path}: no file matches the pattern")
        else:
            return [(self.path, 0.0)]
        starts = [_start_s(file) for file in files]
        known = [start for start in starts if start is not None]
        return [
            (file, 1000.0 * (start - min(known)) if start else 0.0) for file, start in zip(files, starts, strict=True)
        ]

    def _in_order(self, files: list[tuple[Path, float]]) -> Iterator[tuple[Path, int, bytes, float]]:
        lines = _lines(files)
        if not _is_capture(files):
            return lines
        times_ms = array("d", _times_ms(files))
        if all(earlier <= later for earlier, later in pairwise(times_ms)):
            return lines
        return _sorted(lines, times_ms)


def _sorted(
    lines: Iterator[tuple[Path, int, bytes, float]], times_ms: array[float]
) -> Iterator[tuple[Path, int, bytes, float]]:
    order = iter(sorted(range(len(times_ms)), key=times_ms.__getitem__))
    held: dict[int, tuple[Path, int, bytes, float]] = {}
    turn = next(order, -1)
    for index, line in enumerate(lines):
        held[index] = line
        while turn in held:
            yield held.pop(turn)
            turn = next(order, -1)


def _is_capture(files: list[tuple[Path, float]]) -> bool:
    for _file, _number, line, _offset in _lines(files):
        try:
            return msgspec.json.decode(line, type=_Kind).block_size > 0
        except (msgspec.ValidationError, msgspec.DecodeError):
            return False
    return False


def _times_ms(files: list[tuple[Path, float]]) -> Iterator[float]:
    decoder = msgspec.json.Decoder(_Time)
    for file, number, line, offset_ms in _lines(files):
        try:
            time_of = decoder.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise BadTrace(f"{file}, line {number}: {error}") from None
        yield time_of.timestamp + offset_ms + time_of.timestamp_us / 1000.0


def _lines(files: list[tuple[Path, float]]) -> Iterator[tuple[Path, int, bytes, float]]:
    """Return each line with its file, its number and the offset of its times."""
    for file, offset_ms in files:
        try:
            with _open(file) as lines:
                for number, line in enumerate(lines, 1):
                    text = line.rstrip()
                    is_cut_off = not text.endswith(b"}") and FILE_NAME.fullmatch(file.name)  # by a crash
                    if text and not is_cut_off:
                        yield file, number, line, offset_ms
        except OSError as error:
            raise BadTrace(f"{file}: {error.strerror or error}") from None
        except (EOFError, zlib.error) as error:
            raise BadTrace(f"{file}: the compressed file is damaged: {error}") from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _start_s(file: Path) -> float | None:
    """Return when a capture began, from the name of its file."""
    match = FILE_NAME.fullmatch(file.name)
    return float(timegm(time.strptime(match[1], "%Y%m%dT%H%M%SZ"))) if match else None
