"""KV events: read, put in sequence, gaps and restarts noticed, and applied to the cache of their node."""

from __future__ import annotations

import enum
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import astuple

from warmroute.core.node_cache import NEVER_S, EngineHash, NodeCache, Tier
from warmroute.core.reported_values import MAX_BLOCK_TOKENS, MAX_NAME_LENGTH, MAX_TIME_S
from warmroute.event_log import EventLog

# KV event types, and decoding of the payloads that vLLM and SGLang publish. No I/O.
#
# A payload is a msgpack array `[ts, events, rank]`. An event is a map with a "type" (vLLM since 0.24), or an array that
# starts with its name (older vLLM, SGLang) and that newer releases extend at the end. Both forms are decoded; unknown
# fields are ignored. Hashes are opaque: 64-bit integers, signed or unsigned, or 32 bytes.
#
# A payload with a value outside its limits is unreadable as a whole. The limits keep the memory and time of one payload
# small; the C kernel checks token ids and the length of hashes.

MAX_EVENTS: Final = 1 << 18
"""Events of one payload. A payload with more is unreadable."""
MAX_TOKENS: Final = 1 << 21
"""Tokens of one event: more than any context window."""
MAX_EXTRA_KEYS_BYTES: Final = 1 << 20
"""They are hashes of images and names of adapters: a few hundred bytes for each block."""
NO_EXTRA_KEYS: Final = msgspec.Raw(b"\xc0")


class BadPayload(ValueError):
    """Not a batch of KV events."""


_Hashes = Annotated[list[EngineHash], Meta(max_length=MAX_TOKENS)]


class _StoredFields(Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: EngineHash | None = None
    token_ids: Annotated[list[int], Meta(max_length=MAX_TOKENS)] = []
    block_size: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    extra_keys: msgspec.Raw = NO_EXTRA_KEYS
    """A list with an entry for each block: what its hash covers besides its tokens; nil for nothing. Not decoded, since
    it may contain anything: see `salt_and_extra_keys`."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockStored(_StoredFields, tag="BlockStored", tag_field="type", gc=False):
    locality: str | None = None
    """Where the blocks are, as the engine sees it: LOCAL or REMOTE."""
    cache_salt: str | None = None


class _RemovedFields(Struct, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(_RemovedFields, tag="BlockRemoved", tag_field="type", gc=False):
    locality: str | None = None


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


class HashesStored(Struct, gc=False):
    """Stored blocks without tokens, whose hashes are the index's own. Only replay's simulated engines send them."""

    block_hashes: list[int]
    parent_block_hash: int | None


PublishedEvent = BlockStored | BlockRemoved | AllBlocksCleared
Event = PublishedEvent | HashesStored


class Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: Annotated[list[PublishedEvent], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


# The same events as arrays: vLLM before 0.24 and SGLang. A union of both forms in one decoder is not possible: a tag
# is either a field or the first element.


class _StoredArray(_StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    sent_s: float
    events: Annotated[list[_StoredArray | _RemovedArray | _ClearedArray], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


_AS_MAP: Final[dict[type[Struct], Callable[..., PublishedEvent]]] = {
    _StoredArray: BlockStored, _RemovedArray: BlockRemoved, _ClearedArray: AllBlocksCleared,
}  # fmt: skip
_DOUBLE: Final = struct.Struct(">d")
_maps: Final = msgspec.msgpack.Decoder(Batch)
_arrays: Final = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> Batch:
    """Raises BadPayload."""
    try:
        return _maps.decode(payload)
    except msgspec.ValidationError as error:
        # It is msgpack, but not with maps: older engines send arrays. Any other error is no msgpack at all.
        not_maps = str(error)
    except (ValueError, RecursionError) as error:
        raise BadPayload(_reason(error)) from None
    try:
        batch = _arrays.decode(payload)
    except (ValueError, RecursionError) as error:
        reason = _reason(error)
        raise BadPayload(not_maps if "got `object`" in reason else reason) from None
    return Batch(batch.sent_s, [_AS_MAP[type(event)](*astuple(event)) for event in batch.events], batch.rank)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__


def sent_time_s(payload: bytes) -> float | None:
    """Return when a batch was sent, by the engine's clock, without decoding the rest of it; None if it is no time."""
    if payload[1:2] != b"\xcb" or len(payload) < 10:
        return None
    sent_s = float(_DOUBLE.unpack_from(payload, 2)[0])
    return sent_s if 0.0 < sent_s < MAX_TIME_S else None


def salt_and_extra_keys(event: BlockStored) -> tuple[str | None, list[bytes | None] | None]:
    """Return the client's cache salt, and what distinguishes each block besides its tokens, adapter and salt, for
    example images. Raises ValueError."""
    keys_by_block = _decode_extra_keys(event.extra_keys)
    salt = event.cache_salt  # SGLang sends it as a field, vLLM among the first block's extra keys
    if salt is None and event.parent_block_hash is None and keys_by_block:
        salt = next((key for key in _without_adapter(event, keys_by_block[0]) if isinstance(key, str)), None)
    if not any(keys_by_block):
        return salt, None
    extra: list[bytes | None] = []
    for number, keys in enumerate(keys_by_block):
        own = _without_adapter(event, keys)
        if number == 0 and salt in own:
            own.remove(salt)
        extra.append(msgspec.msgpack.encode(own) if own else None)
    return salt, extra if any(extra) else None


def _decode_extra_keys(raw: msgspec.Raw) -> list[Any]:
    if raw == NO_EXTRA_KEYS:
        return []
    if len(raw) > MAX_EXTRA_KEYS_BYTES:
        raise ValueError("the extra keys are too long")
    keys = msgspec.msgpack.decode(raw)
    if not isinstance(keys, list):
        raise ValueError("the extra keys are not a list")
    return keys


def _without_adapter(event: BlockStored, keys: Any) -> list[Any]:
    """Return a block's extra keys without its adapter, which comes first."""
    own = list(keys) if isinstance(keys, (list, tuple)) else []
    if own and event.lora_name is not None and own[0] == event.lora_name:
        del own[0]
    return own


# Applies decoded KV events to one rank of a NodeCache. No I/O.
#
# Models with several kinds of attention publish each block once for each group of layers, under the same hash. The
# applier follows one group, one of full attention if there is any: a prefix that full attention does not cover is no
# hit, whatever the other groups hold.

FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_TIERS: Final = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU, "CPU_PINNED": Tier.CPU, "HOST": Tier.CPU,
    "DISK": Tier.DISK, "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.REMOTE, "REMOTE": Tier.REMOTE,
}  # fmt: skip


