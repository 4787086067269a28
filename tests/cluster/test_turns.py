"""Several processes whose requests wait for the same node: who goes first, and by how much they exceed its limit."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from test_cluster_state import Process, exchange

from warmroute._kernel import TicketState
from warmroute.config import Health, Index, NodeConfig
from warmroute.config.routing import HIGH, NORMAL
from warmroute.core.cache_view import CacheView
from warmroute.core.calls import Call
from warmroute.core.cluster.cluster_turns import ClusterTurns
from warmroute.core.cluster.peer import Peer
from warmroute.core.fleet import Fleet
from warmroute.core.messages import DUE, QUEUE, Arrive, Due, Ended, FirstToken, Lookup, Reject, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import DecodeSpeed

LIMIT_MS = 250.0
"""The default of admission.max_node_backlog_ms."""
LONG = (NORMAL, 1000.0, 1000.0)
"""A request of this process with a second of prefill work."""
_ids = count(1)


class Pending:
    """A request of one process, with a prompt that no node knows."""

    def __init__(self, process: Process, number: int, tokens: int, priority: int = NORMAL) -> None:
        self.process = process
        self.id = next(_ids)
        request = RoutingRequest("m", priority=priority, arrived_s=process.now_s)
        lookup = Lookup(number.to_bytes(4, "little") * tokens, tokens, tokens)
        self.arrive = Arrive(self.id, b"", request, lookup)

    def submit(self) -> None:
        self.process.tell(self.arrive)

    @property
    def call(self) -> Call:
        return self.process.brain.open[self.id]

    @property
    def sent_s(self) -> float | None:
        return self.call.admitted_s or None

    @property
    def node(self) -> Node:
        assert self.call.main is not None
        return self.call.main.node

    def first_token(self) -> None:
        assert not any(isinstance(command, Reject) for command in self.process.tell(FirstToken(self.id, 1, 200)))

    def end(self) -> None:
        self.process.tell(Ended(self.id, 1, 200, self.process.now_s, None))


def look_at(node: Node, process: Process) -> None:
    """Let the process look for a request that this node could serve now."""
    process.brain.node_freed(node)
    process.tell(DUE)


def work_ms(processes: list[Process]) -> float:
    """The prefill work that all processes have sent to the node."""
    exchange(*processes)
    node = processes[0].node()
    return node.pending_work * node.speed.ms_per_token


@pytest.mark.parametrize("count", [2, 8])
def test_processes_exceed_the_limit_of_a_node_by_at_most_one_prompt_each(count: int) -> None:
    processes = [Process(f"p{at}", nodes=1) for at in range(count)]
    exchange(*processes)
    tokens = 1000
    prompt_ms = tokens * 1.05 * processes[0].node().speed.ms_per_token
    for number in range(40):  # no process hears of the others meanwhile
        for at, process in enumerate(processes):
            Pending(process, 1000 * at + number, tokens).submit()
    assert work_ms(processes) <= LIMIT_MS + count * prompt_ms * 1.05
    assert sum(process.admission.queue.waiting for process in processes) > 0


def test_a_node_with_room_gets_the_first_request_of_all_processes() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    first = Pending(a, 0, 8000)
    first.submit()
    exchange(a, b)
    longer, shorter, urgent = Pending(a, 1, 6000), Pending(b, 2, 3000), Pending(b, 3, 7000, HIGH)
    longer.submit()
    shorter.submit()
    urgent.submit()
    exchange(a, b)
    assert longer.sent_s is shorter.sent_s is urgent.sent_s is None
    order: list[Pending] = []
    running: list[Pending] = [first]

    def note() -> None:
        for one in (longer, shorter, urgent):
            if one.sent_s is not None and one not in order:
                order.append(one)
                running.append(one)

    for _ in range(200):
        for process in (a, b):
            process.now_s += 0.02
        if running:
            running.pop().first_token()
            note()
        exchange(a, b)
        for process in (a, b):
            look_at(process.node(), process)
            note()
            exchange(a, b)
        if len(order) == 3:
            break
    assert order == [urgent, shorter, longer]


def test_no_process_waits_for_one_that_does_not_take_its_turn() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    first = Pending(a, 0, 8000)
    first.submit()
    exchange(a, b)
    mine, theirs = Pending(a, 1, 7000), Pending(b, 2, 6000)
    mine.submit()
    theirs.submit()
    exchange(a, b)
    first.first_token()
    look_at(a.node(), a)
    assert mine.sent_s is None  # it is b's turn, but b does nothing
    a.now_s += 0.15
    a.tell(Due(QUEUE))
    assert mine.sent_s == a.now_s


def test_a_new_request_does_not_take_the_turn_for_which_a_queued_one_has_waited() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    first = Pending(a, 0, 8000)
    first.submit()
    exchange(a, b)
    waiting, theirs = Pending(a, 1, 7000), Pending(b, 2, 6000)
    waiting.submit()
    theirs.submit()
    exchange(a, b)
    first.first_token()
    look_at(a.node(), a)
    assert waiting.sent_s is None, "it is b's turn, but b does nothing"
    a.now_s += 0.15
    new = Pending(a, 3, 7500)
    new.submit()
    assert waiting.sent_s == a.now_s and new.sent_s is None


def test_an_idle_node_is_not_left_to_a_peer_whose_request_has_gone() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    blocking = Pending(a, 0, 8000)
    blocking.submit()
    exchange(a, b)
    Pending(b, 1, 1000, HIGH).submit()
    exchange(a, b)
    assert a.state.peers["b"].heads
    turns = a.admission.turns
    assert turns is not None
    assert not turns.is_ours(a.node(), LONG, LIMIT_MS, a.now_s)
    blocking.first_token()
    blocking.end()
    assert not a.node().inflight
    assert turns.is_ours(a.node(), LONG, LIMIT_MS, a.now_s)  # no message of b has arrived


def test_all_processes_see_room_before_the_first_token_of_a_prompt() -> None:
    """A node works on a prompt of a. If only a could tell that it is nearly done, a would take each room, and b's
    request would wait for ever."""
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    first, waiting = Pending(a, 0, 8000), Pending(b, 1, 8000)
    first.submit()
    exchange(a, b)
    waiting.submit()
    assert waiting.sent_s is None
    exchange(a, b)
    for later_s, has_room in ((0.1, False), (0.3, True)):
        for process in (a, b):
            process.now_s += later_s
        rooms = [process.admission.has_room(process.node(), process.now_s) for process in (a, b)]
        assert rooms == [has_room, has_room], later_s
    b.tell(Due(QUEUE))
    assert waiting.sent_s == b.now_s


def test_the_prompt_of_a_peer_that_has_ended_does_not_make_room() -> None:
    a, b, c = (Process(name, nodes=1) for name in "abc")
    theirs = [Pending(process, at, 8000) for at, process in enumerate((a, c))]
    for pending in theirs:
        pending.submit()
    exchange(a, b, c)
    b.now_s += 0.3
    assert b.node().remaining_work(b.now_s) < b.node().pending_work
    b.state.forget("a", b.now_s)
    b.state.forget("c", b.now_s)
    assert b.node().remaining_work(b.now_s) == b.node().pending_work == 0.0
    own = Pending(b, 2, 8000)
    own.submit()
    assert own.sent_s and b.node().remaining_work(b.now_s) == b.node().pending_work > 0.0


def test_the_time_of_a_prompt_that_ended_does_not_count_for_the_next_one() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    first, second = Pending(a, 0, 4000), Pending(a, 1, 4000)
    for pending in (first, second):
        pending.submit()
        a.now_s += 0.001
    exchange(a, b)
    for process in (a, b):
        process.now_s += 0.15
    first.first_token()
    exchange(a, b)
    for process in (a, b):
        process.now_s += 0.05
    node = b.node()
    done_ms = (node.pending_work - node.remaining_work(b.now_s)) * node.speed.ms_per_token
    assert done_ms == pytest.approx(50.0, abs=1.0)


def test_a_process_leaves_the_room_to_a_request_that_waits_elsewhere_and_would_come() -> None:
    """b's shorter request waits for another node, because that one had less work when b decided."""
    a, b = Process("a", nodes=2), Process("b", nodes=2)
    blocking = [Pending(a, number, 8000 + 2000 * number) for number in range(2)]
    for one in blocking:
        one.submit()
    exchange(a, b)
    longer, shorter = Pending(a, 2, 7000), Pending(b, 3, 6000)
    longer.submit()
    shorter.submit()
    exchange(a, b)
    other = next(one for one in blocking if one.node.name not in a.state.peers["b"].heads)
    node = other.node
    other.first_token()
    look_at(node, a)
    assert longer.sent_s is None
    exchange(a, b)
    look_at(b.node(node.name), b)
    assert shorter.sent_s is not None and shorter.node.name == node.name


