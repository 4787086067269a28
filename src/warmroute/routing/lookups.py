"""From a prompt that was read to what the index is asked for."""

from __future__ import annotations

from warmroute.index.lookup import Lookup
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.tokenizer import TOKEN_BYTES

__all__ = ["Lookup", "lookup_of"]


def lookup_of(prompt: Prompt, sharing: str) -> Lookup:
    """`sharing`: the tenant, or the group it shares its cache with."""
    tokens, exact = prompt.tokens, prompt.exact
    return Lookup(
        tokens,
        len(tokens) // TOKEN_BYTES,
        prompt.sure_tokens if exact else 0,
        prompt.cache_salt,
        sharing,
        prompt.media,
        not exact,
    )
