"""What a cloud says of its offers is not always true: prices of 0 stand for "not known", spot prices are bid floors,
fields are missing. Whatever could not be a price is dropped, with a sentence; what can be mended is mended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import msgspec

from warmroute.scaling.offer import Offer

log = logging.getLogger("warmroute.scaling")

LONGEST_START_S = 6 * 3600.0


class Sanity:
    """Checks the offers of one provisioner. A complaint is logged once, and again when it comes back after a while."""

    def __init__(
        self, name: str, *, free: bool = False, min_usd_per_gpu_hour: float = 0.0, max_usd_per_hour: float = math.inf
    ) -> None:
        self._name = name
        self._free = free
        self._floor = min_usd_per_gpu_hour
        self._ceiling = max_usd_per_hour
        self.said: tuple[str, ...] = ()
        """What was wrong the last time."""

    def check(self, offers: Iterable[Offer], complaints: Iterable[str] = ()) -> list[Offer]:
        """Those that can be true, one for each name; `complaints` are those of whoever read them."""
        good: dict[str, Offer] = {}
        said = list(complaints)
        for offer in offers:
            wrong = self._wrong(offer)
            if not wrong and offer.name in good:
                wrong = "stands there twice; the first is taken"
            if wrong:
                said.append(f"{self._name}: the offer {offer.name!r} {wrong}")
                continue
            good[offer.name] = self._mended(offer, said)
        for sentence in said:
            if sentence not in self.said:
                log.warning("%s", sentence)
        self.said = tuple(said)
        return list(good.values())

    def _wrong(self, offer: Offer) -> str:
        usd = offer.usd_per_hour
        if not offer.name:
            return "has no name: dropped"
        if not offer.gpu:
            return "does not say its GPU: dropped"
        if offer.gpus < 1:
            return f"has {offer.gpus} GPUs: dropped"
        if not math.isfinite(usd):
            return f"costs {usd}, which is no price: dropped"
        if usd < 0:
            return f"costs ${usd:g} an hour, which is below 0: dropped"
        if usd == 0:
            return "" if self._free else "costs $0, which stands for a price that is not known: dropped (or set free)"
        if usd < self._floor * offer.gpus and not self._free:
            return (
                f"costs ${usd:g} an hour, below min_usd_per_gpu_hour (${self._floor:g} × {offer.gpus}): a bid floor, "
                "no price: dropped"
            )
        if usd > self._ceiling:
            return f"costs ${usd:g} an hour, above max_usd_per_hour (${self._ceiling:g}): dropped"
        return ""

    def _mended(self, offer: Offer, said: list[str]) -> Offer:
        start_s = offer.start_s
        if not 0 <= start_s <= LONGEST_START_S:  # also where it is NaN
            start_s = LONGEST_START_S if start_s > LONGEST_START_S else 0.0
            said.append(f"{self._name}: the offer {offer.name!r} starts in {offer.start_s} s: {start_s:g} s is taken")
        most = offer.most
        if most is not None and most < 0:
            most = 0
            said.append(f"{self._name}: the offer {offer.name!r} has {offer.most} nodes at most: 0 is taken")
        if start_s is offer.start_s and most is offer.most:
            return offer
        return msgspec.structs.replace(offer, start_s=start_s, most=most)