class Applied(enum.IntEnum):
    DONE = 0
    CLEARED = 1
    """The cache is empty. From here on, the events cover everything in it."""
    ORPHANED = 2
    """The block's parent is unknown, or the event is inconsistent: earlier events were lost."""


def tier_of(medium: str | None, locality: str | None = None) -> Tier:
    """Return the tier of a block. An unknown medium counts as remote."""
    if locality == "REMOTE":
        return Tier.REMOTE
    return Tier.GPU if medium is None else _TIERS.get(medium.upper(), Tier.REMOTE)


class KvEventApplier:
    def __init__(self, cache: NodeCache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self._group: int | None = None
        self._full_attention = False
        self.block_size = 0
        """Block size of the events; 0 before the first."""

    def apply(self, event: Event) -> Applied:
        try:
            return self._apply(event)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return Applied.ORPHANED

    def _apply(self, event: Event) -> Applied:
        """Raises ValueError, TypeError, OverflowError or RecursionError if the event contains impossible values."""
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved):
            if event.group_idx is None or event.group_idx == self._group:
                self._cache.blocks_removed(self._rank, event.block_hashes, tier_of(event.medium, event.locality))
            return Applied.DONE
        if isinstance(event, HashesStored):
            known = self._cache.hashes_stored(self._rank, event.parent_block_hash, event.block_hashes)
            return Applied.DONE if known else Applied.ORPHANED
        self._cache.all_blocks_cleared(self._rank)
        return Applied.CLEARED

    def _stored(self, event: BlockStored) -> Applied:
        if not event.block_hashes or not self._follows_group_of(event):
            return Applied.DONE
        tier = tier_of(event.medium, event.locality)
        if not event.token_ids:
            self._store_known(event.block_hashes, tier)
            return Applied.DONE
        if self.block_size and event.block_size != self.block_size:
            # vLLM publishes parts of blocks for some kinds of layers. Prompts are matched by whole blocks.
            return Applied.DONE  # part of a block
        if tier is not Tier.GPU:
            self._store_offloaded(event, tier)
        elif not self._store(event, tier):
            return Applied.ORPHANED
        self.block_size = event.block_size
        return Applied.DONE

    def _follows_group_of(self, event: BlockStored) -> bool:
        group = event.group_idx
        if group is None or group == self._group:
            return True
        full_attention = event.kv_cache_spec_kind in FULL_ATTENTION
        if not event.token_ids or not (self._group is None or (full_attention and not self._full_attention)):
            return False
        if self._group is not None:
            self._cache.all_blocks_cleared(self._rank)  # so far it held another group's blocks
            self.block_size = 0
        self._group, self._full_attention = group, full_attention
        return True

    def _store(self, event: BlockStored, tier: Tier) -> bool:
        lora = event.lora_name or ""
        if not lora and event.lora_id is not None:
            lora = f"\0{event.lora_id}"  # an adapter without a name: no request can ask for it
        salt, extra = salt_and_extra_keys(event)
        return self._cache.blocks_stored(
            self._rank, event.parent_block_hash, event.block_hashes, event.token_ids, event.block_size, tier,
            lora=lora, salt=salt or "", extra=extra,
        )  # fmt: skip

    def _store_offloaded(self, event: BlockStored, tier: Tier) -> None:
        """Store blocks outside the GPU. vLLM sends no salt with offloaded blocks, so a first block counts only if it is
        known already. An unknown parent is no sign of lost events, since offloaded blocks outlive their parents."""
        if event.parent_block_hash is None and event.extra_keys == NO_EXTRA_KEYS and event.cache_salt is None:
            first, *rest = event.block_hashes
            if not self._cache.knows(self._rank, first):
                return
            self._store_known([first], tier)
            if not rest:
                return
            event.parent_block_hash, event.block_hashes = first, rest
            event.token_ids = event.token_ids[event.block_size :]
        if not self._store(event, tier):
            self._store_known(event.block_hashes, tier)

    def _store_known(self, hashes: list[int | bytes], tier: Tier) -> None:
        self._cache.blocks_stored(self._rank, None, hashes, [], 0, tier)


