"""The protocol of provisioners. Calls are asynchronous and return within the provisioner's `timeout_s`: an operation
that takes longer continues, and the status reports its outcome. Blocking libraries run in threads. A provisioner keeps
no state that a crash could lose: it finds its machines by the deployment's name, which each of them carries.
"""

from __future__ import annotations

import re
import secrets
from enum import Enum
from typing import Final, Protocol

import msgspec

from warmroute.scaling.offer import Offer

TOKEN: Final = re.compile(r"n[0-9a-f]{16}")
"""The form of a token, which tells our machines from others where a name is all there is."""


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
    """The provider's name of it."""
    token: str
    """The token of the request that created it."""
    offer: str
    """Name of its offer; empty if unknown."""
    state: MachineState
    url: str = ""
    """Where its engine will listen, once known."""
    reclaimed: bool = False
    """The cloud will take it back soon, or it has stopped and is still paid for: drain and terminate it now."""
    reason: str = ""
    """Why it is in this state, in the provider's words."""
    island: str = ""
    """Its island; empty for the one of its offer."""
    removable: bool = True
    """Whether it could be terminated now. A StatefulSet or LeaderWorkerSet can only remove its last Pod."""


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
