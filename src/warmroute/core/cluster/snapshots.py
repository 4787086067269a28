"""Snapshots: what a process that starts needs to know from a peer, since no engine reports it again: the prompts
that were routed to each node (for engines without KV events), how often blocks are used again, the homes of
conversations, and learned speeds.

    new process   Update.asks = peer ──────────────────►  peer
                  ◄── Snapshot messages, one for each node, then homes and tenants, the last one with `last`

A process asks one peer after another until one answers. It takes over a node's prompts only if none was routed
there yet: until then, it holds the routed prompts of other messages back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from warmroute.core.cache_view import CacheView
from warmroute.core.cluster.messages import (
    MAX_HOMES,
    MAX_MESSAGE_BYTES,
    MAX_NODES,
    VERSION,
    BadMessage,
    Count,
    Home,
    Name,
    Number,
)
from warmroute.core.cluster.peer import MIN_ANSWERS, Peer
from warmroute.core.fleet import Fleet
from warmroute.core.islands import ConversationAffinity
from warmroute.core.rejections import UnknownNode
from warmroute.event_log import EventLog

log = EventLog("warmroute.cluster")

MARK: Final = b"\xc1"
"""Begins a snapshot message. No MessagePack value begins with it."""
MAX_PIECES_BYTES: Final = 2 << 20
"""Block hashes of one node or tenant in a snapshot. The oldest ones beyond it are left out."""
MAX_PIECES: Final = 1 << 18
ANSWER_S: Final = 1.0
"""How long a process waits for a peer's snapshot, or for its next message, before it asks another one."""
CONNECT_S: Final = 2.0
"""How long a process that starts waits for its link to the others."""
PEERS_S: Final = 0.6
"""How long it then waits for the first message of a peer."""
WAITING_S: Final = 60.0
"""How long the prompts of a node wait until this process knows the node."""
REPEAT_S: Final = 20.0
"""A process sends another one its snapshot at most once in this time."""

Piece = tuple[Number, Annotated[bytes, Meta(max_length=MAX_PIECES_BYTES)]]
"""How long ago these blocks were last used, and their hashes (_kernel Recency.pieces)."""
Pieces = Annotated[tuple[Piece, ...], Meta(max_length=MAX_PIECES)]


class Speed(msgspec.Struct, frozen=True, array_like=True):
    node: Name
    ms_per_token: Number
    factor: Number
    answers: Count


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: Name
    to: Name
    last: bool = False
    node: Name = ""
    """The node that `pieces` were routed to."""
    block_size: Count = 0
    pieces: Pieces = ()
    cache_group: Name = ""
    """The tenants that sent `pieces`, if `node` is empty."""
    speeds: Annotated[tuple[Speed, ...], Meta(max_length=MAX_NODES)] = ()
    homes: Annotated[tuple[Home, ...], Meta(max_length=MAX_HOMES)] = ()
    uses: Number = 0.0
    reused: Annotated[tuple[Number, ...], Meta(max_length=256)] = ()
    """How often blocks are used again, by age (core/reuse.py). Then `pieces` are the sampled blocks."""


_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    return MARK + msgspec.msgpack.encode(snapshot)


