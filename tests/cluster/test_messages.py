"""Messages between processes: what arrives damaged, absurd or from another version is rejected, and never raises."""

from __future__ import annotations

import struct
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from warmroute._kernel import MAX_FIRST_TOKENS
from warmroute.core.cluster.messages import MAX_MESSAGE_BYTES, VERSION, BadMessage, NodeChange, Update, decode, encode

ROW: dict[str, float] = {
    "inflight": 3, "pending_work": 1000.0, "context_tokens": 500, "kv_new": 400, "kv_sum": -5.0, "opened": 9,
    "output_tokens": 120, "ms_per_token": 0.05, "speed_factor": 1.0, "answers": 8,
    "prefill_work": 700.0, "prefill_s": 0.1,
}  # fmt: skip


def row(**values: float) -> bytes:
    return struct.pack("<qdqqdqqddqdd", *{**ROW, **values}.values())


def first_token(
    name: int = 0, lone: int = 1, work: float = 1e3, step_ms: float = 20.0, sent_s: float = 11.0, at_s: float = 11.5
) -> bytes:
    return struct.pack("<IIdddd", name, lone, work, step_ms, sent_s, at_s)


UPDATE = Update(
    VERSION, "router-0", 7, 12.5, True, ("a",), row(), {"m": 2}, {"a": (1, -4.5, 9.0)}, {"m": (1, 2.5, 2.5)},
    {"acme": (3.0, 120.5, 9.0, -4.0)}, ("a",), first_token(), (("a", b"12345678", True, ""),),
    (((1 << 64) - 1, "eu", "us"),),
)  # fmt: skip


def test_a_message_arrives_as_it_was_sent() -> None:
    assert decode(encode(UPDATE)) == UPDATE


def changed(**fields: Any) -> bytes:
    return encode(msgspec.structs.replace(UPDATE, **fields))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        encode(UPDATE)[:-3],
        msgspec.msgpack.encode({"version": 1}),
        b"\x91" * 100_000,
        b"x" * (MAX_MESSAGE_BYTES + 1),
        changed(version=VERSION + 1),
        changed(version=3),  # of processes whose changes of nodes have no role
        changed(sender="x" * 513),
        changed(sequence=-1),
        changed(sent_s=nan),
        changed(rows=row(inflight=-1)),
        changed(rows=row(inflight=(1 << 50) + 1)),
        changed(rows=row(pending_work=nan)),
        changed(rows=row(pending_work=inf)),
        changed(rows=row(kv_sum=nan)),
        changed(rows=row(ms_per_token=-1.0)),
        changed(rows=row(speed_factor=inf)),
        changed(rows=row() + b"x"),
        changed(rows=row() + row()),
        changed(rows=b""),
        changed(nodes=("a", "b")),
        changed(heads={"a": (1, nan, 1.0)}),
        changed(firsts={"m": (1, nan, 1.0)}),
        changed(heads={"a": (1, 1.0, nan)}),
        changed(taken={"a": (nan, 0.0, 0.0, 0.0)}),
        changed(first_tokens=first_token(sent_s=inf)),
        changed(first_tokens=first_token(at_s=nan)),
        changed(first_tokens=first_token(sent_s=11.6)),  # after the first token
        changed(first_tokens=first_token(at_s=1e300)),
        changed(first_tokens=first_token(work=nan)),
        changed(first_tokens=first_token(step_ms=-1.0)),
        changed(first_tokens=first_token(name=1)),
        changed(first_tokens=first_token(lone=2)),
        changed(first_tokens=first_token()[:-1]),
        changed(first_tokens=first_token() * (MAX_FIRST_TOKENS + 1)),
        changed(first_token_nodes=()),
        changed(routed=(("a", b"123", True, ""),)),
        changed(homes=((1, "a", "a"),) * 8193),
    ],
)
def test_a_bad_message_is_rejected(message: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(message)


def test_a_message_of_another_version_is_named_as_such() -> None:
    """Its fields may have other types: the sixth of version 4 was a map."""
    with pytest.raises(BadMessage, match=f"has version 4; this process has version {VERSION}"):
        decode(msgspec.msgpack.encode([4, "router-0", 7, 12.5, True, [["a", 3]], {"m": 2}, {}, {}, [], []]))


def test_a_new_field_of_a_change_gets_a_new_version() -> None:
    """Processes compare digests of encoded changes: with another number of fields they would never agree."""
    assert (VERSION, len(NodeChange.__struct_fields__)) == (8, 10)


def test_damaged_messages_are_read_or_rejected_and_nothing_else() -> None:
    random, good = Random(1), encode(UPDATE)
    for _ in range(3000):
        damaged = bytearray(good)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            decode(bytes(damaged))
        except BadMessage:
            continue
