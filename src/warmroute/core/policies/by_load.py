"""The policies that know no caches: `round_robin`, `random`, `least_loaded`, `power_of_two`, `latency`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from warmroute.core.decision import Decision
from warmroute.core.node import Node
from warmroute.core.policy import Policy
from warmroute.core.routing_context import Query

# round_robin: each node of a model in turn. It ignores load and cache; the baseline.


class RoundRobin(Policy):
    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __copy__(self) -> RoundRobin:
        """Return a copy whose decisions do not advance this one."""
        twin = RoundRobin()
        twin._turns = self._turns.copy()
        return twin

    def decide(self, query: Query) -> Decision:
        group = query.group
        nodes = query.candidates.nodes
        turn = self._turns.get(group.model, 0)
        self._turns[group.model] = turn + 1
        index = turn % len(nodes)
        return Decision(nodes[index], self.name, "next in turn", lambda: nodes[index:] + nodes[:index])


# random: any node with the same probability.


class RandomChoice(Policy):
    name = "random"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        node = nodes[int(self._random.random() * len(nodes))]
        return Decision(node, self.name, "random", lambda: self._random.sample(nodes, len(nodes)))


# least_loaded: the node with the fewest requests (this router's exactly, others' as last polled).
#
# Of several, the one with the shortest context window that holds the request, then any.


class LeastLoaded(Policy):
    name = "least_loaded"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        loads = [node.inflight + node.other_load for node in nodes]
        least = min(loads)
        if query.group.windows is not None:
            tied = [at for at, load in enumerate(loads) if load == least]
            tied = query.group.windows.tightest(nodes, tied)
            index = tied[int(self._random.random() * len(tied))]
            return Decision(nodes[index], self.name, "fewest requests", lambda: self.by_load(nodes))
        ties = loads.count(least)
        index = loads.index(least)
        for _ in range(int(self._random.random() * ties) if ties > 1 else 0):
            index = loads.index(least, index + 1)
        return Decision(nodes[index], self.name, "fewest requests", lambda: self.by_load(nodes))

    def by_load(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes, the least loaded first; ties at random."""
        return sorted(self._random.sample(nodes, len(nodes)), key=lambda node: node.load)


# power_of_two: the less loaded of two random nodes.
#
# Its result is close to least_loaded. Its cost does not depend on the fleet's size, and replicas with outdated loads do
# not all choose the same idle node.


class PowerOfTwo(Policy):
    name = "power_of_two"

    def __init__(self, random: Random) -> None:
        self._random = random
        self._least_loaded = LeastLoaded(random)

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        count = len(nodes)
        first = int(self._random.random() * count)
        node = nodes[first]
        if count > 1:
            second = int(self._random.random() * (count - 1))
            other = nodes[second + (second >= first)]
            if other.load < node.load:
                node = other
        return Decision(node, self.name, "less loaded of two", lambda: self._least_loaded.by_load(nodes))


# latency: the node with the lowest (queued + in flight + 1) × average latency, in ms.
#
# This is the time the request would take if the node served its requests one after the other. A node without an average
# gets the mean of the others, so that it is tried; the average of a node without requests decays.


class Latency(Policy):
    name = "latency"

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, query: Query) -> Decision:
        nodes = query.candidates.nodes
        times_ms = _times_ms(nodes)
        lowest = min(times_ms)
        ties = [node for node, time_ms in zip(nodes, times_ms, strict=True) if time_ms == lowest]
        node = ties[int(self._random.random() * len(ties))]
        return Decision(node, self.name, "lowest load × latency", lambda: _by_time(nodes))


def _times_ms(nodes: tuple[Node, ...]) -> list[float]:
    known = [node.latency_ms for node in nodes if node.latency_ms]
    mean_ms = sum(known) / len(known) if known else 1.0
    return [(node.inflight + node.other_load + 1) * (node.latency_ms or mean_ms) for node in nodes]


def _by_time(nodes: tuple[Node, ...]) -> list[Node]:
    times_ms = dict(zip(nodes, _times_ms(nodes), strict=True))
    return sorted(nodes, key=times_ms.__getitem__)
