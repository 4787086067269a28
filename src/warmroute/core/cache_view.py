"""CacheView: what the caches of all nodes hold, from which source, and how much it counts. No I/O.

EVENT_AGES_S has the two ages between which hits of a silent node lose their value; core/node_cache.py has the formula
(`freshness`) and the value of each tier (SAVED_SHARE), and `_kernel/hits.c` computes both for all nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

from warmroute._kernel import BlockIndex, Hit, add_hits, match_hits
from warmroute.config import Index as IndexConfig
from warmroute.core.kv_store import KvStore, SavedShares
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import DEFAULT_BLOCK_TOKENS, ROUTED, SAVED_SHARE, NodeCache
from warmroute.core.prediction import Prediction
from warmroute.core.reuse import FIRST_INTERVAL_S, PrefixUses, Reuse
from warmroute.core.tenant_isolation import TenantIsolation
from warmroute.event_log import EventLog, where_it_failed

log = EventLog("warmroute.index")

EVENT_DELAY_S: Final = 0.05
"""Events usually report a prompt's blocks within this time after its first token. From then on the blocks are no longer
pending, since the node may evict them long before the pending timeout."""

PENDING_TIMEOUT_S: Final = 1.0
"""Time after a first token for which its blocks stay pending if no event reports them."""
EVENT_AGES_S: Final = (5.0, 30.0)
"""The weight of a node's events falls from 1 to 0 between these two ages of its last event."""

LOWER_TIERS: Final = SAVED_SHARE[1:]

RoutedPrompt = tuple[str, bytes, bool, str]
"""A prompt that was sent to a node: the node, the block hashes, whether they are those of the node's events, and the
tenant's cache group."""


