"""Whose turn it is on a fleet that is full: two experiments in virtual time, under production's own admission.

Priorities: a mix of high, normal and low at more than the fleet can do. Noted at each refusal of a high or normal
request: whether a low one waits here, or is being served.

Tenants: one floods, others ask for somewhat more than their share. Counted: the prefill that each of them got, in
tokens that were not cached, while all of them have somebody waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.config import Admission, Config, Index, Routing
from warmroute.fake_engine.profiles import profile
from warmroute.prompt.routing_request import LOW
from warmroute.replay.contenders import INDEX_BYTES
from warmroute.replay.workloads.arrivals import poisson
from warmroute.replay.workloads.priority_mix import PriorityMix
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.shared_system_prompts import SharedSystemPrompts
from warmroute.replay.world.conditions import Conditions, NodeSpec
from warmroute.replay.world.flight import Flight
from warmroute.replay.world.world import World
from warmroute.routing.decision import Decision


class Noting(World):
    """Notes who goes and who is refused beside whom."""

    def __init__(self, nodes: int, gpu: str, admission: Admission, seed: int) -> None:
        config = Config(routing=Routing(policy="price"), admission=admission, index=Index(memory_bytes=INDEX_BYTES))
        specs = [NodeSpec(f"node-{at}", profile(gpu)) for at in range(nodes)]
        super().__init__(specs, Conditions(seed=seed), config)
        self.sheds: Counter[str] = Counter()
        """Refusals by priority."""
        self.beside_waiting_low = 0
        """Refusals of high and normal ones while a low one waited."""
        self.beside_served_low = 0
        """Refusals of high and normal ones while a low one was being served."""
        self.work: Counter[str] = Counter()
        """Uncached tokens by tenant, that were let through while all tenants waited."""
        self.tenants: frozenset[str] = frozenset()
        self._low: set[int] = set()
        """Low ones that are being served."""

    def _refuse(self, flight: Flight) -> None:
        priority = flight.prompt.priority
        self.sheds[priority] += 1
        if priority != "low":
            waiting = any(key[0] == LOW and tenant.waiting for key, tenant in self.admission.room.tenants.items())
            self.beside_waiting_low += waiting
            self.beside_served_low += bool(self._low)
        super()._refuse(flight)

    def _go(self, flight: Flight, decision: Decision) -> None:
        if flight.prompt.priority == "low":
            self._low.add(id(flight))
        if decision.price is not None and self.tenants:
            waiting = {tenant for _priority, tenant in self.admission.room.tenants}
            if self.tenants <= waiting | {flight.request.tenant}:
                self.work[flight.request.tenant] += round(decision.price.new)
        super()._go(flight, decision)

    def _end(self, flight: Flight, refusal: object) -> None:
        self._low.discard(id(flight))
        super()._end(flight, refusal)  # type: ignore[arg-type]


class Mixed(msgspec.Struct, frozen=True):
    """What came of a mix of priorities."""

    asked: dict[str, int]
    served: dict[str, int]
    refused: dict[str, int]
    ttft_p90_ms: dict[str, float]
    beside_waiting_low: int
    beside_served_low: int


def priorities(
    *, rate: float, requests: int, nodes: int = 2, gpu: str = "l4-1.5b", max_waiting: int = 100, seed: int = 1
) -> Mixed:
    world = Noting(nodes, gpu, Admission(max_waiting=max_waiting), seed)
    mix = PriorityMix(prompts=40, system_tokens=2000, question_tokens=1500, output_tokens=60)
    prompts = mix.generate(Random(f"{seed} mix"))
    world.run(poisson(prompts, rate, Random(f"{seed} arrivals")), limit=requests)
    classes = {name: world.tally.classes[name] for name in ("high", "normal", "low")}
    return Mixed(
        {name: one.arrived for name, one in classes.items()},
        {name: one.finished for name, one in classes.items()},
        {name: one.rejected for name, one in classes.items()},
        {
            name: sorted(one.ttft_ms)[int(0.9 * len(one.ttft_ms))] if one.ttft_ms else 0.0
            for name, one in classes.items()
        },
        world.beside_waiting_low,
        world.beside_served_low,
    )


def flood(
    *,
    rate: float,
    times: float,
    tenants: int = 4,
    requests: int = 2000,
    nodes: int = 2,
    gpu: str = "l4-1.5b",
    seed: int = 1,
) -> dict[str, int]:
    """`rate` requests a second of each tenant, and `times` that of the first. The uncached tokens that each one got."""
    world = Noting(nodes, gpu, Admission(max_waiting=100_000), seed)
    names = [f"tenant-{at}" for at in range(tenants)]
    world.tenants = frozenset(names)
    weights = [times] + [1.0] * (tenants - 1)
    world.run(_of_tenants(names, weights, rate * sum(weights), seed), limit=requests)
    return {name: world.work[name] for name in names}


def _of_tenants(names: list[str], weights: list[float], rate: float, seed: int) -> Iterator[Prompt]:
    random = Random(f"{seed} tenants")
    prompts = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40, spread=0.8)
    for prompt in poisson(prompts.generate(random), rate, Random(f"{seed} arrivals")):
        [prompt.tenant] = random.choices(names, weights)
        yield prompt
