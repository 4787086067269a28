"""The protocol that every provisioner speaks. Calls are asynchronous, and each answers within the provisioner's
`timeout_s`: what takes longer goes on by itself, and the status tells how it went. Blocking libraries run in threads.
A provisioner keeps no state that a crash could lose: what it has started, it finds again by the deployment's name,
which each machine carries.
"""

from __future__ import annotations

import re
import secrets
from enum import Enum
from typing import Final, Protocol

import msgspec

from warmroute.scaling.offer import Offer

TOKEN: Final = re.compile(r"n[0-9a-f]{16}")
"""What a token looks like. Where a machine is found again by its name alone, it tells ours from others'."""


def new_token() -> str:
    """Names one request for a node for good; nobody else has the same."""
    return f"n{secrets.token_hex(8)}"


class MachineState(Enum):
    PENDING = "pending"  # asked for, no endpoint yet
    RUNNING = "running"  # has an endpoint; its engine may still be loading
    ENDING = "ending"
    ENDED = "ended"  # gone, and nothing of it is paid for any more; may be left out of a status, too


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its cloud knows it."""

    id: str
    """The cloud's own name of it."""
    token: str
    """What it was asked for with: names one request for a node for good."""
    offer: str
    """Name of its offer; empty where that is not known any more."""
    state: MachineState
    url: str = ""
    """Where its engine will listen, once known."""
    reclaimed: bool = False
    """The cloud has said that it takes it back soon, or it has stopped and is still paid for: drain and end at once."""
    started_s: float = 0.0
    """When it was asked for, in seconds since 1970; 0 where nobody says."""
    reason: str = ""
    """Why it is as it is, in the cloud's words, where it says so."""
    island: str = ""
    """Where it stands, where the cloud says so; else its offer says it."""
    endable: bool = True
    """Whether it could be ended now. Some controllers (StatefulSet, LeaderWorkerSet) end only their last one."""


class CloudError(Exception):
    """A call failed; a sentence for the operator. It may work later."""


class NoCapacity(CloudError):
    """The cloud has none of these now, or the quota is used up: rest this offer and take another."""


class NoAnswer(CloudError, TimeoutError):
    """A call was given up: nobody knows whether it was done. The status will tell."""


class Provisioner(Protocol):
    name: str

    async def offers(self) -> list[Offer]:
        """What could be had now. Raises CloudError."""

    async def provision(self, offer: Offer, token: str) -> None:
        """Asks for one node. With the same token again: nothing more is started. Raises NoCapacity, NoAnswer,
        CloudError."""

    async def status(self) -> list[Machine]:
        """Every machine of this deployment, whoever asked for it and whenever. Raises CloudError."""

    async def terminate(self, machine: Machine) -> None:
        """Ends it; one that is gone already is no error. Raises CloudError."""

    async def close(self) -> None: ...
