"""The paged KV cache of one engine: which blocks are in use, which are reusable, which are evicted next.

Block 0 is the null block and is never allocated. A block in use belongs to one request, or to several after a cache hit
(`_shared` counts the holders beyond the first). All other blocks are free. Allocation takes free blocks in the order
that vLLM's free queue has:

1. blocks without content (the unfinished last block of a request), the latest freed first;
2. blocks that were never used;
3. cached blocks, the least recently freed first. This evicts their content, to the CPU tier if there is one.

A request's blocks are freed tail first, so that a prefix stays longer than its continuation. Two blocks can have the
same content, because a prompt that ends on a block boundary recomputes its last block. Then lookups find the first one,
and each of them is evicted separately.
"""

from collections import OrderedDict, deque
from itertools import repeat
from operator import itemgetter

from warmroute.fake_engine.core.kv_event_types import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

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
