"""Several simulated routers in front of one fleet: they decide nearly as one, whatever happens to their messages."""

from __future__ import annotations

import pytest
from small_worlds import assert_all_requests_ended, specs

from warmroute.app.main import main
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import parse_policy
from warmroute.lab.run import Setup, build_world, replay
from warmroute.lab.simulated_node import Conditions
from warmroute.lab.summary import Run
from warmroute.lab.workloads import parse_workload


def setup(policy: str = "price", limit: int = 300, rate: float = 4.0, **conditions: object) -> Setup:
    return Setup(
        workload=parse_workload(["tool_agents"]),
        nodes=tuple(specs(4, profile=profile("2xh100-32b"))),
        policy=parse_policy(policy),
        conditions=Conditions(**conditions),  # type: ignore[arg-type]
        rate=rate,
        limit=limit,
    )


def run(**more: object) -> Run:
    return replay(setup(**more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> Run:
    return run()


def test_routers_that_share_decide_nearly_as_one(alone: Run) -> None:
    shared = run(replicas=4)
    assert shared["finished"] == 300
    assert shared["hit_rate"] > alone["hit_rate"] - 0.02
    assert shared["ttft_ms"]["mean"] < 1.25 * alone["ttft_ms"]["mean"]


def test_without_kv_events_routers_know_the_prompts_that_others_sent() -> None:
    alone, shared = run(policy="approximate"), run(policy="approximate", replicas=4)
    apart = run(policy="approximate", replicas=4, shares=False)
    assert shared["hit_rate"] > alone["hit_rate"] - 0.02
    assert shared["hit_rate"] > apart["hit_rate"] + 0.02


@pytest.mark.parametrize(
    "network", [{"sync_loss": 0.3}, {"partitions": ((5.0, 20.0),)}, {"sync_lag_ms": 500.0}, {"sync_loss": 1.0}]
)
def test_lost_and_late_messages_fail_no_request_and_leave_nothing_behind(network: dict[str, object]) -> None:
    one = setup(replicas=3, **network)  # type: ignore[arg-type]
    world = build_world(one)
    world.run(one.arrivals(), limit=one.limit)
    assert world.results.total("finished") == 300
    assert_all_requests_ended(world)
    world.calendar.run(until_ms=world.calendar.now_ms + 3000.0)  # the last messages arrive, or their senders are silent
    for sim in world.nodes.values():
        for node in sim.views:
            assert node.inflight == node.peer_inflight == 0
            assert node.pending_work == 0.0 and node.context_tokens == 0 and node.kv_new == 0
    for replica in world.replicas:
        group = replica.fleet.group("sim")
        assert group is not None and group.inflight == group.waiting == 0


def test_other_routers_run_as_replicas_too() -> None:
    for policy in ("sglang", "dynamo"):
        assert run(policy=policy, replicas=3, limit=60)["finished"] == 60


def test_the_command_takes_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "tool_agents", "--limit", "20", "--policy", "price", "--replicas", "2", "--quiet"]
    network = ["--sync-lag", "5", "--sync-loss", "0.1", "--partition", "1 2"]
    assert main([*arguments, *network]) == 0
    assert main([*arguments, "--partition", "soon"]) == 2
    assert main([*arguments, "--autoscale"]) == 2
    assert "--partition 'soon'" in capsys.readouterr().err
