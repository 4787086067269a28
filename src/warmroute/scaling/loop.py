"""The loop: every interval it looks at what was seen and decides whether nodes come or go, and says why. No I/O.

    up      nobody serves and somebody waits                                            at once
            the work takes more of the fleet's time than `utilisation`, or requests     as many as it takes
            that are so uneven would wait longer than `wait_ms` for a node
            running requests fill more of its KV memory than `kv_usage`                 as many as it takes
            `queue_up` wait for each node; first tokens or answers are over a ceiling   one more than there are
            the hit ratio is under `hit_floor`, and more cache would raise it           one more than there are
            `min_nodes`, an island's, or the hour's                                     as many as lack
    down    fewer than `queue_drain` wait, utilisation is under its floor, no ceiling is broken, and those who stay
            would hold both the load and the warm set
            an island lacks a node, there may be no more, and another has one too many  one, in exchange

Nodes are added as far as `max_nodes` and the budget go, and all that is paid for counts: also what does not answer,
drains or ends. What its cloud takes back is as good as gone.

Work counts with its trend until a node that is asked for now would serve. In a panic (the short window asks for
`panic_threshold` times the nodes there are) the short window counts, too, and nobody is given back. After a change
nothing is added for `cooldown_up_s`, and nothing given back for `cooldown_down_s`; what is given back must have been
too much for all of that time.

A value that can't be (not a number, below 0) is taken as not known, and said.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

import msgspec

from warmroute.config import Scaling
from warmroute.scaling.capacity import Demand, Size, Speeds, size_of
from warmroute.scaling.choose_down import Victim, ranked
from warmroute.scaling.choose_up import Holding, Market
from warmroute.scaling.hours import least_nodes
from warmroute.scaling.observe import FleetView, NodeView, Seen
from warmroute.scaling.offer import Offer
from warmroute.scaling.sanitize_metrics import sane

LEAST_ARRIVALS: Final = 8
"""Fewer make no panic: one long prompt is none."""
LEAST_TIMES: Final = 20
"""Fewer first tokens make no p99."""
HELPS: Final = 0.02
LARGER: Final = 1.5
"""More cache helps where so many times as much would raise the hit ratio by HELPS."""
ROOM: Final = 0.85
"""Of a limit: where it is broken, so many nodes are added that there is room below it."""
SPARE: Final = 0.75
"""Of `utilisation`: those who stay when a node goes may have so much to do."""
SPARE_WAIT: Final = 0.4
"""The same, of `wait_ms`."""
MOST_GROWTH: Final = 2.0
OWN_SHARE: Final = 0.3
"""Requests may wait for `wait_ms`, or for this share of what they take themselves, if that is longer."""
FEWER_MISSED: Final = 0.1
STEP_SHARE: Final = 0.2
"""Where times are over a ceiling, and LARGER times the cache would leave so much less to compute, so many nodes are
added: it is cache that lacks, and one node is little of it."""
LEAST_BUSY: Final = 0.5
"""Of `wait_ms`. Below it, and with nobody waiting, it is not for want of nodes that answers take long."""


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was asked for and does not serve yet."""

    offer: tuple[str, str] | None
    """None for a node that somebody else put there, and that was not checked yet."""
    island: str
    gpu: str
    usd_per_hour: float


class Up(msgspec.Struct, frozen=True):
    offer: Offer
    why: str


class Down(msgspec.Struct, frozen=True):
    node: str
    why: str


