"""Selects the offer for the next node: the cheapest for its speed, of those that are available and start fast
enough.

    cost = usd_per_hour / weight · (1 + start_s / STAY_S)

A machine costs money while it boots, so its start time counts against the time that it will stay. In panic mode
the autoscaler skips offers that start more than twice as slowly as the fastest. It always skips offers whose
nodes could not keep `max_ttft_p99_ms`, since the round trip and the prefill of an average prompt take longer, or
`max_latency_p99_ms`, since the round trip alone does. An offer that was refused, or whose node failed to start,
backs off: for `offer_backoff_s`, twice as long each time, until one of its nodes serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from math import inf, isfinite
from typing import Final

import msgspec

from warmroute.config import Scaling
from warmroute.config.scaling import Pool
from warmroute.scaling.capacity import GpuSpeeds
from warmroute.scaling.observer import pool_of
from warmroute.scaling.offers import Offer, OfferKey, is_quantity, price_problem
from warmroute.scaling.scaling_decision import PaidNode

STAY_S: Final = 3600.0
"""How long a new node is assumed to stay. An hour of use pays for an hour of booting: the price doubles."""
MAX_BACKOFF_S: Final = 3600.0
"""Maximum time for which a failed offer is not used."""
START_WEIGHT: Final = 0.3
"""Weight of the latest measured start time against earlier ones."""
PANIC_START_RATIO: Final = 2.0
"""In panic mode the autoscaler skips offers that start this many times as slowly as the fastest."""
MIN_START_S: Final = 5.0
"""Start times below it count as equal: a local process that starts in 0.2 s must not exclude one that takes 1 s."""


class _Backoff(msgspec.Struct):
    until_s: float
    duration_s: float
    reason: str


class OfferSelector:
    """All current offers, and how requests for them ended."""

    def __init__(self, config: Scaling, round_trip_ms: Callable[[str], float] = lambda _island: 0.0) -> None:
        """`round_trip_ms` returns the round trip to an island; 0 if it is unknown."""
        self.config = config
        self.island_round_trip_ms = round_trip_ms
        self.offers: tuple[Offer, ...] = ()
        self._backoffs: dict[OfferKey, _Backoff] = {}
        self._start_s: dict[OfferKey, float] = {}
        self.problems: tuple[str, ...] = ()
        """Why some offers are ignored."""
        self.kind = "nodes"
        """What the offers create, in words: `nodes`, or `prefill nodes`."""
        self.elsewhere: Sequence[PaidNode] = ()
        """Machines of the other pool. They count towards `max_nodes` of their offers, whatever role they have now."""
        self.somebody_else_scales = True
        """Whether no provisioner offers nodes of any kind: then somebody else adds and removes them."""

    def for_pool(self, config: Scaling, pool: Pool, elsewhere: Sequence[PaidNode]) -> OfferSelector:
        """Return the offers for one pool, with its limits. How requests ended is shared. `elsewhere`: the machines of
        the other pool."""
        # A shallow copy: both pools write to the same backoffs and start times, because both ask the same provider.
        selector = copy(self)
        selector.elsewhere = tuple(elsewhere)
        selector.config, selector.kind, selector.problems = config, f"{pool} nodes", ()
        selector.offers = tuple(offer for offer in self.offers if pool_of(offer.role) == pool)
        return selector

    def update_offers(self, offers: Iterable[Offer]) -> None:
        """Replace the offers by these: all of all provisioners. Offers with impossible values are ignored."""
        valid: dict[OfferKey, Offer] = {}
        problems: list[str] = []
        for offer in offers:
            problem = price_problem(offer.usd_per_hour)
            if not is_quantity(offer.start_s):
                problem = f"has start_s {offer.start_s}"
            if problem:
                problems.append(f"ignoring offer {offer.provisioner}/{offer.name}: it {problem}")
            else:
                valid[offer.key] = offer
        self.offers, self.problems = tuple(valid.values()), tuple(problems)
        self.somebody_else_scales = not valid

    def back_off(self, key: OfferKey, reason: str, now_s: float) -> None:
        """The request for a node of this offer failed: no capacity, no quota, an error, or it did not start."""
        before = self._backoffs.get(key)
        duration_s = min(MAX_BACKOFF_S, before.duration_s * 2.0) if before else self.config.offer_backoff_s
        self._backoffs[key] = _Backoff(now_s + duration_s, duration_s, reason)

    def node_started(self, key: OfferKey, start_s: float) -> None:
        """A node of this offer serves, after this time (NaN where unknown)."""
        self._backoffs.pop(key, None)
        if is_quantity(start_s):
            before = self._start_s.get(key, start_s)
            self._start_s[key] = before + START_WEIGHT * (start_s - before)

    def start_s(self, offer: Offer) -> float:
        """Return the time from the request until the node serves: measured, or else the provisioner's estimate."""
        return self._start_s.get(offer.key, offer.start_s)

    def backoff_rows(self, now_s: float) -> list[tuple[str, str, float, float, str]]:
        """Return provisioner, offer, time left, last duration and reason of each offer that backs off."""
        found = [(key, one) for key, one in self._backoffs.items() if one.until_s > now_s]
        return [(*key, one.until_s - now_s, one.duration_s, one.reason) for key, one in found]

    def restore_backoff(self, key: OfferKey, until_s: float, duration_s: float, reason: str) -> None:
        self._backoffs[key] = _Backoff(until_s, duration_s, reason)

    def backing_off(self, now_s: float) -> dict[OfferKey, tuple[float, str]]:
        """Return the offers that back off: until when, and why."""
        return {key: (one.until_s, one.reason) for key, one in self._backoffs.items() if one.until_s > now_s}

    def select(
        self, paid: Sequence[PaidNode], speeds: GpuSpeeds, now_s: float, *, prefill_work: float = 0.0,
        panicking: bool = False, island: str | None = None, planned: OfferKey | None = None,
    ) -> tuple[Offer | None, str]:  # fmt: skip
        """Return the best offer, or None, and why. `island`: only offers there. `prefill_work`: that of an average
        request, which the node has to finish within the TTFT limit. `planned`: the offer that a replay chose, which
        is taken if it is available."""
        if not self.offers:
            return None, f"no provisioner offers {self.kind}"
        limits = _Limits(self.config, paid, self.elsewhere)
        available, skipped = self._available(limits, speeds, now_s, prefill_work, island)
        if not available:
            return None, "no offer is available: " + ", ".join(f"{n} × {why}" for why, n in skipped.most_common())
        if panicking:
            fastest_s = min(self.start_s(offer) for offer in available)
            limit_s = PANIC_START_RATIO * max(MIN_START_S, fastest_s)
            available = [offer for offer in available if self.start_s(offer) <= limit_s]
        best = min(available, key=lambda offer: (offer.key != planned, *self._rank(offer, speeds)))
        price = f"{best.usd_per_hour:g} USD/hour for {speeds.weight(best.gpu):.2g} × the usual speed"
        which = "as replayed" if best.key == planned else f"cheapest of {len(available)}"
        return best, f"{best.provisioner}/{best.name}: {which} ({price})"

    def ranked(
        self, paid: Sequence[PaidNode], speeds: GpuSpeeds, now_s: float, prefill_work: float = 0.0
    ) -> list[tuple[Offer, int]]:
        """Return the available offers, the cheapest for its speed first, and how many nodes of each may be added."""
        limits = _Limits(self.config, paid, self.elsewhere)
        available, _skipped = self._available(limits, speeds, now_s, prefill_work)
        available.sort(key=lambda offer: self._rank(offer, speeds))
        return [(offer, limits.most(offer)) for offer in available]

    def _available(
        self, limits: _Limits, speeds: GpuSpeeds, now_s: float, prefill_work: float, island: str | None = None
    ) -> tuple[list[Offer], Counter[str]]:
        """Return the available offers, and why others are not."""
        skipped: Counter[str] = Counter()
        available: list[Offer] = []
        for offer in self.offers:
            backoff = self._backoffs.get(offer.key)
            if island is not None and offer.island != island:
                reason = f"not on island {island}"
            elif backoff is not None and backoff.until_s > now_s:
                reason = "backing off after a failure"
            else:
                reason = limits.reason_against(offer) or self._too_late(offer, speeds, prefill_work)
            if reason:
                skipped[reason] += 1
            else:
                available.append(offer)
        return available, skipped

    def _rank(self, offer: Offer, speeds: GpuSpeeds) -> tuple[float, float, OfferKey]:
        start_s = self.start_s(offer)
        return offer.usd_per_hour / speeds.weight(offer.gpu) * (1.0 + start_s / STAY_S), start_s, offer.key

    def round_trip_ms(self, offer: Offer) -> float:
        """Return the round trip to a node of this offer: as the provisioner reports it, or else that of its island."""
        return self.island_round_trip_ms(offer.island) if offer.round_trip_ms is None else offer.round_trip_ms

    def _too_late(self, offer: Offer, speeds: GpuSpeeds, prefill_work: float) -> str:
        """Return which limit of time a node of this offer could not keep, or an empty string."""
        max_ttft_ms, max_latency_ms = self.config.max_ttft_p99_ms, self.config.max_latency_p99_ms
        prefill_ms = prefill_work * (speeds.ms_per_token(offer.gpu) or 0.0)
        round_trip_ms = self.round_trip_ms(offer)
        if 0 < max_ttft_ms < prefill_ms:
            return "too slow for max_ttft_p99_ms"
        if 0 < max_ttft_ms < prefill_ms + round_trip_ms:
            return "too far away for max_ttft_p99_ms"
        return "too far away for max_latency_p99_ms" if 0 < max_latency_ms < round_trip_ms else ""


