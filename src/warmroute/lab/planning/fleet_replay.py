"""One replay of recorded traffic on one fleet, made cheap."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from warmroute.config import Index, Objective
from warmroute.core.prefill_work import ATTENTION_WORK
from warmroute.lab.engine.blocks import BlockContent, mix64
from warmroute.lab.engine.timing import Profile, Timing
from warmroute.lab.planning.recorded_traffic import RecordedRequest, Sample
from warmroute.lab.replay_setup import INDEX_BYTES
from warmroute.lab.request_flow import RequestResults
from warmroute.lab.simulated_node import Conditions, Island, NodeSpec
from warmroute.lab.summary import percentile
from warmroute.lab.workloads.workload_prompt import Blocks, WorkloadPrompt
from warmroute.lab.world import World
from warmroute.scaling.fleet_plan import FleetNode, NodeFigures, PlanRequest, ReplayedFleet, excess
from warmroute.scaling.offers import OfferKey

# The timing of a simulated engine that is as fast as a node: from what the router has learned about the node.
#
#     prefill     = max(step_ms, ms_per_token · n) + ms_per_token · ATTENTION_WORK · n · (c + n/2)
#     decode step = step_ms + slope_ms · context
#
# (n new tokens behind c cached ones; lab/engine/timing.py.) The router learns the same quantities for its
# prices (core/speeds.py, core/speeds.py).

MAX_NUM_SEQS: Final = 512
"""Sequences in one step. Engines do not report their limit; vLLM's is 256 or 1024."""


def fitted_profile(gpu: str, figures: NodeFigures) -> Profile:
    per_token_ms, step_ms = figures.ms_per_token, figures.step_ms
    timing = Timing(
        m=step_ms,
        a=0.0,
        b=per_token_ms,
        d=per_token_ms * ATTENTION_WORK,
        h=0.0,
        e=step_ms,
        f=0.0,
        e2=0.0,
        f2=0.0,
        g=figures.slope_ms,
        overhead_ms=0.0,
    )
    return Profile(
        name=gpu or "gpu", timing=timing, kv_tokens=figures.kv_tokens, kv_bytes_per_token=1, max_num_seqs=MAX_NUM_SEQS
    )


# The sample at another load: more or fewer conversations, each as long as it was.
#
# Conversations that arrive faster would not do: if each were over sooner, the caches would hold as many at a time as
# before, and a fleet whose caches are too small for the load would look large enough. So more load is copies of
# conversations, a few minutes earlier or later, with content of their own. What several conversations share, such as a
# system prompt, the copies share, too. Less load leaves conversations out.
#
# Turns that would come before or after the recorded time come at its other end instead, so that every part of it gets
# as much more. What nobody has cached comes where it did: when a conversation begins, and at the beginning of the
# recorded time, which is not measured. So turns that go to the beginning are those of another conversation, and turns
# that go to the end repeat what their own conversation has cached. In a sample that begins with a cut
# (recorded_traffic.py), all of this happens after the cut: what fills the caches before it keeps its time.

MAX_SHIFT: Final = 1 / 6
"""How much earlier or later a copy begins at most, as a share of the recorded time."""
_HASHES: Final = 1 << 64


