"""Which offer to take: the cheapest for the speed it brings, of those that may be had and are quick enough.

    cost = usd_per_hour / weight · (1 + start_s / STAY_S)

A node that boots is paid for, too: so its start counts by how long it will stay. In a panic, offers that take more
than twice as long as the quickest to start are passed over. An offer that was refused, or whose node never came up,
rests: for `rest_s`, twice as long each time, until one comes up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Final

import msgspec

from warmroute.config import Scaling
from warmroute.scaling.capacity import Speeds
from warmroute.scaling.offer import Offer

STAY_S: Final = 3600.0
ABSURD_USD: Final = 10_000.0
"""Nobody asks so much for an hour of a node: a slip of a catalogue."""
START_WEIGHT: Final = 0.3
"""How much one start that was seen counts against those before it."""
PANIC_TIMES: Final = 2.0
LEAST_START_S: Final = 5.0

Key = tuple[str, str]


class Holding(msgspec.Struct, frozen=True):
    """A node that is there, or is on its way: what counts against limits."""

    offer: Key | None
    island: str
    usd_per_hour: float
    counts: bool = True
    """… against how many there may be; its price counts in any case."""


class _Rest(msgspec.Struct):
    until_s: float
    for_s: float
    why: str


class Market:
    """The offers there are, and what became of those that were taken."""

    def __init__(self, config: Scaling) -> None:
        self._config = config
        self._offers: tuple[Offer, ...] = ()
        self._rests: dict[Key, _Rest] = {}
        self._starts_s: dict[Key, float] = {}
        self.said: tuple[str, ...] = ()
        """What is wrong with offers that are not taken."""

    def reconfigure(self, config: Scaling) -> None:
        self._config = config

    # What is heard.

    def offered(self, offers: Iterable[Offer]) -> None:
        """All offers of all provisioners; those with a price that can't be are left out, and said."""
        good: dict[Key, Offer] = {}
        said: list[str] = []
        for offer in offers:
            price, start_s = offer.usd_per_hour, offer.start_s
            if not isfinite(price) or price < 0 or price > ABSURD_USD:
                said.append(f"{offer.provisioner}/{offer.name}: a price of {price:g} USD an hour can't be; left out")
            elif not isfinite(start_s) or start_s < 0:
                said.append(f"{offer.provisioner}/{offer.name}: a start of {start_s:g} s can't be; left out")
            else:
                good[offer.key] = offer
        self._offers, self.said = tuple(good.values()), tuple(said)

    def refused(self, key: Key, why: str, now_s: float) -> None:
        """No capacity, no quota, an error, or a node that never came up."""
        before = self._rests.get(key)
        for_s = min(self._config.rest_limit_s, before.for_s * 2.0) if before else self._config.rest_s
        self._rests[key] = _Rest(now_s + for_s, for_s, why)

    def came_up(self, key: Key, took_s: float) -> None:
        """A node of this offer serves."""
        self._rests.pop(key, None)
        if isfinite(took_s) and took_s >= 0:
            before = self._starts_s.get(key, took_s)
            self._starts_s[key] = before + START_WEIGHT * (took_s - before)

    # What is asked.

    @property
    def offers(self) -> tuple[Offer, ...]:
        return self._offers

    def offer(self, key: Key) -> Offer | None:
        return next((offer for offer in self._offers if offer.key == key), None)

    def start_s(self, offer: Offer) -> float:
        """From the request to a node that serves: as seen, or as the provisioner says."""
        return self._starts_s.get(offer.key, offer.start_s)

    def resting(self, now_s: float) -> dict[Key, tuple[float, str]]:
        """Offers that are left alone: until when, and why."""
        return {key: (rest.until_s, rest.why) for key, rest in self._rests.items() if rest.until_s > now_s}

    def choose(
        self, held: Sequence[Holding], speeds: Speeds, now_s: float, *, work: float = 0.0, panicking: bool = False,
        island: str | None = None,
    ) -> tuple[Offer | None, str]:  # fmt: skip
        """The offer to take next, or None; and why. `island`: only there. `work`: prefill of a usual request, which a
        node must be able to do within the ceiling."""
        config = self._config
        if not self._offers:
            return None, "nobody offers a node"
        islands = Counter(one.island for one in held if one.counts)
        taken = Counter(one.offer for one in held)
        limits = {one.island: one.max_nodes for one in config.islands}
        spent = sum(one.usd_per_hour for one in held if isfinite(one.usd_per_hour))
        passed: Counter[str] = Counter()
        possible: list[Offer] = []
        for offer in self._offers:
            rest = self._rests.get(offer.key)
            speed_ms = speeds.ms_per_token(offer.gpu)
            if island is not None and offer.island != island:
                why = f"not on {island}"
            elif rest is not None and rest.until_s > now_s:
                why = "resting after a refusal"
            elif islands[offer.island] >= limits.get(offer.island, inf):
                why = "its island is full"
            elif offer.most is not None and taken[offer.key] >= offer.most:
                why = "no more of them can be had"
            elif config.budget_usd_per_hour and spent + offer.usd_per_hour > config.budget_usd_per_hour:
                why = "over the budget"
            elif speed_ms and config.ttft_p99_ceiling_ms and work * speed_ms > config.ttft_p99_ceiling_ms:
                why = "too slow for the ceiling"
            else:
                possible.append(offer)
                continue
            passed[why] += 1
        if not possible:
            return None, "no offer can be taken: " + ", ".join(f"{n} × {why}" for why, n in passed.most_common())
        if panicking:
            quickest_s = min(self.start_s(offer) for offer in possible)
            limit_s = PANIC_TIMES * max(LEAST_START_S, quickest_s)
            possible = [offer for offer in possible if self.start_s(offer) <= limit_s]
        best = min(possible, key=lambda offer: (self._cost(offer, speeds), self.start_s(offer), offer.key))
        words = f"{best.usd_per_hour:g} USD an hour for {speeds.weight(best.gpu):.2g} × the usual speed"
        return best, f"{best.provisioner}/{best.name}: the cheapest of {len(possible)} ({words})"

    def _cost(self, offer: Offer, speeds: Speeds) -> float:
        return offer.usd_per_hour / speeds.weight(offer.gpu) * (1.0 + self.start_s(offer) / STAY_S)
