"""The policies, one small file each. `make_policy` names them all.

A policy that looks up caches or needs KV events also stands in `Routing.looks_up_caches` and `Routing.uses_kv_events`
(config/routing.py). The sentence for its decisions is in core/decision_record.py.
"""

from __future__ import annotations

from random import Random

from warmroute.config import Pricing, Routing
from warmroute.core.cache_view import CacheView
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.policies.by_load import Latency, LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from warmroute.core.policies.hashing import PrefixHash, Session
from warmroute.core.policies.overlap import Approximate, Overlap
from warmroute.core.policies.price import PricePolicy
from warmroute.core.policy import Policy


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
