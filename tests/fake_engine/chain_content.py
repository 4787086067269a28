"""Prompts that are given as block hashes, so that a test can choose the hash of each block."""

from __future__ import annotations

from collections.abc import Sequence

from warmroute.lab.engine.blocks import mix64, namespace_offset


class ChainContent:
    """Implements block_content.BlockContent. The chain can continue into the output.

    Give two turns of a conversation the same chain, so that the second turn finds the first one's blocks.
    """

    def __init__(
        self, chain: Sequence[int], *, seed: int, lora_name: str | None = None, cache_salt: str | None = None
    ) -> None:
        self._chain = chain
        self._seed = seed
        self._namespace = namespace_offset(lora_name, cache_salt)

    def hashes(self, start: int, stop: int) -> list[int]:
        known = [(block_hash + self._namespace) % 2**64 for block_hash in self._chain[start:stop]]
        return known + [mix64(self._seed, index) for index in range(start + len(known), stop)]

    def token_ids(self, start: int, stop: int) -> list[int]:
        return []
