"""The kernel counts peers' load and learns from their first tokens exactly as the plain Python reference does."""

from __future__ import annotations

import gc
import struct
import sys
from random import Random

import pytest
from peer_load_reference import Figures, LearnedInOrder, Row

from warmroute._kernel import (
    MAX_FIRST_TOKENS,
    FirstTokenOrder,
    PeerRow,
    apply_load_rows,
    check_first_tokens,
    check_load_rows,
    pack_load_rows,
)
from warmroute.config import Health, NodeConfig
from warmroute.core.fleet import Fleet
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import DecodeSpeed, NodeSpeed

NAMES = ("n0", "n1", "n2")
MIN_ANSWERS = 8
OUTPUT = Row(output_tokens=9)


class Cache:
    """What the kernel uses of a node's cache."""

    def __init__(self) -> None:
        self.output_tokens = 7
        self.peer_output = 0

    def record_peer_output(self, tokens: int, now_s: float) -> None:
        self.peer_output += tokens


def fleet_of(names: tuple[str, ...] = NAMES) -> Fleet:
    fleet = Fleet(Health())
    for name in names:
        fleet.add(NodeConfig(url=f"http://{name}:1", name=name, models=("m",)))
    return fleet


def pack(rows: list[Row]) -> bytes:
    return b"".join(struct.pack("<qdqqdqqddqdd", *row) for row in rows)


def random_row(random: Random, before: Row) -> Row:
    return Row(
        random.choice((0, random.randrange(9))),
        random.choice((0.0, random.uniform(0.0, 9e4))),
        random.randrange(99_999), random.randrange(99_999), random.uniform(-1e5, 1e5),
        before.opened + random.choice((0, 1, 5, -2 if before.opened > 2 else 0)),
        before.output_tokens + random.choice((0, 100)),
    )  # fmt: skip


def test_rows_change_the_figures_as_in_the_reference() -> None:
    random, fleet = Random(1), fleet_of()
    caches = {"n0": Cache(), "n1": Cache()}
    expected = {name: Figures() for name in NAMES}
    peers: list[dict[str, PeerRow]] = [{}, {}]
    before = [dict.fromkeys(NAMES, Row()) for _ in peers]
    group = fleet.group("m")
    assert group is not None
    now_s = 10.0
    for _ in range(2000):
        now_s += random.choice((0.0, 0.02, -0.001))
        at = random.randrange(2)
        names = tuple(random.sample((*NAMES, "unknown"), random.randrange(5)))
        rows = [random_row(random, before[at].get(name, Row())) for name in names]
        data = pack(rows)
        assert check_load_rows(data, len(names))
        freed = apply_load_rows(peers[at], fleet.by_name, caches, names, data, now_s, True, MIN_ANSWERS, 0.0)
        less = []
        for name, row in zip(names, rows, strict=True):
            if name in expected:
                if expected[name].apply(before[at][name], row, now_s):
                    less.append(name)
                before[at][name] = row
        assert [node.name for node in freed] == less
        if random.random() < 0.05:
            for name, known in peers[at].items():
                expected[name].change(
                    before[at][name],
                    before[at][name]._replace(inflight=0, pending_work=0.0, context_tokens=0, kv_new=0),
                )
                before[at][name] = before[at][name]._replace(inflight=0, pending_work=0.0, context_tokens=0, kv_new=0)
                known.clear()
        for name, figures in expected.items():
            node = fleet.node(name)
            for field in (
                "inflight", "pending_work", "context_tokens", "kv_new", "kv_delta", "arrival_rate", "arrival_s",
                "peer_inflight", "peer_context_tokens", "peer_kv_new", "peer_pending_work",
            ):  # fmt: skip
                assert getattr(node, field) == getattr(figures, field), (name, field)
            if name in caches:
                assert caches[name].peer_output == figures.output_tokens
        assert group.inflight == sum(figures.group_inflight for figures in expected.values())


def test_totals_from_before_this_process_listened_do_not_count() -> None:
    fleet, rows = fleet_of(), dict[str, PeerRow]()
    first = Row(2, 100.0, 50, 40, 500.0, 1000, 9999)
    apply_load_rows(rows, fleet.by_name, {}, ("n0",), pack([first]), 1.0, False, MIN_ANSWERS, 0.0)
    node = fleet.node("n0")
    assert node.inflight == 2 and node.kv_delta == 0.0 and node.arrival_rate == 0.0
    more = pack([first._replace(kv_sum=510.0)])
    apply_load_rows(rows, fleet.by_name, {}, ("n0",), more, 1.0, False, MIN_ANSWERS, 0.0)
    assert node.kv_delta == 10.0


