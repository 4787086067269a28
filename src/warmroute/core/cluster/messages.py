"""The messages of the cluster: what one process tells all others, as MessagePack.

A process publishes one `Update` at most every PUBLISH_S. Rows are gauges and running totals, so that a later message
makes up for a lost one; `full` updates, every FULL_S, have a row for every node that the process has requests on. Times
are the sender's monotonic clock; the receiver translates them (peer.py).

Whatever arrives may be from another version, damaged or hostile: `decode` bounds every number and length, or rejects
the message.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from warmroute._kernel import check_first_tokens, check_load_rows

VERSION: Final = 8
"""Changes with the meaning of a field, and with the fields of `NodeChange`, of which peers compare digests. A process
ignores messages of other versions."""
PUBLISH_S: Final = 0.02
"""Shortest time between two messages of a process."""
FULL_S: Final = 0.25
"""Time between two full updates, which are also the sign of life of an idle process."""
PEER_TTL_S: Final = 1.0
"""What a silent process published counts for this much longer."""

MAX_MESSAGE_BYTES: Final = 4 << 20
MAX_NODES: Final = 16_384
MAX_MODELS: Final = 4_096
MAX_TENANTS: Final = 16_384
MAX_ROUTED: Final = 4_096
MAX_ROUTED_BYTES: Final = 1 << 20
"""Block hashes in one message. What is beyond is not published, and counted."""
MAX_HOMES: Final = 8_192
MAX_CHANGES: Final = 4_096
"""Nodes that were added, removed or drained at run time."""
MAX_NODE_BYTES: Final = 16_384
MAX_TIMES: Final = 256

Total = Annotated[float, Meta(ge=-1e15, le=1e15)]
Name = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Number = Annotated[float, Meta(ge=0.0, le=1e15)]


Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)]
Chain = Annotated[bytes, Meta(max_length=MAX_ROUTED_BYTES)]
"""Block hashes, 8 bytes each."""
RoutedPrompt = tuple[Name, Chain, bool, Name]
"""A prompt that a process sent to a node, which will hold these blocks: the node, its blocks, whether the node's KV
events will contain them, and the cache group."""
WireHead = tuple[Count, float, Number]
"""A waiting request (core/cluster/turns.py), within its bounds."""
Home = tuple[int, Name, Name]
"""The islands of a conversation: a hash of it with 64 bits (MessagePack has no longer integers), its home, and where
its last request went."""


class NodeChange(msgspec.Struct, frozen=True, array_like=True):
    """What was last decided about a node through the admin API of any process, or by the autoscaler. Of two changes of
    a node, the one with the higher version counts, then the one with the higher sender."""

    name: Name
    version: Count
    sender: Name
    config: Annotated[bytes, Meta(max_length=MAX_NODE_BYTES)]
    """The node as JSON, if it was added at run time; empty for a node of the configuration or of a source."""
    removed: bool
    draining: bool
    role: Literal["", "mixed", "prefill", "decode"] = ""
    """Empty for that of its configuration."""
    drained_by_hand: bool = False
    """An operator drained it, and only an operator ends that."""
    added_by_hand: bool = False
    """An operator added it, and not the autoscaler."""
    role_by_hand: bool = False
    """An operator gave it its role, and not the autoscaler."""

    @property
    def by_hand(self) -> bool:
        """Whether it contains anything that has to outlive all processes: the autoscaler finds its nodes again."""
        return not self.removed and (self.drained_by_hand or self.added_by_hand or self.role_by_hand)

    def is_later_than(self, other: NodeChange | None) -> bool:
        """Whether this one counts. One that was restored can lack what the autoscaler did, which the other one has."""
        if other is None or (self.version, self.sender) != (other.version, other.sender):
            return other is None or (self.version, self.sender) > (other.version, other.sender)
        return msgspec.msgpack.encode(self) > msgspec.msgpack.encode(other)


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a process's demand meter (core/demand.py), for the process that scales the fleet."""

    waiting: Count
    counts: Annotated[tuple[Number, ...], Meta(max_length=64)]
    ttft: Annotated[tuple[Count, ...], Meta(max_length=MAX_TIMES)]
    latency: Annotated[tuple[Count, ...], Meta(max_length=MAX_TIMES)]
    inter_token: Annotated[tuple[Count, ...], Meta(max_length=MAX_TIMES)] = ()


