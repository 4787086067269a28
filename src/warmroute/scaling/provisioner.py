"""What a provisioner does, and its calls with bounds of time.

A provisioner starts, lists and ends machines, and nothing else: it adds no node to the fleet, drains and removes none,
and changes no state of node_lifecycle.py. OF_KIND names the environment variables that its programs get.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.config.scaling import COMMON_VARIABLES
from warmroute.event_log import EventLog
from warmroute.scaling.offers import Offer

# The protocol of provisioners. Calls are asynchronous and return within the provisioner's `timeout_s`: an operation
# that takes longer continues, and the status reports its outcome. Blocking libraries run in threads. A provisioner
# keeps no state that a crash could lose: it finds its machines by the deployment's name, which each of them carries.

TOKEN: Final = re.compile(r"n[0-9a-f]{16}")
"""The form of a token. Where a provider keeps only names, it tells machines of this router from others."""


def new_token() -> str:
    """Return a unique token for a request for a node."""
    return f"n{secrets.token_hex(8)}"


class MachineState(Enum):
    PENDING = "pending"  # requested, no address yet
    RUNNING = "running"  # has an address; its engine may still be loading
    TERMINATING = "terminating"
    TERMINATED = "terminated"  # gone, and no longer paid for; a status may omit it


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as its provisioner reports it."""

    id: str
    """The provider's name of the machine."""
    token: str
    """The token of the request that created it."""
    offer: str
    """Name of the machine's offer; empty if unknown."""
    state: MachineState
    url: str = ""
    """Where the machine's engine will listen; empty until that is known."""
    reclaimed: bool = False
    """The cloud will take it back soon, or it has stopped and is still paid for: drain and terminate it now."""
    reason: str = ""
    """Why the machine is in this state, in the provider's words."""
    island: str = ""
    """The machine's island; empty for the island of its offer."""
    removable: bool = True
    """Whether the machine could be terminated now. A StatefulSet or LeaderWorkerSet can only remove its last Pod."""


class ProvisionerError(Exception):
    """A call failed. The message is a sentence for the operator. A later call may succeed."""


class NoCapacity(ProvisionerError):
    """The provider has no such machine now, or the quota is used up: another offer may work."""


class ProvisionerTimeout(ProvisionerError, TimeoutError):
    """A call did not return in time, so its outcome is unknown. The status will show it."""


class Provisioner(Protocol):
    name: str

    async def offers(self) -> list[Offer]:
        """Return what is available now. Raises ProvisionerError."""

    async def provision(self, offer: Offer, token: str) -> None:
        """Request one machine. A second call with the same token creates nothing. Raises NoCapacity,
        ProvisionerTimeout, ProvisionerError."""

    async def status(self) -> list[Machine]:
        """Return every machine of this deployment, also if another router requested it. Raises ProvisionerError."""

    async def terminate(self, machine: Machine) -> None:
        """Terminate a machine. One that is gone already is no error. Raises ProvisionerError."""

    async def close(self) -> None: ...


# The controller's view of one provisioner: it limits the time of each call, logs each failure once, and keeps the last
# report.

log = EventLog("warmroute.scaling")
T = TypeVar("T")

OFFERS_INTERVAL_S: Final = 60.0
"""Prices and quotas change by the hour; listing them takes a cloud seconds."""
OFFERS_RETRY_S: Final = 10.0
"""Time until offers are asked for again after a call that failed."""
OFFERS_WAIT_S: Final = 1.0
"""How long a refresh waits for the offers. Machines are more urgent: they may have joined or died."""
PAUSE_FACTOR: Final = 2.0
MAX_PAUSE_S: Final = 10.0
"""After a slow status call, the next one waits for this many times as long, up to the maximum."""
TIMEOUT_FACTOR: Final = 1.25
"""A provisioner limits its calls to `timeout_s` itself. This is the limit for one that fails to."""
TERMINATED_STATES: Final = (MachineState.TERMINATING, MachineState.TERMINATED)
_TERMINATE: Final = "terminate "


