"""API keys of clients, and what a request with a key may do.

The configuration holds the keys' SHA-256 hashes; a key is looked up by its hash, once, when the request's head arrives.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from warmroute.config import Config
from warmroute.config.priority import HIGH, LOW, PRIORITY_NUMBERS
from warmroute.edge import errors
from warmroute.edge.http1 import RequestHead
from warmroute.routing.rate_limits import RateLimits, TenantLimits
from warmroute.routing.route_matching import Routes

SHOWN_HASH: Final = 8
"""Characters of the hash of a wrong key that logs and alerts show."""


def hash_key(key: str) -> str:
    """Return the hash that the configuration holds for a key."""
    return sha256(key.encode()).hexdigest()


class Rights:
    """What a request may do. A request keeps the rights that its head had: a reload makes new ones for later heads.

    Otherwise a client could send a head, wait until its key is revoked, and send a body that no limit counts.
    """

    def __init__(
        self,
        tenant: str,
        max_priority: int,
        limits: TenantLimits | None,
        cache_group: str,
        routes: Routes | None,
        passes_authorization: bool,
    ) -> None:
        self.tenant = tenant
        """Empty where no keys are configured."""
        self.max_priority = max_priority
        self.limits = limits
        """The tenant's rate limits; None: it has none."""
        self.cache_group = cache_group
        """Whose prompts count as cached; empty: everybody's."""
        self.routes = routes
        """The routes when the head arrived; None: there were none."""
        self.passes_authorization = passes_authorization
        """Whether nodes get the client's key: not if it is a key for the router."""
        self.body_tenant: str | None = None
        """Whose share of the memory for bodies this request takes from; None: there is one tenant, and no shares."""


NO_RIGHTS: Final = Rights("", LOW, None, "", None, False)
"""Of requests to a listener that forwards nothing."""


class ApiKeys:
    def __init__(self, config: Config, limits: RateLimits) -> None:
        routes = Routes(config.routes) or None
        groups = config.cache_groups()
        self.required = bool(config.keys)
        self.without_key = Rights("", LOW if config.keys else HIGH, None, "", routes, not config.keys)
        """Of requests that need no key."""
        self._by_digest: dict[bytes, Rights] = {}
        self._by_tenant: dict[str, Rights] = {}
        for key in config.keys:
            rights = Rights(
                key.tenant, PRIORITY_NUMBERS[key.max_priority], limits.of(key.tenant), groups.get(key.tenant, ""),
                routes, False,
            )  # fmt: skip
            self._by_digest[bytes.fromhex(key.sha256)] = rights
            known = self._by_tenant.get(key.tenant)
            if known is None or known.max_priority < rights.max_priority:
                self._by_tenant[key.tenant] = rights
        if len(self._by_tenant) > 1:
            for rights in (self.without_key, *self._by_digest.values()):
                rights.body_tenant = rights.tenant

    def rights(self, head: RequestHead) -> Rights:
        """Return the rights of the key in `Authorization: Bearer` or `X-Api-Key`. Raises HttpError without a valid
        key, if keys are required."""
        if not self.required:
            return self.without_key
        scheme, _, key = head.authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            key = head.api_key
        if not key:
            raise errors.invalid_api_key()
        digest = sha256(key.strip()).digest()
        found = self._by_digest.get(digest)
        if found is None:
            raise errors.invalid_api_key(digest.hex()[:SHOWN_HASH])
        return found

    def rights_of(self, tenant: str) -> Rights | None:
        """Return the rights of the tenant's key with the lowest priority; None if no key has this tenant."""
        return self._by_tenant.get(tenant)