def test_a_node_of_the_same_name_counts_from_its_own_start() -> None:
    fleet, rows = fleet_of(), dict[str, PeerRow]()
    apply_load_rows(rows, fleet.by_name, {}, ("n0",), pack([Row(2, 100.0)]), 1.0, True, MIN_ANSWERS, 0.0)
    old = fleet.remove("n0")
    assert fleet.group("m") is None or fleet.group("m").inflight == 0  # type: ignore[union-attr]
    new = fleet.add(NodeConfig(url="http://n0:1", name="n0", models=("m",)))
    apply_load_rows(rows, fleet.by_name, {}, ("n0",), pack([Row(3, 50.0, opened=9)]), 1.0, True, MIN_ANSWERS, 0.0)
    assert (old.inflight, new.inflight, new.arrival_rate) == (2, 3, 0.0) and rows["n0"].node is new


def test_an_unmeasured_node_takes_the_speed_of_a_peer_that_has_measured_it() -> None:
    fleet = fleet_of()
    for name, answers in (("n0", MIN_ANSWERS - 1), ("n1", MIN_ANSWERS)):
        row = Row(ms_per_token=0.5, speed_factor=2.0, answers=answers)
        apply_load_rows({}, fleet.by_name, {}, (name,), pack([row]), 1.0, True, MIN_ANSWERS, 0.0)
    assert fleet.node("n0").speed.ms_per_token == NodeSpeed().ms_per_token
    assert (fleet.node("n1").speed.ms_per_token, fleet.node("n1").speed.factor) == (0.5, 2.0)


def test_rows_that_are_published_arrive_as_they_were() -> None:
    fleet, speed = fleet_of(), DecodeSpeed()
    caches = {"n1": Cache()}
    assert pack_load_rows(fleet.by_name, caches, True, 9) == ((), b"")
    tickets = [Ticket.__new__(Ticket) for _ in range(3)]
    for ticket, name in zip(tickets, ("n1", "n1", "n2"), strict=True):
        ticket.open(fleet.node(name), 5.0, speed, True, 300, 200, 220.0)
    names, data = pack_load_rows(fleet.by_name, caches, False, 9)
    assert names == ("n1", "n2") and check_load_rows(data, 2)
    assert fleet.node("n1").published_work == fleet.node("n1").own_pending_work == 440.0
    assert pack_load_rows(fleet.by_name, caches, False, 9) == ((), b"")
    assert pack_load_rows(fleet.by_name, caches, True, 9)[0] == ("n1", "n2")

    other = fleet_of()
    apply_load_rows({}, other.by_name, {}, names, data, 5.0, True, MIN_ANSWERS, 0.0)
    for field in ("inflight", "pending_work", "context_tokens", "kv_new", "kv_delta"):
        assert getattr(other.node("n1"), field) == getattr(fleet.node("n1"), field), field
    assert other.node("n1").own_pending_work == 0.0 and other.node("n1").peer_inflight == 2

    tickets[0].release(0, 6.0)
    tickets[2].release(0, 6.0)
    assert pack_load_rows(fleet.by_name, caches, False, 1)[0] == ("n1",)
    assert pack_load_rows(fleet.by_name, caches, False, 1)[0] == ("n2",), "what was too much for one message follows"


def record(name: int, lone: bool, work: float, step_ms: float, sent_s: float, at_s: float) -> bytes:
    return struct.pack("<IIdddd", name, lone, work, step_ms, sent_s, at_s)


def test_first_tokens_are_learned_in_the_order_of_time() -> None:
    random, fleet = Random(2), fleet_of()
    order = FirstTokenOrder()
    reference = LearnedInOrder({name: NodeSpeed() for name in NAMES})
    now_s = 100.0
    for _ in range(600):
        now_s += random.uniform(0.0, 0.05)
        data = b""
        for _ in range(random.randrange(6)):
            at, lone = random.randrange(3), random.random() < 0.3
            work, step_ms = random.uniform(0.0, 9e3), random.choice((0.0, 20.0))
            at_s = round(now_s - random.uniform(-0.1, 0.2), 2)  # some at the same time, and some from the future
            sent_s = at_s - random.uniform(0.0, 1.0)
            data += record(at, lone, work, step_ms, sent_s - 7.0, at_s - 7.0)
            reference.add(NAMES[at], work, step_ms, (sent_s - 7.0) + 7.0, min(now_s, (at_s - 7.0) + 7.0), lone)
        assert check_first_tokens(data, 3)
        order.add(fleet.by_name, NAMES, data, 7.0, now_s)
        order.learn(now_s - 0.15)
        reference.learn(now_s - 0.15)
    for name in NAMES:
        speed, expected = fleet.node(name).speed, reference._speeds[name]
        assert speed.answers > 100
        for field in ("ms_per_token", "answers", "lone_work", "long_ms", "_last_first_token_s"):
            assert getattr(speed, field) == getattr(expected, field), (name, field)