def test_a_process_does_not_wait_for_a_request_whose_prefix_is_cached_elsewhere() -> None:
    a, b = Process("a", nodes=2), Process("b", nodes=2)
    warm = Pending(b, 9, 8000)
    warm.submit()
    home = warm.node.name
    for process in (a, b):
        process.now_s += 0.464
    warm.first_token()
    warm.end()
    exchange(a, b)
    blocking = [Pending(a, number, 6000) for number in range(2)]
    for one in blocking:
        one.submit()
    exchange(a, b)
    again, longer = Pending(b, 9, 8000), Pending(a, 2, 7000)
    again.submit()
    longer.submit()
    exchange(a, b)
    assert set(a.state.peers["b"].heads) == {home} and not a.state.peers["b"].firsts
    other = next(one for one in blocking if one.node.name != home)
    other.first_token()
    look_at(other.node, a)
    assert longer.sent_s is not None


def test_a_process_does_not_leave_room_to_a_peer_if_the_node_has_room_for_both() -> None:
    """A node that serves hundreds of short prompts per second would else get one of each process per turn."""
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    blocking = Pending(a, 0, 8000)
    blocking.submit()
    exchange(a, b)
    short = [Pending(process, 1 + number, 100) for number in range(40) for process in (a, b)]
    for one in short:
        one.submit()
    exchange(a, b)
    assert all(one.sent_s is None for one in short)
    blocking.first_token()
    for process in (a, b):
        exchange(a, b)
        look_at(process.node(), process)
    sent = [one for one in short if one.sent_s is not None]
    each_ms = 100 * a.node().speed.ms_per_token
    assert LIMIT_MS / each_ms / 2 < len(sent) <= 1.05 * LIMIT_MS / each_ms + 2


