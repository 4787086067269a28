"""The policies, one small file each."""

from __future__ import annotations

from random import Random

from warmroute.config import Pricing, Routing
from warmroute.index.cache_view import CacheView
from warmroute.routing.output_length import OutputLengthEstimate
from warmroute.routing.policies.latency import Latency
from warmroute.routing.policies.least_loaded import LeastLoaded
from warmroute.routing.policies.overlap import Approximate, Overlap
from warmroute.routing.policies.power_of_two import PowerOfTwo
from warmroute.routing.policies.prefix_hash import PrefixHash
from warmroute.routing.policies.price_policy import PricePolicy
from warmroute.routing.policies.random_choice import RandomChoice
from warmroute.routing.policies.round_robin import RoundRobin
from warmroute.routing.policies.session import Session
from warmroute.routing.policy import Policy


def make_policy(
    config: Routing, pricing: Pricing, cache_view: CacheView, output_lengths: OutputLengthEstimate, random: Random
) -> Policy:
    least_loaded = LeastLoaded(random)
    policies: dict[str, Policy] = {
        "round_robin": RoundRobin(),
        "random": RandomChoice(random),
        "least_loaded": least_loaded,
        "power_of_two": PowerOfTwo(random),
        "latency": Latency(random),
        "session": Session(config, least_loaded),
        "prefix_hash": PrefixHash(config, least_loaded),
        "overlap": Overlap(least_loaded),
        "approximate": Approximate(least_loaded),
        "price": PricePolicy(cache_view, output_lengths, pricing, random),
    }
    return policies[config.policy]