class ProvisionerClient:
    def __init__(
        self, provisioner: Provisioner, timeout_s: float, now: Callable[[], float],
        config: ProvisionerConfig | None = None,
    ) -> None:  # fmt: skip
        """`config`: what it says about nodes counts for machines whose offer is unknown."""
        self._config = config = config or ProvisionerConfig(kind="process")
        self.api_key_env = config.api_key_env
        """Environment variable with the API key of the provisioner's engines."""
        self.max_inflight = config.max_inflight
        self._provisioner = provisioner
        self._timeout_s = TIMEOUT_FACTOR * timeout_s
        self._now = now
        self.name = provisioner.name
        self.offers: tuple[Offer, ...] = ()
        self.machines: dict[str, Machine] = {}
        """The last status, by token."""
        self.duplicates: tuple[Machine, ...] = ()
        """Further machines with a token that another machine has."""
        self.status_s: float | None = None
        """When the last successful status call began."""
        self.answered = False
        """Whether a status call has succeeded or failed."""
        self.next_refresh_s = self._next_offers_s = float("-inf")
        self._offers_task: asyncio.Task[None] | None = None
        self._errors: dict[str, str] = {}
        """By call: why it failed last time."""
        self._without_token: set[str] = set()

    @property
    def error(self) -> str:
        """Why calls fail; empty if they succeed."""
        return "; ".join(dict.fromkeys(self._errors.values()))

    async def refresh(self) -> bool:
        """Call the status, and from time to time the offers, for which the machines do not wait long. Return whether
        the status succeeded."""
        started_s = self._now()
        if self._offers_task is None and started_s >= self._next_offers_s:
            self._offers_task = asyncio.create_task(self._refresh_offers())
        machines = await self._call("status", self._provisioner.status())
        self.answered = True
        # A provider that answers slowly is busy or limits its callers. Two thirds of the time it is left alone.
        self.next_refresh_s = self._now() + min(MAX_PAUSE_S, PAUSE_FACTOR * (self._now() - started_s))
        if machines is not None:
            self._update_machines(machines)
            self.status_s = started_s
        if self._offers_task is not None:
            await asyncio.wait((self._offers_task,), timeout=OFFERS_WAIT_S)
        return machines is not None

    async def _refresh_offers(self) -> None:
        offers = await self._call("offers", self._provisioner.offers())
        if offers is not None:
            self.offers = tuple(msgspec.structs.replace(offer, provisioner=self.name) for offer in offers)
        self._next_offers_s = self._now() + (OFFERS_INTERVAL_S if offers is not None else OFFERS_RETRY_S)
        self._offers_task = None

    def _update_machines(self, reported: Iterable[Machine]) -> None:
        before, found, duplicates = self.machines, dict[str, Machine](), []
        for machine in reported:
            if not machine.token:
                if machine.id not in self._without_token:
                    self._without_token.add(machine.id)
                    log.warning(
                        "machine_without_token",
                        "The router does not manage it. Terminate it by hand.",
                        provisioner=self.name,
                        machine=machine.id,
                    )
                continue
            other = found.setdefault(machine.token, machine)
            if other is machine:
                continue
            if other.id == machine.id:  # listed twice, because pages moved between calls: the later entry is newer
                found[machine.token] = machine
                continue
            # Of two machines with one token, the one that serves already stays: requests run on it.
            known = before.get(machine.token)
            preferred = other.state in TERMINATED_STATES or (known is not None and machine.id == known.id)
            if machine.state not in TERMINATED_STATES and preferred:
                found[machine.token] = machine
                machine, other = other, machine
            if machine.state not in TERMINATED_STATES:
                duplicates.append(machine)
        self.machines, self.duplicates = found, tuple(duplicates)
        calls = {f"{_TERMINATE}{machine.id}" for machine in (*found.values(), *duplicates)}
        for call in [call for call in self._errors if call.startswith(_TERMINATE) and call not in calls]:
            del self._errors[call]  # the machine is gone in spite of the error

    async def provision(self, offer: Offer, token: str) -> None:
        """Raises ProvisionerError, NoCapacity, and TimeoutError if it is unknown whether the machine was created."""
        async with asyncio.timeout(self._timeout_s):
            await self._provisioner.provision(offer, token)

    async def terminate(self, machine: Machine) -> bool:
        """Return whether the call succeeded."""
        call = f"{_TERMINATE}{machine.id}"
        await self._call(call, self._provisioner.terminate(machine))
        return call not in self._errors

    async def close(self) -> None:
        if self._offers_task is not None:
            self._offers_task.cancel()
        await self._call("close", self._provisioner.close())

    def offer(self, name: str) -> Offer | None:
        return next((offer for offer in self.offers if offer.name == name), None)

    def unknown_offer(self, machine: Machine) -> Offer:
        """Return what the configuration says about a machine whose offer is not known, without a GPU and a price."""
        config = self._config
        return Offer(
            provisioner=self.name,
            name=machine.offer or "unknown",
            island=machine.island or config.island or self.name,
            gpu="",
            role=config.role,
            bootstrap_port=config.bootstrap_port,
            usd_per_hour=0.0,
        )

    async def _call(self, call: str, result: Awaitable[T]) -> T | None:
        """Return the result, or None if the call failed. Log when it begins to fail and when it succeeds again."""
        error = unexpected = ""
        answer: T | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await result
        except ProvisionerError as raised:
            error = str(raised)
        except TimeoutError:
            error = f"no response within {self._timeout_s:g} s"
        except Exception as raised:  # a provider's library may raise anything
            unexpected = type(raised).__name__
            error = f"{unexpected}: {raised}"
        before = self._errors.pop(call, "")
        if error:
            self._errors[call] = error
            # Such a message may contain an object's address, which differs each time: compare the type alone.
            if error != before and not (unexpected and before.startswith(f"{unexpected}: ")):
                log.warning("provisioner_call_failed", provisioner=self.name, call=call, reason=error)
        elif before:
            log.info("provisioner_call_recovered", provisioner=self.name, call=call)
        return answer


# The environment of the programs that provisioners run: a few harmless variables, and those that `pass_env` names.
#
# The router's own environment contains its secrets: API keys of engines, tokens, other provisioners' credentials.

OF_KIND: Final = {
    "kubernetes": ("KUBECONFIG", "KUBERNETES_*"),
    "process": ("LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*"),
    "skypilot": ("SKYPILOT_*",),
}
"""Variables that the programs of a kind need to find their hardware or server."""


def child_environment(config: ProvisionerConfig, added: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the environment of a program. `added`: variables of the provisioner itself."""
    patterns = (*COMMON_VARIABLES, *OF_KIND.get(config.kind, ()), *config.pass_env)
    found = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, one) for one in patterns)}
    return {**found, **added}
