"""Stems: beginnings of conversations whose tokens are known, so that only what follows has to be rendered and encoded.

A stem ends behind an added token (a clean cut, see Tokenizer.cuts) and holds only the tokens since its parent. Memory
is bounded in bytes: what was not used for longest goes first. Using a stem uses its parents after it, so a parent is
always younger than its children, and a stem that goes has no children left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

_OVERHEAD_BYTES: Final = 480
"""Of a stem without tokens: the object, its key, its place in the table."""


class Stem:
    __slots__ = ("clean", "cut", "key", "parent", "rest", "settled", "starts_with_system", "token_bytes", "tokens")

    def __init__(
        self,
        key: bytes,
        parent: Stem | None,
        tokens: bytes,
        cut: str,
        rest: str,
        settled: bool,
        starts_with_system: bool,
        clean: bool,
    ) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        """Those since the parent's."""
        self.token_bytes: int = len(tokens) + (parent.token_bytes if parent else 0)
        """Of all tokens from the start."""
        self.cut = cut
        """The added token that it ends with."""
        self.rest = rest
        """What its last message renders behind the cut."""
        self.settled = settled
        """Ends with a user's message. Else it ends within the steps of an assistant that uses tools."""
        self.starts_with_system = starts_with_system
        self.clean = clean
        """None of its messages holds a string that the template looks for."""

    def cost_bytes(self) -> int:
        return len(self.tokens) + 4 * len(self.rest) + _OVERHEAD_BYTES

    def all_tokens(self) -> bytes:
        parts: list[bytes] = []
        stem: Stem | None = self
        while stem is not None:
            parts.append(stem.tokens)
            stem = stem.parent
        parts.reverse()
        return b"".join(parts)


class Stems:
    """Safe to use from several threads."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._stems: OrderedDict[bytes, Stem] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stems)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stems

    def get(self, key: bytes) -> Stem | None:
        return self._stems.get(key)

    def use(self, stem: Stem) -> None:
        with self._lock:
            self._use(stem)

    def add(self, stem: Stem) -> None:
        """Does nothing where its parent has gone meanwhile."""
        cost = stem.cost_bytes()
        with self._lock:
            if (known := self._stems.get(stem.key)) is not None:
                self._use(known)
                return
            if cost > self.budget_bytes:
                return
            if stem.parent is not None and self._stems.get(stem.parent.key) is not stem.parent:
                return
            self._stems[stem.key] = stem
            self.used_bytes += cost
            self._use(stem)
            while self.used_bytes > self.budget_bytes:
                _key, oldest = self._stems.popitem(last=False)
                self.used_bytes -= oldest.cost_bytes()

    def clear(self) -> None:
        with self._lock:
            self._stems.clear()
            self.used_bytes = 0

    def _use(self, stem: Stem) -> None:
        at: Stem | None = stem
        while at is not None and at.key in self._stems:
            self._stems.move_to_end(at.key)
            at = at.parent
