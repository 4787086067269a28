"""CPU time that a process takes to publish its requests to its peers, and to count those of a peer:

    python bench/cluster_messages.py [--nodes 2 200] [--requests 40] [--record NAME]

Two processes in one, without sockets: A sends requests to its nodes, publishes them, and B receives the message. A
message has `--requests` requests: 40 is what a process with 2,000 requests per second publishes every 20 ms. Their
prompts have 40 blocks, all new.
"""

from __future__ import annotations

import argparse
import time
from random import Random

from record import Report, add_record_option

from warmroute import build
from warmroute.config import Admission, Health, Index, NodeConfig, Pricing, Routing
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import PUBLISH_S
from warmroute.core.fleet import Fleet
from warmroute.core.node import Ticket
from warmroute.core.router import Router
from warmroute.core.traffic import Counters

BLOCKS = 40
MESSAGES = 400


class Process:
    def __init__(self, name: str, nodes: int) -> None:
        self.fleet = Fleet(Health())
        self.cache_view = CacheView(Index())
        router = Router(self.fleet, self.cache_view, Routing(policy="price", seed=1), Pricing())
        admission = Admitter(router, Admission())
        brain = Brain(self.fleet, router, admission, Counters())
        for at in range(nodes):
            node = self.fleet.add(NodeConfig(url=f"http://n{at}:1", name=f"n{at}", models=("m",)))
            self.fleet.check_passed(node, 0.0)
            self.cache_view.add_node(node.name, ["m"])
        self.state = ClusterState(name, brain, self.cache_view, lambda: None)
        self.sent: list[bytes] = []

    def publish(self, message: bytes) -> None:
        self.sent.append(message)

    def request(self, node_name: str, chain: bytes, now_s: float) -> Ticket:
        node, group = self.fleet.node(node_name), self.fleet.group("m")
        assert group is not None and self.cache_view.routed_log is not None
        ticket = Ticket.__new__(Ticket)
        ticket.open(node, now_s, group.decode_speed, True, 640, 640, 650.0)
        self.cache_view.routed_log.append((node_name, chain, False, ""))
        return ticket


def measure(nodes: int, requests: int) -> tuple[float, float, int]:
    """Return µs per request to publish and to receive, and the bytes of a message."""
    a, b, random = Process("a", nodes), Process("b", nodes), Random(1)
    running: list[Ticket] = []
    publish_s = receive_s = 0.0
    now_s, size = 100.0, 0
    for turn in range(MESSAGES):
        now_s += PUBLISH_S
        for ticket in running:
            ticket.first_token(now_s)
            ticket.release(0, now_s)
        names = [f"n{(at + turn * requests) % nodes}" for at in range(requests)]
        running = [a.request(name, random.randbytes(8 * BLOCKS), now_s) for name in names]
        a.sent.clear()
        began_s = time.process_time()
        a.state.publish(a, now_s)
        published_s = time.process_time()
        for message in a.sent:
            b.state.receive(message, now_s)
        receive_s += time.process_time() - published_s
        publish_s += published_s - began_s
        size = len(a.sent[-1])
    count = MESSAGES * requests / 1e6
    return publish_s / count, receive_s / count, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 200])
    parser.add_argument("--requests", type=int, default=40, help="requests in one message (40)")
    add_record_option(parser)
    args = parser.parse_args()
    report = Report()
    report.table("messages", "nodes", "publish, µs per request", "receive, µs per request", "bytes of a message")
    for nodes in args.nodes:
        publish_us, receive_us, size = measure(nodes, args.requests)
        report.row(str(nodes), f"{publish_us:.1f}", f"{receive_us:.1f}", f"{size:,}")
    report.value("build", build())
    report.record(args.record)


if __name__ == "__main__":
    main()
