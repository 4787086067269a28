"""Stays: which island each conversation lives on. Remembered by where its last prompt ended: the next turn's prompt
goes on from there, while prompts that only begin alike (a system prompt, a document) do not hold that place.

    turn 1     [s1 s2 s3 u4]                   sent to A: u4 → A
    turn 2     [s1 s2 s3 u4 a5 a6 u7]          holds u4: its home is A; u7 → A
    another    [s1 s2 s3 v4]                   holds nothing that is remembered: a new conversation

A client that names its conversation in a header is taken at its word, for each model apart: they need not stand on the
same islands. Two dictionaries take turns, so that what was not used for a while is forgotten without looking for it.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

MOST: Final = 1 << 17
"""Ends remembered in each of the two dictionaries, about 100 bytes each."""
SEARCHED: Final = 256
"""Blocks from a prompt's end in which the end of the turn before is looked for: its answer, and what was said since."""
SETTING_TOKENS: Final = 8
"""The last tokens of a prompt open the answer's turn; some templates set them otherwise once that is given."""


class Stay(NamedTuple):
    home: str
    at: str
    """Where it went last: elsewhere, if its home could not serve it."""


class Stays:
    __slots__ = ("_began_s", "_old", "_pairs", "_young", "remembered_s")

    def __init__(self, remembered_s: float) -> None:
        self.remembered_s = remembered_s
        self._young: dict[int, Stay] = {}
        self._old: dict[int, Stay] = {}
        self._began_s = 0.0
        self._pairs: dict[tuple[str, str], Stay] = {}
        """Each pair once: there are few islands and many conversations."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def by_name(self, tenant: str, model: str, name: bytes) -> Stay | None:
        key = hash((tenant, model, name))
        return self._young.get(key) or self._old.get(key)

    def by_prompt(self, chain: bytes, blocks: int, sharing: str) -> Stay | None:
        """Of the conversation that this prompt goes on with. `blocks` of the chain count (see `ends_at`)."""
        if blocks < 2:
            return None
        ends = array("Q", chain[max(0, blocks - 1 - SEARCHED) * 8 : (blocks - 1) * 8]).tolist()
        if sharing:
            salt = hash(sharing)
            ends = [end ^ salt for end in ends]
        for known in (self._young, self._old):
            if not known.keys().isdisjoint(ends):
                return next(known[end] for end in reversed(ends) if end in known)
        return None

    def keep_name(self, tenant: str, model: str, name: bytes, stay: tuple[str, str], now_s: float) -> None:
        self._keep(hash((tenant, model, name)), stay, now_s)

    def keep_prompt(self, chain: bytes, blocks: int, sharing: str, stay: tuple[str, str], now_s: float) -> None:
        if blocks:
            (end,) = array("Q", chain[(blocks - 1) * 8 : blocks * 8])
            self._keep(end ^ hash(sharing) if sharing else end, stay, now_s)

    def _keep(self, key: int, stay: tuple[str, str], now_s: float) -> None:
        if now_s - self._began_s > self.remembered_s / 2 or len(self._young) >= MOST:
            self._began_s = now_s
            self._old, self._young = self._young, {}
            self._pairs.clear()
        found = self._pairs.get(stay)
        if found is None:
            found = self._pairs[stay] = Stay(*stay)
        self._young[key] = found


def ends_at(tokens: int, block_size: int) -> int:
    """How many of a prompt's blocks the next turn will begin with for certain."""
    return max(0, tokens - SETTING_TOKENS) // block_size