# Limits the memory of one node's KV events between their arrival and their application.

NODE_BYTES: Final = 64 << 20
"""Memory for the KV events of all ranks of a node. An engine's messages are kilobytes, and the router applies them
within milliseconds."""


@dataclass(slots=True, eq=False)
class ByteBudget:
    limit_bytes: int = NODE_BYTES
    used_bytes: int = 0

    @property
    def exceeded(self) -> bool:
        return self.used_bytes > self.limit_bytes


# The sequence numbers of one KV event stream: which messages to apply, when some are missing, and when the engine has
# restarted. No I/O: the driver delivers live and replayed messages and requests replays.
#
#     number follows the last         apply it
#     number skips some               a gap: hold messages back until a replay brings the missing ones
#     number is not above the last    the engine restarted: forget its blocks and read its stream from 0;
#                                     unless a replay has just brought this very message ahead of the live stream
#     first number is not 0           request the messages before it by replay
#
# Without a replay, or if the replay no longer has the missing messages, a gap makes the router forget the blocks of
# this stream: a lost store costs a hit, but a lost removal would promise blocks that are gone.

MAX_HELD: Final = 10_000
"""Messages held back during a replay; vLLM's own replay buffer has the same size. Beyond this, or beyond the node's
byte budget, the oldest is dropped: a gap, which the next replay fills."""

Payload = TypeVar("Payload")


