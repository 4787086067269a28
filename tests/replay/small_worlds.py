"""Small fleets and prompts for tests of the simulated world."""

from __future__ import annotations

from collections.abc import Sequence

from warmroute.fake_engine.core.timing import Timing
from warmroute.fake_engine.profiles import Profile
from warmroute.fleet.node import Node
from warmroute.replay.workloads import Prompt, Segments
from warmroute.replay.workloads.segments import named
from warmroute.replay.workloads.text import KEY_TOKENS
from warmroute.replay.world import Conditions, Island, NodeSpec, World

# A prefill takes 1 ms a token, a decode step 10 ms: easy to reckon with.
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
) -> Prompt:
    """A prompt made of segments with these names, `tokens` long each; `user` is what its first message begins with."""
    text = Segments() if user is None else Segments().followed_by(named(user), KEY_TOKENS)
    for name in names or ("prompt",):
        text = text.followed_by(named(name), tokens)
    answer = text.followed_by(named("answer to", *names), output)
    return Prompt(text.tokens, output, answer, at_ms=at_ms, **more)  # type: ignore[arg-type]


def books_are_closed(world: World) -> None:
    """Every counter is back to zero, and every request has ended once."""
    tally = world.tally
    assert world.inflight == 0
    assert tally.ended == tally.total("arrived")
    for sim in (*world.nodes.values(), *world.gone):
        assert sim.node.inflight == 0
        assert not sim.flights
        assert sim.node.outcomes[0] >= 0
        if sim.node.name in world.nodes and sim.life.value == "serving":
            sim.engine.check()
            assert sim.engine.num_running == sim.engine.num_waiting == 0
    for model in world.fleet.models:
        group = world.fleet.group(model)
        assert group is not None
        assert group.inflight == 0


def nodes_of(world: World) -> Sequence[Node]:
    return [sim.node for sim in world.nodes.values()]
