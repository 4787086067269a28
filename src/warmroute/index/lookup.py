"""A lookup: one prompt as the index sees it, a chain of block hashes for each block size that the fleet has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from warmroute._kernel._index import chain
from warmroute.index.namespace import namespace_seed

TEXT: Final = "text"
"""Stands for the tokenizer of prompts whose text stands in for tokens: they match each other, and no engine's block."""


class Lookup:
    """What is asked for. `sure_tokens` of the tokens are those that the engine will have."""

    __slots__ = ("_chains", "_media", "_text", "_tokens", "salt", "sharing", "sure_tokens", "token_count")

    def __init__(
        self,
        tokens: bytes,
        token_count: int,
        sure_tokens: int,
        salt: str = "",
        sharing: str = "",
        media: tuple[tuple[int, bytes], ...] = (),
        text: bool = False,
    ) -> None:
        self._tokens = tokens
        self.token_count = token_count
        self.sure_tokens = sure_tokens
        self.salt = salt
        self.sharing = sharing
        """The tenant, or the group it shares with; empty where everybody shares."""
        self._media = media
        self._text = text
        self._chains: dict[tuple[str, str, int], bytes] = {}

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        """Hashes of the prompt's full blocks, 8 bytes each. Worked out once for each block size."""
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            extra = self._extra(block_size) if self._media or self.salt else None
            seed = _seed(model, lora, block_size, self._text)
            found = self._chains[key] = chain(seed, None, self._tokens, block_size, extra)
        return found

    def beginning(self, tokens: int) -> Lookup:
        """The first so many tokens by themselves: keeps nothing of the rest alive."""
        first = Lookup(
            self._tokens[: 4 * tokens],
            min(tokens, self.token_count),
            min(tokens, self.sure_tokens),
            salt=self.salt,
            sharing=self.sharing,
            media=tuple([one for one in self._media if one[0] < tokens]),
            text=self._text,
        )
        first._chains = {key: chain[: tokens // key[2] * 8] for key, chain in self._chains.items()}
        return first

    def first_tokens(self, count: int) -> list[int]:
        return array("I", self._tokens[: 4 * count]).tolist()

    def model_of(self, prefix: bytes) -> str | None:
        """The model, or adapter, whose blocks these are; None where they are not of this prompt, or hold more than
        tokens."""
        if self._media or self._text:
            return None
        return next(
            (lora or model for (model, lora, _), chain in self._chains.items() if chain.startswith(prefix)), None
        )

    def _extra(self, block_size: int) -> list[bytes | None] | None:
        blocks = self.token_count // block_size
        if not blocks:
            return None
        extra: list[bytes | None] = [None] * blocks
        for at, content in self._media:
            block = at // block_size
            if block < blocks:
                extra[block] = (extra[block] or b"") + content
        return salted(extra, blocks, self.salt)


def salted(extra: Sequence[bytes | None] | None, blocks: int, salt: str) -> list[bytes | None] | None:
    """A salt is part of the first block, as in the engines: every block after it has it by its parent."""
    whole: list[bytes | None] | None = None
    if extra is not None:
        whole = list(extra)
    elif salt:
        whole = [None] * blocks
    if salt and whole:
        whole[0] = (whole[0] or b"") + b"salt " + salt.encode("utf-8", "surrogatepass")
    return whole


@lru_cache(maxsize=65536)
def _seed(model: str, lora: str, block_size: int, text: bool) -> int:
    return namespace_seed(model, block_size=block_size, tokenizer=TEXT if text else "", lora=lora)


def told_seed(model: str, lora: str, block_size: int) -> int:
    """The namespace of blocks that an engine itself tells of: their tokens are the engine's own."""
    return namespace_seed(model, block_size=block_size, lora=lora)
