"""A process that starts gets from a peer what no engine reports again."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from test_cluster_state import Process

from warmroute.core.cluster.cluster_state import ClusterState
from warmroute.core.cluster.messages import FULL_S, VERSION, BadMessage
from warmroute.core.cluster.snapshots import (
    ANSWER_S,
    CONNECT_S,
    MARK,
    PEERS_S,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
)
from warmroute.core.messages import Lookup, Outcome, RoutingRequest


class Starting(Process):
    """A process that asks its peers for a snapshot."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.state.close()
        self.state = ClusterState(name, self.brain, self.cache_view, lambda: None, self.limits, asks_snapshot=True)


def lookup(number: int, tokens: int = 512) -> Lookup:
    return Lookup(Random(number).randbytes(4 * tokens), tokens, tokens)


def route(process: Process, number: int, node: str) -> None:
    decision = process.router.decide(RoutingRequest("m"), process.now_s, lookup(number))
    ticket = process.router.open_ticket(decision, process.node(node), process.now_s)
    ticket.first_token(process.now_s)
    ticket.close(Outcome.OK, process.now_s)


def deliver(*processes: Process) -> None:
    """Let all publish, answer and receive once, and let time go on."""
    for process in processes:
        process.state.publish(process, process.now_s)
    for sender in processes:
        while (found := sender.state.next_snapshot_message()) is not None:
            to, message = found
            next(one for one in processes if one.state.sender == to).state.receive(message, sender.now_s)
        for message in sender.sent:
            for process in processes:
                if process is not sender:
                    process.state.receive(message, process.now_s)
        sender.sent = []
    for process in processes:
        process.now_s += FULL_S


def test_a_new_process_knows_what_was_routed_where_conversations_are_and_how_fast_nodes_are() -> None:
    a = Process("a")
    for number in range(40):
        a.now_s += 1.0
        route(a, number, f"n{number % 2}")
    a.router.island_choice.affinity.remember_session("acme", "m", b"7", ("eu", "us"), a.now_s)
    for _ in range(20):
        ticket = a.open(1000)
        a.now_s += 0.2
        ticket.first_token(a.now_s)
        ticket.close(Outcome.OK, a.now_s)
    deliver(a)
    a.now_s += 1.0
    deliver(a)
    for number in range(40):  # again, so that blocks are reused
        route(a, number, f"n{number % 2}")
    shared_before = a.cache_view.reuse.share_within(1000.0)
    assert shared_before > 0.3
    deliver(a)
    b = Starting("b")
    b.now_s = a.now_s
    assert b.state.snapshot is not None
    for _ in range(4):
        deliver(a, b)
    assert b.state.snapshot.done
    for number in range(40):
        hits = b.cache_view.hits("m", lookup(number), b.now_s)
        assert list(hits) == [f"n{number % 2}"] and hits[f"n{number % 2}"].tokens > 400
    assert b.cache_view.reuse.share_within(1000.0) == pytest.approx(shared_before, abs=0.02)
    assert b.router.island_choice.affinity.by_session("acme", "m", b"7") == ("eu", "us")
    assert b.node().speed.ms_per_token == pytest.approx(a.node().speed.ms_per_token, rel=0.2)
    cache_a, cache_b = a.cache_view.cache("n0"), b.cache_view.cache("n0")
    assert cache_a is not None and cache_b is not None
    pieces = [hashes for _, hashes in cache_b.recency.pieces()]
    assert pieces == [hashes for _, hashes in cache_a.recency.pieces()], "the same blocks are evicted next"


def test_a_process_without_peers_and_one_whose_peer_is_silent_go_on() -> None:
    alone = Starting("alone")
    request = alone.state.snapshot
    assert request is not None
    alone.state.set_connected(False)
    for _ in range(int(CONNECT_S / FULL_S) + 2):
        deliver(alone)
    assert request.done

    late = Starting("late")
    request = late.state.snapshot
    assert request is not None
    for _ in range(int(PEERS_S / FULL_S) + 3):
        deliver(late)
    assert request.done

    a, b, c = Process("a"), Process("b"), Starting("c")
    for process in (a, b):
        deliver(process)
    request = c.state.snapshot
    assert request is not None
    asked = set()
    for _ in range(int(3 * ANSWER_S / FULL_S) + 4):
        asked.add(request.asks)
        deliver(a, b, c)
        for process in (a, b):  # they never answer
            process.state._answers._answered_s["c"] = process.now_s
    assert request.done and asked == {"", "a", "b"}


def test_damaged_and_foreign_snapshots_are_ignored() -> None:
    good = Snapshot(VERSION, "a", "b", node="n0", block_size=16, pieces=((1.0, b"12345678"),))
    assert decode_snapshot(encode_snapshot(good)) == good
    bad = [
        MARK, MARK + b"\x91", encode_snapshot(good)[:-3], encode_snapshot(msgspec.structs.replace(good, version=99)),
        encode_snapshot(msgspec.structs.replace(good, pieces=((1.0, b"1234567"),))),
        encode_snapshot(msgspec.structs.replace(good, pieces=((-1.0, b"12345678"),))),
    ]  # fmt: skip
    b = Starting("b")
    for message in bad:
        with pytest.raises(BadMessage):
            decode_snapshot(message)
        b.state.receive(message, b.now_s)
    assert b.state.rejected == len(bad)
    b.state.receive(encode_snapshot(good), b.now_s)  # nobody was asked
    cache = b.cache_view.cache("n0")
    assert cache is not None and not len(cache.recency)