class EventSequence(Generic[Payload]):
    def __init__(
        self,
        apply: Callable[[Payload], None],
        forget: Callable[[], None],
        budget: ByteBudget | None = None,
        size_bytes: Callable[[Payload], int] = lambda _payload: 0,
    ) -> None:
        self._apply = apply
        self._forget = forget
        self._budget = budget or ByteBudget()
        self._size_bytes = size_bytes
        self.next_number = 0
        self._started = False
        self._from_start = False
        """Whether the stream was read from its first message on, or from a moment at which the cache was empty."""
        self._reread = False
        """Whether everything has to be read again, from message 0."""
        self._held: dict[int, Payload] = {}
        """Messages that arrived while an earlier one was missing."""
        self._replayed: dict[int, int] = {}
        """Hash of each replayed message by its number. The message may still arrive live."""
        self._replay_start = 0
        self._replay_answered = False
        self._replay_cut_off = False
        """Whether the last replay brought messages, but not its end."""
        self.replaying = False
        self.incomplete = False
        """Whether messages were lost for good since the cache was last empty or the engine started."""

    @property
    def complete(self) -> bool:
        """Whether the messages cover everything that the cache holds."""
        return self._from_start and not self.incomplete

    @property
    def missing_from(self) -> int | None:
        """The number from which a replay is needed; None if nothing is missing or a replay is running."""
        if self.replaying:
            return None
        return 0 if self._reread else self.next_number if self._held or self._replay_cut_off else None

    def receive(self, number: int, payload: Payload) -> None:
        """Handle a live message."""
        if number < self.next_number:
            # The same number with another content is a new process, which counts from 0 again.
            if number in self._replayed and self._replayed.pop(number) == hash(payload):
                return  # the replay was ahead of it
            self._restart()
        if number == self.next_number and not self._held and not self._reread:
            self._replayed.clear()
            self._take(number, payload)
        else:
            self._hold(number, payload)

    def start_replay(self) -> None:
        self.replaying = True
        if self._reread:
            self._reread = self._started = self.incomplete = False
            self.next_number = 0
            self._replayed.clear()
        self._replay_start = self.next_number
        self._replay_answered = self._replay_cut_off = False

    def receive_replayed(self, number: int, payload: Payload) -> None:
        """Handle a message of the requested replay."""
        is_first, self._replay_answered = not self._replay_answered, True
        if number < self.next_number:
            return
        if number > self.next_number:
            if not is_first:
                # ROUTER sockets drop messages beyond their high-water mark.
                self._hold(number, payload)  # the engine's socket dropped messages in the middle of the replay
                return
            self.lose()
            self.next_number = number
        if len(self._replayed) >= MAX_HELD:
            del self._replayed[next(iter(self._replayed))]
        self._replayed[number] = hash(payload)
        self._take(number, payload)

    def end_replay(self, finished: bool = False) -> None:
        """Continue with the messages there are. `finished`: the engine sent the end of the replay."""
        self.replaying = False
        self._replay_cut_off = not finished and self.next_number > self._replay_start
        if finished and self.next_number == 0:
            self._from_start = True  # the engine has not sent anything yet
        if self.next_number > self._replay_start:
            for number in [number for number in self._held if number < self.next_number]:
                self._release(number)
        self._take_held()
        while self._held and self.next_number == self._replay_start:
            self.lose()  # the replay brought none of the missing messages, and never will
            self._replay_start = self.next_number = min(self._held)
            self._take_held()

    def skip_missing(self) -> None:
        """Give up missing messages: there is no replay."""
        if self.missing_from is None:
            return
        self.start_replay()
        self.end_replay()
        for number in sorted(self._held):
            if number > self.next_number:
                self.lose()
                self.next_number = number
            self._take(number, self._release(number))

    def restart(self) -> None:
        """Forget everything, also a running replay: a poll has shown that the engine runs as a new process."""
        self.replaying = False
        self._restart()

    def _restart(self) -> None:
        self.drop_held()
        self._replayed.clear()
        self.next_number = 0
        self._started = self._from_start = self._reread = self._replay_cut_off = self.incomplete = False
        self._forget()

    def mark_empty(self) -> None:
        """Note that the cache is empty: messages lost before no longer matter."""
        self._from_start = True
        self.incomplete = False

    def reread(self) -> None:
        """Forget everything and read all messages that a replay still has: events contradict earlier ones."""
        self.incomplete = True
        self._from_start = False
        self._reread = True
        self._forget()

    def lose(self) -> None:
        """Note that messages are lost for good, and forget everything before them."""
        self.incomplete = True
        if self._started:
            self._forget()

    def _take_held(self) -> None:
        while self.next_number in self._held:
            self._take(self.next_number, self._release(self.next_number))

    def _take(self, number: int, payload: Payload) -> None:
        self.next_number = number + 1
        self._started = True
        self._from_start = self._from_start or number == 0
        self._apply(payload)

    def _hold(self, number: int, payload: Payload) -> None:
        if number in self._held:
            self._release(number)
        self._held[number] = payload
        self._budget.used_bytes += self._size_bytes(payload)
        while len(self._held) > MAX_HELD or (self._budget.exceeded and len(self._held) > 1):
            self._release(next(iter(self._held)))

    def _release(self, number: int) -> Payload:
        payload = self._held.pop(number)
        self._budget.used_bytes -= self._size_bytes(payload)
        return payload

    def drop_held(self) -> None:
        for number in list(self._held):
            self._release(number)


