"""Other ways to scale, to compare with; all of them blind to caches. They take the cheapest offer, and give back the
newest node.

threshold   one node more where over `up` requests wait for each node, one less where fewer than `down` do, with a
            cooldown for each.
hpa         Kubernetes' HorizontalPodAutoscaler on utilisation (here: the share of time in which an engine runs, which
            is what nvidia-smi and DCGM call GPU utilisation):
                desired = ceil(nodes · metric / target), nothing within a tolerance of 0.1, every 15 s
            nodes that are not ready count as idle when growing; it grows by the larger of 4 and 100 % each 15 s, and
            shrinks to the highest that it wanted within the last 5 minutes. kubernetes.io, "Horizontal Pod
            Autoscaling", algorithm details and default behaviour. With kv=1 the metric is the share of KV memory in
            use, which people take who have seen that an engine with one request is a busy one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from warmroute.config import Scaling
from warmroute.scaling.capacity import Speeds
from warmroute.scaling.choose_up import Holding, Market
from warmroute.scaling.loop import Coming, Down, Step, Up
from warmroute.scaling.observe import FleetView

Busy = Callable[[], dict[str, float]]


def _change(view: FleetView, coming: Sequence[Coming], wanted: int, why: str, config: Scaling, market: Market) -> Step:
    serving = [node for node in view.nodes if node.serving]
    count = len(serving) + len(coming)
    wanted = min(config.max_nodes, max(config.min_nodes, wanted))
    step = Step(at_s=view.now_s, desired_nodes=wanted, nodes=count, reasons=(why,))
    if wanted > count:
        held = [Holding(node.offer, node.island, node.usd_per_hour) for node in view.nodes]
        held += [Holding(one.offer, one.island, one.usd_per_hour) for one in coming]
        ups = []
        for _ in range(wanted - count):
            offer, words = market.choose(held, Speeds(()), view.now_s)
            if offer is None:
                break
            ups.append(Up(offer, words))
            held.append(Holding(offer.key, offer.island, offer.usd_per_hour))
        step.ups = tuple(ups)
    elif wanted < len(serving):
        ours = [node.name for node in serving if node.offer is not None]
        step.downs = tuple(Down(name, "the newest") for name in reversed(ours[wanted - len(serving) :]))
    return step


class Threshold:
    def __init__(
        self, config: Scaling, market: Market, busy: Busy, *, up: float = 4.0, down: float = 1.0,
        cooldown_up_s: float = 60.0, cooldown_down_s: float = 180.0,
    ) -> None:  # fmt: skip
        self._config, self._market = config, market
        self._up, self._down = up, down
        self._cooldown_up_s, self._cooldown_down_s = cooldown_up_s, cooldown_down_s
        self._changed_s = float("-inf")

    def step(self, view: FleetView, coming: Sequence[Coming], wall_s: float = 0.0) -> Step:
        serving = sum(node.serving for node in view.nodes)
        count = serving + len(coming)
        queue = view.stable.waiting / max(1, serving)
        since_s = view.now_s - self._changed_s
        wanted = count
        if queue > self._up and since_s >= self._cooldown_up_s:
            wanted = count + 1
        elif queue < self._down and not coming and since_s >= self._cooldown_down_s:
            wanted = count - 1
        step = _change(view, coming, wanted, f"{queue:.1f} wait for each node", self._config, self._market)
        if step.changes:
            self._changed_s = view.now_s
        return step


class Hpa:
    def __init__(
        self, config: Scaling, market: Market, busy: Busy, *, target: float = 0.7, tolerance: float = 0.1,
        period_s: float = 15.0, stabilisation_s: float = 300.0, kv: float = 0.0,
    ) -> None:  # fmt: skip
        self._config, self._market, self._busy = config, market, busy
        self._target, self._tolerance = target, tolerance
        self._period_s, self._stabilisation_s = period_s, stabilisation_s
        self._by_kv = bool(kv)
        self._next_s = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def step(self, view: FleetView, coming: Sequence[Coming], wall_s: float = 0.0) -> Step:
        serving = [node for node in view.nodes if node.serving]
        count = len(serving) + len(coming)
        if view.now_s < self._next_s:
            return Step(at_s=view.now_s, desired_nodes=count, nodes=count)
        self._next_s = view.now_s + self._period_s
        busy = {node.name: node.kv_usage for node in serving} if self._by_kv else self._busy()
        shares = [busy.get(node.name, 0.0) for node in serving]
        mean = sum(shares) / len(shares) if shares else 1.0
        if mean > self._target and coming:
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
        return _change(view, coming, wanted, f"nodes are busy {mean:.0%} of the time", self._config, self._market)


SCALERS = {"threshold": Threshold, "hpa": Hpa}
