"""`serve --edges` with [scaling]: the brain scales, and the next one goes on if it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc.aio
import pytest
from support.free_port import free_port
from support.polling import until
from support.raw_client import chat, post
from support.serve_process import ServeProcess, serve
from test_scaling_after_a_crash import PATIENCE_S, Place, admin, nothing_left_of, scaling, until_serving

from warmroute.config import ConfigError
from warmroute.scaling.keda import SERVICE, messages
from warmroute.scaling.lease import FileLease

pytestmark = pytest.mark.usefixtures("experiment")

EDGES = ("--edges", "2")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def child_pids(router: ServeProcess) -> list[int]:
    children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


async def both_serve(router: ServeProcess) -> None:
    await until(lambda: sum("edge_started" in line for line in router.lines) == 2, "", PATIENCE_S)


def lock_holder(lock: Path) -> int:
    """Return the pid of the brain that holds the lock; 0 if none does."""
    inode = str(lock.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
            return int(words[4])
    return 0


async def request_all_edges(router: ServeProcess) -> list[int]:
    return [(await router.request(post(chat(model="sim", max_tokens=2)))).status for _ in range(6)]


async def test_the_brain_scales_and_the_next_one_goes_on_when_it_dies(place: Place) -> None:
    place.write(nodes=2)
    async with nothing_left_of(place), serve("--config", place.file, *EDGES) as router:
        await both_serve(router)
        await until_serving(router, 2)
        engines = sorted(place.processes())
        assert len(engines) == 2
        assert await request_all_edges(router) == [200] * 6  # each edge knows the new nodes

        lock = place.folder / "lock"
        leader = lock_holder(lock)
        assert leader
        os.kill(leader, signal.SIGKILL)
        await until(lambda: lock_holder(lock) not in (0, leader), "another brain leads", PATIENCE_S)
        found = await until_serving(router, 2)
        assert found["leading"] and sorted(place.processes()) == engines
        assert router.logged("scaling_state_restored")
        await until(lambda: router.logged("process_ended"))

        place.write(nodes=1)  # the brain reloads the configuration
        await until_serving(router, 1)
        await until(lambda: len(place.processes()) == 1, patience_s=PATIENCE_S)
        assert await request_all_edges(router) == [200] * 6  # no edge sends to the removed node
        page = (await router.request(admin("/metrics"), router.admin_port)).body.decode()
        assert "\nwarmroute_scaling_desired_nodes 1\n" in page and "\nwarmroute_scaling_leader 1\n" in page


KEDA = """
[listen]
port = 0
[admin]
port = 0
[scaling]
enabled = true
interval_s = 0.3
min_nodes = 3
keda_port = {port}
"""


async def desired_nodes(port: int) -> int:
    """Ask as KEDA does; 0 if nobody listens."""
    kinds = messages()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/GetMetrics",
            kinds["GetMetricsRequest"].SerializeToString,
            kinds["GetMetricsResponse"].FromString,
        )
        try:
            answer = await call(kinds["GetMetricsRequest"](), timeout=2.0)
        except grpc.aio.AioRpcError:
            return 0
        return int(answer.metricValues[0].metricValue)


async def test_the_brain_answers_keda(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "router.toml"
    file.write_text(KEDA.format(port=port))

    async def answered() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await desired_nodes(port) != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async with serve("--config", file, *EDGES) as router:
        await both_serve(router)
        await answered()
        assert sum("keda_listening" in line for line in router.lines) == 1
        assert (await scaling(router))["leading"]
        (leader,) = (pid for pid in child_pids(router) if listens(pid, port))
        os.kill(leader, signal.SIGKILL)
        await until(lambda: sum("keda_listening" in line for line in router.lines) == 2, "", PATIENCE_S)
        await answered()


def listens(pid: int, port: int) -> bool:
    """Return whether a process has a listening socket on the port."""
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for lines in tables for line in lines]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    files = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.readlink(file) in inodes for file in files if file.is_symlink())


async def test_a_lease_keeps_the_state_for_the_next_leader(tmp_path: Path) -> None:
    first, second = FileLease(tmp_path / "lock"), FileLease(tmp_path / "lock")
    first.start()
    second.start()
    assert first.is_leader() and not second.is_leader() and first.state == b""
    assert await first.commit(b"one") and not await second.commit(b"two")
    await first.close()
    assert second.is_leader() and second.state == b"one"
    assert not await first.commit(b"three") and second.state == b"one"
    (tmp_path / "lock.state.new").mkdir()  # it cannot be written
    assert not await second.commit(b"four") and second.state == b"one"


def test_a_lock_that_cannot_be_opened_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.lock_file: .*Is a directory"):
        FileLease(tmp_path).start()
