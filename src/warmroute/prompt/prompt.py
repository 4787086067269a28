"""A prompt: what an engine will be asked to prefill, as far as it can be known from the request's body."""

from __future__ import annotations

import msgspec

from warmroute.prompt.tokenizer import TOKEN_BYTES, unpacked


class Prompt(msgspec.Struct, gc=False):
    """Of a request with several prompts, the first one."""

    model: str
    """As the body names it: a model, or a LoRA adapter; empty where it names none."""
    tokens: bytes = b""
    """Token ids, four bytes each, little-endian. With `exact` false they only stand for the text."""
    sure_tokens: int = 0
    """So many of the first tokens are those that the engine will have. Behind them, they may be others."""
    exact: bool = True
    """Whether the tokens were made with the model's own tokenizer and template."""
    doubt: str = ""
    """Why not all of it is sure; empty where all is. Never holds what a user typed."""
    media: tuple[tuple[int, bytes], ...] = ()
    """Pictures, sound, video: the token that each stands before, and a hash of its content, for the blocks from there
    on.
    """
    max_output_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    prompts: int = 1
    warm_tokens: int = 0
    """So many of the first tokens came from the cache of conversations. For metrics."""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def token_ids(self) -> list[int]:
        return unpacked(self.tokens)
