"""Small fleets and prompts for tests of the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from support.engine_invariants import check_engine

from warmroute.core.node import Node
from warmroute.lab.engine.timing import Profile, Timing
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.workloads.workload_prompt import KEY_TOKENS, Segments, WorkloadPrompt, segment_id
from warmroute.lab.world import World

# A prefill takes 1 ms per token, a decode step 10 ms, so that times can be computed by hand.
PLAIN = Profile(
    name="plain",
    timing=Timing(m=0, a=0, b=1.0, d=0, h=0, e=10.0, f=0, e2=0, f2=0, g=0, overhead_ms=0),
    kv_tokens=64_000,
    kv_bytes_per_token=1,
)
NEAR = Conditions(islands={"local": Island(0.0)}, seed=5)


def specs(count: int, *, profile: Profile = PLAIN, island: str = "local", blocks: int | None = None) -> list[NodeSpec]:
    return [NodeSpec(f"node-{at}", profile, island, blocks=blocks) for at in range(count)]


def prompt(
    *names: object, tokens: int = 64, output: int = 2, at_ms: float = 0.0, user: object = None, **more: object
) -> WorkloadPrompt:
    """Return a prompt of segments with these names, `tokens` long each. `user` names the start of its first message."""
    text = Segments() if user is None else Segments().followed_by(segment_id(user), KEY_TOKENS)
    for name in names or ("prompt",):
        text = text.followed_by(segment_id(name), tokens)
    answer = text.followed_by(segment_id("answer to", *names), output)
    return WorkloadPrompt(text.tokens, output, answer, at_ms=at_ms, **more)  # type: ignore[arg-type]


def assert_all_requests_ended(world: World) -> None:
    """Every counter is back to zero, and every request has ended exactly once."""
    results = world.results
    assert world.inflight == 0
    assert results.ended == results.total("arrived")
    for sim in (*world.nodes.values(), *world.departed):
        assert sim.inflight == 0
        assert not sim.tries
        assert sim.node.outcomes[0] >= 0
        if sim.node.name in world.nodes and sim.state.value == "serving":
            check_engine(sim.engine)
            assert sim.engine.num_running == sim.engine.num_waiting == 0
    for model in world.fleet.models:
        group = world.fleet.group(model)
        assert group is not None
        assert group.inflight == 0


def nodes_of(world: World) -> Sequence[Node]:
    return [sim.node for sim in world.nodes.values()]
