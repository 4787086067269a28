"""One provisioner as the driver sees it: every call bounded in time, every failure said once, and what it last told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, Provisioner

log = logging.getLogger("warmroute.scaling")
T = TypeVar("T")

OFFERS_S: Final = 60.0
"""How often it is asked what it offers."""


class Cloud:
    def __init__(self, provisioner: Provisioner, timeout_s: float, now: Callable[[], float]) -> None:
        self._provisioner = provisioner
        self._timeout_s = timeout_s
        self._now = now
        self.name = provisioner.name
        self.offers: tuple[Offer, ...] = ()
        self.machines: dict[str, Machine] = {}
        """By token, as of the last status."""
        self.asked_s: float | None = None
        """When the status was asked for that told of them; None before the first."""
        self._offered_s = float("-inf")
        self.problem = ""
        """Why the last call failed; empty where it did not."""

    async def look(self) -> bool:
        """Asks for its machines, and now and then for its offers. Whether it told of its machines."""
        if self._now() - self._offered_s >= OFFERS_S:
            offers = await self._call("what it offers", self._provisioner.offers())
            if offers is not None:
                self.offers = tuple(offers)
                self._offered_s = self._now()
        asked_s = self._now()
        machines = await self._call("its machines", self._provisioner.status())
        if machines is None:
            return False
        self.machines = {machine.token: machine for machine in machines if machine.token}
        self.asked_s = asked_s
        return True

    async def provision(self, offer: Offer, token: str) -> None:
        """Raises CloudError (NoCapacity), TimeoutError: then nobody knows whether it was started."""
        async with asyncio.timeout(self._timeout_s):
            await self._provisioner.provision(offer, token)

    async def terminate(self, machine: Machine) -> bool:
        """Whether it was ended."""

        async def end() -> bool:
            await self._provisioner.terminate(machine)
            return True

        return bool(await self._call(f"the end of {machine.id}", end()))

    async def close(self) -> None:
        await self._provisioner.close()

    def offer(self, name: str) -> Offer | None:
        return next((offer for offer in self.offers if offer.name == name), None)

    async def _call(self, what: str, call: Awaitable[T]) -> T | None:
        """None where it fails: said when it begins to, and when it is over."""
        problem = ""
        answer: T | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call
        except CloudError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no answer within {self._timeout_s:g} s"
        except Exception as error:  # another's library: whatever it raises, the router goes on
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self.problem:
            log.warning("%s: asking for %s failed: %s", self.name, what, problem)
        elif self.problem and not problem:
            log.info("%s answers again", self.name)
        self.problem = problem
        return answer
