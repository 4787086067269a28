"""Turns a tokenized prompt into a lookup in the index of cached blocks."""

from __future__ import annotations

from warmroute.index.lookup import Lookup
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.tokenizer import TOKEN_BYTES

__all__ = ["Lookup", "lookup_of"]


def lookup_of(prompt: Prompt, cache_group: str) -> Lookup:
    """`cache_group`: the tenant, or the group of tenants it shares caches with."""
    tokens, exact = prompt.tokens, prompt.exact
    return Lookup(
        tokens,
        len(tokens) // TOKEN_BYTES,
        prompt.exact_tokens if exact else 0,
        prompt.cache_salt,
        cache_group,
        prompt.media,
        not exact,
    )
