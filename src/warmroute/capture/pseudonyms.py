"""What a capture writes instead of content and names: a keyed hash of each block, tenant and session.

The key is random, belongs to one capture and exists only in memory. Without it, a reader cannot test whether a known
text or name is in a capture, or compare two captures.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from warmroute._kernel import capture_ids
from warmroute.prompt.prompt import Prompt
from warmroute.routing.query import lookup_of

NAME_BYTES = 6
MAX_NAMES = 4096


class Pseudonyms:
    def __init__(self) -> None:
        self._block_key = secrets.token_bytes(16)
        self._name_key = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        """The latest pseudonyms."""

    def blocks(self, model: str, prompt: Prompt, block_size: int) -> list[int]:
        """Return the ids of the prompt's full blocks. They depend on the model and on everything before the block."""
        return capture_ids(lookup_of(prompt, "").blocks(model, "", block_size), self._block_key)

    def name(self, name: bytes) -> str:
        """Return the pseudonym of a name; empty for an empty one."""
        found = self._names.get(name)
        if found is None:
            found = blake2b(name, key=self._name_key, digest_size=NAME_BYTES).hexdigest() if name else ""
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            self._names[name] = found
        return found
