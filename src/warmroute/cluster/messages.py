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

VERSION: Final = 4
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
MAX_PREFILLS: Final = 8_192
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


class NodeRow(msgspec.Struct, frozen=True, array_like=True):
    """What a process has on one node now, and totals since its start."""

    node: Name
    inflight: Count
    pending_work: Number
    context_tokens: Count
    kv_new: Count
    kv_sum: Total
    """Total of the KV tokens that its requests allocated, minus those they freed."""
    opened: Count
    """Total of the requests that it sent to the node."""
    output_tokens: Count
    """Total of the tokens that the node generated for it, which take room in the node's cache."""
    ms_per_token: Number
    """The prefill speed that it has learned, and from how many answers."""
    speed_factor: Number
    answers: Count


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """A first token: a prompt with this much uncached work was prefilled. All processes learn a node's speed from the
    first tokens of all, in the order of time, since a node prefills their prompts together."""

    node: Name
    work: Number
    step_ms: Number
    sent_s: float
    at_s: float
    lone: bool
    """Whether no other prompt waited on the node."""


class RoutedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that a process sent to a node: the node will hold these blocks."""

    node: Name
    chain: Annotated[bytes, Meta(max_length=MAX_ROUTED_BYTES)]
    """Block hashes, 8 bytes each."""
    exact: bool
    """Whether the node's KV events will contain these blocks."""
    cache_group: Name


class Home(msgspec.Struct, frozen=True, array_like=True):
    """The islands of a conversation."""

    key: int
    """A hash of 64 bits; MessagePack has no longer integers."""
    home: Name
    last: Name


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


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a process's demand meter (fleet/demand.py), for the process that scales the fleet."""

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
    nodes: Annotated[tuple[NodeRow, ...], Meta(max_length=MAX_NODES)] = ()
    waiting: Annotated[dict[Name, Count], Meta(max_length=MAX_MODELS)] = {}
    """Requests in its admission queue, by model."""
    heads: Annotated[dict[Name, tuple[Count, float]], Meta(max_length=MAX_NODES)] = {}
    """Priority and score of the first request that waits for a node, by node."""
    taken: Annotated[dict[Name, tuple[Total, Total, Total, Total]], Meta(max_length=MAX_TENANTS)] = {}
    """Of the tenants for which it changed: totals of the requests and tokens that its requests took from the limits,
    and what it knows to be left of both."""
    prefills: Annotated[tuple[Prefill, ...], Meta(max_length=MAX_PREFILLS)] = ()
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


def encode(update: Update) -> bytes:
    return _encoder.encode(update)


def decode(message: bytes) -> Update:
    """Raises BadMessage."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadMessage("the message is too long")
    try:
        update = _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadMessage("the message is not an update") from None
    if update.version != VERSION:
        raise BadMessage(f"the message has version {update.version}; this process has version {VERSION}")
    times = (update.sent_s, *(time_s for one in update.prefills for time_s in (one.sent_s, one.at_s)))
    if not all(map(isfinite, times)):
        raise BadMessage("a time is not a number")
    if not all(isfinite(score) for _, score in update.heads.values()):
        raise BadMessage("a score is not a number")
    if any(len(prompt.chain) % 8 for prompt in update.routed):
        raise BadMessage("a list of block hashes is cut off")
    return update
