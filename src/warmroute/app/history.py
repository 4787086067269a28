"""An hour of history in fixed memory, for the live page: two minutes by the second, the rest by ten seconds.

A point has the rates between two readings of the router's counters, and the gauges at the second one. A reading takes
some tens of microseconds for a fleet of 64 nodes, whether or not anybody looks at the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from warmroute._kernel import RouteTraffic, TokenTraffic
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.traffic import Counters, Traffic, time_percentile
from warmroute.edge.client_errors import is_client_error

FINE_S: Final = 1.0
FINE_POINTS: Final = 120
"""Two minutes with a point each second."""
COARSE_S: Final = 10.0
COARSE_POINTS: Final = 360
"""An hour with a point each ten seconds."""
WINDOW_S: Final = 300.0
"""The time for which the page shows sums: requests, tokens and rejections of the last five minutes."""
MAX_SCALING_CHANGES: Final = 20


class Point(NamedTuple):
    """None where nothing was measured: a hit rate without prompts, a TTFT without responses."""

    at_s: float
    requests_per_s: float
    hit_ratio: float | None
    round_robin_hit_ratio: float | None
    """Estimated hit rate of round robin."""
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    duration_p50_ms: float | None
    """Median time from arrival to the end of the response, streamed or not."""
    duration_p90_ms: float | None
    token_p50_ms: float | None
    """Median time between two output tokens of a streamed response."""
    token_p90_ms: float | None
    saved_gpus: float
    """GPU seconds of prefill saved per second, compared with a cold fleet."""
    round_robin_saved_gpus: float
    """An estimate of what round robin would have saved."""
    waiting: int
    rejected_per_s: float
    failed_per_s: float
    client_errors_per_s: float
    """Requests rejected because of what the client sent (4xx), without those that admission rejected."""
    in_flight: int
    nodes_up: int
    kv_usage: float
    """Mean over the nodes that are up."""


class Sums(NamedTuple):
    """The totals of one route, or of all of them, at one time; also their difference between two times."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    reported_tokens: int
    round_robin_tokens: float
    output_tokens: int
    saved_gpu_ms: float
    round_robin_saved_gpu_ms: float
    short_reports: int
    ttft_counts: tuple[int, ...]
    token_counts: tuple[int, ...]
    duration_counts: tuple[int, ...]
    duration_sum_ms: float

    def since(self, before: Sums | None) -> Sums:
        if before is None:
            return self
        return Sums(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
            self.predicted_tokens - before.predicted_tokens,
            self.reported_tokens - before.reported_tokens,
            self.round_robin_tokens - before.round_robin_tokens,
            self.output_tokens - before.output_tokens,
            self.saved_gpu_ms - before.saved_gpu_ms,
            self.round_robin_saved_gpu_ms - before.round_robin_saved_gpu_ms,
            self.short_reports - before.short_reports,
            _difference(self.ttft_counts, before.ttft_counts),
            _difference(self.token_counts, before.token_counts),
            _difference(self.duration_counts, before.duration_counts),
            self.duration_sum_ms - before.duration_sum_ms,
        )

    @property
    def hit_ratio(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def round_robin_hit_ratio(self) -> float | None:
        return self.round_robin_tokens / self.prompt_tokens if self.prompt_tokens else None

    def ttft_ms(self, fraction: float) -> float | None:
        return time_percentile(self.ttft_counts, fraction)

    def token_ms(self, fraction: float) -> float | None:
        return time_percentile(self.token_counts, fraction)

    def duration_ms(self, fraction: float) -> float | None:
        return time_percentile(self.duration_counts, fraction)

    @property
    def token_at_most_ms(self) -> float | None:
        """The time of all responses by their output tokens. It contains queue and prefill, so a token took less. It is
        known for responses that are not streamed, too."""
        return self.duration_sum_ms / self.output_tokens if self.output_tokens else None


def _difference(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([one - other for one, other in zip(now, before, strict=True)])


def sums_of(traffic: RouteTraffic) -> Sums:
    return Sums(
        traffic.requests, traffic.prompt_tokens, traffic.cached_tokens, traffic.predicted_tokens,
        traffic.reported_tokens, traffic.round_robin_tokens, traffic.output_tokens, traffic.saved_gpu_ms,
        traffic.round_robin_saved_gpu_ms, traffic.short_reports, tuple(traffic.ttft_counts),
        tuple(traffic.inter_token.counts), tuple(traffic.duration.counts), traffic.duration.sum_ms,
    )  # fmt: skip


class TenantSums(NamedTuple):
    """The complete responses of one tenant, of all models."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def plus(self, more: TenantSums | TokenTraffic) -> TenantSums:
        return TenantSums(
            self.requests + more.requests, self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens, self.output_tokens + more.output_tokens,
        )  # fmt: skip

    def since(self, before: TenantSums) -> TenantSums:
        return TenantSums(*[now - then for now, then in zip(self, before, strict=True)])


NO_REQUESTS: Final = TenantSums(0, 0, 0, 0)


class ScalingChange(NamedTuple):
    at_s: float
    nodes: int
    desired_nodes: int
    reasons: tuple[str, ...]


class _Reading(NamedTuple):
    at_s: float
    sums: Sums
    rejected: int
    failed: int
    client_errors: int


RouteKey = tuple[str, str]
RejectionKey = tuple[str, int, str]


class _WindowStart(NamedTuple):
    """The totals at one time, for differences with the current ones."""

    at_s: float
    total: Sums
    routes: dict[RouteKey, Sums]
    tenants: dict[str, TenantSums]
    rejected: dict[RejectionKey, int]


class History:
    def __init__(
        self,
        traffic: Traffic,
        counters: Counters,
        fleet: Fleet,
        waiting: Callable[[], int],
        scaling: Callable[[], ScalingChange | None] = lambda: None,
    ) -> None:
        """`waiting`: requests in the admission queue. `scaling`: the autoscaler's last decision."""
        self._traffic = traffic
        self._counters = counters
        self._fleet = fleet
        self._waiting = waiting
        self._scaling = scaling
        self.fine: deque[Point] = deque(maxlen=FINE_POINTS)
        self.coarse: deque[Point] = deque(maxlen=COARSE_POINTS)
        self.scaling_changes: deque[ScalingChange] = deque(maxlen=MAX_SCALING_CHANGES)
        self._fine: _Reading | None = None
        self._coarse: _Reading | None = None
        self._window: deque[_WindowStart] = deque(maxlen=int(WINDOW_S / COARSE_S) + 1)

    def sample(self, now_s: float) -> None:
        """Add the points that are due. Call it every FINE_S."""
        reading = self._read(now_s)
        if self._fine is not None and now_s > self._fine.at_s:
            self.fine.append(self._point(self._fine, reading))
        self._fine = reading
        if self._coarse is None or now_s - self._coarse.at_s >= COARSE_S - FINE_S / 2:
            if self._coarse is not None:
                self.coarse.append(self._point(self._coarse, reading))
            self._coarse = reading
            self._window.append(self._totals(now_s))
            self._traffic.keep_nodes({node.name for node in self._fleet})
        self._note_scaling()

    def _read(self, now_s: float) -> _Reading:
        counters = self._counters
        failed = sum([count for (status, _), count in counters.errors.items() if status >= 500])
        rejected = sum(counters.rejected.values())
        client_errors = sum([count for (status, _), count in counters.errors.items() if is_client_error(status)])
        return _Reading(now_s, sums_of(self._traffic.total), rejected, failed + counters.interrupted, client_errors)

    def _point(self, before: _Reading, now: _Reading) -> Point:
        seconds = now.at_s - before.at_s
        sums = now.sums.since(before.sums)
        up = in_flight = 0
        kv_usage = 0.0
        for node in self._fleet:
            in_flight += node.inflight + node.other_load
            if node.health.state is HealthState.UP and not node.draining:
                up += 1
                kv_usage += node.kv_usage
        return Point(
            now.at_s,
            sums.requests / seconds,
            sums.hit_ratio,
            sums.round_robin_hit_ratio,
            sums.ttft_ms(0.5),
            sums.ttft_ms(0.9),
            sums.duration_ms(0.5),
            sums.duration_ms(0.9),
            sums.token_ms(0.5),
            sums.token_ms(0.9),
            sums.saved_gpu_ms / 1000.0 / seconds,
            sums.round_robin_saved_gpu_ms / 1000.0 / seconds,
            self._waiting(),
            (now.rejected - before.rejected) / seconds,
            (now.failed - before.failed) / seconds,
            (now.client_errors - before.client_errors) / seconds,
            in_flight,
            up,
            kv_usage / up if up else 0.0,
        )

    def _totals(self, now_s: float) -> _WindowStart:
        """Return the current totals. A thread may call it while requests change them."""
        traffic = self._traffic
        routes = {key: sums_of(one) for key, one in traffic.by_route.copy().items()}
        tenants: dict[str, TenantSums] = {}
        for (_model, tenant), one in traffic.by_tenant.copy().items():
            tenants[tenant] = tenants.get(tenant, NO_REQUESTS).plus(one)
        return _WindowStart(now_s, sums_of(traffic.total), routes, tenants, dict(self._counters.rejected_by_tenant))

    def _note_scaling(self) -> None:
        last = self._scaling()
        if last is None:
            return
        known = self.scaling_changes[-1] if self.scaling_changes else None
        if known is None or (known.nodes, known.desired_nodes) != (last.nodes, last.desired_nodes):
            self.scaling_changes.append(last)

    # The last five minutes.

    def window(self, now_s: float) -> Window:
        """Return the sums of the last WINDOW_S, or since the start."""
        now = self._totals(now_s)
        start = self._window[0] if self._window else now
        routes = {key: sums.since(start.routes.get(key)) for key, sums in now.routes.items()}
        tenants = {key: sums.since(start.tenants.get(key, NO_REQUESTS)) for key, sums in now.tenants.items()}
        rejected = {key: count - start.rejected.get(key, 0) for key, count in now.rejected.items()}
        return Window(now_s - start.at_s, now.total.since(start.total), routes, tenants, rejected)


class Window(NamedTuple):
    seconds: float
    total: Sums
    routes: Mapping[RouteKey, Sums]
    tenants: Mapping[str, TenantSums]
    rejected: Mapping[RejectionKey, int]
    """Rejected requests by tenant, priority and reason."""
