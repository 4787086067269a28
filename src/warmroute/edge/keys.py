"""API keys: only their hashes are known here; a key is looked up by its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from warmroute.config import KeyConfig, PriorityName
from warmroute.edge.head import RequestHead


def hash_key(key: str) -> str:
    """What stands in the configuration for a key."""
    return sha256(key.encode()).hexdigest()


class Keys:
    def __init__(self, keys: Sequence[KeyConfig]) -> None:
        self._tenants = {bytes.fromhex(key.sha256): key.tenant for key in keys}
        self._priorities = {bytes.fromhex(key.sha256): key.priority for key in keys}
        of_tenants: dict[str, set[PriorityName]] = {}
        for key in keys:
            of_tenants.setdefault(key.tenant, set()).add(key.priority)
        self._alike = {tenant: found.pop() for tenant, found in of_tenants.items() if len(found) == 1}
        """Tenants all of whose keys may ask for the same priority."""

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, head: RequestHead) -> str | None:
        """Whose key a request carries, as Bearer or as X-Api-Key; None where it carries none that is known."""
        digest = self._digest(head)
        return self._tenants.get(digest) if digest is not None else None

    def highest_priority(self, head: RequestHead, tenant: str) -> PriorityName:
        """That the tenant's request may ask for with its key."""
        found = self._alike.get(tenant)
        if found is None:
            digest = self._digest(head)
            found = self._priorities.get(digest, "high") if digest is not None else "high"
        return found

    @staticmethod
    def _digest(head: RequestHead) -> bytes | None:
        scheme, _, key = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            key = head.api_key
        return sha256(key.strip()).digest() if key else None
