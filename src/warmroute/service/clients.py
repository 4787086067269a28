"""The side of the service that clients talk to, HTTP clients or Envoy, and how their requests end when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import TYPE_CHECKING, Final, Protocol

from warmroute.config import Limits

if TYPE_CHECKING:
    from warmroute.service.service import Service

CUT_OFF_S: Final = 1.0
"""How long clients may take to read the end of a response that was cut off."""


class Clients(Protocol):
    limits: Limits
    accepted: int

    @property
    def connections(self) -> Sized: ...

    @property
    def busy(self) -> int:
        """Connections with a request."""

    def close_idle(self) -> None:
        """Close the connections that wait for a request now, and the others after their response."""

    async def until_empty(self) -> None: ...

    def cut_off_all(self) -> None:
        """End all requests with an error: the router stops."""

    def abort_all(self) -> None: ...


class EnvoyClients(Clients, Protocol):
    """The picker's gRPC server."""

    port: int

    async def listen(self) -> str:
        """Return the address. Raises ConfigError if it cannot be used."""

    async def close(self) -> None: ...


def pool_name(service: Service) -> str | None:
    """Return the name of the picker's InferencePool for the metrics; None if the service is not a picker."""
    pools = (one.inference_pool for one in service.config.discovery if one.inference_pool)
    return None if service.picker is None else next(pools, "default")


async def finish_requests(clients: Clients, stop_now: asyncio.Event, deadline_s: float) -> None:
    """Wait until all clients have left, at most until the deadline or `stop_now`."""
    endings = [asyncio.create_task(clients.until_empty()), asyncio.create_task(stop_now.wait())]
    await asyncio.wait(endings, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
    for ending in endings:
        ending.cancel()


async def cut_off(clients: Clients) -> None:
    """End running requests with an error, and give their clients a moment to read it."""
    clients.cut_off_all()
    try:
        async with asyncio.timeout(CUT_OFF_S):
            await clients.until_empty()
    except TimeoutError:
        clients.abort_all()
