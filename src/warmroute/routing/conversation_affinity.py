"""Conversation affinity: which island each conversation belongs to.

A conversation is recognised by the block at which its last prompt ended. The next turn's prompt contains that block;
prompts that only share a prefix (a system prompt, a document) do not.

    turn 1     [s1 s2 s3 u4]                   sent to A: remember u4 → A
    turn 2     [s1 s2 s3 u4 a5 a6 u7]          contains u4: its home is A; remember u7 → A
    another    [s1 s2 s3 v4]                   contains no remembered block: a new conversation

A session header identifies a conversation directly, per model. Two generations of dictionaries let unused entries
expire without a search.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from warmroute._kernel import key_hash

REMEMBERED_S: Final = 3600.0
"""Time for which a conversation without requests is remembered, and at least half of it."""
MAX_ENTRIES: Final = 1 << 17
"""Entries in each of the two generations, about 100 bytes each."""
SEARCHED_BLOCKS: Final = 256
"""Blocks from a prompt's end that are searched for the end of the previous turn: its response, and the new messages."""
UNSTABLE_TOKENS: Final = 8
"""The last tokens of a prompt open the response's turn; some chat templates render them differently later."""


class ConversationIslands(NamedTuple):
    home: str
    last: str
    """Where the last turn was served: differs from `home` if the home could not serve it."""


class ConversationAffinity:
    __slots__ = ("_generation_s", "_new", "_old", "_pairs", "log")

    def __init__(self) -> None:
        self._new: dict[int, ConversationIslands] = {}
        self._old: dict[int, ConversationIslands] = {}
        self._generation_s = 0.0
        self._pairs: dict[tuple[str, str], ConversationIslands] = {}
        """One object per pair: there are few islands and many conversations."""
        self.log: list[tuple[int, str, str]] | None = None
        """Key, home and last island of what was remembered, for the peers of this process; None without peers."""

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def entries(self) -> Iterator[tuple[int, str, str]]:
        """Yield the key, home and last island of each conversation, those of the older generation first."""
        for generation in (self._old, self._new):
            for key, islands in list(generation.items()):
                yield key, *islands

    def by_session(self, tenant: str, model: str, session: bytes) -> ConversationIslands | None:
        key = _session_key(tenant, model, session)
        return self._new.get(key) or self._old.get(key)

    def by_prompt(self, chain: bytes, blocks: int, cache_group: str) -> ConversationIslands | None:
        """Return the islands of the conversation that this prompt continues. `blocks`: see `stable_blocks`."""
        if blocks < 2:
            return None
        ends = array("Q", chain[max(0, blocks - 1 - SEARCHED_BLOCKS) * 8 : (blocks - 1) * 8]).tolist()
        if cache_group:
            salt = _salt(cache_group)
            ends = [end ^ salt for end in ends]
        for known in (self._new, self._old):
            if not known.keys().isdisjoint(ends):
                return next(known[end] for end in reversed(ends) if end in known)
        return None

    def remember_session(self, tenant: str, model: str, session: bytes, islands: tuple[str, str], now_s: float) -> None:
        self._remember(_session_key(tenant, model, session), islands, now_s)

    def remember_prompt(
        self, chain: bytes, blocks: int, cache_group: str, islands: tuple[str, str], now_s: float
    ) -> None:
        if blocks:
            (end,) = array("Q", chain[(blocks - 1) * 8 : blocks * 8])
            self._remember(end ^ _salt(cache_group) if cache_group else end, islands, now_s)

    def _remember(self, key: int, islands: tuple[str, str], now_s: float) -> None:
        if self.log is not None:
            self.log.append((key, *islands))
        self.remember(key, islands, now_s)

    def remember(self, key: int, islands: tuple[str, str], now_s: float) -> None:
        """Remember the islands of a conversation, also of one that a peer serves."""
        if now_s - self._generation_s > REMEMBERED_S / 2 or len(self._new) >= MAX_ENTRIES:
            self._generation_s = now_s
            self._old, self._new = self._new, {}
            self._pairs.clear()
        found = self._pairs.get(islands)
        if found is None:
            found = self._pairs[islands] = ConversationIslands(*islands)
        self._new[key] = found


def _session_key(tenant: str, model: str, session: bytes) -> int:
    """Equal in all processes, unlike Python's hash()."""
    tenant_bytes, model_bytes = tenant.encode("utf-8", "surrogatepass"), model.encode("utf-8", "surrogatepass")
    return key_hash(b"%d %s%d %s%s" % (len(tenant_bytes), tenant_bytes, len(model_bytes), model_bytes, session))


def _salt(cache_group: str) -> int:
    return key_hash(cache_group.encode("utf-8", "surrogatepass"))


def stable_blocks(tokens: int, block_size: int) -> int:
    """Return how many of a prompt's blocks the next turn's prompt will begin with."""
    return max(0, tokens - UNSTABLE_TOKENS) // block_size
