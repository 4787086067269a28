"""One provisioner as the driver sees it: every call bounded in time, every failure said once, and what it last told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import msgspec

from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, Provisioner

log = logging.getLogger("warmroute.scaling")
T = TypeVar("T")

OFFERS_S: Final = 60.0
"""How often it is asked what it offers."""
OFFERS_RETRY_S: Final = 10.0
"""… and how soon again where it did not say."""
OFFERS_PATIENCE_S: Final = 1.0
"""So long a look at its machines waits for its offers."""
REST_TIMES: Final = 2.0
REST_LIMIT_S: Final = 10.0
"""One that takes long to tell of its machines is left alone for so many times as long, at most so long."""
BACKSTOP: Final = 1.25
"""A provisioner keeps to its `timeout_s` by itself, and knows best what to make of a part that did not answer. Where it
does not keep to it, it is given up after so many times as long."""
GONE: Final = (MachineState.ENDING, MachineState.ENDED)


class Cloud:
    def __init__(
        self, provisioner: Provisioner, timeout_s: float, now: Callable[[], float], api_key_env: str = ""
    ) -> None:
        self.api_key_env = api_key_env
        """Variable with the key that its engines ask for."""
        self._provisioner = provisioner
        self._limit_s = BACKSTOP * timeout_s
        self._now = now
        self.name = provisioner.name
        self.offers: tuple[Offer, ...] = ()
        self.machines: dict[str, Machine] = {}
        """By token, as of the last status."""
        self.surplus: tuple[Machine, ...] = ()
        """Machines that run with the token of another one: nobody asked for a second."""
        self.asked_s: float | None = None
        """When the status was asked for that told of them; None before the first."""
        self.has_spoken = False
        """Whether it has told of its machines, or failed to."""
        self.next_s = self._offers_due_s = float("-inf")
        """When to look again."""
        self._offering: asyncio.Task[None] | None = None
        """It is being asked what it offers."""
        self._problems: dict[str, str] = {}
        """What failed when it was last tried, and why."""
        self._nameless: set[str] = set()

    @property
    def problem(self) -> str:
        """Why calls fail; empty where they do not."""
        return "; ".join(dict.fromkeys(self._problems.values()))

    async def look(self) -> bool:
        """Asks for its machines, and now and then for its offers: these come later where they take long, and the news
        of machines does not wait for them. Whether it told of its machines."""
        asked_s = self._now()
        if self._offering is None and asked_s >= self._offers_due_s:
            self._offering = asyncio.create_task(self._look_at_offers())
        machines = await self._call("its machines", self._provisioner.status())
        self.has_spoken = True
        self.next_s = self._now() + min(REST_LIMIT_S, REST_TIMES * (self._now() - asked_s))
        if machines is not None:
            self._take(machines)
            self.asked_s = asked_s
        if self._offering is not None:
            await asyncio.wait((self._offering,), timeout=OFFERS_PATIENCE_S)
        return machines is not None

    async def _look_at_offers(self) -> None:
        offers = await self._call("what it offers", self._provisioner.offers())
        if offers is not None:
            self.offers = tuple(msgspec.structs.replace(offer, provisioner=self.name) for offer in offers)
        self._offers_due_s = self._now() + (OFFERS_S if offers is not None else OFFERS_RETRY_S)
        self._offering = None

    def _take(self, told: Iterable[Machine]) -> None:
        before, found, surplus = self.machines, dict[str, Machine](), []
        for machine in told:
            if not machine.token:
                if machine.id not in self._nameless:
                    self._nameless.add(machine.id)
                    log.warning("%s: %s has no token: it is left alone, end it by hand", self.name, machine.id)
                continue
            rival = found.setdefault(machine.token, machine)
            if rival is machine:
                continue
            if rival.id == machine.id:  # told twice, as pages that move do: the later word counts
                found[machine.token] = machine
                continue
            known = before.get(machine.token)
            if machine.state not in GONE and (rival.state in GONE or (known is not None and machine.id == known.id)):
                found[machine.token] = machine
                machine, rival = rival, machine
            if machine.state not in GONE:
                surplus.append(machine)
        self.machines, self.surplus = found, tuple(surplus)
        ids = {_end_of(machine) for machine in (*found.values(), *surplus)}
        for what in [what for what in self._problems if what.startswith(END) and what not in ids]:
            del self._problems[what]  # it is gone all the same

    async def provision(self, offer: Offer, token: str) -> None:
        """Raises CloudError (NoCapacity), TimeoutError (NoAnswer): then nobody knows whether it was started."""
        async with asyncio.timeout(self._limit_s):
            await self._provisioner.provision(offer, token)

    async def terminate(self, machine: Machine) -> bool:
        """Whether it was ended."""

        async def end() -> bool:
            await self._provisioner.terminate(machine)
            return True

        return bool(await self._call(_end_of(machine), end()))

    async def close(self) -> None:
        if self._offering is not None:
            self._offering.cancel()
        await self._call("its goodbye", self._provisioner.close())

    def offer(self, name: str) -> Offer | None:
        return next((offer for offer in self.offers if offer.name == name), None)

    async def _call(self, what: str, call: Awaitable[T]) -> T | None:
        """None where it fails: said when it begins to, and when it is over."""
        problem = kind = ""
        answer: T | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await call
        except CloudError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no answer within {self._limit_s:g} s"
        except Exception as error:  # another's library: whatever it raises, the router goes on
            kind = type(error).__name__
            problem = f"{kind}: {error}"
        before = self._problems.pop(what, "")
        if problem:
            self._problems[what] = problem
            # Such texts may have an address in them that is another each time: there the type alone counts.
            if problem != before and not (kind and before.startswith(f"{kind}: ")):
                log.warning("%s: asking for %s failed: %s", self.name, what, problem)
        elif before:
            log.info("%s: asking for %s works again", self.name, what)
        return answer


END: Final = "the end of "


def _end_of(machine: Machine) -> str:
    return f"{END}{machine.id}"
