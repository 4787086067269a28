"""The leader lock: only one of several processes scales the fleet."""

from __future__ import annotations

from pathlib import Path

from scripted_provisioner import Clock, ScriptedProvisioner, running

from warmroute.scaling.lease import LeaderLock


async def test_only_one_of_two_processes_scales_and_the_other_succeeds_it(tmp_path: Path) -> None:
    provisioner, clock = ScriptedProvisioner(), Clock()
    first, second = LeaderLock(tmp_path / "deep" / "lock"), LeaderLock(tmp_path / "deep" / "lock")
    async with (
        running(provisioner, clock=clock, is_leader=first.is_leader, min_nodes=2) as harness,
        running(provisioner, clock=clock, is_leader=second.is_leader, min_nodes=2) as two,
    ):
        for _ in range(10):
            await harness.tick()
            await two.tick()
        assert harness.loop.leading and not two.loop.leading
        assert len(harness.serving()) == 2 and not two.managed and len(provisioner.requested) == 2
        first.release()
        for _ in range(10):
            await two.tick()
        assert two.loop.leading
        assert len(two.serving()) == 2
        assert len(provisioner.requested) == 2
        assert not provisioner.terminated
        await harness.tick()
        assert not harness.loop.leading


def test_a_removed_lock_file_leaves_only_one_leader(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = LeaderLock(path), LeaderLock(path)
    assert first.is_leader() and not second.is_leader()
    path.unlink()
    assert second.is_leader() and not first.is_leader()
    second.release()
    assert first.is_leader()
