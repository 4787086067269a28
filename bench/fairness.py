"""Fairness of admission on an overloaded fleet, in virtual time under the production admission. Two tables:

    python bench/fairness.py [--seeds 5] [--requests 3000]

Priorities: high, normal and low requests at one to two times the load that two L4 can serve. The last columns count
rejections of high and normal requests while a low one was waiting, or was being served. Both must be 0.

Tenants: four, of which the first sends ten times as many requests; each of the others sends more than a quarter of
the load that the fleet can serve. The table has the prefill time, in ms, that each tenant got while all tenants had
requests waiting.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from random import Random

import msgspec
from record import Report, add_record_option

from warmroute.config import Admission, Config, Index, Routing
from warmroute.config.routing import LOW
from warmroute.lab.engine.timing import profile
from warmroute.lab.replay_setup import INDEX_BYTES
from warmroute.lab.request_flow import SimulatedExchange
from warmroute.lab.simulated_node import Conditions, NodeSpec, SimulatedNode
from warmroute.lab.workloads import poisson
from warmroute.lab.workloads.generators import PriorityMix, SharedSystemPrompts
from warmroute.lab.workloads.workload_prompt import WorkloadPrompt
from warmroute.lab.world import World

RATES = (12.0, 16.0, 20.0, 24.0, 30.0)
MAX_WAITING = 200
TENANT_RATE = 6.0
FLOOD_FACTOR = 10.0


class FairnessWorld(World):
    """A simulation that counts unfair rejections, and the work of each tenant."""

    def __init__(self, nodes: int, gpu: str, admission: Admission, seed: int) -> None:
        config = Config(routing=Routing(policy="price"), admission=admission, index=Index(memory_bytes=INDEX_BYTES))
        specs = [NodeSpec(f"node-{at}", profile(gpu)) for at in range(nodes)]
        super().__init__(specs, Conditions(seed=seed), config)
        self.rejected_while_low_waits = 0
        """Rejections of high and normal requests while a low one was waiting."""
        self.rejected_while_low_runs = 0
        """Rejections of high and normal requests while a low one was being served."""
        self.served_ms: Counter[str] = Counter()
        """Expected prefill time by tenant, of requests sent while all tenants had requests waiting."""
        self.tenants: frozenset[str] = frozenset()
        self._running_low: set[int] = set()

    def request_sent(self, exchange: SimulatedExchange, sim: SimulatedNode) -> None:
        call = self.requests.brain.open[exchange.id]
        decision = call.decision
        if call.tried == 1 and decision is not None:
            if exchange.prompt.priority == "low":
                self._running_low.add(exchange.id)
            if decision.price is not None and self.tenants:
                waiting = {tenant for _priority, tenant in self.admission.queue.tenants}
                if self.tenants <= waiting | {exchange.request.tenant}:
                    self.served_ms[exchange.request.tenant] += round(decision.price.prefill)
        super().request_sent(exchange, sim)

    def request_ended(self, exchange: SimulatedExchange, answered: bool) -> None:
        self._running_low.discard(exchange.id)
        if not answered and not exchange.tries and exchange.prompt.priority != "low":
            queues = self.admission.queue.tenants.items()
            self.rejected_while_low_waits += any(key[0] == LOW and tenant.waiting for key, tenant in queues)
            self.rejected_while_low_runs += bool(self._running_low)
        super().request_ended(exchange, answered)


class PriorityResult(msgspec.Struct, frozen=True):
    """The result of a mix of priorities. The dictionaries are by priority."""

    arrived: dict[str, int]
    served: dict[str, int]
    rejected: dict[str, int]
    ttft_p90_ms: dict[str, float]
    rejected_while_low_waits: int
    rejected_while_low_runs: int


def run_priorities(
    *, rate: float, requests: int, nodes: int = 2, gpu: str = "l4-1.5b", max_waiting: int = 100, seed: int = 1
) -> PriorityResult:
    world = FairnessWorld(nodes, gpu, Admission(max_waiting=max_waiting), seed)
    mix = PriorityMix(prompts=40, system_tokens=2000, question_tokens=1500, output_tokens=60)
    prompts = mix.generate(Random(f"{seed} mix"))
    world.run(poisson(prompts, rate, Random(f"{seed} arrivals")), limit=requests)
    results = {name: world.results.by_priority[name] for name in ("high", "normal", "low")}
    return PriorityResult(
        {name: one.arrived for name, one in results.items()},
        {name: one.finished for name, one in results.items()},
        {name: one.rejected for name, one in results.items()},
        {
            name: sorted(one.ttft_ms)[int(0.9 * len(one.ttft_ms))] if one.ttft_ms else 0.0
            for name, one in results.items()
        },
        world.rejected_while_low_waits,
        world.rejected_while_low_runs,
    )


def run_flood(
    *,
    rate: float,
    factor: float,
    tenants: int = 4,
    requests: int = 2000,
    nodes: int = 2,
    gpu: str = "l4-1.5b",
    seed: int = 1,
) -> dict[str, int]:
    """Each tenant sends `rate` requests per second, the first one `factor` times as many. Return the prefill time
    that each tenant was served."""
    world = FairnessWorld(nodes, gpu, Admission(max_waiting=100_000), seed)
    names = [f"tenant-{at}" for at in range(tenants)]
    world.tenants = frozenset(names)
    weights = [factor] + [1.0] * (tenants - 1)
    world.run(_tenant_prompts(names, weights, rate * sum(weights), seed), limit=requests)
    return {name: world.served_ms[name] for name in names}


def _tenant_prompts(names: list[str], weights: list[float], rate: float, seed: int) -> Iterator[WorkloadPrompt]:
    random = Random(f"{seed} tenants")
    prompts = SharedSystemPrompts(prompts=40, system_tokens=1000, question_tokens=2000, output_tokens=40, spread=0.8)
    for prompt in poisson(prompts.generate(random), rate, Random(f"{seed} arrivals")):
        [prompt.tenant] = random.choices(names, weights)
        yield prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    columns = ("high: served, TTFT p90", "normal", "low", "rejected while low waits", "while low runs")
    report.table("priorities", "requests/s", *columns)
    for rate in RATES:
        result = run_priorities(rate=rate, requests=args.requests, max_waiting=MAX_WAITING)
        cells = [
            f"{result.served[name] / result.arrived[name]:.1%}"
            + (f", {result.ttft_p90_ms[name] / 1000.0:.2f} s" if result.served[name] else "")
            for name in ("high", "normal", "low")
        ]
        report.row(f"{rate:g}", *cells, result.rejected_while_low_waits, result.rejected_while_low_runs)
    columns = ("prefill time, ms: the first", "second", "third", "fourth", "largest difference from the mean")
    report.table("tenants", "seed", *columns)
    for seed in range(1, args.seeds + 1):
        served = list(run_flood(rate=TENANT_RATE, factor=FLOOD_FACTOR, requests=args.requests, seed=seed).values())
        mean = sum(served) / len(served)
        difference = max(abs(work_ms - mean) for work_ms in served) / mean
        report.row(seed, *(f"{work_ms:,}" for work_ms in served), f"{difference:.1%}")
    report.record(args.record)


if __name__ == "__main__":
    main()