def test_room_for_both_is_left_to_a_peer_with_a_higher_priority() -> None:
    """Its first request is one of many: each of them goes before those with a lower priority."""
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    blocking = Pending(a, 0, 8000)
    blocking.submit()
    exchange(a, b)
    low = [Pending(a, 1 + number, 100) for number in range(40)]
    high = [Pending(b, 100 + number, 100, HIGH) for number in range(40)]
    for one in (*low, *high):
        one.submit()
    exchange(a, b)
    blocking.first_token()
    for process in (a, b):
        exchange(a, b)
        look_at(process.node(), process)
    assert not any(one.sent_s is not None for one in low)
    assert sum(one.sent_s is not None for one in high) > 20


def test_short_requests_that_fit_do_not_delay_the_turn_of_a_long_one() -> None:
    fleet = Fleet(Health())
    peer = Peer("b", fleet, CacheView(Index()), None)
    turns = ClusterTurns({"b": peer}, lambda: None)
    node = fleet.add(NodeConfig(url="http://n:1", models=("m",)))
    Ticket(node, 0.0)
    peer.heads = {node.name: (NORMAL, 0.5, 0.5)}
    went_s = next(
        at / 100
        for at in range(100)
        if turns.is_ours(node, (NORMAL, 1.0, 1.0), LIMIT_MS, at / 100) and turns.is_ours(node, LONG, LIMIT_MS, at / 100)
    )
    assert went_s < 0.1


