"""Creates offers from a provisioner's configuration."""

from __future__ import annotations

from typing import Any

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer


def configured_offer(config: ProvisionerConfig, name: str, island: str, **known: Any) -> Offer:
    """Return an offer. `island` counts if the configuration names none; `known` replaces configured values."""
    node = {"gpu": config.gpu, "gpus": config.gpus, "spot": config.spot, "usd_per_hour": config.usd_per_hour}
    return Offer(
        provisioner=config.label,
        name=name,
        island=config.island or island,
        start_s=config.expected_start_s,
        max_nodes=config.max_nodes or None,
        **{**node, **known},
    )
