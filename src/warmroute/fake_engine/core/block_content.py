"""What a request is made of, block by block: the hash of each full block of its prompt and of its answer.

The core never sees tokens. It asks a request's content for hashes by block index, as far as it needs them. The same
hash means the same tokens after the same prefix, in the same namespace. Blocks past what the content knows (answers
that nobody will send back) get hashes that no other request has, derived from the content's seed.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

_MASK64 = (1 << 64) - 1


class BlockContent(Protocol):
    """Hashes, and where there are any tokens, of full blocks [start, stop)."""

    def hashes(self, start: int, stop: int) -> list[int]: ...

    def token_ids(self, start: int, stop: int) -> list[int]: ...


def mix64(seed: int, index: int) -> int:
    """A well-spread 64-bit value from two integers (splitmix64)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed64(text: str) -> int:
    """The same 64-bit seed for the same text, in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def namespace_offset(lora_name: str | None, cache_salt: str | None) -> int:
    """What keeps the abstract hashes of a LoRA or a salt apart from everybody else's; 0 without either."""
    if lora_name is None and cache_salt is None:
        return 0
    return seed64(f"{lora_name!r}\x00{cache_salt!r}") >> 1  # leaves room above it for a trace's dense ids


class ChainContent:
    """Blocks given as hashes at the engine's own block size.

    The chain may run on into the answer, which is how the next turn of a conversation finds this one's blocks: give
    both turns the same chain.
    """

    __slots__ = ("_chain", "_namespace", "_seed")

    def __init__(
        self, chain: Sequence[int], *, seed: int, lora_name: str | None = None, cache_salt: str | None = None
    ) -> None:
        self._chain = chain
        self._seed = seed
        self._namespace = namespace_offset(lora_name, cache_salt)

    def hashes(self, start: int, stop: int) -> list[int]:
        known = list(self._chain[start:stop])
        if self._namespace:
            known = [(value + self._namespace) & _MASK64 for value in known]
        known.extend(mix64(self._seed, index) for index in range(start + len(known), stop))
        return known

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []


class TraceContent:
    """A prompt of a Mooncake-format trace: hash ids, chained over their prefix, each for `id_tokens` tokens.

    An engine block inside an id's tokens is that id's n-th part; one that spans several ids is known by the last of
    them. A last id that covers a partial stretch still names its content, so its full engine blocks count. What the
    ids do not cover (a trace that leaves out the partial last one, and the answer) is nobody else's.
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
            raise ValueError(f"blocks of {block_size} tokens do not line up with hash ids of {id_tokens}")
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
    """Real tokens, prompt and planned answer; the hash chains over tokens, LoRA name and salt as vLLM's does.

    The hash function is not vLLM's (which is the operator's choice there, and opaque to everybody else).
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
