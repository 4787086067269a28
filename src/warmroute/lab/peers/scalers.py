"""Other scalers to compare with. They know nothing of caches, add the cheapest offer and remove the newest node.

threshold   adds a node when more than `up` requests wait for each node, and removes one when fewer than `down` do, with
            a cooldown for each direction.
hpa         Kubernetes' HorizontalPodAutoscaler on utilisation, which is the fraction of time in which the engine runs,
            as nvidia-smi and DCGM measure it:
                desired = ceil(nodes · metric / target), no change within a tolerance of 0.1, every 15 s
            When it grows, nodes that are not ready count as idle. It adds up to the larger of 4 nodes and 100 % every
            15 s, and shrinks to the highest number desired within the last 5 minutes (kubernetes.io, "Horizontal Pod
            Autoscaling", algorithm details and default behaviour). With kv=1 the metric is KV cache usage.
keda        KEDA with a Prometheus trigger on the number of requests that wait at engines and router, as in vLLM
            production-stack's guide ("Autoscaling with KEDA": vllm:num_requests_waiting): the HPA's rule with an
            average value, desired = ceil(waiting / target), read every 30 s. With running=1 running requests count,
            too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from warmroute.config import Scaling
from warmroute.lab.simulated_scaling import BusyShares
from warmroute.scaling.capacity import GpuSpeeds
from warmroute.scaling.observer import FleetView
from warmroute.scaling.offer_selection import OfferSelector
from warmroute.scaling.scaling_decision import AddNode, PaidNode, RemoveNode, ScalingDecision, paid_for


def decision_for(
    view: FleetView, pending: Sequence[PaidNode], wanted: int, reason: str, config: Scaling, offers: OfferSelector
) -> ScalingDecision:
    """Return the decision that makes the fleet one of `wanted` nodes."""
    serving = [node for node in view.nodes if node.serving]
    count = len(serving) + len(pending)
    wanted = min(config.max_nodes, max(config.min_nodes, wanted))
    decision = ScalingDecision(at_s=view.now_s, desired_nodes=wanted, nodes=count, reasons=(reason,))
    if wanted > count:
        paid = [*(PaidNode(node.offer, node.island, node.usd_per_hour) for node in view.nodes), *pending]
        additions = []
        for _ in range(wanted - count):
            offer, reason = offers.select(paid, GpuSpeeds(()), view.now_s)
            if offer is None:
                break
            additions.append(AddNode(offer, reason))
            paid.append(paid_for(offer))
        decision.additions = tuple(additions)
    elif wanted < len(serving):
        ours = [node.name for node in serving if node.offer is not None]
        decision.removals = tuple(RemoveNode(name, "newest node") for name in reversed(ours[wanted - len(serving) :]))
    return decision


class Threshold:
    def __init__(
        self, config: Scaling, offers: OfferSelector, busy: BusyShares, *, up: float = 4.0, down: float = 1.0,
        cooldown_up_s: float = 60.0, cooldown_down_s: float = 180.0,
    ) -> None:  # fmt: skip
        self._config, self._offers = config, offers
        self._up, self._down = up, down
        self._cooldown_up_s, self._cooldown_down_s = cooldown_up_s, cooldown_down_s
        self._changed_s = float("-inf")

    def decide(self, view: FleetView, pending: Sequence[PaidNode], wall_s: float = 0.0) -> ScalingDecision:
        serving = sum(node.serving for node in view.nodes)
        count = serving + len(pending)
        queue = view.stable.waiting / max(1, serving)
        since_s = view.now_s - self._changed_s
        wanted = count
        if queue > self._up and since_s >= self._cooldown_up_s:
            wanted = count + 1
        elif queue < self._down and not pending and since_s >= self._cooldown_down_s:
            wanted = count - 1
        decision = decision_for(
            view, pending, wanted, f"{queue:.1f} requests wait for each node", self._config, self._offers
        )
        if decision.changes:
            self._changed_s = view.now_s
        return decision


class Hpa:
    def __init__(
        self, config: Scaling, offers: OfferSelector, busy: BusyShares, *, target: float = 0.7, tolerance: float = 0.1,
        period_s: float = 15.0, stabilisation_s: float = 300.0, kv: float = 0.0,
    ) -> None:  # fmt: skip
        self._config, self._offers, self._busy = config, offers, busy
        self._target, self._tolerance = target, tolerance
        self._period_s, self._stabilisation_s = period_s, stabilisation_s
        self._by_kv = bool(kv)
        self._next_s = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, view: FleetView, pending: Sequence[PaidNode], wall_s: float = 0.0) -> ScalingDecision:
        serving = [node for node in view.nodes if node.serving]
        count = len(serving) + len(pending)
        if view.now_s < self._next_s:
            return ScalingDecision(at_s=view.now_s, desired_nodes=count, nodes=count)
        self._next_s = view.now_s + self._period_s
        busy = {node.name: node.kv_usage for node in serving} if self._by_kv else self._busy()
        shares = [busy.get(node.name, 0.0) for node in serving]
        mean = sum(shares) / len(shares) if shares else 1.0
        if mean > self._target and pending:
            mean = max(self._target, sum(shares) / count)
        ratio = mean / self._target
        now = count if abs(ratio - 1.0) <= self._tolerance else ceil((len(serving) if ratio < 1.0 else count) * ratio)
        now = min(now, max(2 * count, count + 4))
        self._wanted.append((view.now_s, now))
        while self._wanted[0][0] < view.now_s - self._stabilisation_s:
            self._wanted.popleft()
        wanted = now
        if now < count:
            wanted = min(count, max(one for _, one in self._wanted))
        return decision_for(view, pending, wanted, f"mean utilisation is {mean:.0%}", self._config, self._offers)


class Keda:
    def __init__(
        self, config: Scaling, offers: OfferSelector, busy: BusyShares, *, target: float = 5.0, tolerance: float = 0.1,
        polling_s: float = 30.0, stabilisation_s: float = 300.0, running: float = 0.0,
    ) -> None:  # fmt: skip
        self._config, self._offers = config, offers
        self._target, self._tolerance = target, tolerance
        self._polling_s, self._stabilisation_s = polling_s, stabilisation_s
        self._running = bool(running)
        self._next_s = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, view: FleetView, pending: Sequence[PaidNode], wall_s: float = 0.0) -> ScalingDecision:
        count = sum(node.serving for node in view.nodes) + len(pending)
        if view.now_s < self._next_s:
            return ScalingDecision(at_s=view.now_s, desired_nodes=count, nodes=count)
        self._next_s = view.now_s + self._polling_s
        requests = view.waiting + sum(node.load if self._running else node.queued for node in view.nodes)
        ratio = requests / (self._target * max(1, count))
        now = count if abs(ratio - 1.0) <= self._tolerance else ceil(requests / self._target)
        now = min(now, max(2 * count, count + 4))
        self._wanted.append((view.now_s, now))
        while self._wanted[0][0] < view.now_s - self._stabilisation_s:
            self._wanted.popleft()
        wanted = min(count, max(one for _, one in self._wanted)) if now < count else now
        return decision_for(view, pending, wanted, f"{requests} requests", self._config, self._offers)


SCALERS = {"threshold": Threshold, "hpa": Hpa, "keda": Keda}
