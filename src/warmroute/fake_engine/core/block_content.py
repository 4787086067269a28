"""The content of a request as block hashes: one for each full block of its prompt and its output.

The core does not read tokens. It asks a request's content for hashes by block index when it needs them. Two equal
hashes mean the same tokens after the same prefix in the same namespace. Blocks that the content does not know (outputs
that no later prompt contains) get unique hashes, derived from the content's seed.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

_MASK64 = (1 << 64) - 1


class BlockContent(Protocol):
    """The hashes and tokens of the full blocks [start, stop)."""

    def hashes(self, start: int, stop: int) -> list[int]: ...

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the tokens, or an empty list if the content has only hashes."""


def mix64(seed: int, index: int) -> int:
    """Hash two integers to 64 bits (splitmix64)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed64(text: str) -> int:
    """Hash a text to a 64-bit seed, the same one in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def namespace_offset(lora_name: str | None, cache_salt: str | None) -> int:
    """Return the number that is added to trace hashes to separate a LoRA or a salt from others; 0 without either."""
    if lora_name is None and cache_salt is None:
        return 0
    return seed64(f"{lora_name!r}\x00{cache_salt!r}") >> 1  # leaves room for a trace's ids, which are added to it


class TraceContent:
    """A prompt of a Mooncake-format trace: hash ids, chained over their prefix, each for `id_tokens` tokens.

    An engine block that is smaller than an id is the id's n-th part. An engine block that spans several ids is
    identified by the last of them. If the last id covers fewer than `id_tokens` tokens, the full engine blocks within
    it count. Tokens without an id (the output, and the end of the prompt in some traces) are unique to this request.
    """

    __slots__ = ("_covered", "_ids", "_namespace", "_parts", "_seed", "_span")

    def __init__(
        self,
        hash_ids: Sequence[int],
        id_tokens: int,
        block_size: int,
        prompt_tokens: int,
        *,
        seed: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        if id_tokens % block_size == 0:
            self._parts, self._span = id_tokens // block_size, 1
        elif block_size % id_tokens == 0:
            self._parts, self._span = 1, block_size // id_tokens
        else:
            raise ValueError(f"block size {block_size} is no multiple or divisor of {id_tokens} tokens per hash id")
        self._ids = hash_ids
        self._covered = min(prompt_tokens, len(hash_ids) * id_tokens) // block_size
        self._seed = seed
        self._namespace = namespace_offset(lora_name, cache_salt)

    def hashes(self, start: int, stop: int) -> list[int]:
        known: list[int] = []
        end = min(stop, self._covered)
        if start < end:
            parts, ids, namespace = self._parts, self._ids, self._namespace
            if parts == 1:
                span = self._span
                known = [ids[(index + 1) * span - 1] + namespace for index in range(start, end)]
            else:
                first = start // parts
                for hash_id in ids[first : -(-end // parts)]:
                    base = hash_id * parts + namespace
                    known.extend(range(base, base + parts))
                skip = start - first * parts
                known = known[skip : skip + end - start]
        known.extend(mix64(self._seed, index) for index in range(start + len(known), stop))
        return known

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []


class TokenContent:
    """Real tokens of the prompt and the planned output. Hashes chain over tokens, LoRA name and salt, as in vLLM.

    The hash function is not vLLM's: there the operator chooses it, and readers of KV events cannot compute it.
    """

    __slots__ = ("_block_size", "_known", "_lora_name", "_salt", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._tokens = array("I", tokens)
        self._block_size = block_size
        self._lora_name = lora_name
        self._salt = cache_salt
        self._known: list[int] = []

    def hashes(self, start: int, stop: int) -> list[int]:
        known, size = self._known, self._block_size
        root = repr(self._salt).encode()
        lora = repr(self._lora_name).encode()
        for index in range(len(known), stop):
            digest = blake2b(known[-1].to_bytes(8, "big") if known else root, digest_size=8)
            digest.update(lora)
            digest.update(self._tokens[index * size : (index + 1) * size].tobytes())
            known.append(int.from_bytes(digest.digest(), "big"))
        return known[start:stop]

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self._tokens[start * self._block_size : stop * self._block_size].tolist()