class _Limits:
    """What the configuration and the offers still allow beside the machines that are paid for."""

    def __init__(self, config: Scaling, paid: Sequence[PaidNode], elsewhere: Sequence[PaidNode]) -> None:
        """`elsewhere`: machines by which the configuration's limits are reduced already."""
        self._budget_usd_per_hour = config.budget_usd_per_hour
        self._max_by_island = {one.island: one.max_nodes for one in config.islands}
        self._by_island = Counter(one.island for one in paid if one.counts_toward_limit)
        self._by_offer = Counter(one.offer for one in (*paid, *elsewhere))
        self._usd_per_hour = sum(one.usd_per_hour for one in paid if isfinite(one.usd_per_hour))
        self._free = config.max_nodes - sum(one.counts_toward_limit for one in paid)

    def reason_against(self, offer: Offer) -> str:
        if self._by_island[offer.island] >= self._max_by_island.get(offer.island, inf):
            return "island is full"
        if offer.max_nodes is not None and self._by_offer[offer.key] >= offer.max_nodes:
            return "offer is used up"
        if self._budget_usd_per_hour and self._usd_per_hour + offer.usd_per_hour > self._budget_usd_per_hour:
            return "over the budget"
        return ""

    def most(self, offer: Offer) -> int:
        """Return how many nodes of this offer may be added, if no other ones are."""
        most = min(float(self._free), self._max_by_island.get(offer.island, inf) - self._by_island[offer.island])
        if offer.max_nodes is not None:
            most = min(most, offer.max_nodes - self._by_offer[offer.key])
        if self._budget_usd_per_hour and offer.usd_per_hour > 0:
            most = min(most, (self._budget_usd_per_hour - self._usd_per_hour) // offer.usd_per_hour)
        return max(0, int(most))
