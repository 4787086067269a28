"""CacheView: what the fleet's caches hold, who told it, and how much that counts. Takes events and a clock; no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from warmroute._kernel._index import BlockIndex
from warmroute._kernel._price import Hit as Hit
from warmroute._kernel._price import add_hits, match_hits
from warmroute.config import Index as IndexConfig
from warmroute.index.lookup import Lookup
from warmroute.index.node_cache import ROUTED, USUAL_BLOCK_TOKENS, NodeCache
from warmroute.index.prediction import Prediction
from warmroute.index.reuse import Reuse
from warmroute.index.sharing import Sharing
from warmroute.index.tiers import WORTH

TOLD_S: Final = 0.05
"""So soon after a first token its blocks have usually been told of. Then they are expected no more: the node may evict
them long before `expected_s` is over."""

FARTHER_WORTH: Final = WORTH[1:]


class CacheView:
    def __init__(self, config: IndexConfig) -> None:
        self.index = BlockIndex(config.memory_bytes)
        self._owners: dict[int, tuple[NodeCache, int]] = {}
        self._caches: dict[str, NodeCache] = {}
        self.roster = object()
        """Another one whenever a cache comes or goes."""
        self._names: dict[str, tuple[str, str]] = {}
        """Served model → base model and adapter."""
        self._sizes: dict[str, set[int]] = {}
        """Base model → block sizes of the nodes that serve it. Made anew when somebody describes itself."""
        self._fulfilling: deque[tuple[float, Prediction]] = deque()
        """Predictions whose first token came, and when they are looked at; those not told of by then go on to wait."""
        self._waiting: deque[tuple[float, Prediction]] = deque()
        """Those, and when they end in any case."""
        self.sharing = Sharing(self.index)
        self.reuse = Reuse()
        self.reconfigure(config)

    def reconfigure(self, config: IndexConfig) -> None:
        """The memory budget is that of the start."""
        self.config = config
        self._ages_s = (config.stale_s, config.gone_s)

    # Who there is.

    def __iter__(self) -> Iterator[NodeCache]:
        return iter(list(self._caches.values()))  # as they are now: the metrics page is read in a thread

    def cache(self, name: str) -> NodeCache | None:
        return self._caches.get(name)

    def join(self, name: str, models: Iterable[str] = ()) -> NodeCache:
        """A node is in the fleet. Told again, nothing changes but what it serves."""
        cache = self._caches.get(name)
        if cache is None:
            assumed = max(1, self.config.assumed_cache_tokens // USUAL_BLOCK_TOKENS)
            cache = self._caches[name] = NodeCache(name, self.index, self._owners, assumed, self._sizes_changed)
            self.roster = object()
        served = list(models)
        if served:
            self.serves(cache, served[0], served[1:])
        return cache

    def serves(self, cache: NodeCache, base: str, aliases: Iterable[str] = (), adapters: Iterable[str] = ()) -> None:
        """Whose blocks its cache holds: those of its base model, which may go by several names, and of adapters."""
        cache.model = base
        self._names[base] = (base, "")
        for name in aliases:
            self._names[name] = (base, "")
        for name in adapters:
            self._names[name] = (base, name)
        self._sizes_changed()

    def leave(self, name: str) -> None:
        """A node is gone: nothing is believed of it from now on."""
        cache = self._caches.pop(name, None)
        if cache is not None:
            cache.close()
            self.roster = object()
            self._sizes_changed()

    def _sizes_changed(self) -> None:
        """A node's block size, or what it serves, is another."""
        sizes: dict[str, set[int]] = {}
        for cache in self._caches.values():
            sizes.setdefault(cache.model, set()).add(cache.block_size)
        self._sizes = sizes

    # Who holds what.

    def hits(self, model: str, lookup: Lookup, now_s: float) -> dict[str, Hit]:
        """For every node that holds the beginning of the prompt: how much of it. In time that grows with the match."""
        if self._fulfilling or self._waiting:
            self._let_go(now_s)
        base, lora = self._names.get(model) or (model, "")
        found: dict[str, Hit] = {}
        tokens, sure_tokens = lookup.token_count, lookup.sure_tokens
        for size in self._sizes.get(base, ()):
            chain = lookup.blocks(base, lora, size)
            if not chain:
                continue
            most = (tokens - 1) // size  # engines compute at least one token
            limits = (most, min(most, sure_tokens // size) if sure_tokens else 0, sure_tokens == tokens)
            if lookup.sharing:
                self._add_shared(found, chain, size, lookup.sharing, limits, now_s)
            else:
                match_hits(
                    found, self.index, chain, self._owners, size, limits, now_s, self._ages_s, FARTHER_WORTH
                )  # fmt: skip
        return found

    def _add_shared(
        self, found: dict[str, Hit], chain: bytes, size: int, sharing: str, limits: tuple[int, int, bool], now_s: float
    ) -> None:
        """No farther than what those with whom it shares have sent."""
        rows = self.index.match(chain)
        if rows:
            owned = self.sharing.owned_depth(sharing, rows)
            limits = (min(limits[0], owned), min(limits[1], owned), limits[2])
            add_hits(found, rows, self._owners, size, limits, now_s, self._ages_s, FARTHER_WORTH)

    def holders(self, chain: bytes) -> set[str]:
        """Nodes that hold all of these blocks, by name."""
        blocks = len(chain) // 8
        found = (self._owners.get(row[0]) for row in self.index.match(chain) if row[1] >= blocks)
        return {owner[0].name for owner in found if owner is not None}

    def last_used_s(self, model: str, lookup: Lookup, name: str, tokens: float) -> float | None:
        """When somebody with the same first so many tokens was last sent to a node; None where nobody is known of."""
        cache = self._caches.get(name)
        if cache is None:
            return None
        base, lora = self._names.get(model) or (model, "")
        return cache.last_used_s(lookup.blocks(base, lora, cache.block_size), tokens)

    def chain(self, model: str, lookup: Lookup) -> tuple[bytes, int]:
        """The prompt in the smallest blocks that the model's nodes have, and their size."""
        base, lora = self._names.get(model) or (model, "")
        size = min(self._sizes.get(base, ()), default=0)
        return (lookup.blocks(base, lora, size), size) if size else (b"", 0)

    # What is sent where.

    def sent(self, model: str, lookup: Lookup, name: str, hit: Hit | None, now_s: float) -> Prediction | None:
        """A prompt goes to a node. None where nothing is kept of that node."""
        cache = self._caches.get(name)
        if cache is None:
            return None
        base, lora = self._names.get(model) or (model, "")
        chain = lookup.blocks(base, lora, cache.block_size)
        if not chain:
            return None
        self.reuse.saw(chain, now_s)
        if lookup.sharing:
            self.sharing.sent(lookup.sharing, chain, now_s)
        sure = lookup.sure_tokens == lookup.token_count
        tokens, rank = (hit.tokens, hit.rank) if hit is not None else (0, ROUTED)
        return Prediction(cache, chain, lookup.token_count, tokens, rank, sure, now_s)

    def first_token(self, prediction: Prediction, now_s: float) -> None:
        """The prompt is prefilled: what was expected will be told within moments."""
        prediction.prefilled()
        if prediction.expected:
            self._fulfilling.append((now_s + TOLD_S, prediction))

    def _let_go(self, now_s: float) -> None:
        fulfilling, waiting = self._fulfilling, self._waiting
        while fulfilling and fulfilling[0][0] <= now_s:
            at_s, prediction = fulfilling.popleft()
            if self._is_told(prediction.cache, prediction.chain[-8:]):
                self._fulfil(prediction)
            else:
                waiting.append((at_s - TOLD_S + self.config.expected_s, prediction))
        while waiting and waiting[0][0] <= now_s:
            self._fulfil(waiting.popleft()[1])

    def _is_told(self, cache: NodeCache, block: bytes) -> bool:
        """Whether the node itself has told that it holds this block."""
        told = cache.ranks.values()
        return any(place in told for place, *_ in self.index.match(block))

    def _fulfil(self, prediction: Prediction) -> None:
        if not prediction.expected:
            return  # withdrawn: the node refused it
        prediction.fulfilled()
        cache = prediction.cache
        if prediction.stands and cache.complete and cache.model:
            if self._is_told(cache, prediction.chain[:8]):
                cache.surprised(False)
            elif prediction.heard_of_others:
                cache.surprised(True)
            if not prediction.heard_of_others and not self._is_told(cache, prediction.chain[-8:]):
                cache.heard_of(False)

    # In idle moments.

    def tidy(self, now_s: float) -> None:
        """Called now and then: lets go of what has had its time, and sweeps up."""
        self._let_go(now_s)
        self.index.sweep(4096)

    def silent(self) -> Sequence[NodeCache]:
        """Nodes whose events do not come, though they are listened to."""
        return [cache for cache in self._caches.values() if cache.is_silent]

    def doubted(self) -> Sequence[NodeCache]:
        return [cache for cache in self._caches.values() if cache.doubted]
