"""An offer: one kind of node that a provisioner can create somewhere, and its price."""

from __future__ import annotations

import msgspec

OfferKey = tuple[str, str]
"""The names of the provisioner and of the offer."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    provisioner: str
    """Name of the provisioner that creates it."""
    name: str
    """Its name at the provisioner, which stays the same from one call to the next, say `us-east-1/g6.xlarge/spot`."""
    island: str
    """Where the node would be: provider and region."""
    gpu: str
    """The hardware, say `L4`. Nodes with the same value are assumed to be equally fast."""
    gpus: int = 1
    spot: bool = False
    usd_per_hour: float
    """Price of the whole node; 0 if an additional node costs nothing."""
    start_s: float = 0.0
    """Time from the request until the node serves, as the provisioner estimates it. Measured times replace it."""
    max_nodes: int | None = None
    """How many nodes of this offer can exist at a time; None if unknown."""

    @property
    def key(self) -> OfferKey:
        return self.provisioner, self.name
