"""kind = "dns": the addresses of a name (A or AAAA), or the hosts and ports of a service (SRV), resolved again when
their TTL has passed.

All records of an answer are nodes. The router ignores priorities and weights of SRV records: prices decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver

from warmroute.blocking import run_in_thread
from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery.target import MAX_TARGETS, SourceError, Target, Targets, create_target, split_host_port

MIN_REFRESH_S: Final = 1.0
"""Shortest time between two resolutions, whatever the TTL says."""
LOOKUPS: Final = 16
"""Hosts of SRV records that are resolved at the same time."""


class DnsRecords:
    max_retry_s = 5.0

    def __init__(self, config: DiscoveryConfig) -> None:
        self._config = config

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Read /etc/resolv.conf each time: it changes with the network."""
        config = self._config
        try:
            resolver = dns.asyncresolver.Resolver(configure=not config.dns_server)
        except dns.exception.DNSException as error:
            raise SourceError(f"/etc/resolv.conf: {error}") from None
        if config.dns_server:
            host, port = split_host_port(config.dns_server) or (config.dns_server, 0)
            resolver.nameservers, resolver.port = [host], port or 53
        resolver.lifetime = config.timeout_s
        # Short names work as they do for other programs in a Pod: `engines` means
        # `engines.NAMESPACE.svc.cluster.local`.
        resolver.use_search_by_default = True
        return resolver

    async def run(self, report: Callable[[Targets], None]) -> None:
        while True:
            # In a thread: a long answer takes tens of milliseconds to parse, and requests must not wait for it.
            targets, ttl_s = await run_in_thread(lambda: asyncio.run(self._resolve()), "dns")
            report(targets)
            await asyncio.sleep(max(MIN_REFRESH_S, min(ttl_s, self._config.max_refresh_s)))

    async def _resolve(self) -> tuple[Targets, float]:
        """Return the targets, and for how long they are valid. Raises SourceError."""
        config, invalid = self._config, list[str]()
        resolver, slots = self._resolver(), asyncio.Semaphore(LOOKUPS)
        found: list[Target | None] = []
        if config.record_type == "SRV":
            records, ttl_s = await self._records(resolver, config.dns_name, "SRV")
            hosts = [(str(record.target).rstrip("."), int(record.port)) for record in records[:MAX_TARGETS]]
            hosts = [(host, port) for host, port in hosts if host]
            if config.scheme == "https":  # the certificate has the host's name
                found = [create_target(config, host, config.port or port, {}, invalid) for host, port in hosts]
                return Targets([one for one in found if one is not None], invalid), ttl_s
            resolved = await asyncio.gather(*(self._addresses(resolver, host, slots) for host, _port in hosts))
            for (host, port), (addresses, host_ttl_s) in zip(hosts, resolved, strict=True):
                ttl_s = min(ttl_s, host_ttl_s)
                port = config.port or port
                # A host with several addresses is several nodes, which cannot share its name.
                name = f"{host}:{port}" if len(addresses) == 1 else ""
                found += [create_target(config, address, port, {}, invalid, name=name) for address in addresses]
        else:
            records, ttl_s = await self._records(resolver, config.dns_name, config.record_type)
            found = [create_target(config, record.address, config.port, {}, invalid) for record in records]
        return Targets([one for one in found if one is not None], invalid), ttl_s

    async def _addresses(
        self, resolver: dns.asyncresolver.Resolver, host: str, slots: asyncio.Semaphore
    ) -> tuple[list[str], float]:
        """Return the IPv4 addresses of a host, or its IPv6 addresses if it has no others."""
        async with slots:
            ttls_s = []
            for kind in ("A", "AAAA"):
                records, ttl_s = await self._records(resolver, f"{host}.", kind)
                ttls_s.append(ttl_s)
                if records:
                    break
            return [record.address for record in records], min(ttls_s)

    async def _records(self, resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> tuple[list[Any], float]:
        """Return the records, none if the name has none, and their TTL. Raises SourceError if no server answers."""
        try:
            answer = await resolver.resolve(name, kind, raise_on_no_answer=False)
        # A headless Service without ready Pods has no records: an empty fleet, and no failure of the source.
        except dns.resolver.NXDOMAIN:
            return [], MIN_REFRESH_S
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise SourceError(f"{kind} {name}: {error or type(error).__name__}") from None
        if answer.rrset is None:
            return [], MIN_REFRESH_S
        return list(answer.rrset), answer.expiration - time.time()
