"""`warmroute demo` shows more cache hits than round robin, and leaves no processes behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.engine_processes import FakeEngine, replay_events, wait_until

from warmroute.lab.demo.part_routing import RoutingComparison
from warmroute.lab.demo.part_scaling import sparkline
from warmroute.lab.demo.processes import Children
from warmroute.lab.engine.blocks import AllBlocksCleared

DEMO = [sys.executable, "-m", "warmroute", "demo"]


def with_temp_dir(folder: Path) -> dict[str, str]:
    """Return an environment in which a killed demo leaves its files in `folder`."""
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


def test_price_has_more_cache_hits_than_round_robin() -> None:
    done = subprocess.run(
        [*DEMO, "--only", "compare", "--exit", "--speed", "4"], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"cached prompt tokens\D+([\d.]+)%\D+([\d.]+)%", done.stdout.partition("Results")[2])
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 10
    assert "failed" not in done.stdout
    assert re.search(r"node-\d: [\d,]+ of [\d,]+ tokens cached, saves [\d,.]+ ms", done.stdout), done.stdout


def test_cleared_caches_are_announced_before_the_next_router_starts(tmp_path: Path) -> None:
    """Else the second policy starts with an outdated view of the engines' caches."""
    with Children() as children:
        engine = FakeEngine(children)
        engine.complete("word " * 200)
        comparison = RoutingComparison(children, tmp_path, 20)
        comparison._engine_urls = [engine.url]
        asyncio.run(comparison._clear_caches())
        events = [event for _, _, batch in replay_events(engine.replay_ports[0], 0) for event in batch.events]
    assert any(isinstance(event, AllBlocksCleared) for event in events)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_demo(number: signal.Signals, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--only", "compare"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=with_temp_dir(tmp_path)
    )
    wait_until(lambda: len(children_of(demo.pid)) >= 4, 60)
    time.sleep(0.3)
    children = children_of(demo.pid)
    os.kill(demo.pid, number)
    demo.wait(30)
    wait_until(lambda: not any(alive(child) for child in children))


def engines_of(demo: int) -> list[int]:
    """Return the engines that the demo's router has started. They are not children of the demo."""
    wrapper = f"warmroute.lab.demo.die_with_parent\0{demo}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if wrapper in command and b"\0engine\0" in command:
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.parametrize("cause", ["SIGINT", "SIGKILL", "router crash"])
def test_no_autoscaled_engine_outlives_the_demo(cause: str, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--only", "scale"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_temp_dir(tmp_path),
    )
    try:
        assert demo.stdout is not None and demo.stderr is not None
        while line := demo.stdout.readline():
            if "2 serving" in line:
                break
        engines, children = engines_of(demo.pid), children_of(demo.pid)
        assert len(engines) >= 2
        assert len(children) == 1
        if cause == "router crash":
            os.kill(children[0], signal.SIGKILL)
        else:
            os.kill(demo.pid, signal.Signals[cause])
        demo.wait(30)
        wait_until(lambda: not any(alive(one) for one in (*engines_of(demo.pid), *engines, *children)), 10)
        if cause == "router crash":
            assert demo.returncode == 2
            assert "the router exited with status" in demo.stderr.read()
    finally:
        demo.kill()
        demo.communicate()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speed", "0"), "--speed: expected a number above 0"),
        (("--only", "scale", "--speed", "2"), "--speed applies to the comparison"),
    ],
)
def test_invalid_flags_are_rejected(flags: tuple[str, ...], message: str) -> None:
    done = subprocess.run([*DEMO, *flags], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_sparkline_shows_the_highest_value_of_each_interval() -> None:
    assert sparkline([1, 1, 5, 1], [0.0, 1.0, 2.0, 3.0], 5.0) == "▂▂█▂"
    assert sparkline([2.0] * 100 + [4.0] * 100, [float(s) for s in range(200)], 4.0, width=10) == "▄" * 5 + "█" * 5
    assert sparkline([2.0], [0.0], 4.0) == "▄"
    assert sparkline([], [], 4.0) == ""


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = subprocess.run([*DEMO, "--port", str(port)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
