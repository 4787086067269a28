"""The core's messages as frames, for an edge in another process. No I/O.

    edge → brain    Hello, Resync, Report, and every Event
    brain → edge    Welcome, Settings, TablesFrame, ModelCards, and every Command

A frame is a length of four bytes, and a MessagePack array: the sender's clock, and the messages of one turn of its
event loop, in their order. Each message is an array that begins with its tag. A newer version of a message has more
fields at its end, with defaults, so an older side reads what it knows. A side does not send tags that the other
side's version does not have.

The brain gets the hashes of a prompt from the edge (`Lookup.chains`), for every block size in Tables. The tokens stay
at the edge.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from warmroute.core.messages import (
    AnswerNow,
    Arrive,
    Cancel,
    Charge,
    Cut,
    Ended,
    Failed,
    FirstToken,
    Lookup,
    NodeRow,
    Prefilled,
    Reject,
    Resume,
    RoutingRequest,
    Send,
    Started,
    Tables,
    Withdraw,
    Withdrawn,
)

VERSION: Final = 1
OLDEST: Final = 1
"""The oldest version that this side speaks, too."""
MAX_FRAME_BYTES: Final = 256 << 20
"""A Resync has the hashes of every open call."""
MAX_UNSENT_BYTES: Final = 4 << 20
"""What may wait for a side that does not read, before its link is closed."""
EDGE_BITS: Final = 40
"""An edge numbers its calls from its own number on, shifted by this many bits."""
LENGTH: Final = struct.Struct("<I")


class Unreadable(ValueError):
    """The other side sent what is no frame, or what its version cannot have."""


# What others want of a call, as data.


class KeptFrame(msgspec.Struct, array_like=True):
    """`Arrive.kept` of an edge in another process."""

    body_bytes: int = -1
    """Of a request that is captured; -1: it is not."""
    prompt: Any = None
    """Of a request that is captured (prompt/prompt.py)."""
    tokens: bytes = b""
    """Of a request that the prompt doctor samples."""
    path: bytes = b""
    sample: bytes | None = None
    """The body of a request that the prompt doctor may sample."""
    trace: TraceFrame | None = None


class TraceFrame(msgspec.Struct, array_like=True):
    trace_id: bytes
    span_id: bytes
    flags: int
    parent_id: bytes
    tracestate: bytes
    path: bytes
    started_s: float
    span_seed: int


class EndedEarlyFrame(msgspec.Struct, array_like=True, tag=18):
    """A request that ended at the edge before it asked for a node."""

    trace: TraceFrame | None
    kept: KeptFrame | None
    ended_s: float
    status: int
    error: str
    client_left: bool
    request: RoutingRequest | None
    request_id: bytes


# About the link.


class Link(Protocol):
    """What a connection is to its two ends: an asyncio.Transport, or the kernel's SocketTransport."""

    def write(self, data: bytes, /) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def abort(self) -> None: ...


class Hello(msgspec.Struct, array_like=True, tag=16):
    """The first message of an edge."""

    version: int
    name: str
    """For log, metrics and page."""
    edge: int
    """Random, of this process: its calls begin with it, and go on behind a link that was lost."""
    machine: bytes
    """Edge and brain with the same one have the same clock."""
    pid: int = 0
    fence: int = 0
    """The highest that it has obeyed."""


class Welcome(msgspec.Struct, array_like=True, tag=48):
    """The brain's answer to Hello."""

    version: int
    fence: int
    """Each brain that leads has a higher one than those before it."""


class Bye(msgspec.Struct, array_like=True, tag=20):
    """The edge ends in order: it has no calls any more."""


class Resync(msgspec.Struct, array_like=True, tag=17):
    """Every call that is open at the edge, in the order of arrival. What it does not list has ended."""

    calls: list[Resume]
    reading: list[int] = []
    """Calls whose prompt is still being read."""


class ClientErrorCount(msgspec.Struct, array_like=True):
    status: int
    code: str
    source: str
    key: str
    count: int


class Report(msgspec.Struct, array_like=True, tag=19):
    """An edge lives. Its numbers are totals since its start, so that a report that is lost does no harm."""

    tables: int
    """The version that it has."""
    errors: list[tuple[int, str, int]]
    route_requests: dict[str, int]
    prompts: list[tuple[str, str, int]]
    counts: tuple[int, ...]
    """In the order of COUNTS."""
    gauges: tuple[int, ...]
    """In the order of GAUGES."""
    silent: list[tuple[int, float]] = []
    """Nodes with running responses, and for how many seconds none of them has had a byte."""
    client_errors: list[ClientErrorCount] = []
    """Since the last report."""


COUNTS: Final = (
    "disconnects", "stale_connections", "prompts_in_threads", "prompts_not_tokenized", "accepted", "too_slow",
    "traces_limited", "times_alone",
)  # fmt: skip
GAUGES: Final = ("connections", "busy", "body_bytes", "unread_bytes")


