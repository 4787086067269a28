"""Captures on disk: bounded, and disturbed by full disks and missing directories no more than necessary."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import logging
import shutil
from pathlib import Path

import pytest

from warmroute.app import capture as capture_files_module
from warmroute.app import capture as capture_module
from warmroute.app.capture import (
    CapturedCall,
    CaptureDirectory,
    CaptureFile,
    CaptureFull,
    TrafficCapture,
    capture_files,
)
from warmroute.config import Capture
from warmroute.core.messages import RoutingRequest
from warmroute.core.traffic import Counters
from warmroute.prompt.prompt import exact_prompt

LINE = b'{"timestamp":0}' + b" " * 84 + b"\n"


def ended(arrived_s: float = 1e12, tokens: int = 64) -> CapturedCall:
    request = RoutingRequest("m", arrived_s=arrived_s)
    return CapturedCall(request, b"", exact_prompt(bytes(4 * tokens)), 300, "ok", arrived_s + 1, 5, False)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def test_files_and_their_number_are_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    files = CaptureDirectory(folder, 1000, 3, 0.0)
    (tmp_path / "captures").mkdir()
    other = folder / "not-a-capture.jsonl"
    other.write_text("kept")
    for _ in range(100):
        files.write(LINE)
    kept = capture_files(folder)
    assert [file.stat().st_size for file in kept] == [1000, 1000, 1000]
    assert [file.name.split(".")[1] for file in kept] == ["0008", "0009", "0010"]
    assert kept[0].name.startswith("capture-19700101T000000Z-")
    assert other.exists()


def test_earlier_captures_count_among_the_files(tmp_path: Path) -> None:
    for started_s in (0.0, 86_400.0):
        files = CaptureDirectory(tmp_path, 100, 4, started_s)
        for _ in range(3):
            files.write(LINE)
    days = [file.name[8:16] for file in capture_files(tmp_path)]
    assert days == ["19700101", "19700102", "19700102", "19700102"]


def test_a_write_larger_than_a_file_gets_a_file_of_its_own(tmp_path: Path) -> None:
    files = CaptureDirectory(tmp_path, 150, 10, 0.0)
    for lines in (LINE, LINE * 3, LINE):
        files.write(lines)
    assert [file.stat().st_size for file in capture_files(tmp_path)] == [100, 300, 100]


def test_a_single_file_has_a_maximum_and_can_be_compressed(tmp_path: Path) -> None:
    plain = CaptureFile(tmp_path / "a.jsonl", 250)
    plain.write(LINE * 2)
    with pytest.raises(CaptureFull):
        plain.write(LINE)
    packed = CaptureFile(tmp_path / "a.jsonl.gz", 10_000)
    for _ in range(5):
        packed.write(LINE)
    with gzip.open(tmp_path / "a.jsonl.gz") as file:
        assert file.read() == LINE * 5


async def test_a_full_disk_is_logged_once_and_the_capture_resumes(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    capture = TrafficCapture(Capture(), counters, lambda: 0.0)
    file = CaptureFile(Path("/dev/full"), 1000)
    capture.start(file)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            capture.add(ended())
            await capture.flush()
        assert events(caplog) == ["capture_write_failed"]
        assert "No space left on device" in caplog.text
        file.path = Path("/dev/null")
        capture.add(ended())
        await capture.flush()
    assert events(caplog) == ["capture_write_failed", "capture_write_recovered"]
    assert (counters.capture_dropped, counters.capture_written) == (3, 1)
    [described] = capture.describe()["captures"]
    assert (described["requests"], described["dropped"], described["failing"]) == (1, 3, False)


async def test_a_full_disk_removes_no_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that cannot write must not rotate its own past away."""
    files = CaptureDirectory(tmp_path, 150, 3, 0.0)
    for _ in range(3):
        files.write(LINE)
    before = capture_files(tmp_path)

    def full(_path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(capture_files_module, "append_all", full)
        for _ in range(10):
            with pytest.raises(OSError):
                files.write(LINE)
    assert capture_files(tmp_path) == before[1:]  # one was removed for the file that could not be written
    files.write(LINE)
    assert len(capture_files(tmp_path)) == 3


async def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    counters = Counters()
    capture = TrafficCapture(Capture(directory=str(folder)), counters, lambda: 0.0)
    for _ in range(2):
        capture.add(ended())
        await capture.flush()
        assert len(capture_files(folder)) == 1
        shutil.rmtree(folder)
    assert counters.capture_written == 2


async def test_a_directory_that_cannot_be_written_costs_only_the_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "captures"
    folder.write_text("a file is in the way")
    counters = Counters()
    capture = TrafficCapture(Capture(directory=str(folder)), counters, lambda: 0.0)
    for _ in range(2):
        capture.add(ended())
        await capture.flush()
    assert counters.capture_dropped == 2 and events(caplog).count("capture_write_failed") == 1
    folder.unlink()
    capture.add(ended())
    await capture.flush()
    assert counters.capture_written == 1


async def test_a_slow_disk_drops_requests_and_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture_module, "MAX_PENDING", 5)
    counters = Counters()
    capture = TrafficCapture(Capture(directory=str(tmp_path / "captures")), counters, lambda: 0.0)
    for _ in range(8):
        capture.add(ended())
    assert counters.capture_dropped == 3 and events(caplog).count("capture_overloaded") == 1
    await capture.flush()
    assert counters.capture_written == 5
    monkeypatch.setattr(capture_module, "MAX_PENDING_BYTES", 1000)
    for _ in range(8):
        capture.add(ended(tokens=100))
    await capture.flush()
    assert counters.capture_dropped == 3 + 5


async def test_requests_that_arrived_before_the_start_are_left_out(tmp_path: Path) -> None:
    capture = TrafficCapture(Capture(directory=str(tmp_path / "captures")), Counters(), lambda: 100.0)
    for arrived_s in (99.9, 100.0, 101.25037):
        capture.add(ended(arrived_s))
    await capture.flush()
    [file] = capture_files(tmp_path / "captures")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["timestamp"], row.get("timestamp_us", 0)) for row in rows] == [(0, 0), (1250, 370)]


async def test_closing_writes_what_is_pending(tmp_path: Path) -> None:
    counters = Counters()
    capture = TrafficCapture(Capture(directory=str(tmp_path / "captures")), counters, lambda: 0.0)
    task = asyncio.get_running_loop().create_task(capture.run())
    capture.add(ended())
    await capture.close()
    task.cancel()
    assert counters.capture_written == 1