class Step(msgspec.Struct, kw_only=True):
    """One decision. In a dry run it is only said."""

    at_s: float
    desired_nodes: int
    nodes: int
    """Serving, and on their way."""
    ups: tuple[Up, ...] = ()
    downs: tuple[Down, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why so many, in words; also what stands against it."""
    obstacles: tuple[str, ...] = ()
    """Those of them that keep nodes from coming which are lacking."""
    doubts: tuple[str, ...] = ()
    """Values that were not taken."""
    panicking: bool = False
    dry_run: bool = False
    utilisation: float = 0.0
    """Share of the serving nodes' time that the work takes."""

    @property
    def changes(self) -> bool:
        return bool(self.ups or self.downs)


class Scaler:
    def __init__(self, config: Scaling, market: Market) -> None:
        self._market = market
        self._up_s = self._down_s = float("-inf")
        """When nodes were last added, and given back."""
        self._panic_until_s = float("-inf")
        self._elsewhere: int | None = None
        """What was last desired, where somebody else adds nodes."""
        self._spare: deque[tuple[float, int]] = deque()
        """When how many nodes were too many, for as long as a cooldown."""
        self.reconfigure(config)

    def reconfigure(self, config: Scaling) -> None:
        self._config = config
        self._market.reconfigure(config)

    def came_to_nothing(self) -> None:
        """What was asked for was refused: the next choice need not wait for a cooldown."""
        self._up_s = float("-inf")

    def step(
        self, view: FleetView, coming: Sequence[Coming] = (), wall_s: float = 0.0, ending: Sequence[Holding] = ()
    ) -> Step:
        """`wall_s`: seconds since 1970, for the hours. `ending`: what is paid for still, and not in the view."""
        doubts: list[str] = [*self._market.said]
        view = sane(view, doubts)
        config, now_s = self._config, view.now_s
        speeds = Speeds(view.nodes)
        serving = [node for node in view.nodes if node.serving]
        coming = [*coming, *(_on_its_way(node) for node in view.nodes if node.unchecked)]
        count = len(serving) + len(coming)
        demand = Demand(view, view.stable, speeds)
        urgent = Demand(view, view.panic, speeds)
        size = size_of(serving, speeds)
        for one in coming:
            size = size.plus(speeds.weight(one.gpu), speeds.blocks(one.gpu))
        step = Step(
            at_s=now_s,
            desired_nodes=count,
            nodes=count,
            dry_run=config.dry_run,
            utilisation=demand.utilisation(size_of(serving, speeds)),
            doubts=tuple(doubts),
        )
        missing, unoffered = self._missing_islands(serving, coming)
        islands_least = sum(one.min_nodes for one in config.islands) - sum(unoffered.values())
        anywhere = max(config.min_nodes, least_nodes(config.hours, wall_s))
        least = min(max(anywhere, islands_least), config.max_nodes)
        if self._goes_to_zero(view, least):
            least = 0
        elif config.min_nodes == 0 and not least and (view.waiting or serving):
            least = 1
        growth = self._growth(view)
        step.panicking = self._panics(view, urgent, size, growth)
        lacking, reasons = self._lacking(view, serving, coming, size, demand, urgent, growth, step.panicking)
        if count < least:
            lacking = max(lacking, min(anywhere, least) - count)
            there = f"{nodes_in_words(count)} {'is' if count == 1 else 'are'}"
            reasons.append(f"{there} fewer than the {least} there are to be")
        obstacles = [
            f"{island} is to have {nodes_in_words(many)} more, and nobody offers any there"
            for island, many in unoffered.items()
        ]
        held_up = False
        held = _held(view, coming, ending)
        if lacking > 0 or missing:
            nobody = not serving and not coming
            held_up = self._add(step, view, held, speeds, lacking, missing, reasons, obstacles, nobody)
        if lacking > 0 or (missing and not held_up):
            self._spare.clear()
        else:  # also where only an island lacks nodes, and they cannot be had
            victims, why = self._too_many(view, serving, coming, speeds, demand, size, least, growth, step.panicking)
            if missing and not victims and not coming and len(serving) > 1 and not step.panicking:
                victims, why = self._in_exchange(view, held, speeds, count, missing)
            self._give_back(step, now_s, victims, why, least, reasons)
        if not self._market.offers:
            self._say_elsewhere(step)
        step.reasons, step.obstacles = (*reasons, *obstacles), tuple(obstacles)
        return step

    def _say_elsewhere(self, step: Step) -> None:
        """Nobody offers nodes here: somebody else scales, by what is desired. That stands until it is done, or for a
        cooldown."""
        if step.desired_nodes != step.nodes:
            self._elsewhere = step.desired_nodes
        elif step.at_s - max(self._up_s, self._down_s) < self._config.cooldown_down_s and self._elsewhere is not None:
            step.desired_nodes = self._elsewhere
        else:
            self._elsewhere = None

    # What lacks.

    def _growth(self, view: FleetView) -> float:
        """Times the load of now, when a node that is asked for now would serve."""
        starts_s = [self._market.start_s(offer) for offer in self._market.offers]
        ahead_s = min(starts_s, default=0.0) + self._config.interval_s
        return min(MOST_GROWTH, max(1.0, 1.0 + view.growth_per_s * ahead_s))

    def _panics(self, view: FleetView, urgent: Demand, size: Size, growth: float) -> bool:
        config = self._config
        over = urgent.utilisation(size, growth) > config.utilisation * config.panic_threshold and urgent.known
        queued = view.panic.waiting > config.queue_drain * max(1, len(view.nodes))
        if over and queued and view.panic.arrivals >= LEAST_ARRIVALS:
            self._panic_until_s = view.now_s + config.stable_window_s
        return view.now_s < self._panic_until_s

    def _lacking(
        self, view: FleetView, serving: Sequence[NodeView], coming: Sequence[Coming], size: Size, demand: Demand,
        urgent: Demand, growth: float, panicking: bool,
    ) -> tuple[int, list[str]]:  # fmt: skip
        """How many nodes lack, and why. Nodes that are coming count as if they were there, except for what waits."""
        config = self._config
        if not serving:
            asleep = 0 < config.to_zero_after_s <= view.idle_s
            if not view.waiting and (asleep or not view.stable.arrivals_per_s):
                return 0, []
            if coming:
                return 0, [f"{view.waiting} wait for a first node, {len(coming)} on the way"]
            return 1, [f"{view.waiting} wait, and nobody serves"]
        reasons: list[str] = []
        lacking = 0
        weight, blocks = size.weight / (len(serving) + len(coming)), size.blocks / (len(serving) + len(coming))
        windows = [("", demand)] + ([("of late ", urgent)] if panicking else [])
        for words, asked in windows:
            used = asked.utilisation(size, growth)
            wait_ms = asked.wait_ms(size, growth)
            most_ms = self._most_wait_ms(asked, size)
            if used > config.utilisation or wait_ms > most_ms:
                lacking = max(lacking, _more_for(asked, growth, config.utilisation, most_ms, size, weight, blocks))
                ahead = f" ({growth:.0%} of the present load, when a node would serve)" if growth > 1.005 else ""
                if used > config.utilisation:
                    over = f"takes {used:.0%} of the nodes' time, over {config.utilisation:.0%}"
                else:
                    over = f"is uneven: requests would wait {wait_ms:,.0f} ms, over {most_ms:,.0f}"
                reasons.append(f"work {words}{over}{ahead}")
        kv = demand.kv_usage(size)
        if kv > config.kv_usage:
            lacking = max(lacking, _more(lambda s: demand.kv_usage(s) <= config.kv_usage, size, weight, blocks))
            reasons.append(f"running requests fill {kv:.0%} of KV memory, over {config.kv_usage:.0%}")
        symptoms = self._symptoms(view, serving, demand, size)
        if symptoms:
            reasons.extend(symptoms)
            if not coming:
                lacking = max(lacking, self._step_for(demand, size, len(serving)))
        cache = self._wants_cache(view.stable, demand, size)
        if cache:
            reasons.append(cache[1])
            if cache[0] and not coming:
                lacking = max(lacking, 1)
        return lacking, reasons

    def _most_wait_ms(self, demand: Demand, size: Size) -> float:
        return max(self._config.wait_ms, OWN_SHARE * demand.service_ms(size))

    def _symptoms(self, view: FleetView, serving: Sequence[NodeView], demand: Demand, size: Size) -> list[str]:
        """What clients feel, whatever the work says."""
        config, stable = self._config, view.stable
        found = []
        queue = view.stable.waiting / len(serving)
        if queue > config.queue_up:
            found.append(f"{queue:.1f} wait for each node, over {config.queue_up:g}")
        busy = queue > config.queue_drain or demand.wait_ms(size) > LEAST_BUSY * self._most_wait_ms(demand, size)
        for name, value, ceiling in (
            ("first tokens", stable.ttft_p99_ms, config.ttft_p99_ceiling_ms),
            ("answers", stable.latency_p99_ms, config.latency_p99_ceiling_ms),
        ):
            if ceiling and value is not None and value > ceiling and stable.first_tokens >= LEAST_TIMES and busy:
                found.append(f"p99 of {name} is {value:,.0f} ms, over {ceiling:,.0f}")
        if stable.shed_per_s > 0:
            found.append(f"{stable.shed_per_s:.2g} requests a second are refused")
        return found

    def _wants_cache(self, stable: Seen, demand: Demand, size: Size) -> tuple[bool, str] | None:
        hit, floor = stable.hit_ratio, self._config.hit_floor
        if hit is None or hit >= floor or stable.arrivals_per_s <= 0 or stable.first_tokens < LEAST_TIMES:
            return None
        said = f"the hit ratio is {hit:.0%}, under {floor:.0%}"
        now, then = demand.hit(size), demand.hit(Size(LARGER * size.weight, LARGER * size.blocks))
        if now is None or then is None or then - now < HELPS:
            return False, f"{said}, and more cache would not help: little comes again"
        return True, f"{said}; with {LARGER:g} times the cache it would be {then:.0%}"

    def _step_for(self, demand: Demand, size: Size, serving: int) -> int:
        """How many nodes to try where clients feel what the work does not say."""
        now, then = demand.hit(size), demand.hit(Size(LARGER * size.weight, LARGER * size.blocks))
        if now is None or then is None or 1.0 - then > (1.0 - FEWER_MISSED) * (1.0 - now):
            return 1
        return max(1, ceil(STEP_SHARE * serving))

    def _missing_islands(
        self, serving: Sequence[NodeView], coming: Sequence[Coming]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """How many nodes islands lack: those where nodes are on offer, and those where nobody offers any. For the
        latter nothing is held up. (Where nobody offers nodes at all, somebody else adds them.)"""
        there = Counter(node.island for node in serving) + Counter(one.island for one in coming)
        offered = {offer.island for offer in self._market.offers}
        missing: dict[str, int] = {}
        unoffered: dict[str, int] = {}
        for one in self._config.islands:
            if there[one.island] < one.min_nodes:
                found = missing if not offered or one.island in offered else unoffered
                found[one.island] = one.min_nodes - there[one.island]
        return missing, unoffered

    # Up.

    def _add(
        self, step: Step, view: FleetView, held: Sequence[Holding], speeds: Speeds, lacking: int,
        missing: dict[str, int], reasons: list[str], obstacles: list[str], nobody: bool,
    ) -> bool:  # fmt: skip
        """`lacking` nodes anywhere; first of all those that islands miss, which count among them. Whether none can be
        had now, for another reason than a cooldown."""
        config, now_s = self._config, view.now_s
        wanted = min(step.nodes + max(lacking, sum(missing.values())), config.max_nodes)
        step.desired_nodes = max(step.nodes, wanted)
        if wanted <= step.nodes:
            are = "is" if step.nodes == 1 else "are"
            obstacles.append(f"there {are} {nodes_in_words(step.nodes)}, the most there may be")
            return True
        held = list(held)
        machines = sum(one.counts for one in held)
        if machines >= config.max_nodes and self._market.offers:
            idle = f"{machines - step.nodes} of them not answering or on the way out"
            obstacles.append(f"{nodes_in_words(machines)} paid for, the most there may be; {idle}")
            return True
        wait_s = config.cooldown_up_s - (now_s - max(self._up_s, self._down_s))
        if wait_s > 0 and not nobody:
            reasons.append(f"the last change was less than {config.cooldown_up_s:g} s ago")
            return False
        ups: list[Up] = []
        room = min(wanted - step.nodes, config.max_nodes - machines)
        work, most = view.stable.work or 0.0, min(room, config.max_step_up)

        def take(count: int, island: str | None) -> None:
            for _ in range(count):
                offer, why = self._market.choose(
                    held, speeds, now_s, work=work, panicking=step.panicking or nobody, island=island
                )
                if offer is None:
                    if why not in obstacles:
                        obstacles.append(why)
                    return
                ups.append(Up(offer, why))
                held.append(Holding(offer.key, offer.island, offer.usd_per_hour))

        for island, count in missing.items():
            take(min(count, most - len(ups)), island)
        take(min(lacking, most) - len(ups), None)
        if ups:
            self._up_s = now_s
            step.ups = tuple(ups)
        return not ups

    # Down.

    def _goes_to_zero(self, view: FleetView, least: int) -> bool:
        config = self._config
        return least == 0 and config.to_zero_after_s > 0 and not view.waiting and view.idle_s >= config.to_zero_after_s

    def _give_back(
        self, step: Step, now_s: float, victims: Sequence[Victim], why: str, least: int, reasons: list[str]
    ) -> None:
        """Those of them who were too many for all of a cooldown."""
        config = self._config
        spare = self._spare
        spare.append((now_s, len(victims)))
        while spare and spare[0][0] < now_s - config.cooldown_down_s:
            spare.popleft()
        if why:
            reasons.append(why)
        for_all = min(count for _, count in spare)
        if not for_all:
            return
        if now_s - max(self._up_s, self._down_s) < config.cooldown_down_s:
            reasons.append(f"the last change was less than {config.cooldown_down_s:g} s ago")
            return
        if now_s - spare[0][0] < config.cooldown_down_s - 1.5 * config.interval_s and least:
            reasons.append("not for long enough")
            return
        chosen = victims[: min(for_all, config.max_step_down)]
        step.downs = tuple(Down(one.node.name, _worth(one)) for one in chosen)
        step.desired_nodes = step.nodes - len(chosen)
        self._down_s = now_s
        spare.clear()

    def _too_many(
        self, view: FleetView, serving: Sequence[NodeView], coming: Sequence[Coming], speeds: Speeds, demand: Demand,
        size: Size, least: int, growth: float, panicking: bool,
    ) -> tuple[list[Victim], str]:  # fmt: skip
        """Nodes that the rest could do without, the best to give back first; and why these, or none."""
        config, stable = self._config, view.stable
        spare = len(serving) - least
        if spare <= 0 or coming or panicking:
            return [], "in a panic nobody is given back" if panicking and spare > 0 else ""
        victims = ranked(view.nodes, speeds, config, view.reuse_chance, anybodys=not self._market.offers)
        if not least:
            return victims, f"no request for {view.idle_s:,.0f} s"
        queue = stable.waiting / len(serving)
        used = demand.utilisation(size)
        if len(serving) > config.max_nodes:
            return victims[: len(serving) - config.max_nodes], f"more than {nodes_in_words(config.max_nodes)}"
        if queue >= config.queue_drain or used >= config.utilisation_floor or view.waiting > len(serving):
            return [], ""
        chosen: list[Victim] = []
        for victim in victims[:spare]:
            node = victim.node
            rest = size.plus(-speeds.weight(node.gpu), -(node.cache_blocks or speeds.blocks(node.gpu)))
            if rest.weight <= 0 or demand.utilisation(rest, growth) > SPARE * config.utilisation:
                break
            if demand.wait_ms(rest, growth) > SPARE_WAIT * self._most_wait_ms(demand, rest):
                break
            if demand.kv_usage(rest) > SPARE * config.kv_usage:
                break
            now, then = demand.hit(size), demand.hit(rest)
            if now is not None and then is not None and then < config.hit_floor <= now:
                break  # the warm set would not fit any more
            chosen.append(victim)
            size = rest
        if not chosen:
            return [], ""
        could = f"{len(chosen)} of them could go" if len(chosen) > 1 else "one of them could go"
        return (
            chosen,
            f"work takes {used:.0%} of the nodes' time; {could}, and it would be {demand.utilisation(size):.0%}",
        )

    def _in_exchange(
        self, view: FleetView, held: Sequence[Holding], speeds: Speeds, count: int, missing: dict[str, int]
    ) -> tuple[list[Victim], str]:
        """A node of an island that has more than it needs, for one that has less, where there may be no more of them,
        and where the other could be had."""
        if count < self._config.max_nodes or not self._market.offers:
            return [], ""
        work = view.stable.work or 0.0
        for victim in ranked(view.nodes, speeds, self._config, view.reuse_chance)[:1]:
            node = victim.node
            rest = list(held)
            rest.remove(_holding(node))
            for island in missing:
                if self._market.choose(rest, speeds, view.now_s, work=work, island=island)[0] is not None:
                    return [victim], f"a node goes from {node.island}, so that {island} has those that it is to have"
        return [], ""


def _on_its_way(node: NodeView) -> Coming:
    return Coming(offer=node.offer, island=node.island, gpu=node.gpu, usd_per_hour=node.usd_per_hour)


def _holding(node: NodeView) -> Holding:
    """What a provisioner made is paid for whether it answers or not, until it is gone; what somebody else put there and
    does not serve is nobody's to give back, and keeps no other from coming."""
    counts = not node.leaving and (node.serving or node.unchecked or node.offer is not None)
    return Holding(node.offer, node.island, node.usd_per_hour, counts)


def _held(view: FleetView, coming: Sequence[Coming], ending: Sequence[Holding]) -> list[Holding]:
    """All that is paid for: those that serve, that come, that do not answer, and that are on their way out."""
    there = [_holding(node) for node in view.nodes if not node.unchecked]
    return [*there, *(Holding(one.offer, one.island, one.usd_per_hour) for one in coming), *ending]


def nodes_in_words(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _worth(victim: Victim) -> str:
    usd, lost = victim.saved_usd, victim.lost_usd
    if victim.node.usd_per_hour <= 0:
        return "its cache is worth least"
    return f"it costs most for what it does ({usd:.2g} USD to keep), and its cache is worth least ({lost:.2g} USD)"


def _more_for(
    asked: Demand, growth: float, most: float, most_ms: float, size: Size, weight: float, blocks: float
) -> int:
    def enough(larger: Size) -> bool:
        quick = asked.wait_ms(larger, growth) <= ROOM * most_ms
        return quick and asked.utilisation(larger, growth) <= ROOM * most

    return _more(enough, size, weight, blocks)


def _more(enough: Callable[[Size], bool], size: Size, weight: float, blocks: float) -> int:
    """How many nodes like those there are it takes."""
    for more in range(1, 1025):
        size = size.plus(weight, blocks)
        if enough(size):
            return more
    return 1024