class Settings(msgspec.Struct, array_like=True, tag=49):
    """The configuration in use."""

    config: bytes
    """As JSON."""


class ModelCards(msgspec.Struct, array_like=True, tag=50):
    """What a node says of its models: an edge chooses tokenizers by it."""

    node: str
    cards: list[dict[str, Any]]
    """Empty: the node has left."""


class TablesFrame(msgspec.Struct, array_like=True, tag=51):
    """Tables as data."""

    version: int
    nodes: dict[int, NodeRow]
    is_ready: bool
    cards: bytes
    """As JSON."""
    only_model: str
    has_several_islands: bool
    has_pairs: bool
    pairs_only_with_vllm: bool
    shortest_window: dict[str, int]
    wants_tokens: bool
    route_wants_tokens: dict[str, bool]
    chains: dict[str, tuple[tuple[str, str, int], ...]]
    keeps_prompts: bool
    starting: bool
    serving: dict[str, tuple[int, ...]]
    captures: bool
    edges: int


class Beat(msgspec.Struct, array_like=True, tag=52):
    """The brain lives."""

    fence: int


FromEdge = (
    Charge | Arrive | AnswerNow | Started | FirstToken | Ended | Prefilled | Failed | Withdrawn | Cancel
    | Hello | Resync | EndedEarlyFrame | Report | Bye
)  # fmt: skip
FromBrain = Send | Withdraw | Reject | Cut | Welcome | Settings | ModelCards | TablesFrame | Beat

_encoder: Final = msgspec.msgpack.Encoder()
_from_edge: Final = msgspec.msgpack.Decoder(tuple[float, list[FromEdge]])
_from_brain: Final = msgspec.msgpack.Decoder(tuple[float, list[FromBrain]])


def encode(clock_s: float, messages: Sequence[Any]) -> bytes:
    """Return a frame."""
    frame = _encoder.encode((clock_s, messages))
    return LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Cuts what arrives into frames, and reads them."""

    def __init__(self, of_edge: bool) -> None:
        self._decode: Callable[[Any], Any] = (_from_edge if of_edge else _from_brain).decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[float, list[Any]]]:
        """Return the whole frames. Raises Unreadable."""
        rest, found = self._rest, list[tuple[float, list[Any]]]()
        if rest:
            rest += data
            view = memoryview(bytes(rest)) if self._is_whole(rest) else memoryview(b"")
        else:
            view = memoryview(data)
        at, size = 0, len(view)
        try:
            while size - at >= 4:
                (length,) = LENGTH.unpack_from(view, at)
                if length > MAX_FRAME_BYTES:
                    raise Unreadable(f"a frame of {length:,} bytes")
                end = at + 4 + length
                if end > size:
                    break
                found.append(self._decode(view[at + 4 : end]))
                at = end
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unreadable(str(error)) from None
        if size:
            self._rest = bytearray(view[at:]) if at < size else bytearray()
        return found

    @staticmethod
    def _is_whole(rest: bytearray) -> bool:
        """Whether the first frame is complete: a large one comes in many pieces, which are not looked at one by one."""
        return len(rest) >= 4 and len(rest) >= 4 + min(LENGTH.unpack_from(rest)[0], MAX_FRAME_BYTES)


def tables_frame(tables: Tables) -> TablesFrame:
    return TablesFrame(
        tables.version, tables.nodes, tables.is_ready, msgspec.json.encode(tables.cards()), tables.only_model,
        tables.has_several_islands, tables.has_pairs, tables.pairs_only_with_vllm, tables.shortest_window,
        tables.wants_tokens, tables.route_wants_tokens, tables.chains, tables.keeps_prompts, tables.starting,
        tables.serving, tables.captures, tables.edges,
    )  # fmt: skip


def tables_of(frame: TablesFrame) -> Tables:
    cards = tuple(msgspec.json.decode(frame.cards))
    return Tables(
        frame.version, frame.nodes, frame.is_ready, lambda: cards, frame.only_model, frame.has_several_islands,
        frame.has_pairs, frame.pairs_only_with_vllm, frame.shortest_window, frame.wants_tokens,
        frame.route_wants_tokens, frame.chains, frame.keeps_prompts, frame.starting, frame.serving,
        frame.captures, frame.edges,
    )  # fmt: skip


def hash_for(lookup: Lookup, tables: Tables, model: str) -> None:
    """Compute the hashes that the brain looks up, and drop the tokens that it does not need."""
    for base, lora, block_size in tables.chains.get(model, ()):
        lookup.blocks(base, lora, block_size)
    batch = lookup.batch
    if batch is not None:
        for other in batch.others:
            hash_for(other, tables, model)
    if not tables.keeps_prompts:
        lookup.tokens = b""
