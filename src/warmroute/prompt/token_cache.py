"""A cache of tokenized conversation prefixes, so that only the messages after a known prefix are rendered and encoded.

A prefix ends with an added token (see Tokenizer.can_cut_after) and stores only the tokens after its parent prefix. The
cache is bounded in bytes and evicts the least recently used prefix. Using a prefix also marks its parents as used,
after itself: a parent is always younger than its children, so an evicted prefix never has children in the cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_OVERHEAD_BYTES: Final = 480
"""Memory of a prefix without tokens: the object, its key, its table entry."""


@dataclass(slots=True, eq=False)
class CachedPrefix:
    key: bytes
    parent: CachedPrefix | None
    cut_token: str
    """The added token that `tokens` ends with."""
    text_after_cut: str
    """The rest of the last message's text, after the cut token. It is not in `tokens`."""
    ends_with_user: bool
    """Whether the last message is a user's. Otherwise it is a tool result."""
    starts_with_system: bool
    clean: bool
    """Whether no message contains a string that the template searches for."""
    tokens: bytes = b""
    """The tokens after the parent's last token."""
    token_bytes: int = 0
    """Size of all tokens from the start of the conversation."""

    def cost_bytes(self) -> int:
        return len(self.tokens) + 4 * len(self.text_after_cut) + _OVERHEAD_BYTES

    def all_tokens(self) -> bytes:
        """Return the tokens from the start of the conversation."""
        parts: list[bytes] = []
        prefix: CachedPrefix | None = self
        while prefix is not None:
            parts.append(prefix.tokens)
            prefix = prefix.parent
        parts.reverse()
        return b"".join(parts)


class TokenCache:
    """Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._prefixes: OrderedDict[bytes, CachedPrefix] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prefixes)

    def get(self, key: bytes) -> CachedPrefix | None:
        return self._prefixes.get(key)

    def touch(self, prefix: CachedPrefix) -> None:
        """Mark the prefix and its parents as recently used."""
        with self._lock:
            self._touch(prefix)

    def add(self, prefix: CachedPrefix) -> None:
        """Add the prefix, unless its parent was evicted meanwhile or it is larger than the whole budget."""
        cost = prefix.cost_bytes()
        with self._lock:
            if (known := self._prefixes.get(prefix.key)) is not None:
                self._touch(known)
                return
            if cost > self.budget_bytes:
                return
            if prefix.parent is not None and self._prefixes.get(prefix.parent.key) is not prefix.parent:
                return
            self._prefixes[prefix.key] = prefix
            self.used_bytes += cost
            self._touch(prefix)
            while self.used_bytes > self.budget_bytes:
                _key, oldest = self._prefixes.popitem(last=False)
                self.used_bytes -= oldest.cost_bytes()

    def clear(self) -> None:
        with self._lock:
            self._prefixes.clear()
            self.used_bytes = 0

    def _touch(self, prefix: CachedPrefix) -> None:
        at: CachedPrefix | None = prefix
        while at is not None and at.key in self._prefixes:
            self._prefixes.move_to_end(at.key)
            at = at.parent
