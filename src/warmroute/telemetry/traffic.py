"""What routing was worth: tokens, time to first token and saved prefill time of complete responses, by model and route.

A cached token saves the time that its node would have needed to prefill it:

    saved(cached) = ms_per_token · (work(prompt, 0) − work(prompt − cached, cached))
                  = ms_per_token · (cached + ATTENTION_WORK / 2 · cached²)                               [ms]

`saved_ms` compares with a cold fleet: the cached tokens are those that the node reported, or the predicted ones if it
reported none. `round_robin_saved_ms` estimates what round robin would have saved: the mean over all candidates of what
the prompt's prefix on each of them would have saved. It assumes the caches that this router's choices have filled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from warmroute.fleet.node_speed import saved_work
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatch import Dispatch
from warmroute.telemetry.popular_prefixes import PopularPrefixes

MAX_ROUTES: Final = 256
"""Pairs of model and route that are counted apart. Further ones count as OTHER."""
OTHER: Final = ("(other)", "")
TTFT_BOUNDS_MS: Final = tuple(1.25**step for step in range(53))
"""Upper bounds of the histogram's buckets, 1 ms to 110 s; one more bucket has the rest."""


class RouteTraffic(msgspec.Struct, eq=False):
    """Totals since the start. All counts are of complete responses with a status below 400."""

    requests: int = 0
    prompt_tokens: int = 0
    """As the nodes reported them, or as the router counted them; 0 for prompts without a count."""
    cached_tokens: int = 0
    """Those of the prompt tokens that were cached: reported, or predicted where a node reports none."""
    predicted_tokens: float = 0.0
    """Cached tokens as the router predicted them."""
    reported_tokens: int = 0
    """Cached tokens as nodes reported them."""
    round_robin_tokens: float = 0.0
    """An estimate: cached tokens under round robin."""
    output_tokens: int = 0
    saved_ms: float = 0.0
    """Prefill time saved, compared with a cold fleet."""
    round_robin_saved_ms: float = 0.0
    """An estimate: prefill time that round robin would have saved."""
    prompt_ms: float = 0.0
    """Prefill time of the prompts on a cold fleet."""
    hit_shares: float = 0.0
    """Sum over the requests with prompt tokens of the share that was cached."""
    hit_share_squares: float = 0.0
    counted_prompts: int = 0
    """Requests with prompt tokens."""
    sampled_blocks: int = 0
    """Blocks of their prompts, of those that index/reuse.py samples."""
    known_blocks: int = 0
    """Those that an earlier prompt had, whether or not a node still has them."""
    ttft_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_MS) + 1))
    """Streamed responses by time from arrival to first byte, in the buckets of TTFT_BOUNDS_MS."""


SUMMED: Final = tuple(name for name in RouteTraffic.__struct_fields__ if name != "ttft_counts")


class Traffic:
    def __init__(self) -> None:
        self.by_route: dict[tuple[str, str], RouteTraffic] = {}
        """By model and route. The route is empty for requests that match none."""
        self.prefixes = PopularPrefixes()

    def request_completed(self, attempts: Attempts, now_s: float) -> None:
        """Count a complete response. The dispatcher calls it after the client has everything."""
        request, ticket, query = attempts.request, attempts.ticket, attempts.decision.query
        key = (query.group.model if query is not None else request.model, request.route)
        of_route = self.by_route.get(key)
        if of_route is None:
            of_route = self._add(key)
        of_route.requests += 1
        if request.streams:
            ttft_ms = (ticket.first_token_s - request.arrived_s) * 1000.0
            of_route.ttft_counts[bisect_left(TTFT_BOUNDS_MS, ttft_ms)] += 1
        prompt, cached, output = attempts.reported or (None, None, None)
        if output:
            of_route.output_tokens += output
        predicted = 0
        if isinstance(ticket, Dispatch):
            self.prefixes.sample(key, request.tenant, ticket.prediction, attempts.lookup, now_s)
            predicted = ticket.cached
            if ticket.prediction is not None:
                of_route.sampled_blocks += ticket.prediction.sampled_blocks
                of_route.known_blocks += ticket.prediction.known_blocks
            if prompt is None:
                prompt = ticket.tokens
        if not prompt:
            return
        if cached is not None:
            cached = min(max(0, cached), prompt)  # a node may report anything
            of_route.reported_tokens += cached
        else:
            cached = min(predicted, prompt)
        of_route.prompt_tokens += prompt
        of_route.cached_tokens += cached
        of_route.predicted_tokens += predicted
        ms_per_token = ticket.node.speed.ms_per_token
        of_route.saved_ms += ms_per_token * saved_work(cached, cached * cached)
        of_route.prompt_ms += ms_per_token * saved_work(prompt, prompt * prompt)
        share = cached / prompt
        of_route.counted_prompts += 1
        of_route.hit_shares += share
        of_route.hit_share_squares += share * share
        if attempts.sample is not None:
            attempts.sample.completed(attempts, key, prompt, cached, ms_per_token)
        if query is not None and query.known_hits:
            tokens, squares = query.mean_hit()
            of_route.round_robin_tokens += tokens
            of_route.round_robin_saved_ms += ms_per_token * saved_work(tokens, squares)

    def requests(self, key: tuple[str, str]) -> int:
        """Return the number of complete requests of a model and route."""
        traffic = self.by_route.get(key)
        return traffic.requests if traffic is not None else 0

    @property
    def total(self) -> RouteTraffic:
        """The sum over all routes. A thread may ask for it."""
        routes = list(self.by_route.values())
        if len(routes) == 1:
            return routes[0]
        total = RouteTraffic()
        for name in SUMMED:
            setattr(total, name, sum([getattr(route, name) for route in routes]))
        if routes:
            total.ttft_counts = [sum(counts) for counts in zip(*[route.ttft_counts for route in routes], strict=True)]
        return total

    def _add(self, key: tuple[str, str]) -> RouteTraffic:
        if len(self.by_route) >= MAX_ROUTES:
            key = OTHER
        return self.by_route.setdefault(key, RouteTraffic())


def ttft_percentile(counts: Sequence[int], fraction: float) -> float | None:
    """Return a percentile in milliseconds, interpolated within its bucket; None without any response."""
    wanted = fraction * sum(counts)
    if not wanted:
        return None
    seen = 0.0
    for count, (low, high) in zip(counts, pairwise((0.0, *TTFT_BOUNDS_MS, TTFT_BOUNDS_MS[-1])), strict=True):
        if count and seen + count >= wanted:
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return TTFT_BOUNDS_MS[-1]
