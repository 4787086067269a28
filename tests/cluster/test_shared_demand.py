"""What the process that scales the fleet knows of the requests of the others: demand, and hot prefixes."""

from __future__ import annotations

from random import Random

from test_cluster_state import Process, exchange

from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import FULL_S, PEER_TTL_S, Demand
from warmroute.core.cluster.shared_demand import SharedDemand
from warmroute.core.demand import COUNTERS, DemandMeter
from warmroute.core.hot_prefixes import HotPrefixes
from warmroute.core.messages import Lookup, Outcome, RoutingRequest


class Scaled(Process):
    """A process of an autoscaled fleet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state.close()
        self.meter, self.waiting = DemandMeter(), 0
        self.router.demand_meter, self.router.hot = self.meter, HotPrefixes()
        self.demand = SharedDemand(self.meter, lambda: self.waiting)
        self.state = ClusterState(name, self.brain, self.cache_view, lambda: None, self.limits, demand=self.demand)

    def send(self, lookup: Lookup) -> None:
        self.meter.arrived += 1
        ticket = self.router.open_ticket(
            self.router.decide(RoutingRequest("m"), self.now_s, lookup), self.node(), self.now_s
        )
        ticket.first_token(self.now_s)
        self.meter.record_ttft(30.0)
        ticket.close(Outcome.OK, self.now_s)


def pass_time(*processes: Process, seconds: float = FULL_S) -> None:
    for process in processes:
        process.now_s += seconds
    exchange(*processes)


def prompt(number: int) -> Lookup:
    shared = Random(0).randbytes(4 * 320)
    return Lookup(shared + Random(number).randbytes(4 * 64), 384, 384)


def test_every_process_knows_the_demand_of_all_since_it_hears_them() -> None:
    a, b, c = Scaled("a"), Scaled("b"), Scaled("c")
    for number in range(5):
        a.send(prompt(number))
    pass_time(a, b)
    before = b.meter.counts()[0]
    for number in range(7):
        a.send(prompt(100 + number))
    b.send(prompt(200))
    a.waiting, b.waiting = 3, 2
    pass_time(a, b)
    assert b.meter.counts()[0] - before == 8 and b.meter.own_counts()[0] == 1
    assert sum(b.meter.times()[0]) >= 8
    assert b.demand.waiting == 5
    pass_time(a, b, c)  # what the others counted before it came is not its demand
    assert c.meter.counts()[0] == 0
    b.now_s += PEER_TTL_S + 1.0
    b.state.publish(b, b.now_s)
    assert b.demand.waiting == 2 and b.meter.counts()[0] - before == 8  # a is gone; what it sent was sent


def test_demand_of_another_form_is_ignored() -> None:
    demand = SharedDemand(DemandMeter(), lambda: 0)
    demand.apply("x", Demand(0, (1.0,) * (len(COUNTERS) + 1), (), ()))
    assert demand.waiting == 0


def test_a_prefix_is_hot_by_the_requests_of_all_processes_and_its_tokens_stay_in_each() -> None:
    a, b = Scaled("a"), Scaled("b")
    for number in range(4):
        a.send(prompt(number))
        pass_time(a, b)
    hot = b.router.hot
    assert hot is not None and not hot.hottest(4, b.now_s)  # b has no tokens of it yet
    b.send(prompt(99))
    (found,) = hot.hottest(1, b.now_s)
    assert found.uses > 4.0 and found.tokens == 256  # depths are 1, 2, 3, 4, 6, … 16 blocks
