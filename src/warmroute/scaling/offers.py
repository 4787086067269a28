"""An offer: one kind of node that a provisioner can create somewhere, and its price.

Providers report impossible values: a price of 0 stands for an unknown price, a spot price may be a bid floor, fields
are missing. The router drops offers with an impossible price and repairs what can be repaired.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, Final

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.config.nodes import Role
from warmroute.event_log import EventLog

log = EventLog("warmroute.scaling")

MAX_USD_PER_HOUR: Final = 10_000.0
"""No node costs more; a higher price is an error in a catalogue."""
MAX_START_S: Final = 6 * 3600.0
"""A larger estimate counts as this."""
MAX_ROUND_TRIP_MS: Final = 60_000.0
"""A larger round trip is an error; the island's counts."""
OfferKey = tuple[str, str]
"""The names of the provisioner and of the offer."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    provisioner: str
    """Name of the provisioner that creates the node."""
    name: str
    """The offer's name at the provisioner, which stays the same from one call to the next, for example
    `us-east-1/g6.xlarge/spot`."""
    island: str
    """Where the node would be: provider and region."""
    gpu: str
    """The hardware, for example `L4`. Nodes with the same value are assumed to be equally fast."""
    gpus: int = 1
    spot: bool = False
    role: Role = "mixed"
    """Role of the node (nodes.role)."""
    bootstrap_port: int = 8998
    """Bootstrap port of a prefill node (nodes.bootstrap_port)."""
    usd_per_hour: float
    """Price of the whole node; 0 if an additional node costs nothing."""
    start_s: float = 0.0
    """Time from the request until the node serves, as the provisioner estimates it. Measured times replace it."""
    max_nodes: int | None = None
    """How many nodes of this offer can exist at a time; None if unknown."""
    round_trip_ms: float | None = None
    """Round trip from the router to the node, as the provisioner reports it; None for the round trip of its island."""

    @property
    def key(self) -> OfferKey:
        return self.provisioner, self.name


def configured_offer(config: ProvisionerConfig, name: str, island: str, **known: Any) -> Offer:
    """Return an offer. `island` counts if the configuration names none; `known` replaces configured values."""
    node = {"gpu": config.gpu, "gpus": config.gpus, "spot": config.spot, "usd_per_hour": config.usd_per_hour}
    return Offer(
        provisioner=config.label,
        name=name,
        island=config.island or island,
        role=config.role,
        bootstrap_port=config.bootstrap_port,
        start_s=config.expected_start_s,
        max_nodes=config.max_nodes or None,
        **{**node, **known},
    )


def is_quantity(value: float) -> bool:
    """Return whether a reported value is a number from 0 up: neither NaN nor infinite nor negative."""
    return isfinite(value) and value >= 0


def price_problem(usd_per_hour: float, max_usd_per_hour: float = MAX_USD_PER_HOUR) -> str:
    """Return why a price is impossible, or an empty string."""
    if not isfinite(usd_per_hour):
        return f"costs {usd_per_hour}, which is not a price"
    if usd_per_hour < 0:
        return f"costs ${usd_per_hour:g}/hour, which is below 0"
    if usd_per_hour > max_usd_per_hour:
        return f"costs ${usd_per_hour:g}/hour, above the maximum of ${max_usd_per_hour:g}"
    return ""


class OfferValidator:
    """Validates the offers of one provisioner. It logs a problem once, and again when it comes back."""

    def __init__(self, config: ProvisionerConfig, *, free: bool = False) -> None:
        """`free`: a price of 0 is a real price."""
        self._name = config.label
        self._free = free or config.allow_free
        self._min_usd_per_gpu_hour = config.min_usd_per_gpu_hour
        self._max_usd_per_hour = config.max_usd_per_hour
        self.problems: tuple[str, ...] = ()
        """The problems that the last call of `validate` found."""

    def validate(self, offers: Iterable[Offer], problems: Iterable[str] = ()) -> list[Offer]:
        """Return the valid offers, one for each name. `problems`: those that were found before."""
        valid: dict[str, Offer] = {}
        found = list(problems)
        for offer in offers:
            problem = self._problem(offer)
            if not problem and offer.name in valid:
                problem = "is listed twice; using the first"
            if problem:
                found.append(f"offer {offer.name!r} {problem}")
            else:
                valid[offer.name] = self._repaired(offer, found)
        for problem in found:
            if problem not in self.problems:
                log.warning("offer_problem", provisioner=self._name, reason=problem)
        self.problems = tuple(found)
        return list(valid.values())

    def _problem(self, offer: Offer) -> str:
        """Return why the offer is dropped, or an empty string."""
        usd = offer.usd_per_hour
        if not offer.name:
            return "has no name: dropped"
        if not offer.gpu:
            return "has no GPU name: dropped"
        if offer.gpus < 1:
            return f"has {offer.gpus} GPUs: dropped"
        problem = price_problem(usd, self._max_usd_per_hour)
        if problem:
            return f"{problem}: dropped"
        if self._free:
            return ""
        if usd == 0:
            return "costs $0, which stands for an unknown price: dropped"
        # Some catalogues list the lowest bid that a spot market accepts. By that price the autoscaler would always
        # choose it, and never get it.
        if usd < self._min_usd_per_gpu_hour * offer.gpus:
            minimum = f"${self._min_usd_per_gpu_hour:g} per GPU (it has {offer.gpus})"
            return f"costs ${usd:g}/hour, below {minimum}; this is a bid floor, not a price: dropped"
        return ""

    def _repaired(self, offer: Offer, problems: list[str]) -> Offer:
        start_s, max_nodes, round_trip_ms = offer.start_s, offer.max_nodes, offer.round_trip_ms
        if not 0 <= start_s <= MAX_START_S:  # also where it is NaN
            start_s = MAX_START_S if start_s > MAX_START_S else 0.0
            problems.append(f"offer {offer.name!r} has start_s {offer.start_s}: using {start_s:g}")
        if max_nodes is not None and max_nodes < 0:
            max_nodes = 0
            problems.append(f"offer {offer.name!r} has max_nodes {offer.max_nodes}: using 0")
        if round_trip_ms is not None and not 0 <= round_trip_ms <= MAX_ROUND_TRIP_MS:
            round_trip_ms = None
            problems.append(f"offer {offer.name!r} has round_trip_ms {offer.round_trip_ms}: using that of its island")
        return msgspec.structs.replace(offer, start_s=start_s, max_nodes=max_nodes, round_trip_ms=round_trip_ms)
