"""A prediction: what a node was believed to hold of one prompt when it was sent there, from dispatch to its end."""

from __future__ import annotations

from warmroute.index.node_cache import NodeCache


class Prediction:
    __slots__ = (
        "_era",
        "_kept",
        "_stores",
        "_uses",
        "cache",
        "chain",
        "expected",
        "prompt_tokens",
        "rank",
        "sent_s",
        "sure",
        "tokens",
    )

    def __init__(
        self, cache: NodeCache, chain: bytes, prompt_tokens: int, tokens: int, rank: int, sure: bool, now_s: float
    ) -> None:
        self.cache = cache
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens
        """So many cached tokens the engine should report."""
        self.rank = rank
        self.sure = sure
        """The blocks are those that the engine will tell of."""
        self.sent_s = now_s
        self._era = cache.era
        self._stores = cache.stores
        self.expected = sure and cache.complete
        """Held as an expectation, which ends shortly after its first token."""
        if self.expected:
            cache.expect(chain)
            tokens = 0
        self._kept, self._uses = cache.keep(chain, tokens, now_s)
        """`_uses`: to learn how far the node's LRU reaches."""

    @property
    def stands(self) -> bool:
        """The node is still the one that the prompt was sent to, with what it then had."""
        return self.cache.era == self._era

    def prefilled(self) -> None:
        """It got its first token."""
        cache, sent_s = self.cache, self.sent_s
        if cache.prefilled_s < sent_s and cache.era == self._era:
            cache.prefilled_s = sent_s

    def fulfilled(self) -> None:
        """What was expected has been told by now, or never will."""
        if self.expected:
            self.expected = False
            if self.stands:
                self.cache.stop_expecting(self.chain)

    @property
    def heard_of_others(self) -> bool:
        """The node has told of new blocks since: its events come."""
        return self.stands and self.cache.stores != self._stores

    def withdraw(self) -> None:
        """It never got its first token: the node may not have prefilled it."""
        self.fulfilled()
        if self._kept and self.stands:
            self.cache.drop(self.chain, self._kept)
            self._kept = b""

    def counted(self, prompt_tokens: int) -> None:
        """The engine says how long the prompt was: another number means another tokenizer, or template. The same
        means little where the node tells of its blocks: a date in the template leaves the length as it is."""
        if not self.sure:
            return
        surprised = prompt_tokens != self.prompt_tokens
        if self.stands and (surprised or not self.cache.complete):
            self.cache.surprised(surprised)

    def answered(self, output_tokens: int, now_s: float) -> None:
        """The engine says how long its answer was."""
        cache = self.cache
        if output_tokens >= cache.block_size and cache.era == self._era:
            cache.keep_answer(output_tokens, now_s)

    def reported(self, cached_tokens: int, now_s: float) -> None:
        """The engine says how much of the prompt it had."""
        cache = self.cache
        if not self.stands:
            return
        cache.accuracy.compare(self.tokens, cached_tokens, now_s)
        if cached_tokens < self.tokens:
            gone = cached_tokens // cache.block_size
            stamps = [stamp for _, end, stamp in self._uses or () if end > gone]
            if stamps:
                cache.outlived(max(stamps))
