"""CPU time of the admission queue by the number of requests that wait in it:

    python bench/queue_length.py [--nodes 8] [--tenants 1]

Prompts have lognormal lengths (median 8,000 tokens) and share no prefix. Each figure is a mean of CPU times:

    enter       a request arrives, gets a decision, and waits
    freed       a request ends, so its node has room: the router decides again for some queued requests, and one or
                none of them goes there
    tick        the periodic check of the queue, every 50 ms, and the longest of them
"""

from __future__ import annotations

import argparse
from array import array
from collections import deque
from random import Random
from statistics import fmean
from time import process_time

from record import Report, add_record_option, load_average

from warmroute.config import Admission, Health, Index, NodeConfig, Routing
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.messages import QUEUE, Arrive, Cancel, Due, Event, Left, Lookup, RoutingRequest, Send
from warmroute.core.router import Router
from warmroute.core.traffic import Counters

MODEL = "model"
ADMISSIONS = 500
TICKS = 40


class QueueBench:
    def __init__(self, nodes: int, tenants: int) -> None:
        self.now_s = 1000.0
        self.fleet = Fleet(Health(slow_start_s=0.0))
        cache_view = CacheView(Index())
        for number in range(nodes):
            name = f"node-{number}"
            node = self.fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=(MODEL,)))
            self.fleet.check_passed(node, 0.0)
            cache_view.add_node(name, [MODEL]).set_size(16, 300_000)
        self.router = Router(self.fleet, cache_view, Routing(policy="price", seed=1))
        self.admission = Admitter(self.router, Admission(max_waiting=1_000_000))
        self.brain = Brain(self.fleet, self.router, self.admission, Counters())
        self.running: deque[int] = deque()
        """The requests that nodes have, the oldest first."""
        self._last_id = 0
        self._tenants = tenants
        self._random = Random(1)
        self._token = 0

    def next_token(self) -> int:
        self._token = (self._token + 1_000_003) % 4_000_000_000
        return self._token

    def enter(self) -> float:
        """Return the CPU time of a request that enters the queue, without that of making it."""
        tokens = min(60_000, round(self._random.lognormvariate(9, 1)))
        first = self.next_token()
        lookup = Lookup(array("I", range(first, first + tokens)).tobytes(), tokens, 0)
        tenant = f"tenant-{self._random.randrange(self._tenants)}"
        self._last_id += 1
        request = RoutingRequest(MODEL, arrived_s=self.now_s, tenant=tenant)
        return self._tell(Arrive(self._last_id, b"", request, lookup))

    def free_node(self) -> float:
        """The oldest running request ends. Return the CPU time of that."""
        return self._tell(Cancel(self.running.popleft(), Left.LEFT))

    def tick(self) -> float:
        return self._tell(Due(QUEUE))

    def _tell(self, event: Event) -> float:
        began = process_time()
        commands = self.brain.handle(event, self.now_s)
        took_s = process_time() - began
        self.running.extend(command.id for command in commands if isinstance(command, Send))
        return took_s


def measure(waiting: int, nodes: int, tenants: int) -> tuple[float, float, float, float]:
    """Return the microseconds of an entry, of a freed node, of a tick, and of the longest tick."""
    bench = QueueBench(nodes, tenants)
    queue = bench.admission.queue
    while queue.waiting < waiting:
        bench.enter()
    entered = admitting = 0.0
    before = queue.admitted_by_work + queue.admitted_by_guarantee
    admitted = entries = freed = 0
    while admitted < ADMISSIONS:
        bench.now_s += 0.01
        admitting += bench.free_node()
        freed += 1
        admitted = queue.admitted_by_work + queue.admitted_by_guarantee - before
        while queue.waiting < waiting:
            entered += bench.enter()
            entries += 1
    bench.tick()  # the first one looks at all requests
    ticks: list[float] = []
    for _ in range(TICKS):
        bench.now_s += 0.05
        ticks.append(bench.tick())
    return 1e6 * entered / entries, 1e6 * admitting / freed, 1e6 * fmean(ticks), 1e6 * max(ticks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=1)
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.value("load", load_average())
    report.value("nodes", args.nodes)
    report.table("queue_length", "waiting requests", "enter, µs", "node freed, µs", "tick, µs", "longest tick, µs")
    for waiting in (10, 100, 1000, 10_000):
        found = measure(waiting, args.nodes, args.tenants)
        report.row(f"{waiting:,}", *(f"{one:,.0f}" for one in found))
    report.record(args.record)


if __name__ == "__main__":
    main()
