"""A prediction: how many tokens of one prompt a node should have cached, from its dispatch to its end."""

from __future__ import annotations

from typing import Final

from warmroute.core.node_cache import NodeCache, Uses

TEXT_TOLERANCE: Final = 0.25
"""Share of a prediction that the engine need not confirm if its tokens are not the router's: they are longer in one
part of a text than in another."""


MIN_LOADED_TOKENS: Final = 256
"""Fewer reported tokens from a shared KV store do not show that the engine loads from there."""


class Prediction:
    cache: NodeCache
    chain: bytes
    prompt_tokens: int
    tokens: int
    """Cached tokens that the engine should report."""
    rank: int
    exact: bool
    """Whether the blocks are those that the engine's events will contain."""
    sent_s: float
    text: bool
    """Whether the prompt is matched by its text: its tokens are four bytes each, not the engine's."""
    comparable: bool
    """Whether the cached tokens that the response reports can be compared with `tokens`."""
    sampled_blocks: int = 0
    """Blocks of the prompt that core/reuse.py samples."""
    known_blocks: int = 0
    """Those of them that an earlier prompt had."""
    store_tokens: int = 0
    """Those of `tokens` that the node has to load from a shared KV store."""
    declined_tokens: int = 0
    """Further tokens that a shared KV store has, and that should take longer to load than to prefill."""
    has_hidden_hits: bool = False
    """Whether the node has more of the prompt than the request's tenant may learn of (tenant_isolation.py)."""
    pending: bool = False
    """Whether the blocks count as pending; that ends shortly after the first token."""
    generation: int = 0
    """Of the node's cache when the prompt was sent: emptying it begins a new one."""
    _store_events: int = 0
    _new_blocks: bytes = b""
    _uses: Uses | None = None
    """When the cached blocks were last used, to learn how far back the node's LRU reaches."""

    def __init__(
        self,
        cache: NodeCache,
        chain: bytes,
        prompt_tokens: int,
        tokens: int,
        rank: int,
        exact: bool,
        sent_s: float,
        text: bool = False,
        comparable: bool = True,
    ) -> None:
        self.cache = cache
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens
        self.rank = rank
        self.exact = exact
        self.sent_s = sent_s
        self.text = text
        self.comparable = comparable
        self.generation = cache.generation
        self._store_events = cache.store_events
        if exact and cache.complete:
            self.pending = True
            cache.add_pending(chain)
            tokens = 0
        self._new_blocks, self._uses = cache.record_routed(chain, tokens, sent_s)

    @property
    def is_current(self) -> bool:
        """Whether the node's cache has not been emptied since the prompt was sent."""
        return self.cache.generation == self.generation

    def end_pending(self) -> None:
        """Stop counting the blocks as pending: events have reported them by now, or never will."""
        if self.pending:
            self.pending = False
            if self.is_current:
                self.cache.remove_pending(self.chain)

    @property
    def events_arrived(self) -> bool:
        """Whether the node has reported any stored blocks since the prompt was sent."""
        return self.is_current and self.cache.store_events != self._store_events

    def withdraw(self) -> None:
        """Undo the prediction of a request without a first token: the node may not have prefilled it."""
        self.end_pending()
        if self._new_blocks and self.is_current:
            self.cache.undo_routed(self.chain, self._new_blocks)
            self._new_blocks = b""

    def check_prompt_tokens(self, prompt_tokens: int) -> None:
        """Compare the prompt length that the engine reports with the router's. Another length means another tokenizer
        or chat template. The same length proves little where events show the blocks: a date in the template changes
        tokens and keeps the length."""
        if not self.exact or not self.comparable:
            return
        cache, matches = self.cache, prompt_tokens == self.prompt_tokens
        if matches and (cache.complete or not cache.token_mismatches):
            return
        if cache.generation == self.generation:
            cache.note_tokens(matches)

    def reported_hit(self, cached_tokens: int, prompt_tokens: int | None) -> int | None:
        """Return the cached tokens that the engine reports in tokens of the router; None if that is not known."""
        if not self.comparable:
            return None
        if self.text or self.cache.token_mismatch:
            if not prompt_tokens:
                return None
            cached_tokens = cached_tokens * self.prompt_tokens // prompt_tokens
        return max(0, min(cached_tokens, self.prompt_tokens - 1))  # engines compute at least one token

    def check_cached_tokens(self, cached_tokens: int, now_s: float, prompt_tokens: int | None = None) -> None:
        """Compare the cached tokens that the engine reports with the prediction.

        `prompt_tokens`: the prompt's length in the engine's tokens. Where those are not the router's, only a large
        difference shows that the node's cache differs from what the router knows.
        """
        cache = self.cache
        if not self.comparable or not self.is_current:
            return
        if self.text or cache.token_mismatch:
            if not prompt_tokens:
                return
            cached_tokens = cached_tokens * self.prompt_tokens // prompt_tokens
            if cached_tokens >= (1.0 - TEXT_TOLERANCE) * self.tokens - 2 * cache.block_size:
                cached_tokens = self.tokens
        if self.declined_tokens >= MIN_LOADED_TOKENS:
            cache.loads_always = cached_tokens - self.tokens >= 0.5 * self.declined_tokens
        local = self.tokens - self.store_tokens
        if self.store_tokens and cache.store is not None:
            loaded = min(max(0, cached_tokens - local), self.store_tokens)
            cache.store.accuracy.compare(self.store_tokens, loaded, now_s)
            if self.store_tokens >= MIN_LOADED_TOKENS and loaded < 0.5 * self.store_tokens:
                cache.loads_always = False
        cache.accuracy.compare(local, cached_tokens - min(max(0, cached_tokens - local), self.store_tokens), now_s)
        if cached_tokens < local:
            cached_blocks = cached_tokens // cache.block_size
            stamps = [stamp for _, end, stamp in self._uses or () if end > cached_blocks]
            if stamps:
                cache.evict_older_than(max(stamps))

    def record_output(self, output_tokens: int, now_s: float) -> None:
        """Account for the response, which takes room in the node's cache."""
        cache = self.cache
        if output_tokens >= cache.block_size and cache.generation == self.generation:
            cache.record_output(output_tokens, now_s)
