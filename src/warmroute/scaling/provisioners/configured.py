"""What the configuration says of offers: the one that a kind with a single sort of node has, and which can be true."""

from __future__ import annotations

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.validate_offers import Sanity


def configured_offer(config: ProvisionerConfig, name: str, island: str) -> Offer:
    """`island`: where the configuration does not say."""
    return Offer(
        provisioner=config.label,
        name=name,
        island=config.island or island,
        gpu=config.gpu,
        gpus=config.gpus,
        spot=config.spot,
        usd_per_hour=config.usd_per_hour,
        start_s=config.start_s,
        most=config.most or None,
    )


def sanity_of(config: ProvisionerConfig, *, free: bool = False) -> Sanity:
    return Sanity(
        config.label,
        free=free or config.free,
        min_usd_per_gpu_hour=config.min_usd_per_gpu_hour,
        max_usd_per_hour=config.max_usd_per_hour,
    )
