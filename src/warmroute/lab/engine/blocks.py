"""The paged KV cache: block hashes, allocation, a shared store, and the events of all that."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import repeat
from operator import itemgetter
from typing import Protocol

import msgspec

# The content of a request as block hashes: one for each full block of its prompt and its output.
#
# The core does not read tokens. It asks a request's content for hashes by block index when it needs them. Two equal
# hashes mean the same tokens after the same prefix in the same namespace. Blocks that the content does not know
# (outputs that no later prompt contains) get unique hashes, derived from the content's seed.

_MASK64 = (1 << 64) - 1


class BlockContent(Protocol):
    """The hashes and tokens of the full blocks [start, stop)."""

    def hashes(self, start: int, stop: int) -> list[int]: ...

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the tokens, or an empty list if the content has only hashes."""


def mix64(seed: int, index: int) -> int:
    """Hash two integers to 64 bits (splitmix64)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed64(text: str) -> int:
    """Hash a text to a 64-bit seed, the same one in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def namespace_offset(lora_name: str | None, cache_salt: str | None) -> int:
    """Return the number that is added to trace hashes to separate a LoRA or a salt from others; 0 without either."""
    if lora_name is None and cache_salt is None:
        return 0
    return seed64(f"{lora_name!r}\x00{cache_salt!r}") >> 1  # leaves room for a trace's ids, which are added to it


