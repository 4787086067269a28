"""An offer: one kind of node that could be had somewhere, and what it costs."""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    provisioner: str
    """Name of the provisioner that makes it."""
    name: str
    """Its own name there; stays the same from one call to the next. Say `us-east-1/g6.xlarge/spot`."""
    island: str
    """Where it would stand: provider and region."""
    gpu: str
    """The hardware, say `L4`: nodes with the same word are taken to be equally fast."""
    gpus: int = 1
    spot: bool = False
    usd_per_hour: float
    """Of the whole node. 0 for what costs nothing to add."""
    start_s: float = 0.0
    """From the request to a node that serves, as far as the provisioner knows; what is seen counts more."""
    most: int | None = None
    """How many of them can be had in all; None where nobody says."""

    @property
    def key(self) -> tuple[str, str]:
        return self.provisioner, self.name
