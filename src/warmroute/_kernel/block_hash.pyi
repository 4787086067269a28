from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

MAX_BLOCK_TOKENS: Final[int]
"""The largest block that can be hashed."""

Packed: TypeAlias = bytes | bytearray | memoryview | array[int]
"""Integers as they lie in memory: an array or a memoryview of them, or their bytes."""

Hashes: TypeAlias = Packed | list[int] | tuple[int, ...]
"""Block hashes, packed with 8 bytes each as `hash_blocks` returns them, or as integers."""

TokenIds: TypeAlias = Packed | list[int] | tuple[int, ...]
"""Token ids as 32-bit or 64-bit integers, or bytes that hold 32-bit ones."""

EngineHash: TypeAlias = int | bytes
"""An engine's name for a block: a signed or unsigned 64-bit integer, or 1 to 64 bytes."""

EngineHashes: TypeAlias = Packed | list[int] | list[bytes] | list[EngineHash] | tuple[EngineHash, ...]

def hash_blocks(
    namespace: int,
    parent: int | None,
    token_ids: TokenIds,
    block_size: int,
    extra: Sequence[bytes | None] | None = None,
    /,
) -> bytes:
    """Return the hashes of the full blocks of `token_ids`, 8 bytes each, in native order.

    `parent` is the hash of the block before, or None. `extra` is a list or tuple with an entry for each block: what
    else distinguishes it (LoRA, salt, images).
    """

def engine_hash(hash: EngineHash, /) -> int:
    """Return an engine's hash as an unsigned 64-bit integer."""
