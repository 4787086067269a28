"""The policies that a replay can compare: the router's own and those of other routers, with parameters.

Examples: `prefix_hash`, `prefix_hash:load_factor=2`, `sglang:cache_threshold=0.5`, `dynamo:queue=shortest`, `oracle`.

`queue` separates placement from order. Every policy takes it:

    own         what the policy has of itself (default)
    warmroute   the admission queue of `price`, in its order
    fcfs        the same queue, first come, first served
    shortest    the same queue, least prefill work first
    none        requests are sent to their node at once
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from random import Random
from typing import Any, get_args

import msgspec

from warmroute.config import Admission, Config, PolicyName, Pricing, Routing, Section, from_table
from warmroute.replay.peers.aibrix_router import Aibrix
from warmroute.replay.peers.dynamo_router import Dynamo, DynamoFcfs, DynamoWspt
from warmroute.replay.peers.kubeai_router import Kubeai
from warmroute.replay.peers.llm_d_router import LlmD, LlmDPrecise
from warmroute.replay.peers.sglang_router import Sglang
from warmroute.replay.peers.split_routers import DynamoSplit, LlmDSplit
from warmroute.routing.queued_request import QueueOrder

INDEX_BYTES = 1 << 30
"""Large enough that the index never evicts in a replay."""
ORACLE = "oracle"
"""Not a policy: the hit rate of one cache as large as the fleet's caches together."""

PEERS: dict[str, Callable[..., Any]] = {
    "sglang": Sglang,
    "llm_d": LlmD,
    "llm_d_precise": LlmDPrecise,
    "dynamo": Dynamo,
    "dynamo_fcfs": DynamoFcfs,
    "dynamo_wspt": DynamoWspt,
    "kubeai": Kubeai,
    "aibrix": Aibrix,
    "llm_d_split": LlmDSplit,
    "dynamo_split": DynamoSplit,
}

QUEUE_ORDERS: dict[str, QueueOrder] = {
    "warmroute": QueueOrder.GUARANTEED,
    "fcfs": QueueOrder.FIRST_COME,
    "shortest": QueueOrder.SHORTEST,
}
QUEUE = "queue"
OWN_QUEUE, NO_QUEUE = "own", "none"
QUEUES = (OWN_QUEUE, *QUEUE_ORDERS, NO_QUEUE)
"""Values of the parameter `queue`."""

POLICIES: tuple[str, ...] = (*get_args(PolicyName), *PEERS, ORACLE)


class BadPolicy(ValueError):
    """What is wrong with a policy's name or parameters."""


class PolicySpec(msgspec.Struct, frozen=True):
    text: str
    """The policy as the user wrote it; its name in reports."""
    name: str
    parameters: dict[str, Any]
    queue: str = OWN_QUEUE
    """Where and in which order requests wait: one of QUEUES."""

    @property
    def queue_order(self) -> QueueOrder | None:
        """The order of the router's admission queue, if this policy does not have its own queue."""
        return QUEUE_ORDERS.get(self.queue)

    def peer(self, seed: int) -> Any:
        """Return a new instance of another router's policy, which is also its listener. None for our own."""
        return PEERS[self.name](Random(f"{seed} policy"), **self.parameters) if self.name in PEERS else None

    def config(self) -> Config:
        """Return the router's configuration for this policy."""
        if self.name in PEERS:
            return Config()
        table: dict[str, dict[str, Any]] = {"index": {"memory_bytes": INDEX_BYTES}, "routing": {"policy": self.name}}
        for name, section in _sections(self.name):
            known = msgspec.structs.asdict(section)
            table.setdefault(name, {}).update({key: self.parameters[key] for key in known if key in self.parameters})
        if self.queue == NO_QUEUE:
            table.setdefault("admission", {})["queue_at_router"] = False
        return from_table(table, experiment=True)


def _sections(name: str) -> list[tuple[str, Section]]:
    """Return the configuration tables whose keys are the policy's parameters."""
    return [("price", Pricing()), ("admission", Admission())] if name == "price" else [("routing", Routing())]


def parse_policy(text: str) -> PolicySpec:
    """Parse `name` or `name:key=value,…`. Raises BadPolicy."""
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"policies: {', '.join(POLICIES)}"
        raise BadPolicy(f"no policy {name!r}; {hint}")
    known = _parameters_of(name)
    parameters: dict[str, Any] = {}
    queue = OWN_QUEUE
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise BadPolicy(f"{name} takes {', '.join(known) or 'no parameters'}, as in {name}:key=value; not {word!r}")
        if key == QUEUE:
            if value not in QUEUES:
                raise BadPolicy(f"{name}: queue is one of {', '.join(QUEUES)}; not {value!r}")
            queue = value
            continue
        kind = type(known[key])
        try:
            parameters[key] = msgspec.convert(value, float if kind is int else kind, strict=False)
            if parameters[key] != parameters[key]:
                raise ValueError("not a number")
            if parameters[key] in (float("inf"), float("-inf")):
                # The configuration takes finite numbers only.
                parameters[key] = math.copysign(1e9, parameters[key])
            if kind is int:
                parameters[key] = int(parameters[key])
        except (msgspec.ValidationError, OverflowError, ValueError):
            raise BadPolicy(f"{name}: {key} is a {kind.__name__}, not {value!r}") from None
    return PolicySpec(text, name, parameters, queue)


def _parameters_of(name: str) -> dict[str, Any]:
    """Return the policy's parameters with their defaults."""
    if name == ORACLE:
        return {}
    own: dict[str, Any] = {}
    if name in PEERS:
        parameters = inspect.signature(PEERS[name]).parameters.values()
        own = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    elif name == "price":
        own = {key: value for _, section in _sections(name) for key, value in msgspec.structs.asdict(section).items()}
    elif name in ("session", "prefix_hash"):
        own = {"load_factor": Routing().load_factor}
    return {**own, QUEUE: OWN_QUEUE}
