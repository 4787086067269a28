"""`warmroute demo` shows that warm caches are found, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from engine_processes import until

DEMO = [sys.executable, "-m", "warmroute.cli.main", "demo"]


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
    done = subprocess.run([*DEMO, "--exit", "--speed", "6"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = re.search(r"from cache\D+([\d.]+)%\D+([\d.]+)%", done.stdout.partition("Side by side")[2])
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 10
    assert "failed" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_demo(number: signal.Signals) -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(children_of(demo.pid)) >= 4, 15)
    time.sleep(0.3)
    children = children_of(demo.pid)
    os.kill(demo.pid, number)
    demo.wait(10)
    until(lambda: not any(alive(child) for child in children))


def test_a_taken_port_is_said(tmp_path: object) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([*DEMO, "--port", str(port)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr
