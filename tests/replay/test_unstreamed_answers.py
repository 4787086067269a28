"""Answers that are not streamed, in virtual time: nobody sees their first tokens. The router learns the speed of nodes
from the engines' own times, and keeps requests in its own queue, which is fair."""

from __future__ import annotations

from itertools import count
from random import Random
from statistics import median

import msgspec
import pytest
from small_worlds import NEAR, assert_all_requests_ended, prompt, specs

from warmroute.config import Config
from warmroute.core.speeds import NodeSpeed
from warmroute.lab.engine.timing import Profile, profile
from warmroute.lab.request_flow import SimulatedExchange
from warmroute.lab.simulated_node import Conditions, SimulatedNode
from warmroute.lab.world import World

UNSTREAMED = msgspec.structs.replace(NEAR, streams=False)
L4 = profile("l4-1.5b")


class TwoTenants:
    """A tenant with many clients and one with two, who each send a request when their last one has ended."""

    def __init__(self, engine: Profile, *, tokens: int, output: int, many: int = 80, seconds: float = 60.0) -> None:
        world = self.world = World(specs(1, profile=engine), UNSTREAMED, Config())
        self.took_s: list[float] = []
        """Of the requests of the tenant with two clients, without the first 20 s."""
        self.waiting: list[int] = []
        """Lengths of the engine's queue, every 0.1 s without the first 20 s."""
        numbers, request_ended = count(), world.request_ended

        def send(tenant: str) -> None:
            world.arrive(prompt(next(numbers), tokens=tokens, output=output, tenant=tenant))

        def send_next(exchange: SimulatedExchange, answered: bool) -> None:
            request_ended(exchange, answered)
            assert answered
            if exchange.request.tenant == "few" and world.calendar.now_ms > 20_000.0:
                self.took_s.append((world.calendar.now_ms - exchange.arrived_ms) / 1000.0)
            world.calendar.after(10.0, send, exchange.request.tenant)

        def look() -> None:
            if world.calendar.now_ms > 20_000.0:
                self.waiting.append(self.node.engine.num_waiting)
            world.calendar.after(100.0, look)

        world.request_ended = send_next  # type: ignore[method-assign]
        for client in range(many + 2):
            world.calendar.after(float(client), send, "few" if client >= many else "many")
        look()
        world.calendar.run(lambda: world.calendar.now_ms < 1000.0 * seconds)

    @property
    def node(self) -> SimulatedNode:
        return next(iter(self.world.nodes.values()))


def test_the_engines_own_times_teach_the_speed_of_a_node_that_nobody_streams_from() -> None:
    world = World(specs(1, profile=L4), UNSTREAMED, Config())
    world.run(prompt(number, tokens=3000, output=100, at_ms=4000.0 * number) for number in range(20))
    assert_all_requests_ended(world)
    node = next(iter(world.nodes.values())).node
    streamed = World(specs(1, profile=L4), NEAR, Config())
    streamed.run(prompt(number, tokens=3000, output=100, at_ms=4000.0 * number) for number in range(20))
    true = next(iter(streamed.nodes.values())).node
    assert node.speed.source == "learned"
    assert node.speed.ms_per_token == pytest.approx(true.speed.ms_per_token, rel=0.1)


@pytest.mark.parametrize("engine", ["l4-1.5b", "h200-8b"])
def test_whole_answers_teach_the_speed_of_a_node_whose_engine_reports_no_times(engine: str) -> None:
    """Prompts and outputs of different lengths. Nearly all of the time is decoding."""
    lengths = Random(3)
    sizes = [(lengths.randint(200, 4000), lengths.randint(100, 300)) for _ in range(200)]

    def learned(conditions: Conditions) -> NodeSpeed:
        silent = [msgspec.structs.replace(spec, misreports=("load",)) for spec in specs(1, profile=profile(engine))]
        world = World(silent, conditions, Config())
        world.run(
            prompt(number, tokens=tokens, output=output, at_ms=8000.0 * number)
            for number, (tokens, output) in enumerate(sizes)
        )
        assert_all_requests_ended(world)
        return next(iter(world.nodes.values())).node.speed

    whole, streamed = learned(UNSTREAMED), learned(NEAR)
    assert whole.source == "learned"
    assert whole.ms_per_token == pytest.approx(streamed.ms_per_token, rel=0.35)


@pytest.mark.parametrize("bound_by", ["batch", "prefill"])
def test_requests_wait_at_the_router_and_not_in_the_engine(bound_by: str) -> None:
    """One engine with few places in its batch, or with long prompts; neither can serve 82 clients at once. With 74
    requests in the engine's queue, those of the tenant with two clients would take 14 s where the batch is small."""
    if bound_by == "batch":
        found = TwoTenants(msgspec.structs.replace(L4, max_num_seqs=8), tokens=200, output=100)
    else:
        found = TwoTenants(L4, tokens=6000, output=20)
    assert max(found.waiting) <= 8 and median(found.waiting) <= 2
    assert median(found.took_s) < (3.0 if bound_by == "batch" else 6.0)
    assert found.world.results.total("finished") > (320 if bound_by == "batch" else 110), "the engine stays busy"


def test_a_small_load_without_streaming_never_waits_at_the_router() -> None:
    """Three clients of an engine with a place for each, whose reports show them waiting for a step now and then."""
    found = TwoTenants(msgspec.structs.replace(L4, max_num_seqs=8), tokens=400, output=40, many=1, seconds=120.0)
    assert found.world.admission.queue.queued_total <= 0.02 * found.world.results.total("finished")