class OtherLoads:
    def __init__(self, sample: Sample, block_size: int) -> None:
        self._sample = sample
        self._block_size = block_size
        by_conversation: dict[int, list[RecordedRequest]] = {}
        for one in sample.requests:
            by_conversation.setdefault(one.conversation, []).append(one)
        self._conversations = list(by_conversation.values())
        self._shared: set[int] | None = None

    def prompts(self, load: float, variant: int = 0) -> tuple[list[WorkloadPrompt], int]:
        """Return `load` times as many requests in the order of their arrival, and how many come before the measured
        part. In another variant, other conversations are copied or left out, and copies come at other times."""
        sample = self._sample
        first_ms, wanted = sample.requests[0].at_ms, round(load * len(sample.requests))
        requests = self._fewer(wanted, variant) if load < 1.0 else self._more(wanted, variant)
        requests.sort(key=lambda one: one.at_ms)
        warm_up = sum(one.at_ms < sample.from_ms for one in requests)
        return [_sent_at(one.prompt, one.at_ms - first_ms) for one in requests], warm_up

    def _fewer(self, wanted: int, variant: int) -> list[RecordedRequest]:
        kept: list[RecordedRequest] = []
        for turns in self._shuffled(variant):
            kept += turns[: wanted - len(kept)]
        return kept

    def _more(self, wanted: int, variant: int) -> list[RecordedRequest]:
        requests, shuffled = list(self._sample.requests), self._shuffled(variant)
        number = 0
        while len(requests) < wanted:
            number += 1
            for turns in shuffled:
                requests += self._copy(turns[: wanted - len(requests)], number, variant)
        return requests

    def _shuffled(self, variant: int) -> list[list[RecordedRequest]]:
        """Return the conversations in an order that has nothing to do with their times."""
        return sorted(self._conversations, key=lambda turns: mix64(turns[0].conversation, 2 + (variant << 32)))

    def _copy(self, turns: Sequence[RecordedRequest], number: int, variant: int) -> list[RecordedRequest]:
        """Return the turns at other times within the recorded time, with content of their own."""
        if not turns:
            return []
        if self._shared is None:
            self._shared = _shared_blocks(self._sample.requests, self._block_size)
        first_ms, until_ms = self._sample.complete_from_ms, self._sample.until_ms
        chance = mix64(turns[0].conversation, 2 + number + (variant << 32)) % _HASHES / _HASHES
        span_ms = until_ms - first_ms
        shift_ms = (2.0 * chance - 1.0) * MAX_SHIFT * span_ms
        if first_ms <= turns[-1].at_ms < first_ms - shift_ms:  # all of them would go to the end
            shift_ms = -shift_ms
        copies = []
        for one in turns:
            if one.at_ms < first_ms:
                rounds, at_ms = 0.0, one.at_ms - first_ms
            else:
                rounds, at_ms = divmod(one.at_ms + shift_ms - first_ms, span_ms) if span_ms > 0 else (0.0, 0.0)
            copy = 2 * number + (rounds > 0)
            prompt = msgspec.structs.replace(
                one.prompt,
                blocks=_CopiedBlocks(one.prompt.blocks, self._shared, copy),
                session=b"%b, copy %d" % (one.prompt.session, copy) if one.prompt.session else b"",
            )
            copies.append(RecordedRequest(prompt, first_ms + at_ms, one.conversation))
        return copies


def _sent_at(prompt: WorkloadPrompt, at_ms: float) -> WorkloadPrompt:
    """Return a request that is sent at this time, whatever has been answered."""
    return msgspec.structs.replace(prompt, at_ms=at_ms, number=-1, follows=-1, think_ms=0.0, next_turn=None)


def _shared_blocks(requests: Sequence[RecordedRequest], block_size: int) -> set[int]:
    """Return the hashes of blocks that several conversations have."""
    by_conversation: dict[int, set[int]] = {}
    for one in requests:
        blocks = one.prompt.blocks.content(block_size).hashes(0, one.prompt.prompt_tokens // block_size)
        by_conversation.setdefault(one.conversation, set()).update(blocks)
    seen = Counter(block for blocks in by_conversation.values() for block in blocks)
    return {block for block, conversations in seen.items() if conversations > 1}


class _CopiedBlocks:
    def __init__(self, blocks: Blocks, shared: set[int], number: int) -> None:
        self._blocks, self._shared, self._key = blocks, shared, mix64(number, 7) >> 2

    def content(self, block_size: int) -> BlockContent:
        return _CopiedContent(self._blocks.content(block_size), self._shared, self._key)


class _CopiedContent:
    __slots__ = ("_content", "_key", "_shared")

    def __init__(self, content: BlockContent, shared: set[int], key: int) -> None:
        self._content, self._shared, self._key = content, shared, key

    def hashes(self, start: int, stop: int) -> list[int]:
        shared, key = self._shared, self._key
        return [one if one in shared else one ^ key for one in self._content.hashes(start, stop)]

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self._content.token_ids(start, stop)


# One replay of the recorded traffic on one fleet, with production's routing in virtual time.
#
# It is made cheap, because searches run often: large blocks, few polls, and it stops as soon as the objective is out of
# reach.

BLOCK_SIZES: Final = ((16_384, 256), (4096, 128), (0, 64))
"""Mean prompt length, and the block size that is precise enough from this length on."""
POLL_INTERVAL_S: Final = 2.0
"""The router polls more often. A search replays hours, and polls are its idle work."""
CHECK_EVERY: Final = 32
"""Requests between two looks at whether the objective is out of reach."""
HOPELESS: Final = 2.0
"""A first token that takes this many times the limit is hopeless. Enough of them end a replay early."""
MAX_LOST: Final = 0.01
"""Fraction of requests that may be rejected or fail."""
LOST_EXCESS: Final = 10.0
"""Excess of a fleet that loses requests. It is far beyond any that only makes them wait."""


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
