"""A lookup: one prompt as the index sees it, a chain of block hashes for each block size in the fleet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

from warmroute._kernel import hash_blocks

TEXT: Final = "text"
"""The tokenizer name of prompts that are matched by text: they match each other and no engine's block."""


@lru_cache(maxsize=65536)
def namespace_seed(model: str, lora: str, block_size: int, tokenizer: str = "") -> int:
    """Return the namespace, with which every chain of block hashes starts: 64 bits over all that must be equal for two
    prompts to share KV blocks. Tenants are not part of it (see tenant_isolation.py). `tokenizer` is empty where the
    tokens are those of the engine."""
    digest = blake2b(digest_size=8, person=b"warmroute-blocks")
    for part in (model, lora, str(block_size), tokenizer):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


class SpecialPrompt(msgspec.Struct, eq=False):
    """What else there is to know of a prompt whose reported cached tokens cannot be compared with a prediction."""

    skips_cache: bool = False
    """Whether the engine prefills the whole prompt, whatever it has cached."""
    others: tuple[Lookup, ...] = ()
    """The request's other prompts, as far as they were read."""
    prompts: int = 1
    """Number of the request's prompts."""
    total_tokens: int = 0
    """Tokens of all of them."""


class Lookup(msgspec.Struct, eq=False):
    """One prompt to look up. Its first `exact_tokens` tokens are those that the engine will compute."""

    tokens: bytes
    token_count: int
    exact_tokens: int
    salt: str = ""
    cache_group: str = ""
    """The tenant, or the group of tenants it shares caches with; empty where all tenants share."""
    media: tuple[tuple[int, bytes], ...] = ()
    text: bool = False
    """Whether the prompt matches only prompts like itself, not the engine's blocks: `tokens` are bytes of its text, or
    the engine may truncate it."""
    special: SpecialPrompt | None = None
    """Set where the request is not a single prompt that the engine takes as it is."""
    _chains: dict[tuple[str, str, int], bytes] = {}
    """The result of `blocks`."""

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        """Return the hashes of the prompt's full blocks, 8 bytes each. They are computed once for each block size."""
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            extra = self._extra(block_size) if self.media or self.salt else None
            seed = namespace_seed(model, lora, block_size, TEXT if self.text else "")
            found = self._chains[key] = hash_blocks(seed, None, self.tokens, block_size, extra)
        return found

    def prefix(self, tokens: int) -> Lookup:
        """Return a lookup of the first `tokens` tokens. It keeps no reference to the rest of the prompt."""
        return Lookup(
            self.tokens[: 4 * tokens],
            min(tokens, self.token_count),
            min(tokens, self.exact_tokens),
            self.salt,
            self.cache_group,
            tuple([one for one in self.media if one[0] < tokens]),
            self.text,
            _chains={key: chain[: tokens // key[2] * 8] for key, chain in self._chains.items()},
        )

    def first_tokens(self, count: int) -> list[int]:
        return array("I", self.tokens[: 4 * count]).tolist()

    def model_of(self, prefix: bytes) -> str | None:
        """Return the model or adapter whose blocks `prefix` is; None if this prompt does not start with them, or if
        it is more than tokens (media, text)."""
        if self.media or self.text:
            return None
        return next(
            (lora or model for (model, lora, _), chain in self._chains.items() if chain.startswith(prefix)), None
        )

    def _extra(self, block_size: int) -> list[bytes | None] | None:
        blocks = self.token_count // block_size
        if not blocks:
            return None
        extra: list[bytes | None] = [None] * blocks
        for at, content in self.media:
            block = at // block_size
            if block < blocks:
                extra[block] = (extra[block] or b"") + content
        return salted(extra, blocks, self.salt)


def salted(extra: Sequence[bytes | None] | None, blocks: int, salt: str) -> list[bytes | None] | None:
    """Add the salt to the first block, as engines do. The blocks after it depend on it through their parent."""
    whole: list[bytes | None] | None = None
    if extra is not None:
        whole = list(extra)
    elif salt:
        whole = [None] * blocks
    if salt and whole:
        whole[0] = (whole[0] or b"") + b"salt " + salt.encode("utf-8", "surrogatepass")
    return whole