# The KV events of one data-parallel rank, from numbered messages to its NodeCache. No I/O.
#
# Production's sockets and replay's virtual time both deliver messages here. Messages that are in sequence are queued,
# and `work` applies them in slices of time, so that neither a flood of messages nor one message with thousands of
# events blocks the event loop.

log = EventLog("warmroute.engines")

EVENTS_PER_CHECK: Final = 16
"""Events applied between two readings of the clock."""
REREAD_INTERVAL_S: Final = 60.0
"""Minimum time between two rereads of a stream whose events contradict each other, and between two warnings."""
DELAY_WINDOW_S: Final = 60.0
"""Clocks drift and are set. What was least more than two windows ago says nothing about now."""
START_TIME_ERROR_S: Final = 2.0
"""How much a process's reported start time may be too early: kernels count it from a boot time in whole seconds."""

Decoder = Callable[[Payload], Iterable[Event]]
"""Return a message's events. Raises BadPayload."""


class LeastDelay:
    """The least difference between this clock and the engine's in the last minute or two: that of a message that was
    not late. One message from the future, or a clock that was set, does not make all later ones look late for ever."""

    def __init__(self) -> None:
        self._since_s = NEVER_S
        self._least_s = self._earlier_s = inf

    def least_s(self, delay_s: float, now_s: float) -> float:
        """Add a delay, and return the least one."""
        if now_s - self._since_s >= DELAY_WINDOW_S:
            self._since_s, self._earlier_s, self._least_s = now_s, self._least_s, inf
        self._least_s = min(self._least_s, delay_s)
        return min(self._least_s, self._earlier_s)


