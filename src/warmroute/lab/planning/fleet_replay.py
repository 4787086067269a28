"""One replay of the recorded traffic on one fleet, with production's routing in virtual time.

It is made cheap, because searches run often: large blocks, few polls, and it stops as soon as the objective is out of
reach.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from warmroute.config import Index, Objective
from warmroute.fake_engine.profiles import Profile
from warmroute.replay.planning.engine_fit import fitted_profile
from warmroute.replay.planning.other_loads import OtherLoads
from warmroute.replay.planning.recorded_traffic import Sample
from warmroute.replay.policy_spec import INDEX_BYTES
from warmroute.replay.simulation.conditions import Conditions, Island, NodeSpec
from warmroute.replay.simulation.results import RequestResults
from warmroute.replay.simulation.world import World
from warmroute.replay.summary import percentile
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.scaling.fleet_plan import FleetNode, PlanRequest, ReplayedFleet, excess
from warmroute.scaling.offer import OfferKey

BLOCK_SIZES: Final = ((16_384, 256), (4096, 128), (0, 64))
"""Mean prompt length, and the block size that is precise enough from this length on."""
POLL_INTERVAL_S: Final = 2.0
CHECK_EVERY: Final = 32
HOPELESS: Final = 2.0
"""A first token that takes this many times the limit counts as hopeless."""
MAX_LOST: Final = 0.01
"""Fraction of requests that may be rejected or fail."""
LOST_EXCESS: Final = 10.0


class FleetReplay:
    """Replays one sample on several fleets."""

    def __init__(self, request: PlanRequest, sample: Sample, pause: Callable[[], object] = lambda: None) -> None:
        """`pause` is called often; it sleeps where the process has used up its share of a core."""
        self._request = request
        self._sample = sample
        self._pause = pause
        figures = request.figures
        self._profiles: dict[str, Profile] = {gpu: fitted_profile(gpu, one) for gpu, one in figures.items()}
        self._usual = next(iter(self._profiles.values()))
        prompts = sample.requests
        mean_tokens = sum(one.prompt.prompt_tokens for one in prompts) / len(prompts)
        self._block_size = next(size for tokens, size in BLOCK_SIZES if mean_tokens >= tokens)
        self._loads = OtherLoads(sample, self._block_size)
        self.arrivals_per_s, self.tokens_per_s = sample.arrivals_per_s, sample.tokens_per_s
        self.measured = len(sample.requests) - sample.warm_up
        """Requests that are measured, as they were recorded."""
        self.replays = self.requests = 0

    def run(
        self, nodes: Sequence[FleetNode], load: float, offer: OfferKey | None = None, variant: int = 0
    ) -> ReplayedFleet:
        """Replay the sample with `load` times the recorded arrivals on these nodes. In another variant, other
        conversations are copied or left out, copies come at other times, and the router's random choices differ."""
        sample, request = self._sample, self._request
        count = simulated_nodes(len(nodes), sample.share)
        simulated = [nodes[at * len(nodes) // count] for at in range(count)]
        prompts, warm_up = self._loads.prompts(load * count / (len(nodes) * sample.share), variant)
        config = msgspec.structs.replace(request.router, index=Index(memory_bytes=INDEX_BYTES))
        islands = {name: Island(round_trip_ms) for name, round_trip_ms in request.round_trip_ms.items()}
        specs = [
            NodeSpec(
                f"node-{at}",
                self._profiles.get(node.gpu, self._usual),
                island=node.island,
                block_size=self._block_size,
                usd_per_hour=node.usd_per_hour,
            )
            for at, node in enumerate(simulated)
        ]
        conditions = Conditions(
            seed=1 + variant, islands=islands, poll_interval_s=POLL_INTERVAL_S, stale_s=5 * POLL_INTERVAL_S
        )
        world = World(specs, conditions, config)
        self.replays += 1
        hopeless = _Hopeless(world, request.objective, len(prompts) - warm_up)
        world.run(self._prompts(prompts, hopeless), warm_up=warm_up)
        usd = sum(node.usd_per_hour for node in nodes)
        fleet = _measured(world.results, request.objective, len(nodes), usd, load, offer, hopeless.found)
        return msgspec.structs.replace(
            fleet, arrivals_per_s=load * sample.arrivals_per_s, tokens_per_s=load * sample.tokens_per_s
        )

    def _prompts(self, prompts: Sequence[WorkloadPrompt], hopeless: _Hopeless) -> Iterator[WorkloadPrompt]:
        for at, prompt in enumerate(prompts):
            self._pause()
            if at % CHECK_EVERY == 0 and hopeless.check():
                return
            self.requests += 1
            hopeless.arrivals_ms.append(prompt.at_ms)
            yield prompt


def simulated_nodes(nodes: int, share: float) -> int:
    """Return how many of the nodes serve this share of the fleet's requests in a replay."""
    return max(1, round(nodes * share))


class _Hopeless:
    """Whether the first tokens that are, or will be, far over the limit are too many to meet the objective."""

    def __init__(self, world: World, objective: Objective, measured: int) -> None:
        self._world = world
        self._warm_up_results = world.results
        self.found = False
        self.arrivals_ms: list[float] = []
        self._limits = [
            (HOPELESS * limit_ms, allowed * measured + CHECK_EVERY)
            for limit_ms, allowed in ((objective.ttft_p90_ms, 0.1), (objective.ttft_p99_ms, 0.01))
            if limit_ms
        ]

    def check(self) -> bool:
        results, now_ms = self._world.results, self._world.calendar.now_ms
        answered = len(results.ttft_ms)
        if results is not self._warm_up_results:
            answered += len(self._warm_up_results.ttft_ms)
        for limit_ms, allowed in self._limits:
            waiting = bisect_left(self.arrivals_ms, now_ms - limit_ms) - answered  # at least as many wait for so long
            if max(waiting, sum(one > limit_ms for one in results.ttft_ms)) > allowed:
                self.found = True
        return self.found


def _measured(
    results: RequestResults, objective: Objective, nodes: int, usd_per_hour: float, load: float, offer: OfferKey | None,
    hopeless: bool,
) -> ReplayedFleet:  # fmt: skip
    ttft_ms = sorted(results.ttft_ms)
    fleet = ReplayedFleet(
        nodes=nodes,
        usd_per_hour=usd_per_hour,
        offer=offer,
        load=load,
        ttft_p50_ms=percentile(ttft_ms, 0.5),
        ttft_p90_ms=percentile(ttft_ms, 0.9),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        inter_token_p90_ms=percentile(sorted(results.inter_token_ms), 0.9),
        good_ratio=results.good_first_tokens / len(ttft_ms) if ttft_ms else None,
        hit_ratio=results.cached_tokens / results.prompt_tokens if results.prompt_tokens else 0.0,
    )
    over = excess(
        objective, fleet.ttft_p90_ms, fleet.ttft_p99_ms, fleet.inter_token_p90_ms, fleet.good_ratio
    )  # fmt: skip
    if hopeless:
        over = max(over, HOPELESS)
    if results.total("rejected") + results.total("failed") > MAX_LOST * results.total("arrived"):
        over = max(over, LOST_EXCESS)
    return msgspec.structs.replace(fleet, excess=over)