def test_a_process_yields_again_when_a_node_has_room_again() -> None:
    fleet = Fleet(Health())
    peer = Peer("b", fleet, CacheView(Index()), None)
    turns = ClusterTurns({"b": peer}, lambda: None)
    node = fleet.add(NodeConfig(url="http://n:1", models=("m",)))
    Ticket(node, 0.0)
    peer.heads = {node.name: (HIGH, 1.0, 1.0)}
    assert not turns.is_ours(node, LONG, LIMIT_MS, 0.0)
    turns.no_room(node)  # the peer's request has taken it
    assert not turns.is_ours(node, LONG, LIMIT_MS, 0.5)
    assert turns.is_ours(node, LONG, LIMIT_MS, 0.7)


def test_processes_that_wait_for_a_peer_in_vain_do_not_all_send_at_once() -> None:
    fleet = Fleet(Health())
    node = fleet.add(NodeConfig(url="http://n:1", models=("m",)))
    Ticket(node, 0.0)
    begins_s = []
    for ahead in (1, 2, 3):
        peers = {str(at): Peer(str(at), fleet, CacheView(Index()), None) for at in range(ahead)}
        for at, peer in enumerate(peers.values()):
            peer.heads = {node.name: (NORMAL, 10.0 * at, 10.0)}
        turns = ClusterTurns(peers, lambda: None)
        begins_s.append(next(ms for ms in range(1000) if turns.is_ours(node, LONG, LIMIT_MS, ms / 1000)))
    assert min(later - sooner for sooner, later in pairwise(begins_s)) >= 40


def test_a_request_that_begins_to_wait_is_published_at_once() -> None:
    a, b = Process("a", nodes=1), Process("b", nodes=1)
    Pending(a, 0, 8000).submit()
    Pending(a, 1, 7000).submit()
    exchange(a, b)
    before = b.state.peers["a"].heads["n0"]
    a.now_s += 0.03
    Pending(a, 2, 3000).submit()
    exchange(a, b)
    assert b.state.peers["a"].heads["n0"] < before


def test_a_process_without_peers_sees_room_before_the_first_token() -> None:
    a = Process("a", nodes=1)
    first = Pending(a, 0, 8000)
    first.submit()
    a.now_s += 0.4
    assert a.admission.has_room(a.node(), a.now_s) and first.call.main is not None


def test_nodes_that_left_are_forgotten() -> None:
    """A fleet that replaces its nodes again and again, while a peer always has an earlier request."""
    fleet = Fleet(Health())
    peer = Peer("b", fleet, CacheView(Index()), None)
    turns = ClusterTurns({"b": peer}, lambda: None)
    for number in range(5000):
        node = fleet.add(NodeConfig(url=f"http://n{number}:1", models=("m",)))
        Ticket(node, float(number))
        peer.heads = {node.name: (HIGH, 1.0, 1.0)}
        assert not turns.is_ours(node, LONG, LIMIT_MS, float(number))
        fleet.remove(node.name)
    assert len(turns._yields_since_s) < 200


def test_an_unstreamed_prompt_is_due_after_those_of_peers() -> None:
    ours, theirs = processes = [Process(f"p{at}", nodes=1) for at in range(2)]
    exchange(*processes)
    decode_speed, now_s = DecodeSpeed(), ours.now_s
    first, second, peers = TicketState(), TicketState(), TicketState()
    first.open(ours.node(), now_s, decode_speed, False, 2000, 2000, 2000.0)  # 100 ms
    peers.open(theirs.node(), now_s, decode_speed, False, 4000, 4000, 4000.0)  # 200 ms
    exchange(*processes)
    second.open(ours.node(), now_s + 0.05, decode_speed, False, 2000, 2000, 2000.0)
    ours.node().assume_prefilled(now_s + 0.3)
    assert ours.node().unstreamed_prefills == 1
    ours.node().assume_prefilled(now_s + 0.5)
    assert ours.node().unstreamed_prefills == 0
