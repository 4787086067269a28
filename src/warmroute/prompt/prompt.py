"""A prompt: the tokens that an engine will prefill for a request, as far as the request body shows them."""

from __future__ import annotations

import msgspec

from warmroute._kernel import TOKEN_BYTES


class Prompt(msgspec.Struct, gc=False):
    """One request's prompt; the first one where the request has several."""

    tokens: bytes = b""
    """Token ids, four bytes each, little-endian. Where `exact` is false, these may be bytes of the prompt's text."""
    exact_tokens: int = 0
    """How many leading tokens the engine will certainly have. It may have other tokens after these."""
    exact: bool = True
    """Whether the tokens were made with the model's own tokenizer and chat template."""
    inexact_reason: str = ""
    """Why `exact_tokens` does not cover the whole prompt; empty where it does. Never contains what a user typed."""
    media: tuple[tuple[int, bytes], ...] = ()
    """For each picture, sound or video: the position of the token after it, and a hash of its content. The hash counts
    for all blocks from that position on.
    """
    cache_salt: str = ""
    warm_tokens: int = 0
    """How many leading tokens came from the token cache."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def exact_prompt(tokens: bytes, warm_tokens: int = 0) -> Prompt:
    """Return a prompt whose tokens are all certain."""
    return Prompt(tokens, len(tokens) // TOKEN_BYTES, warm_tokens=warm_tokens)