class TraceContent:
    """A prompt of a Mooncake-format trace: hash ids, chained over their prefix, each for `id_tokens` tokens.

    An engine block that is smaller than an id is the id's n-th part. An engine block that spans several ids is
    identified by the last of them. If the last id covers fewer than `id_tokens` tokens, the full engine blocks within
    it count. Tokens without an id (the output, and the end of the prompt in some traces) are unique to this request.
    """

    __slots__ = ("_covered", "_ids", "_namespace", "_parts", "_seed", "_span")

    def __init__(
        self,
        hash_ids: Sequence[int],
        id_tokens: int,
        block_size: int,
        prompt_tokens: int,
        *,
        seed: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        if id_tokens % block_size == 0:
            self._parts, self._span = id_tokens // block_size, 1
        elif block_size % id_tokens == 0:
            self._parts, self._span = 1, block_size // id_tokens
        else:
            raise ValueError(f"block size {block_size} is no multiple or divisor of {id_tokens} tokens per hash id")
        self._ids = hash_ids
        self._covered = min(prompt_tokens, len(hash_ids) * id_tokens) // block_size
        self._seed = seed
        self._namespace = namespace_offset(lora_name, cache_salt)

    def hashes(self, start: int, stop: int) -> list[int]:
        known: list[int] = []
        end = min(stop, self._covered)
        if start < end:
            parts, ids, namespace = self._parts, self._ids, self._namespace
            if parts == 1:
                span = self._span
                known = [ids[(index + 1) * span - 1] + namespace for index in range(start, end)]
            else:
                first = start // parts
                for hash_id in ids[first : -(-end // parts)]:
                    base = hash_id * parts + namespace
                    known.extend(range(base, base + parts))
                skip = start - first * parts
                known = known[skip : skip + end - start]
        known.extend(mix64(self._seed, index) for index in range(start + len(known), stop))
        return known

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []


class TokenContent:
    """Real tokens of the prompt and the planned output. Hashes chain over tokens, LoRA name and salt, as in vLLM.

    The hash function is not vLLM's: there the operator chooses it, and readers of KV events cannot compute it.
    """

    __slots__ = ("_block_size", "_known", "_lora_name", "_salt", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._tokens = array("I", tokens)
        self._block_size = block_size
        self._lora_name = lora_name
        self._salt = cache_salt
        self._known: list[int] = []

    def hashes(self, start: int, stop: int) -> list[int]:
        known, size = self._known, self._block_size
        root = repr(self._salt).encode()
        lora = repr(self._lora_name).encode()
        for index in range(len(known), stop):
            digest = blake2b(known[-1].to_bytes(8, "big") if known else root, digest_size=8)
            digest.update(lora)
            digest.update(self._tokens[index * size : (index + 1) * size].tobytes())
            known.append(int.from_bytes(digest.digest(), "big"))
        return known[start:stop]

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self._tokens[start * self._block_size : stop * self._block_size].tolist()


# A KV store that several simulated engines share: an LRU of block hashes behind a network with a bandwidth.


class SharedStoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "store"
    capacity_tokens: int = 1_000_000
    gigabytes_per_s: float = 10.0
    """Bandwidth of all engines together."""


class SharedStore:
    """Engines write each block that they have computed, and load what they find. Writing takes no time."""

    def __init__(self, config: SharedStoreConfig, block_size: int, bytes_per_token: float) -> None:
        self.config = config
        self._capacity = max(1, config.capacity_tokens // block_size)
        self._ms_per_token = bytes_per_token / (config.gigabytes_per_s * 1e6)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._free_ms = 0.0
        """When the last load ends."""
        self.loaded_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: list[int], start: int, limit: int) -> int:
        """Return how many consecutive hashes from `start` up to `limit` the store holds."""
        blocks, stop = self._blocks, start
        while stop < limit and hashes[stop] in blocks:
            blocks.move_to_end(hashes[stop])
            stop += 1
        return stop - start

    def put(self, hashes: list[int]) -> None:
        blocks = self._blocks
        for one in hashes:
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def load_ms(self, tokens: int, now_ms: float) -> float:
        """Return how long it takes from now on to load this many tokens, after the loads that began before."""
        self.loaded_tokens += tokens
        self._free_ms = max(now_ms, self._free_ms) + tokens * self._ms_per_token
        return self._free_ms - now_ms


# The KV events of an engine, with vLLM 0.32's names and field order.
#
# Encoded with msgspec's msgpack, they are the bytes that vLLM publishes. Two steps are left to the publisher: it wraps
# the events of a step in an `EventBatch`, and it splits them with `wire_events`, because the core reports all blocks
# that one allocation evicts in one event and vLLM sends one event for each block.

GPU = "GPU"
CPU = "CPU"


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of one request that became reusable. `parent_block_hash` precedes the first of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that were evicted from one medium, in the order of eviction."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The engine cleared its whole prefix cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

KvEventSink = Callable[[float, list[KvEvent]], None]
"""Takes the time (ms) at which a step ended and the events of that step. The list is never empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one ZMQ message: `[ts, events, data_parallel_rank]`."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


def wire_events(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Split events as vLLM sends them: one `BlockRemoved` per block, one `BlockStored` per block of the CPU tier."""
    for event in events:
        if isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                yield BlockRemoved([block_hash], event.medium, event.group_idx)
        elif isinstance(event, BlockStored) and event.medium == CPU:
            for block_hash in event.block_hashes:
                yield BlockStored([block_hash], None, [], 0, None, CPU, None, group_idx=event.group_idx)
        else:
            yield event


# The paged KV cache of one engine: which blocks are in use, which are reusable, which are evicted next.
#
# Block 0 is the null block and is never allocated. A block in use belongs to one request, or to several after a cache
# hit (`_shared` counts the holders beyond the first). All other blocks are free. Allocation takes free blocks in the
# order that vLLM's free queue has:
#
# 1. blocks without content (the unfinished last block of a request), the latest freed first;
# 2. blocks that were never used;
# 3. cached blocks, the least recently freed first. This evicts their content, to the CPU tier if there is one.
#
# A request's blocks are freed tail first, so that a prefix stays longer than its continuation. Two blocks can have the
# same content, because a prompt that ends on a block boundary recomputes its last block. Then lookups find the first
# one, and each of them is evicted separately.

_FIRST, _SECOND = itemgetter(0), itemgetter(1)


class BlockPool:
    """Allocates and frees blocks by id. Contents are hashes. Appends KV events to `events`, unless that is None."""

    __slots__ = (
        "_blank",
        "_cached",
        "_cpu",
        "_duplicates",
        "_idle",
        "_never_used",
        "_shared",
        "cpu_blocks",
        "events",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, cpu_blocks: int = 0, events: list[KvEvent] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError("an engine needs at least two blocks: block 0 is the null block")
        self.num_blocks = num_blocks
        self.cpu_blocks = cpu_blocks
        self.events = events
        self._blank: list[int] = []  # free, without content; a stack
        self._never_used = 1  # this id and all above it are free
        self._idle: OrderedDict[int, int] = OrderedDict()  # free, cached: block → hash, next to evict first
        self._cached: dict[int, int] = {}  # hash → the block that lookups find
        self._duplicates: dict[int, list[int]] = {}  # hash → further blocks with that content
        self._shared: dict[int, int] = {}  # block in use → holders beyond the first
        self._cpu: OrderedDict[int, None] = OrderedDict()  # hashes in host memory, next to evict first

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, including cached ones."""
        return len(self._blank) + self.num_blocks - self._never_used + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self.num_blocks - 1 - self.free_blocks

    def match(self, hashes: list[int], limit: int) -> list[int]:
        """Return the blocks of the leading hashes that are cached, at most `limit`."""
        cached = self._cached
        hits: list[int] = []
        start = 0
        while start < limit:
            # Slices of growing length: a miss at the first block is cheap, a long hit runs in C.
            stop = min(limit, 2 * start + 8)
            found = list(map(cached.get, hashes[start:stop], repeat(0)))
            if 0 in found:
                hits.extend(found[: found.index(0)])
                break
            hits.extend(found)
            start = stop
        return hits

    def match_cpu(self, hashes: list[int], start: int, limit: int) -> int:
        """Return how many consecutive hashes from `start` up to `limit` are in host memory."""
        cpu = self._cpu
        stop = start
        while stop < limit and hashes[stop] in cpu:
            cpu.move_to_end(hashes[stop])
            stop += 1
        return stop - start

    def count_idle(self, blocks: list[int]) -> int:
        """Return how many of these cached blocks are free. Acquiring those lowers `free_blocks`."""
        idle = self._idle
        return sum(map(idle.__contains__, blocks))

    def acquire(self, blocks: list[int]) -> None:
        """Add a holder to cached blocks, which `match` returned."""
        idle, shared = self._idle, self._shared
        for block in blocks:
            if block in idle:
                del idle[block]
            else:
                shared[block] = shared.get(block, 0) + 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free blocks and evict the content of cached ones. The caller has checked `free_blocks`."""
        blank = self._blank
        if count == 1 and blank:
            return [blank.pop()]
        allocated: list[int] = []
        if blank:
            cut = max(0, len(blank) - count)
            allocated = blank[: cut - 1 if cut else None : -1]
            del blank[cut:]
        missing = count - len(allocated)
        if missing and self._never_used < self.num_blocks:
            first = self._never_used
            self._never_used = min(first + missing, self.num_blocks)
            allocated.extend(range(first, self._never_used))
            missing = count - len(allocated)
        if missing:
            self._evict(missing, allocated)
        return allocated

    def _evict(self, count: int, allocated: list[int]) -> None:
        pop, cached, duplicates = self._idle.popitem, self._cached, self._duplicates
        pairs = [pop(False) for _ in range(count)]
        allocated.extend(map(_FIRST, pairs))
        evicted = list(map(_SECOND, pairs))
        if not duplicates or duplicates.keys().isdisjoint(evicted):
            deque(map(cached.__delitem__, evicted), maxlen=0)  # a loop that runs in C
        else:
            for block, block_hash in pairs:
                self._uncache(block, block_hash)
        if self.events is not None:
            self.events.append(BlockRemoved(evicted, GPU, 0))
        if self.cpu_blocks:
            self._offload_to_cpu(evicted)

    def _uncache(self, block: int, block_hash: int) -> None:
        others = self._duplicates.get(block_hash)
        if others is None:
            del self._cached[block_hash]
            return
        if self._cached[block_hash] == block:
            self._cached[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._duplicates[block_hash]

    def _offload_to_cpu(self, hashes: list[int]) -> None:
        cpu, events = self._cpu, self.events
        new = [block_hash for block_hash in hashes if block_hash not in cpu]
        cpu.update(zip(hashes, repeat(None), strict=False))
        for block_hash in hashes:
            cpu.move_to_end(block_hash)
        evicted: list[int] = []
        while len(cpu) > self.cpu_blocks:
            evicted.append(cpu.popitem(last=False)[0])
        if events is not None:
            if evicted:
                events.append(BlockRemoved(evicted, CPU, 0))
            evicted_now = set(evicted)
            kept = [block_hash for block_hash in new if block_hash not in evicted_now]
            if kept:
                # As vLLM's offloading connector reports them: without parent or tokens.
                events.append(BlockStored(kept, None, [], 0, None, CPU, None, group_idx=0))

    def store(self, blocks: list[int], hashes: list[int]) -> None:
        """Make blocks in use reusable under these hashes."""
        cached = self._cached
        if cached.keys().isdisjoint(hashes):
            cached.update(zip(hashes, blocks, strict=True))
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash in cached:
                self._duplicates.setdefault(block_hash, []).append(block)
            else:
                cached[block_hash] = block

    def free(self, blocks: list[int], hashes: list[int]) -> None:
        """Free a request's blocks. `hashes` belong to its leading, stored blocks. The other blocks have no content."""
        stored = len(hashes)
        self._blank.extend(blocks[stored:])
        if not stored:
            return
        tail_first = blocks[stored - 1 :: -1]
        shared, idle = self._shared, self._idle
        held_by_others = list(map(shared.__contains__, tail_first)) if shared else []
        # Usually only the head of a prompt is shared, so the tail is freed in one piece.
        alone = held_by_others.index(True) if True in held_by_others else stored
        head_last = hashes[::-1]
        idle.update(zip(tail_first[:alone], head_last[:alone], strict=True))
        for block, block_hash in zip(tail_first[alone:], head_last[alone:], strict=True):
            holders = shared.get(block)
            if holders is None:
                idle[block] = block_hash
            elif holders == 1:
                del shared[block]
            else:
                shared[block] = holders - 1

    def reset(self) -> bool:
        """Clear the prefix cache. Return False, as vLLM does, if a block is in use."""
        if self.used_blocks:
            return False
        self._blank[:0] = reversed(self._idle)
        self._idle.clear()
        self._cached.clear()
        self._duplicates.clear()
        self._cpu.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return True