def decode_snapshot(message: bytes) -> Snapshot:
    """Raises BadMessage."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise BadMessage("the snapshot is too long")
    try:
        snapshot = _decoder.decode(message[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadMessage("the message is not a snapshot") from None
    if snapshot.version != VERSION:
        raise BadMessage(f"the snapshot has version {snapshot.version}; this process has version {VERSION}")
    if any(len(hashes) % 8 for _, hashes in snapshot.pieces):
        raise BadMessage("a list of block hashes is cut off")
    return snapshot


def snapshot_messages(
    sender: str, to: str, fleet: Fleet, cache_view: CacheView, affinity: ConversationAffinity, now_s: float
) -> Iterator[bytes]:
    """Yield the messages of a snapshot. Each is built when it is asked for."""
    speeds = tuple(
        Speed(node.name, node.speed.learned_ms_per_token, node.speed.factor, node.speed.answers)
        for node in fleet
        if node.speed.answers
    )
    yield encode_snapshot(Snapshot(VERSION, sender, to, speeds=speeds))
    uses, reused, sampled = cache_view.reuse.export()
    if uses:
        pieces = _newest(sampled, now_s)
        yield encode_snapshot(Snapshot(VERSION, sender, to, pieces=pieces, uses=uses, reused=reused))
    for cache in cache_view:
        if pieces := _newest(cache.recency.pieces(), now_s):
            snapshot = Snapshot(VERSION, sender, to, node=cache.name, block_size=cache.block_size, pieces=pieces)
            yield encode_snapshot(snapshot)
    for group, sent in cache_view.tenants.groups():
        pieces = _newest(sent, now_s)
        yield encode_snapshot(Snapshot(VERSION, sender, to, cache_group=group, pieces=pieces))
    entries = affinity.entries()
    while homes := tuple(islice(entries, MAX_HOMES)):
        yield encode_snapshot(Snapshot(VERSION, sender, to, homes=homes))
    yield encode_snapshot(Snapshot(VERSION, sender, to, last=True))


def _newest(pieces: list[tuple[float, bytes]], now_s: float) -> tuple[tuple[float, bytes], ...]:
    """Return the latest pieces that fit into a message, the oldest first."""
    left, first = MAX_PIECES_BYTES, len(pieces)
    while first and len(pieces) - first < MAX_PIECES and left >= len(pieces[first - 1][1]):
        first -= 1
        left -= len(pieces[first][1])
    return tuple((max(0.0, now_s - stamp_s), hashes) for stamp_s, hashes in pieces[first:])


class SnapshotRequest:
    """Asks peers for a snapshot when this process has started, and takes it over."""

    def __init__(
        self, peers: Mapping[str, Peer], fleet: Fleet, cache_view: CacheView, affinity: ConversationAffinity
    ) -> None:
        self._peers = peers
        self._fleet = fleet
        self._cache_view = cache_view
        self._affinity = affinity
        self._started_s: float | None = None
        self._since_s: float | None = None
        """When it was last able to ask, or heard an answer."""
        self._asked: set[str] = set()
        self.asks = ""
        """The peer that is asked now."""
        self.done = False
        """Whether the snapshot has arrived, or will not."""
        self._waiting: dict[str, tuple[Snapshot, float]] = {}
        """Prompts routed to nodes that this process does not know yet, and when they arrived."""

    def update(self, connected: bool, now_s: float) -> None:
        """Ask a peer, or another one. Call it regularly. `connected`: whether messages can arrive."""
        if self.done:
            self.apply_waiting(now_s)
            return
        if self._started_s is None:
            self._started_s = now_s
        if self._since_s is None:
            if connected:
                self._since_s = now_s
            elif now_s - self._started_s > CONNECT_S:
                self._end("the server does not reply")
            return
        if self.asks and now_s - self._since_s <= ANSWER_S:
            return
        peer = next((name for name, one in self._peers.items() if name not in self._asked and one.may_know), "")
        if peer:
            self.asks, self._since_s = peer, now_s
            self._asked.add(peer)
        elif self.asks or now_s - self._since_s > PEERS_S:
            nobody = "no peer runs for long enough to have one" if self._peers else "there is no peer"
            self._end("no peer sent a snapshot" if self.asks else nobody)

    @property
    def complete(self) -> bool:
        """Whether all that has arrived is taken over."""
        return self.done and not self._waiting

    def receive(self, snapshot: Snapshot, now_s: float) -> None:
        if self.done or snapshot.sender != self.asks:
            return
        self._since_s = now_s
        for speed in snapshot.speeds:
            self._apply_speed(speed)
        for key, home, last in snapshot.homes:
            self._affinity.remember(key, (home, last), now_s)
        if snapshot.uses:
            pieces = ((now_s - age_s, hashes) for age_s, hashes in snapshot.pieces if hashes)
            self._cache_view.reuse.restore(snapshot.uses, snapshot.reused, pieces)
        if snapshot.node and not self._apply_routed(snapshot, now_s, now_s):
            self._waiting[snapshot.node] = (snapshot, now_s)
        elif snapshot.cache_group:
            for age_s, hashes in snapshot.pieces:
                self._cache_view.tenants.record(snapshot.cache_group, hashes, now_s - age_s)
        if snapshot.last:
            self._end("", snapshot.sender)

    def _end(self, reason: str, peer: str = "") -> None:
        self.done, self.asks = True, ""
        if peer:
            log.info("snapshot_received", "The process knows what its peers routed.", peer=peer)
        else:
            log.info("snapshot_missing", "The process learns caches from events and its own requests.", reason=reason)

    def _apply_speed(self, speed: Speed) -> None:
        try:
            node = self._fleet.node(speed.node)
        except UnknownNode:
            return
        if not node.speed.answers and speed.answers >= MIN_ANSWERS and speed.ms_per_token > 0.0:
            node.speed.guess(speed.ms_per_token)
            node.speed.factor = speed.factor or 1.0

    def _apply_routed(self, snapshot: Snapshot, received_s: float, now_s: float) -> bool:
        """Return False if the node is not known yet."""
        cache = self._cache_view.cache(snapshot.node)
        if cache is None or not cache.model:
            return False
        cache.restore_routed(snapshot.block_size, ((received_s - age_s, hashes) for age_s, hashes in snapshot.pieces))
        return True

    def apply_waiting(self, now_s: float) -> None:
        """Take over the prompts of nodes that this process knows by now, before other prompts are recorded there."""
        for name, (snapshot, received_s) in list(self._waiting.items()):
            if self._apply_routed(snapshot, received_s, now_s) or now_s - received_s > WAITING_S:
                del self._waiting[name]


class SnapshotAnswers:
    """Which peers this process sends its snapshot to."""

    def __init__(self) -> None:
        self._answered_s: dict[str, float] = {}
        self._unsent: Iterator[tuple[str, bytes]] = iter(())
        self.has_unsent = False
        """Whether a peer has asked for a snapshot that was not sent completely."""

    def may_answer(self, asker: str, now_s: float) -> bool:
        if now_s - self._answered_s.get(asker, -1e9) < REPEAT_S:
            return False
        if len(self._answered_s) > 1024:
            self._answered_s.clear()
        self._answered_s[asker] = now_s
        return True

    def add(self, to: str, messages: Iterator[bytes]) -> None:
        self.has_unsent = True
        self._unsent = chain(self._unsent, ((to, message) for message in messages))

    def next_message(self) -> tuple[str, bytes] | None:
        """Return the next message to send, and its receiver."""
        found = next(self._unsent, None)
        self.has_unsent = found is not None
        return found