class RankEvents(Generic[Payload]):
    def __init__(
        self,
        cache: NodeCache,
        rank: int,
        new_decoder: Callable[[], Decoder[Payload]],
        sent_time_s: Callable[[Payload], float | None] = lambda _payload: None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        budget: ByteBudget | None = None,
        size_bytes: Callable[[Payload], int] = lambda _payload: 0,
    ) -> None:
        """`new_decoder` makes a decoder for each process of the engine; `sent_time_s` returns when a message was sent,
        by the engine's clock; `size_bytes` returns the size of a message, which counts in the node's `budget`."""
        self._cache = cache
        self._rank = rank
        self.log_fields: dict[str, Any] = {"node": cache.name, "rank": rank}
        self._new_decoder = new_decoder
        self._sent_time_s = sent_time_s
        self._now = now
        self._wall = wall
        self._queue: deque[Payload] = deque()
        self._events: Iterator[Event] | None = None
        """The events of the current message that are not applied yet."""
        self._decode = new_decoder()
        self._applier = KvEventApplier(cache, rank)
        self._delays = LeastDelay()
        self._reread_s = self._warned_s = NEVER_S
        self.first_sent_s: float | None = None
        """When the engine's current process sent its first message, by the engine's clock."""
        self.renumbered_s = NEVER_S
        """When a message last showed a new process: the numbers started again."""
        self.sequence = EventSequence[Payload](self._enqueue, self._forget, budget, size_bytes)
        cache.add_rank(rank)

    @property
    def block_size(self) -> int:
        return self._applier.block_size

    @property
    def is_settled(self) -> bool:
        """Whether no replay is running and all messages are applied."""
        return not self.sequence.replaying and not self._queue and self._events is None

    def receive(self, number: int, payload: Payload) -> None:
        """Handle a live message."""
        self._cache.last_contact_s = self._now()
        sent_s = self._sent_time_s(payload)
        if sent_s is not None:
            delay_s = self._wall() - sent_s
            self._cache.event_lag_s = delay_s - self._delays.least_s(delay_s, self._now())
        self.sequence.receive(number, payload)

    def restart(self) -> None:
        """Forget everything: a poll has shown a new process or another model."""
        self.sequence.restart()
        self.renumbered_s = NEVER_S

    def work(self, until_s: float) -> bool:
        """Apply queued messages until a moment of `time.monotonic`. Return whether some are left."""
        while True:
            if self._events is None:
                if not self._queue:
                    self._cache.set_complete(self._rank, self.sequence.complete)
                    return False
                self._events = self._decoded(self._queue.popleft())
            for done, event in enumerate(self._events, 1):
                applied = self._applier.apply(event)
                if applied is not Applied.DONE and self._handle(applied):
                    break
                # An event may have a million tokens, so checks go by events that are usually small, and a slice may run
                # over.
                if done % EVENTS_PER_CHECK == 0 and time.monotonic() >= until_s:
                    return True
            self._events = None
            if self._queue and time.monotonic() >= until_s:
                return True

    def is_current(self, started_s: float, polled_s: float) -> bool:
        """Return whether the rank's events are those of a process that started at `started_s` (see
        NodeKvEvents.restarted)."""
        sent_s = self.first_sent_s
        if sent_s is not None and sent_s >= started_s + START_TIME_ERROR_S:
            return True
        return self.renumbered_s > polled_s and (sent_s is None or sent_s >= started_s)

    def _enqueue(self, payload: Payload) -> None:
        if self.first_sent_s is None:
            self.first_sent_s = self._sent_time_s(payload)
        self._queue.append(payload)

    def _decoded(self, payload: Payload) -> Iterator[Event]:
        try:
            return iter(self._decode(payload))
        except BadPayload as error:
            if self._now() - self._warned_s >= REREAD_INTERVAL_S:
                self._warned_s = self._now()
                log.warning(
                    "kv_events_unreadable", "The router forgets this node's cached blocks: events are lost.",
                    **self.log_fields, reason=str(error),
                )  # fmt: skip
            # `lose` forgets the queue, too. The messages behind the unreadable one are still good.
            after = list(self._queue)
            self.sequence.lose()
            self._queue.extend(after)
            return iter(())

    def _handle(self, applied: Applied) -> bool:
        """Handle a cleared cache or an unknown parent. Return whether the queue was dropped."""
        if applied is Applied.CLEARED:
            self.sequence.mark_empty()
            return False
        if not self.sequence.complete:
            return False  # the parent was stored before this router listened
        if self._now() - self._reread_s >= REREAD_INTERVAL_S:
            self._reread_s = self._now()
            log.info(
                "kv_events_reread", "A stored block has an unknown parent. The router reads this node's events again.",
                **self.log_fields,
            )  # fmt: skip
            self.sequence.reread()
            return True
        self.sequence.incomplete = True
        self._cache.events_lost(self._rank)
        return False

    def _forget(self) -> None:
        self._queue.clear()
        self._events = None
        if self.sequence.incomplete:
            self._cache.events_lost(self._rank)
        else:  # a new process
            self._decode = self._new_decoder()
            self._applier = KvEventApplier(self._cache, self._rank)
            self.first_sent_s = None
            self.renumbered_s = self._now()
            self._cache.all_blocks_cleared(self._rank)
            self._cache.set_complete(self._rank, False)


class NodeKvEvents:
    def __init__(self, cache: NodeCache) -> None:
        self.cache = cache
        self.ranks: dict[int, RankEvents[Any]] = {}

    @property
    def block_size(self) -> int:
        """Block size of the node's events; 0 before the first."""
        return next((rank.block_size for rank in self.ranks.values()), 0)

    @property
    def is_connected(self) -> bool:
        return bool(self.ranks)

    def restarted(self, started_s: float, polled_s: float = inf) -> list[int]:
        """Forget the blocks of the engine's previous process. Return the ranks whose streams start again at 0.

        `started_s` is the new process's start time by its own clock; `polled_s` is when the previous process was last
        seen. Ranks are current which have sent their first event well after the start, and those whose numbers started
        again since `polled_s`, unless they have sent it before the start."""
        current = [number for number, rank in self.ranks.items() if rank.is_current(started_s, polled_s)]
        self.cache.restarted(current)
        stale = [number for number in self.ranks if number not in current]
        for number in stale:
            self.ranks[number].restart()
        return stale

    def remove_rank(self, number: int) -> None:
        self.ranks.pop(number).sequence.drop_held()
        self.cache.remove_rank(number)
