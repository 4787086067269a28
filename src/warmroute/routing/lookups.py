"""From a prompt that was read to what the index is asked for."""

from __future__ import annotations

from warmroute.index.lookup import Lookup
from warmroute.prompt.prompt import Prompt

__all__ = ["Lookup", "lookup_of"]


def lookup_of(prompt: Prompt, sharing: str) -> Lookup:
    """`sharing`: the tenant, or the group it shares its cache with."""
    return Lookup(
        prompt.tokens,
        prompt.token_count,
        prompt.sure_tokens if prompt.exact else 0,
        salt=prompt.cache_salt,
        sharing=sharing,
        media=prompt.media,
        text=not prompt.exact,
    )