class Update(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: Name
    """Identifies a process: another one after each start."""
    sequence: Count
    sent_s: float
    full: bool
    nodes: Names = ()
    """The nodes that `rows` describes, in the same order."""
    rows: bytes = b""
    """What the process has on each of these nodes now, and totals since its start, 96 bytes each. The kernel packs,
    checks and applies them (_kernel/peer_load.c):

    inflight, pending_work, context_tokens, kv_new
    kv_sum            total of the KV tokens that its requests allocated, minus those they freed
    opened            total of the requests that it sent to the node
    output_tokens     total of the tokens that the node generated for it, which take room in the node's cache
    ms_per_token, speed_factor, answers
                      the prefill speed that it has learned, and from how many answers
    prefill_work, prefill_s
                      its oldest prompt there without a first token, and when that reached the node"""
    waiting: Annotated[dict[Name, Count], Meta(max_length=MAX_MODELS)] = {}
    """Requests in its admission queue, by model."""
    heads: Annotated[dict[Name, WireHead], Meta(max_length=MAX_NODES)] = {}
    """The first request that waits for a node, by node."""
    firsts: Annotated[dict[Name, WireHead], Meta(max_length=MAX_MODELS)] = {}
    """The first waiting request that would go to any node with room, by model."""
    taken: Annotated[dict[Name, tuple[Total, Total, Total, Total]], Meta(max_length=MAX_TENANTS)] = {}
    """Of the tenants for which it changed: totals of the requests and tokens that its requests took from the limits,
    and what it knows to be left of both."""
    first_token_nodes: Names = ()
    first_tokens: bytes = b""
    """Prompts that were prefilled, 40 bytes each: the index in `first_token_nodes`, lone, work, step_ms, sent_s, at_s
    (_kernel/first_token_order.c). All processes learn a node's speed from the first tokens of all, in the order of
    time, since a node prefills their prompts together."""
    routed: Annotated[tuple[RoutedPrompt, ...], Meta(max_length=MAX_ROUTED)] = ()
    homes: Annotated[tuple[Home, ...], Meta(max_length=MAX_HOMES)] = ()
    changes: Annotated[tuple[NodeChange, ...], Meta(max_length=MAX_CHANGES)] = ()
    changes_digest: int = 0
    """A hash of all changes of nodes that it knows: whether two processes know the same ones."""
    demand: Demand | None = None
    asks: Name = ""
    """The process that should send it a snapshot (snapshots.py)."""
    leaving: bool = False
    """It ends: this is its last message."""


class BadMessage(ValueError):
    """Why a message was rejected. Contains nothing of its content."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Update)


class _FirstField(msgspec.Struct, array_like=True):
    version: int


_first_field_decoder = msgspec.msgpack.Decoder(_FirstField)


def _unreadable(message: bytes) -> BadMessage:
    """Return why a message could not be read: the fields of another version have other types."""
    try:
        version = _first_field_decoder.decode(message).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BadMessage("the message is not an update")
    return _other_version(version) if version != VERSION else BadMessage("the message is not an update")


def _other_version(version: int) -> BadMessage:
    return BadMessage(f"the message has version {version}; this process has version {VERSION}")


def encode(update: Update) -> bytes:
    return _encoder.encode(update)


def decode(message: bytes) -> Update:
    """Raises BadMessage."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadMessage("the message is too long")
    try:
        update = _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _unreadable(message) from None
    if update.version != VERSION:
        raise _other_version(update.version)
    if not isfinite(update.sent_s):
        raise BadMessage("a time is not a number")
    if not check_load_rows(update.rows, len(update.nodes)):
        raise BadMessage("the load of a node is not within its bounds")
    if not check_first_tokens(update.first_tokens, len(update.first_token_nodes)):
        raise BadMessage("a first token is not within its bounds")
    if not all(isfinite(work_ms) for firsts in (update.heads, update.firsts) for _, work_ms, _ in firsts.values()):
        raise BadMessage("the work of a waiting request is not a number")
    if any(len(chain) % 8 for _, chain, _, _ in update.routed):
        raise BadMessage("a list of block hashes is cut off")
    return update
