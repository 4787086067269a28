"""Messages as frames (core/wire.py), and what a brain tells the next one (core/snapshot.py)."""

from __future__ import annotations

import random

import msgspec
import pytest

from warmroute.core import snapshot, wire
from warmroute.core.messages import (
    Arrive,
    Cut,
    Ended,
    Failed,
    FirstToken,
    Left,
    Lookup,
    NodeError,
    NodeRow,
    OpenTry,
    Reject,
    Resume,
    Role,
    RoutingRequest,
    Send,
    Tables,
)
from warmroute.core.messages import Cancel as CancelCall

REQUEST = RoutingRequest("m", b"s", b"u", tenant="t", arrived_s=12.5, subset=frozenset({"a"}))
LOOKUP = Lookup(b"\1\0\0\0" * 64, 64, 64, chains={("m", "", 16): b"12345678" * 4})
FROM_EDGE = [
    wire.Hello(1, "edge-1", 7, b"machine"),
    Arrive((7 << 40) + 1, b"id", REQUEST, LOOKUP, 64),
    FirstToken(1, 1, 200),
    Ended(1, 1, 200, 3.0, (10, 5, None), NodeError("other", "t", "c", 5, "x")),
    Failed(1, 2, -1, "refused", 3),
    CancelCall(1, Left.LEFT),
    wire.Resync([Resume(Arrive(1, b"id", REQUEST), (OpenTry(1, Role.DECODE, "n", 1.0, 200, 2.0),), 100, True)], [4]),
    wire.Report(3, [(404, "not_found", 2)], {"r": 1}, [("m", "exact", 3)], (0,) * len(wire.COUNTS), (0,) * 4),
    wire.Bye(),
    wire.EndedEarlyFrame(None, wire.KeptFrame(5), 1.0, 404, "x", False, REQUEST, b"id"),
]
ROW = NodeRow(1, "n", "http", "h", 80, "", "vllm", "mixed", 0)
TABLES = Tables(
    3, {1: ROW}, True, lambda: ({"id": "m"},), "m", chains={"m": (("m", "", 16),)}, serving={"m": (1,)}, edges=2
)
FROM_BRAIN = [
    wire.Welcome(1, 5),
    wire.tables_frame(TABLES),
    Send(1, 1, 1, Role.FIRST, limit_lines=(("a", "b"),), node_lines=((b"a", b"b"),), fallbacks=(2, 3)),
    Reject(1, 429, "c", "m", retry_after_s=3, headers=(("a", "b"),)),
    Cut(1, Reject(1, 504, "c", "m")),
    wire.Beat(5),
]


def plain(messages: object) -> object:
    return msgspec.to_builtins(messages, order="deterministic")


@pytest.mark.parametrize(("of_edge", "messages"), [(True, FROM_EDGE), (False, FROM_BRAIN)])
def test_messages_arrive_as_they_were_sent_however_they_are_cut(of_edge: bool, messages: list[object]) -> None:
    data = wire.encode(1.5, messages) + wire.encode(2.5, messages[:1])
    source = random.Random(1)
    for _ in range(50):
        reader, found = wire.FrameReader(of_edge), []
        cuts = sorted(source.sample(range(1, len(data)), source.randrange(5)))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            found += reader.feed(data[start:end])
        assert [clock_s for clock_s, _ in found] == [1.5, 2.5]
        assert [type(one) for one in found[0][1]] == [type(one) for one in messages]
        assert plain(found[0][1]) == plain(messages) and plain(found[1][1]) == plain(messages[:1])


def test_tables_are_the_same_on_the_other_side() -> None:
    there = wire.tables_of(wire.tables_frame(TABLES))
    assert there.cards() == ({"id": "m"},) and there.nodes[1].name == "n" and there.serving == TABLES.serving


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\4\0\0\0\xc1\xc1\xc1\xc1", b"\1\0\0\0\x01"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(wire.Unreadable):
        wire.FrameReader(of_edge=True).feed(data)


def test_garbage_never_raises_anything_else() -> None:
    source, good = random.Random(2), wire.encode(1.0, FROM_EDGE)
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(source.randrange(1, 6)):
            data[source.randrange(4, len(data))] = source.randrange(256)
        try:
            wire.FrameReader(of_edge=True).feed(bytes(data))
        except wire.Unreadable:
            pass


def test_the_hashes_go_and_the_tokens_stay() -> None:
    lookup = Lookup(b"\1\0\0\0" * 64, 64, 64)
    wire.hash_for(lookup, TABLES, "m")
    assert lookup.tokens == b"" and len(lookup.blocks("m", "", 16)) == 32
    assert lookup.blocks("m", "", 32) == b"", "the brain cannot compute what it was not sent"


def test_a_snapshot_that_cannot_be_read_is_an_error() -> None:
    source = random.Random(3)
    with pytest.raises(ValueError, match="no snapshot"):
        snapshot.Restored(b"", 0.0)
    for _ in range(200):
        with pytest.raises(ValueError):
            snapshot.Restored(source.randbytes(source.randrange(1, 60)), 0.0)
