"""API keys: only their hashes are known here; a key is looked up by its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from warmroute.config import KeyConfig
from warmroute.edge.head import RequestHead


def hash_key(key: str) -> str:
    """What stands in the configuration for a key."""
    return sha256(key.encode()).hexdigest()


class Keys:
    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._tenants = {bytes.fromhex(key.sha256): key.tenant for key in keys}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, head: RequestHead) -> str | None:
        """Whose key a request carries, as Bearer or as X-Api-Key; None where it carries none that is known."""
        scheme, _, key = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            key = head.api_key
        return self._tenants.get(sha256(key.strip()).digest()) if key else None
