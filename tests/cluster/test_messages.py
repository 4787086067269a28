"""Messages between processes: what arrives damaged, absurd or from another version is rejected, and never raises."""

from __future__ import annotations

from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from warmroute.cluster.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    BadMessage,
    Home,
    NodeChange,
    NodeRow,
    Prefill,
    RoutedPrompt,
    Update,
    decode,
    encode,
)

ROW = NodeRow("a", 3, 1000.0, 500, 400, -5.0, 9, 120, 0.05, 1.0, 8)
UPDATE = Update(
    VERSION, "router-0", 7, 12.5, True, (ROW,), {"m": 2}, {"a": (1, -4.5)}, {"acme": (3.0, 120.5, 9.0, -4.0)},
    (Prefill("a", 1000.0, 20.0, 11.0, 11.5, True),), (RoutedPrompt("a", b"12345678", True, ""),),
    (Home((1 << 64) - 1, "eu", "us"),),
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
        changed(nodes=(msgspec.structs.replace(ROW, inflight=-1),)),
        changed(nodes=(msgspec.structs.replace(ROW, pending_work=nan),)),
        changed(nodes=(msgspec.structs.replace(ROW, pending_work=inf),)),
        changed(nodes=(msgspec.structs.replace(ROW, ms_per_token=-1.0),)),
        changed(heads={"a": (1, nan)}),
        changed(taken={"a": (nan, 0.0, 0.0, 0.0)}),
        changed(prefills=(Prefill("a", 1.0, 1.0, inf, 1.0, True),)),
        changed(prefills=(Prefill("a", nan, 1.0, 1.0, 1.0, True),)),
        changed(routed=(RoutedPrompt("a", b"123", True, ""),)),
        changed(homes=tuple([Home(1, "a", "a")] * 8193)),
    ],
)
def test_a_bad_message_is_rejected(message: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(message)


def test_a_new_field_of_a_change_gets_a_new_version() -> None:
    """Processes compare digests of encoded changes: with another number of fields they would never agree."""
    assert (VERSION, len(NodeChange.__struct_fields__)) == (4, 7)


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
