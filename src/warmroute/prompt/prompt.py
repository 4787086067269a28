"""A prompt: the tokens that an engine will prefill for a request, as far as the request body shows them."""

from __future__ import annotations

import msgspec

from warmroute._kernel import TOKEN_BYTES


class Prompt(msgspec.Struct, gc=False):
    """One request's prompt; the first one where the request has several (see `others`)."""

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
    skips_cache: bool = False
    """Whether the engine prefills the whole prompt although parts of it are cached: for prompt logprobs."""
    truncated: bool = False
    """Whether the engine may truncate or pad the prompt, so that it may begin with other tokens."""
    others: tuple[Prompt, ...] = ()
    """The request's other prompts, as far as they were read."""
    unread_prompts: int = 0
    """Further prompts, which were not read."""
    unread_tokens: int = 0
    """Their estimated tokens."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts of the request."""
        own = len(self.tokens) // TOKEN_BYTES
        return own + sum([other.token_count for other in self.others]) + self.unread_tokens if self.others else own


def exact_prompt(tokens: bytes, warm_tokens: int = 0) -> Prompt:
    """Return a prompt whose tokens are all certain."""
    return Prompt(tokens, len(tokens) // TOKEN_BYTES, warm_tokens=warm_tokens)