class CacheView:
    def __init__(self, config: IndexConfig) -> None:
        self.index = BlockIndex(config.memory_bytes)
        self._owners: dict[int, tuple[NodeCache, int]] = {}
        """Place in the index → its cache and rank."""
        self._caches: dict[str, NodeCache] = {}
        self.membership = object()
        """A new object whenever a node is added or removed."""
        self._served: dict[str, dict[str, tuple[str, str]]] = {}
        """Node → its served models, each with its base model and adapter."""
        self._models: dict[str, tuple[str, str]] = {}
        self.chain_keys: dict[str, tuple[tuple[str, str, int], ...]] = {}
        """What the blocks of each served model are hashed with: base model, adapter, block size. A new object whenever
        something in it has changed."""
        """Those of all nodes. Where nodes differ, the latest one counts."""
        self._block_sizes: dict[str, set[int]] = {}
        """Base model → block sizes of the nodes that serve it."""
        self._prefilled: deque[tuple[float, Prediction]] = deque()
        """Pending predictions with a first token, and when the router looks for their events."""
        self._overdue: deque[tuple[float, Prediction]] = deque()
        """Those whose events had not arrived by then, and when they stop being pending in any case."""
        self._peers_pending: list[tuple[float, int, float, Prediction]] = []
        """A heap of the pending predictions of peers: when to check whether they are still pending, and when they stop
        being so in any case."""
        self._order = count()
        self.lookup_errors = 0
        """Requests that were routed by load because the index failed at their prompt."""
        self._logged_errors: set[str] = set()
        self.routed_log: list[RoutedPrompt] | None = None
        """Prompts that were sent to nodes, for the peers of this process; None without peers."""
        self.tenants = TenantIsolation(self.index)
        self.reuse = Reuse()
        self._prefix_uses = PrefixUses()
        self.stores: dict[str, KvStore] = {}
        """Shared KV stores by name."""
        self.saved_shares: SavedShares = lambda _model, _store, nodes, _now_s: [0.0] * len(nodes)
        """What a token from a store saves on each node (kv_store.py). The router sets it."""
        self.reconfigure(config)

    def reconfigure(self, config: IndexConfig) -> None:
        """Use a changed configuration. The memory budget stays that of the start."""
        self.config = config

    def set_stores(self, capacities: Mapping[str, int]) -> None:
        """Use these shared KV stores: their capacities in tokens by name."""
        for name in self.stores.keys() - capacities.keys():
            self.stores.pop(name).close()
        for name, tokens in capacities.items():
            store = self.stores.get(name)
            if store is None:
                self.stores[name] = KvStore(name, tokens, self.index, self._owners)
            elif store.capacity_tokens != tokens:
                store.resize(tokens)

    def attach(self, name: str, store_name: str) -> None:
        """Set the shared KV store of a node; none with an empty name."""
        cache, store = self._caches.get(name), self.stores.get(store_name)
        if cache is None or cache.store is store:
            return
        if cache.store is not None:
            cache.store.detach(cache)
        if store is not None:
            store.attach(cache)

    # Nodes.

    def __iter__(self) -> Iterator[NodeCache]:
        return iter(list(self._caches.values()))  # a copy: a thread reads the metrics page

    @property
    def by_name(self) -> dict[str, NodeCache]:
        """The caches themselves, not a copy: for the kernel."""
        return self._caches

    def cache(self, name: str) -> NodeCache | None:
        return self._caches.get(name)

    def add_node(self, name: str, models: Iterable[str] = ()) -> NodeCache:
        """Add a node's cache, or update the models of one that is there."""
        cache = self._caches.get(name)
        if cache is None:
            assumed = max(1, self.config.assumed_cache_tokens // DEFAULT_BLOCK_TOKENS)
            cache = self._caches[name] = NodeCache(name, self.index, self._owners, assumed, self._update_block_sizes)
            self.membership = object()
        served = list(models)
        if served:
            self.set_models(cache, served[0], served[1:])
        return cache

    def set_models(
        self, cache: NodeCache, base: str, aliases: Iterable[str] = (), adapters: Iterable[str] = ()
    ) -> None:
        """Set whose blocks a cache holds: those of its base model, under all its names, and of its adapters."""
        cache.model = base
        self._served.pop(cache.name, None)
        self._served[cache.name] = {
            base: (base, ""), **dict.fromkeys(aliases, (base, "")), **{name: (base, name) for name in adapters},
        }  # fmt: skip
        self._update_models()
        self._update_block_sizes()

    def _update_models(self) -> None:
        models: dict[str, tuple[str, str]] = {}
        for served in self._served.values():
            models.update(served)
        self._models = models

    def remove_node(self, name: str) -> None:
        cache = self._caches.pop(name, None)
        if cache is not None:
            if cache.store is not None:
                cache.store.detach(cache)
            cache.close()
            self.membership = object()
            if self._served.pop(name, None) is not None:
                self._update_models()
            self._update_block_sizes()

    def _update_chain_keys(self) -> None:
        found = {
            model: tuple([(base, lora, size) for size in sorted(self._block_sizes.get(base, ()))])
            for model, (base, lora) in self._models.items()
        }
        if found != self.chain_keys:
            self.chain_keys = found

    def _update_block_sizes(self) -> None:
        sizes: dict[str, set[int]] = {}
        for cache in self._caches.values():
            sizes.setdefault(cache.model, set()).add(cache.block_size)
        self._block_sizes = sizes
        self._update_chain_keys()

    # Lookups.

    def hits(self, model: str, lookup: Lookup, now_s: float) -> dict[str, Hit]:
        """Return a hit for every node that holds a prefix of the prompt; the sum for several prompts. The time grows
        with the length of the match, not with the size of the index."""
        if self._prefilled or self._overdue or self._peers_pending:
            self._expire_pending(now_s)
        batch = lookup.batch
        if batch is not None and batch.skips_cache:
            return {}
        base, lora = self._models.get(model) or (model, "")
        found: dict[str, Hit] = {}
        tokens, exact_tokens = lookup.token_count, lookup.exact_tokens
        for size in self._block_sizes.get(base, ()):
            chain = lookup.blocks(base, lora, size)
            if not chain:
                continue
            most = (tokens - 1) // size  # engines compute at least one token
            limits = (most, min(most, exact_tokens // size) if exact_tokens else 0, exact_tokens == tokens)
            if lookup.cache_group:
                self._add_isolated(found, chain, size, lookup.cache_group, limits, now_s)
            else:
                match_hits(
                    found, self.index, chain, self._owners, size, limits, now_s, EVENT_AGES_S, LOWER_TIERS
                )  # fmt: skip
        for store in self.stores.values():
            store.add_hits(found, model, self.saved_shares, now_s)
        if batch is not None:
            for other in batch.others:
                for name, hit in self.hits(model, other, now_s).items():
                    known = found.get(name)
                    found[name] = hit if known is None else _sum(known, hit)
        return found

    def _add_isolated(
        self, found: dict[str, Hit], chain: bytes, size: int, group: str, limits: tuple[int, int, bool], now_s: float
    ) -> None:
        """Add hits no deeper than what the tenant's group may learn of."""
        rows = self.index.match(chain)
        if rows:
            depth = self.tenants.visible_depth(group, rows)
            limits = (min(limits[0], depth), min(limits[1], depth), limits[2])
            add_hits(found, rows, self._owners, size, limits, now_s, EVENT_AGES_S, LOWER_TIERS)

    def holders(self, chain: bytes) -> set[str]:
        """Return the names of the nodes that hold all of these blocks."""
        blocks = len(chain) // 8
        found = (self._owners.get(row[0]) for row in self.index.match(chain) if row[1] >= blocks)
        return {owner[0].name for owner in found if owner is not None}

    def use_interval_s(self, model: str, lookup: Lookup, name: str, hit: Hit, now_s: float) -> float | None:
        """Return the mean time between two requests for the prefix that a node has cached; None if no process sent it
        a prompt with that prefix."""
        cache = self._caches.get(name)
        if cache is None:
            return None
        base, lora = self._models.get(model) or (model, "")
        chain = lookup.blocks(base, lora, cache.block_size)
        tokens = _first_prompt_tokens(lookup, hit)
        interval_s = self._prefix_uses.interval_s(_last_block(chain, cache.block_size, tokens), now_s)
        if interval_s is None and cache.last_used_s(chain, tokens) is not None:
            return FIRST_INTERVAL_S  # it was used once, by the prompt that the node prefilled
        return interval_s

    def chain(self, model: str, lookup: Lookup) -> tuple[bytes, int]:
        """Return the prompt's block hashes for the smallest block size of the model's nodes, and that size."""
        base, lora = self._models.get(model) or (model, "")
        size = min(self._block_sizes.get(base, ()), default=0)
        return (lookup.blocks(base, lora, size), size) if size else (b"", 0)

    # Routed prompts.

    def record_routed(
        self, model: str, lookup: Lookup, name: str, hit: Hit | None, now_s: float, *, tell_peers: bool = True,
        counted: bool = False,
    ) -> Prediction | None:  # fmt: skip
        """Record that a prompt goes to a node, and return what should be cached there; None for an unknown node.
        `counted`: the same request was recorded for another node, which did not get it."""
        cache = self._caches.get(name)
        if cache is None:
            return None
        base, lora = self._models.get(model) or (model, "")
        size, batch = cache.block_size, lookup.batch
        chain = lookup.chains.get((base, lora, size)) or lookup.blocks(base, lora, size)
        if not chain:
            return None
        sampled, known = self.reuse.record(chain, now_s) if not counted else (0, 0)
        if hit is not None and not counted:
            end = (hit.tokens if batch is None else hit.tokens // batch.prompts) // size * 8
            if end:
                self._prefix_uses.record(chain[end - 8 : end], now_s)
        exact, has_hidden_hits = lookup.exact_tokens == lookup.token_count, False
        if lookup.cache_group:
            has_hidden_hits = self._has_hidden_hits(cache, chain, exact, lookup, hit)
            self.tenants.record(lookup.cache_group, chain, now_s)
        if self.routed_log is not None and tell_peers:
            self.routed_log.append((name, chain, exact, lookup.cache_group))
        tokens, rank = (hit.tokens, hit.rank) if hit is not None else (0, ROUTED)
        from_store, declined = 0, 0
        if cache.store is not None:
            rows = self.index.match(chain)
            held = cache.store.held_blocks(rows, cache.block_size) * cache.block_size
            from_store = _from_store(cache, rows, tokens) if tokens else 0
            declined = max(0, held - tokens)
        comparable = batch is None
        if comparable:
            cache.routed_prompts += 1
            cache.routed_tokens += lookup.token_count
            cache.predicted_tokens += tokens
        prediction = Prediction(
            cache, chain, lookup.token_count, tokens, rank, exact, now_s, lookup.text, comparable
        )  # fmt: skip
        if sampled:
            prediction.sampled_blocks, prediction.known_blocks = sampled, known
        if cache.store is not None:
            prediction.store_tokens, prediction.declined_tokens = from_store, declined
        if has_hidden_hits:
            prediction.has_hidden_hits = True
        return prediction

    def _has_hidden_hits(
        self, cache: NodeCache, chain: bytes, exact: bool, lookup: Lookup, hit: Hit | None
    ) -> bool:  # fmt: skip
        """Return whether the node, or its shared KV store, has the first block after those that the tenant may learn
        of. A hash of a block is one of all blocks before it, too."""
        batch = lookup.batch
        if batch is not None and batch.skips_cache:
            return False
        depth = hit.tokens // cache.block_size if hit is not None else 0
        if depth >= (lookup.token_count - 1) // cache.block_size:
            return False
        rows = self.index.match(chain[8 * depth : 8 * depth + 8])
        if not rows:
            return False
        if cache.store is not None and cache.store.held_blocks(rows, cache.block_size):
            return True
        own = {cache.pending_holder}
        if not cache.token_mismatch:
            own.update(cache.ranks.values())
        if not (exact and cache.complete):
            own.add(cache.routed_holder)
        return any(row[0] in own for row in rows)

    def from_store(self, model: str, lookup: Lookup, name: str, hit: Hit | None) -> tuple[str, int]:
        """Return the node's shared KV store, and how many tokens of a hit the node has to load from there."""
        cache = self._caches.get(name)
        if cache is None or cache.store is None or hit is None:
            return "", 0
        base, lora = self._models.get(model) or (model, "")
        chain = lookup.blocks(base, lora, cache.block_size)
        tokens = _from_store(cache, self.index.match(chain), hit.tokens)
        return (cache.store.name, tokens) if tokens else ("", 0)

    def tell_peers(self, prediction: Prediction, cache_group: str) -> None:
        """Tell the peers of a prompt that was recorded without that."""
        if self.routed_log is not None:
            self.routed_log.append((prediction.cache.name, prediction.chain, prediction.exact, cache_group))

    def record_peer_routed(self, prompt: RoutedPrompt, prefilled_s: float, now_s: float) -> None:
        """Record that a peer sent a prompt to a node, which will have prefilled it by `prefilled_s`."""
        name, chain, exact, cache_group = prompt
        cache = self._caches.get(name)
        if cache is None or not chain:
            return
        self.reuse.record(chain, now_s)
        if cache_group:
            self.tenants.record(cache_group, chain, now_s)
        if cache.store is not None:
            cache.store.prefilled(chain, cache.block_size, now_s)
        if not (exact and cache.complete):
            cache.record_routed(chain, 0, now_s)
            return
        prediction = Prediction(cache, chain, 0, 0, ROUTED, exact, now_s, comparable=False)
        if prediction.pending:
            latest_s = prefilled_s + (prefilled_s - now_s) + PENDING_TIMEOUT_S
            heappush(self._peers_pending, (prefilled_s + EVENT_DELAY_S, next(self._order), latest_s, prediction))

    def first_token(self, prediction: Prediction, now_s: float) -> None:
        """Handle a first token: the prompt is prefilled, and events will soon report the pending blocks."""
        cache, sent_s = prediction.cache, prediction.sent_s
        if cache.prefilled_s < sent_s and cache.generation == prediction.generation:
            cache.prefilled_s = sent_s
        if cache.store is not None:
            cache.store.prefilled(prediction.chain, cache.block_size, now_s)
        if prediction.pending:
            self._prefilled.append((now_s + EVENT_DELAY_S, prediction))

    def _expire_pending(self, now_s: float) -> None:
        prefilled, overdue = self._prefilled, self._overdue
        while prefilled and prefilled[0][0] <= now_s:
            at_s, prediction = prefilled.popleft()
            if self._reported_by_events(prediction.cache, prediction.chain[-8:]):
                self._end_pending(prediction)
            else:
                overdue.append((at_s - EVENT_DELAY_S + PENDING_TIMEOUT_S, prediction))
        while overdue and overdue[0][0] <= now_s:
            self._end_pending(overdue.popleft()[1])
        peers = self._peers_pending
        while peers and peers[0][0] <= now_s:
            at_s, order, latest_s, prediction = heappop(peers)
            if at_s < latest_s and not self._reported_by_events(prediction.cache, prediction.chain[-8:]):
                heappush(peers, (latest_s, order, latest_s, prediction))  # its prefill takes longer than estimated
            else:
                prediction.end_pending()

    def _reported_by_events(self, cache: NodeCache, block: bytes) -> bool:
        """Return whether the node's events say that it holds this block."""
        holders = cache.ranks.values()
        return any(holder in holders for holder, *_ in self.index.match(block))

    def _end_pending(self, prediction: Prediction) -> None:
        if not prediction.pending:
            return  # withdrawn: the node refused the request
        prediction.end_pending()
        cache = prediction.cache
        if prediction.is_current and cache.complete and cache.model:
            if self._reported_by_events(cache, prediction.chain[:8]):
                cache.note_tokens(True)
            elif prediction.events_arrived:
                cache.note_tokens(False)
            if not prediction.events_arrived and not self._reported_by_events(cache, prediction.chain[-8:]):
                cache.note_events(False)

    def lookup_failed(self, error: Exception) -> None:
        """A lookup failed, and its request is routed by load. Each place in the code is logged once."""
        self.lookup_errors += 1
        reason = where_it_failed(error)
        if reason not in self._logged_errors:
            self._logged_errors.add(reason)
            log.error("lookup_failed", "The router routes such requests by load.", reason=reason)

    # Maintenance.

    def tidy(self, now_s: float) -> None:
        """Expire pending blocks and sweep the index. Call it in idle moments."""
        self._expire_pending(now_s)
        self.index.sweep(4096)


def _first_prompt_tokens(lookup: Lookup, hit: Hit) -> int:
    """Return the tokens of a hit; of several prompts those of the first one, as if all were equally long."""
    return hit.tokens if lookup.batch is None else hit.tokens // lookup.batch.prompts


def _last_block(chain: bytes, block_size: int, tokens: int) -> bytes:
    """Return the last whole block of a prefix."""
    end = tokens // block_size * 8
    return chain[max(0, end - 8) : end]


def _from_store(cache: NodeCache, rows: Sequence[tuple[int, ...]], tokens: int) -> int:
    """Return how many of a hit's tokens the node has to load from its shared KV store. `rows`: the index's matches."""
    own = {*cache.ranks.values(), cache.pending_holder}
    if not cache.complete:
        own.add(cache.routed_holder)
    local = max((row[-1] for row in rows if row[0] in own), default=0)
    return max(0, tokens - local * cache.block_size)


def _sum(one: Hit, other: Hit) -> Hit:
    return Hit(one.tokens + other.tokens, one.expected + other.expected, max(one.rank, other.rank))