def test_own_first_tokens_are_kept_published_and_learned_once() -> None:
    fleet, order, decode_speed = fleet_of(), FirstTokenOrder(), DecodeSpeed()
    order.join(fleet.by_name)
    for at in range(4):
        ticket = Ticket.__new__(Ticket)
        ticket.open(fleet.node(NAMES[1 + at % 2]), 10.0 + at, decode_speed, True, 500, 500, 510.0)
        ticket.first_token(10.5 + at)
        ticket.release(0, 11.0 + at)
    assert len(order) == 4 and fleet.node("n1").speed.answers == 0
    names, data = order.take()
    assert names == ("n1", "n2") and check_first_tokens(data, 2) and len(data) == 4 * 40
    assert order.take() == ((), b"")
    other, copy = fleet_of(), FirstTokenOrder()
    copy.add(other.by_name, names, data, 0.0, 99.0)
    for kept in (order, copy):
        kept.learn(11.6)
        assert len(kept) == 2
        kept.learn(99.0)
    for name in ("n1", "n2"):
        assert fleet.node(name).speed.ms_per_token == other.node(name).speed.ms_per_token
        assert fleet.node(name).speed.answers == other.node(name).speed.answers == 2


def test_too_many_first_tokens_are_dropped_and_none_leaks_a_node() -> None:
    fleet, order = fleet_of(), FirstTokenOrder()
    node = fleet.node("n0")
    before = sys.getrefcount(node)
    for at in range(5):
        order.add(
            fleet.by_name, ("n0", "gone"), record(0, False, 1.0, 0.0, 1.0, float(at)) * MAX_FIRST_TOKENS, 0.0, 99.0
        )
    order.add(fleet.by_name, ("n0", "gone"), record(1, False, 1.0, 0.0, 1.0, 2.0), 0.0, 99.0)
    assert len(order) == MAX_FIRST_TOKENS and sys.getrefcount(node) == before + MAX_FIRST_TOKENS
    order.clear()
    assert len(order) == 0 and sys.getrefcount(node) == before
    order.add(fleet.by_name, ("n0",), record(0, False, 1.0, 0.0, 1.0, 1.0), 0.0, 99.0)
    order.join(fleet.by_name)
    for one in fleet:
        one.speed.first_tokens = None
    del order, one
    gc.collect()
    assert sys.getrefcount(node) == before


def test_first_tokens_of_a_removed_node_are_not_learned_for_another_one_of_its_name() -> None:
    fleet, order = fleet_of(), FirstTokenOrder()
    order.join(fleet.by_name)
    ticket = Ticket.__new__(Ticket)
    ticket.open(fleet.node("n0"), 10.0, DecodeSpeed(), True, 500, 500, 510.0)
    old = fleet.remove("n0")
    ticket.first_token(10.5)
    assert order.take() == ((), b"") and old.speed.answers == 1


def test_nodes_with_first_tokens_that_wait_are_collected() -> None:
    fleet, order = fleet_of(), FirstTokenOrder()
    order.join(fleet.by_name)
    order.add(fleet.by_name, NAMES, record(0, False, 1.0, 0.0, 1.0, 1.0), 0.0, 99.0)
    numbers = {id(node) for node in fleet}
    assert alive(numbers) == len(NAMES)
    del fleet, order
    gc.collect()
    assert not alive(numbers)


def alive(numbers: set[int]) -> int:
    """Return how many of the nodes with these numbers, their id(), exist."""
    return sum(isinstance(one, Node) and id(one) in numbers for one in gc.get_objects())


@pytest.mark.parametrize(
    "call",
    [
        lambda fleet: apply_load_rows({}, fleet.by_name, {}, ("n0", "n1"), pack([Row()]), 1.0, True, 8, 0.0),
        lambda fleet: apply_load_rows({}, {"n0": object()}, {}, ("n0",), pack([Row()]), 1.0, True, 8, 0.0),  # type: ignore[dict-item]
        lambda fleet: apply_load_rows({}, fleet.by_name, {"n0": 3}, ("n0",), pack([OUTPUT]), 1.0, True, 8, 0.0),
        lambda fleet: pack_load_rows({"n0": object()}, {}, True, 9),  # type: ignore[dict-item]
        lambda fleet: FirstTokenOrder().join({"n0": object()}),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((TypeError, ValueError, AttributeError)):
        call(fleet_of())
