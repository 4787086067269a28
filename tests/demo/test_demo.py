"""`warmroute demo` shows that warm caches are found, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_processes import until

from warmroute.demo.show_scaling import curve

DEMO = [sys.executable, "-m", "warmroute.cli.main", "demo"]


def its_own(folder: Path) -> dict[str, str]:
    """An environment in which what a demo that is killed leaves behind is swept away."""
    return {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_demo_finds_more_in_the_caches_than_round_robin_does() -> None:
    done = subprocess.run(
        [*DEMO, "--only", "compare", "--exit", "--speed", "4"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"from cache\D+([\d.]+)%\D+([\d.]+)%", done.stdout.partition("Side by side")[2])
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 10
    assert "failed" not in done.stdout
    assert re.search(r"node-\d: [\d,]+ of [\d,]+ tokens warm, saves [\d,.]+ ms", done.stdout), done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_demo(number: signal.Signals, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--only", "compare"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=its_own(tmp_path)
    )
    until(lambda: len(children_of(demo.pid)) >= 4, 60)
    time.sleep(0.3)
    children = children_of(demo.pid)
    os.kill(demo.pid, number)
    demo.wait(30)
    until(lambda: not any(alive(child) for child in children))


def engines_of(demo: int) -> list[int]:
    """Those that its router has started: they are no children of the demo's."""
    tied = f"warmroute.demo.die_with_parent\0{demo}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if tied in command and b"\0engine\0" in command:
                found.append(int(path.parent.name))
        except OSError:
            continue  # gone meanwhile
    return found


@pytest.mark.parametrize("what", ["SIGINT", "SIGKILL", "its router crashes"])
def test_no_engine_that_was_scaled_outlives_the_demo(what: str, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--only", "scale"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=its_own(tmp_path),
    )
    try:
        assert demo.stdout is not None and demo.stderr is not None
        while line := demo.stdout.readline():
            if "2 serve" in line:
                break
        engines, children = engines_of(demo.pid), children_of(demo.pid)
        assert len(engines) >= 2
        assert len(children) == 1
        if what == "its router crashes":
            os.kill(children[0], signal.SIGKILL)
        else:
            os.kill(demo.pid, signal.Signals[what])
        demo.wait(30)
        until(lambda: not any(alive(one) for one in (*engines_of(demo.pid), *engines, *children)), 10)
        if what == "its router crashes":
            assert demo.returncode == 2
            assert "the router has ended" in demo.stderr.read()
    finally:
        demo.kill()
        demo.communicate()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speed", "0"), "--speed must be above 0"),
        (("--only", "scale", "--speed", "2"), "--speed is for the comparison"),
    ],
)
def test_what_cannot_be_is_said(flags: tuple[str, ...], said: str) -> None:
    done = subprocess.run([*DEMO, *flags], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert said in done.stderr


def test_curves_show_the_highest_of_each_stretch() -> None:
    assert curve([1, 1, 5, 1], [0.0, 1.0, 2.0, 3.0], 5.0) == "▂▂█▂"
    assert curve([2.0] * 100 + [4.0] * 100, [float(s) for s in range(200)], 4.0, width=10) == "▄" * 5 + "█" * 5
    assert curve([2.0], [0.0], 4.0) == "▄"
    assert curve([], [], 4.0) == ""


def test_a_taken_port_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([*DEMO, "--port", str(port)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr
