"""CPU time of the admission queue by the number of requests that wait in it:

    python bench/queue_length.py [--nodes 8] [--tenants 1]

Prompts have lognormal lengths (median 8,000 tokens) and share no prefix. Each figure is a mean of CPU times:

    enter       a request arrives, gets a decision, and waits
    freed       a node has room: the router decides again for some queued requests, and one or none of them goes there
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

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import Health, Index, NodeConfig, Routing
from warmroute.core.admission import Admission
from warmroute.core.cache_view import CacheView
from warmroute.core.decision import Decision
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Lookup, Outcome, RoutingRequest
from warmroute.core.node import Ticket
from warmroute.core.rejections import RoutingError
from warmroute.core.router import Router

MODEL = "model"
ADMISSIONS = 500
TICKS = 40


class Pending:
    """A pending request."""

    def __init__(self, bench: QueueBench, tokens: int, tenant: str) -> None:
        self._bench = bench
        first = bench.next_token()
        self.lookup: Lookup | None = Lookup(array("I", range(first, first + tokens)).tobytes(), tokens, 0)
        self.request = RoutingRequest(MODEL, arrived_s=bench.now_s, tenant=tenant)

    def on_admitted(self, decision: Decision) -> None:
        bench = self._bench
        bench.running.append(bench.router.dispatch(decision, decision.node, bench.now_s))

    def on_rejected(self, error: RoutingError) -> None:
        raise error


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
        self.admission = Admission(self.router, AdmissionConfig(max_waiting=1_000_000))
        self.running: deque[Ticket] = deque()
        self._tenants = tenants
        self._random = Random(1)
        self._token = 0

    def next_token(self) -> int:
        self._token = (self._token + 1_000_003) % 4_000_000_000
        return self._token

    def enter(self) -> float:
        """Return the CPU time of a request that enters the queue, without that of making it."""
        tokens = min(60_000, round(self._random.lognormvariate(9, 1)))
        pending = Pending(self, tokens, f"tenant-{self._random.randrange(self._tenants)}")
        began = process_time()
        self.admission.submit(pending, self.now_s)
        return process_time() - began

    def free_node(self) -> float:
        """The oldest running request gets its first token, and ends. Return the CPU time of what admission does."""
        ticket = self.running.popleft()
        self.fleet.close_ticket(ticket, Outcome.CANCELLED, self.now_s)
        began = process_time()
        self.admission.node_freed(ticket.node, self.now_s)
        return process_time() - began

    def tick(self) -> float:
        began = process_time()
        self.admission.tick(self.fleet, self.now_s)
        return process_time() - began


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
