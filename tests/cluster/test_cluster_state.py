"""Several processes in front of one fleet: what each counts of the others, and that it all returns to zero."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

import pytest

from warmroute._kernel import REQUEST_CONTEXT
from warmroute.config import Admission, Health, Index, KeyConfig, NodeConfig, Pricing, Routing
from warmroute.core.admission import Admitter
from warmroute.core.brain import Brain
from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import FULL_S, PEER_TTL_S, decode, encode
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Command, Event, Lookup, Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.rate_limits import RateLimits
from warmroute.core.rejections import RateLimited
from warmroute.core.router import Router
from warmroute.core.traffic import Counters


class Process:
    """One router with two nodes, and what it publishes."""

    def __init__(self, name: str, nodes: int = 2, requests_per_min: int = 0) -> None:
        self.now_s = 100.0
        self.fleet = Fleet(Health())
        self.cache_view = CacheView(Index())
        self.router = Router(self.fleet, self.cache_view, Routing(policy="price", seed=1), Pricing())
        self.admission = Admitter(self.router, Admission())
        self.brain = Brain(self.fleet, self.router, self.admission, Counters())
        for at in range(nodes):
            node = self.fleet.add(NodeConfig(url=f"http://n{at}:1", name=f"n{at}", models=("m",)))
            self.fleet.check_passed(node, 0.0)
            self.cache_view.add_node(node.name, ["m"])
        key = KeyConfig(sha256="0" * 64, tenant="acme", requests_per_min=requests_per_min)
        self.limits = RateLimits([key] if requests_per_min else [], self.now_s)
        self.sent: list[bytes] = []
        self.state = ClusterState(name, self.brain, self.cache_view, lambda: None, self.limits)

    def publish(self, message: bytes) -> None:
        self.sent.append(message)

    def tell(self, event: Event) -> Sequence[Command]:
        return self.brain.handle(event, self.now_s)

    def node(self, name: str = "n0") -> Node:
        return self.fleet.node(name)

    def open(self, tokens: int = 1000, name: str = "n0") -> Ticket:
        """Send a request to a node."""
        group = self.fleet.group("m")
        assert group is not None
        ticket = Ticket.__new__(Ticket)
        node = self.node(name)
        ticket.open(node, self.now_s, group.decode_speed, True, tokens, tokens, float(tokens))
        ticket._groups = node.groups
        for one in node.groups:
            one.inflight += 1
        return ticket


def exchange(*processes: Process, lose: float = 0.0, random: Random | None = None) -> None:
    """Let all processes publish, and deliver what is not lost."""
    for process in processes:
        process.state.publish(process, process.now_s)
    messages = [(process, process.sent) for process in processes]
    for sender, sent in messages:
        for message in sent:
            for process in processes:
                if process is not sender and not (random is not None and random.random() < lose):
                    process.state.receive(message, process.now_s)
        sender.sent = []


def test_a_node_counts_the_requests_of_all_processes() -> None:
    a, b = Process("a"), Process("b")
    tickets = [a.open(1000), a.open(500)]
    own = b.open(200)
    exchange(a, b)
    assert a.node().inflight == b.node().inflight == 3
    assert a.node().pending_work == b.node().pending_work == 1700.0
    assert (
        b.node().context_tokens == 1700 + 3 * REQUEST_CONTEXT
        and b.node().kv_new == 1700
        and b.node().kv_delta == 1700.0
    )
    assert b.node().own_inflight == 1 and b.node().own_pending_work == pytest.approx(200.0)
    assert b.node().arrival_rate == pytest.approx(a.node().arrival_rate)
    group = b.fleet.group("m")
    assert group is not None and group.inflight == 3
    assert b.node("n1").inflight == 0

    tickets[0].first_token(a.now_s)
    exchange(a, b)
    assert b.node().pending_work == pytest.approx(700.0) and b.node().inflight == 3
    assert b.brain.due_now, "queued requests may go there"

    for ticket in (*tickets, own):
        ticket.close(Outcome.OK, a.now_s)
    exchange(a, b)
    for process in (a, b):
        node = process.node()
        assert (node.inflight, node.pending_work, node.context_tokens, node.kv_new) == (0, 0.0, 0, 0)
        assert node.peer_inflight == 0 and node.kv_delta == 0.0


def test_what_the_node_reports_counts_beyond_the_requests_of_all_processes() -> None:
    a, b = Process("a"), Process("b")
    a.open()
    exchange(a, b)
    b.node().update_load(running=3, waiting=0, kv_usage=0.1, now_s=b.now_s)
    assert b.node().load == 3 and b.node().other_load == 2


def test_a_request_of_a_peer_that_the_node_reported_first_counts_once() -> None:
    a, b = Process("a"), Process("b")
    exchange(a, b)
    a.open()
    b.node().update_load(running=3, waiting=0, kv_usage=0.1, now_s=b.now_s)
    b.now_s += 0.02
    exchange(a, b)
    assert b.node().load == 3 and b.node().other_load == 2
    a.now_s += 1.0
    b.now_s += 1.0
    a.open()
    exchange(a, b)
    assert b.node().load == 4 and b.node().other_load == 2


def test_a_silent_process_counts_for_a_second_and_a_lost_one_not_at_all() -> None:
    a, b, c = Process("a"), Process("b"), Process("c")
    a.open()
    b.open()
    exchange(a, b, c)
    assert c.node().inflight == 2
    c.state.forget("b", c.now_s)
    assert c.node().inflight == 1
    c.now_s += PEER_TTL_S + 0.1
    c.state.publish(c, c.now_s)
    assert c.node().inflight == 0 and not c.state.peers
    group = c.fleet.group("m")
    assert group is not None and group.inflight == 0


def test_the_next_full_message_makes_up_for_lost_ones() -> None:
    random, a, b = Random(3), Process("a"), Process("b")
    open_tickets: list[Ticket] = []
    for _ in range(200):
        for process in (a, b):
            process.now_s += 0.02
        if open_tickets and random.random() < 0.5:
            open_tickets.pop(random.randrange(len(open_tickets))).close(Outcome.OK, a.now_s)
        else:
            open_tickets.append(a.open(random.randrange(1, 1000), random.choice(("n0", "n1"))))
        exchange(a, b, lose=0.5, random=random)
    for process in (a, b):
        process.now_s += FULL_S
    exchange(a, b)
    for name in ("n0", "n1"):
        assert b.node(name).inflight == a.node(name).inflight
        assert b.node(name).pending_work == pytest.approx(a.node(name).pending_work)
        assert b.node(name).kv_new == a.node(name).kv_new
    for ticket in open_tickets:
        ticket.close(Outcome.OK, a.now_s)
    exchange(a, b)
    assert b.node("n0").inflight == b.node("n1").inflight == 0


def test_a_repeated_or_late_message_counts_once() -> None:
    a, b = Process("a"), Process("b")
    ticket = a.open()
    a.state.publish(a, a.now_s)
    ticket.close(Outcome.OK, a.now_s)
    a.state.publish(a, a.now_s)
    first, second = a.sent
    for message in (first, first, second, first, b"nonsense", second):
        b.state.receive(message, b.now_s)
    assert b.node().inflight == 0 and b.state.rejected == 1


def test_rows_of_unknown_and_of_returning_nodes_do_no_harm() -> None:
    a, b = Process("a", nodes=3), Process("b")
    a.open(name="n2")
    a.open(name="n0")
    exchange(a, b)
    b.fleet.remove("n0")
    exchange(a, b)
    b.fleet.add(NodeConfig(url="http://n0:1", name="n0", models=("m",)))
    b.now_s, a.now_s = b.now_s + FULL_S, a.now_s + FULL_S
    exchange(a, b)
    assert b.node().inflight == 1


def test_prompts_of_peers_are_known_to_be_on_their_nodes() -> None:
    a, b = Process("a"), Process("b")
    lookup = Lookup(bytes(range(256)) * 4, 256, 256)
    request = RoutingRequest("m")
    decision = a.router.decide(request, a.now_s, lookup)
    a.router.open_ticket(decision, a.node("n1"), a.now_s)
    assert not b.cache_view.hits("m", lookup, b.now_s)
    exchange(a, b)
    hits = b.cache_view.hits("m", lookup, b.now_s)
    assert list(hits) == ["n1"] and hits["n1"].tokens > 0
    assert b.node("n1").inflight == 1


@pytest.mark.parametrize("reported", [False, True])
def test_a_prompt_of_a_peer_is_pending_until_events_report_it(reported: bool) -> None:
    """Its prefill can take longer than estimated. Meanwhile no event has reported its last block."""
    a, b = Process("a"), Process("b")
    for process in (a, b):
        cache = process.cache_view.cache("n1")
        assert cache is not None
        cache.add_rank(0)
        cache.set_complete(0, True)
    ids = [number % 7 for number in range(4096)]
    lookup = Lookup(array("I", ids).tobytes(), len(ids), len(ids))
    a.router.open_ticket(a.router.decide(RoutingRequest("m"), a.now_s, lookup), a.node("n1"), a.now_s)
    exchange(a, b)
    node, cache = b.node("n1"), b.cache_view.cache("n1")
    estimate_s = node.pending_work * node.speed.ms_per_token / 1000.0
    assert cache is not None and estimate_s > 0.2
    if reported:
        blocks: list[int | bytes] = list(range(1, len(ids) // 16 + 1))
        cache.blocks_stored(0, None, blocks, ids, 16)
    for later_s, pending in ((0.1, True), (estimate_s + 0.5, not reported), (2 * estimate_s + 1.1, False)):
        hit = b.cache_view.hits("m", lookup, b.now_s + later_s).get("n1")
        assert bool(b.cache_view._peers_pending) is pending
        assert (hit is not None) is (pending or reported)


def test_all_processes_learn_a_nodes_speed_from_the_first_tokens_of_all() -> None:
    one, a, b = Process("one"), Process("a"), Process("b")
    for turn in range(40):  # the node prefills two prompts in one step: 0.1 ms for each token of both
        for process in (one, a, b):
            process.now_s = 100.0 + turn
        both = [one.open(2000), one.open(2000)]
        apart = [a.open(2000), b.open(2000)]
        exchange(a, b)
        for process in (one, a, b):
            process.now_s += 0.4
        for ticket in (*both, *apart):
            ticket.first_token(one.now_s)
            ticket.close(Outcome.OK, one.now_s)
        exchange(a, b)
    for process in (a, b):
        process.now_s += 1.0
    exchange(a, b)
    alone = one.node().speed.ms_per_token
    assert a.node().speed.ms_per_token == pytest.approx(alone, rel=0.05)
    assert b.node().speed.ms_per_token == pytest.approx(alone, rel=0.05)


def test_a_limit_holds_for_all_processes_together() -> None:
    processes = [Process(name, requests_per_min=600) for name in "abc"]
    passed = 0
    for step in range(60 * 50):  # a minute in steps of 20 ms, in which each process gets a request
        for process in processes:
            process.now_s = 100.0 + step * 0.02
            limits = process.limits.of("acme")
            assert limits is not None
            try:
                limits.begin(process.now_s, 0, True)
                passed += 1
            except RateLimited:
                pass
        exchange(*processes)
    assert passed <= 1.02 * (600 + 600)  # a full bucket, and what is refilled in a minute
    assert passed >= 0.98 * (600 + 600)


def test_conversations_stay_on_their_islands_whichever_process_serves_them() -> None:
    a, b = Process("a"), Process("b")
    affinity = a.router.island_choice.affinity
    affinity.remember_session("acme", "m", b"7", ("eu", "us"), a.now_s)
    exchange(a, b)
    assert b.router.island_choice.affinity.by_session("acme", "m", b"7") == ("eu", "us")


def test_a_message_has_no_text_of_a_prompt() -> None:
    a = Process("a")
    lookup = Lookup(b"secret words of a user, " * 40, 240, 240)
    a.router.open_ticket(a.router.decide(RoutingRequest("m"), a.now_s, lookup), a.node(), a.now_s)
    a.state.publish(a, a.now_s)
    assert a.sent and b"secret" not in a.sent[-1]
    assert decode(encode(decode(a.sent[-1]))).routed
