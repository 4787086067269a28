"""API keys of clients. The configuration holds their SHA-256 hashes; a key is looked up by its hash."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from warmroute.config import KeyConfig, PriorityName
from warmroute.edge.http1 import RequestHead


def hash_key(key: str) -> str:
    """Return the hash that the configuration holds for a key."""
    return sha256(key.encode()).hexdigest()


class ApiKeys:
    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}
        by_tenant: dict[str, set[PriorityName]] = {}
        for key in keys:
            by_tenant.setdefault(key.tenant, set()).add(key.max_priority)
        self._tenant_priority = {tenant: found.pop() for tenant, found in by_tenant.items() if len(found) == 1}
        """The highest priority of each tenant whose keys all have the same one. Saves hashing the key again."""

    def __bool__(self) -> bool:
        return bool(self._keys)

    def tenant(self, head: RequestHead) -> str | None:
        """Return the tenant of the key in `Authorization: Bearer` or `X-Api-Key`; None without a valid key."""
        key = self._keys.get(self._digest(head))
        return key.tenant if key is not None else None

    def highest_priority(self, head: RequestHead, tenant: str) -> PriorityName:
        found = self._tenant_priority.get(tenant)
        if found is not None:
            return found
        key = self._keys.get(self._digest(head))
        return key.max_priority if key is not None else "high"

    @staticmethod
    def _digest(head: RequestHead) -> bytes:
        scheme, _, key = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            key = head.api_key
        return sha256(key.strip()).digest() if key else b""
