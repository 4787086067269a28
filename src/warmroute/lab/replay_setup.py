"""What a replay is asked: policies and scalers by name, with their parameters."""

from __future__ import annotations

import difflib
import inspect
import math
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec

from warmroute.config import Admission, Config, ConfigError, PolicyName, Pricing, Routing, Scaling, Section, from_table
from warmroute.config.nodes import Role
from warmroute.core.queue_order import QueueOrder
from warmroute.lab.engine.timing import profile
from warmroute.lab.peers.cache_rules import Aibrix, Kubeai, Sglang, Smg
from warmroute.lab.peers.dynamo import Dynamo, DynamoFcfs, DynamoWspt
from warmroute.lab.peers.llm_d import LlmD, LlmDAffinity, LlmDPrecise
from warmroute.lab.peers.scalers import SCALERS
from warmroute.lab.peers.split_routers import DynamoSplit, LlmDSplit
from warmroute.lab.simulated_scaling import CreateDecisionMaker, SimulatedOffer
from warmroute.scaling.offers import Offer, is_quantity

# The policies that a replay can compare: the router's own and those of other routers, with parameters.
#
# Examples: `prefix_hash`, `prefix_hash:load_factor=2`, `sglang:cache_threshold=0.5`, `dynamo:queue=shortest`, `oracle`.
#
# `queue` separates placement from order. Every policy takes it:
#
#     own         what the policy has of itself (default)
#     warmroute   the admission queue of `price`, in its order
#     fcfs        the same queue, first come, first served
#     shortest    the same queue, least prefill work first
#     none        requests are sent to their node at once

INDEX_BYTES = 1 << 30
"""Large enough that the index never evicts in a replay."""
ORACLE = "oracle"
"""Not a policy: the hit rate of one cache as large as the fleet's caches together."""

PEERS: dict[str, Callable[..., Any]] = {
    "sglang": Sglang,
    "smg": Smg,
    "llm_d": LlmD,
    "llm_d_precise": LlmDPrecise,
    "llm_d_affinity": LlmDAffinity,
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


# How a replay scales: `--scaler`, and a TOML file with `[scaling]` as in the router's configuration and `[[offers]]`,
# one for each kind of node that is available.
#
#     [scaling]
#     max_nodes = 24
#     [[offers]]
#     name = "h100-spot"
#     profile = "2xh100-32b"
#     usd_per_hour = 4.2
#     start_s = 150
#     quota = 6

OURS = "warmroute"
THRESHOLDS = "warmroute:thresholds"
"""The autoscaler without replay."""
FIXED = "fixed"
"""Not a scaler: the fleet stays as it is."""
NAMES = (OURS, THRESHOLDS, *SCALERS, FIXED)
PROVISIONER = "replay"


class OfferTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[offers]]` of the file."""

    name: str
    profile: str
    island: str = "local"
    usd_per_hour: float = 0.0
    start_s: float = 120.0
    start_jitter: float = 0.2
    quota: int | None = None
    max_nodes: int | None = None
    spot: bool = False
    role: Role = "mixed"

    def offer(self) -> SimulatedOffer:
        """Raises ConfigError."""
        try:
            hardware = profile(self.profile)
        except ValueError as error:
            raise ConfigError(f"offers.profile: {error}") from None
        if not is_quantity(self.start_s):
            raise ConfigError(f"offers.start_s of {self.name!r} is {self.start_s:g}; it has to be 0 or more")
        if not 0.0 <= self.start_jitter < 1.0:
            raise ConfigError(f"offers.start_jitter of {self.name!r} is {self.start_jitter:g}; it has to be below 1")
        return SimulatedOffer(
            offer=Offer(
                provisioner=PROVISIONER,
                name=self.name,
                island=self.island,
                gpu=hardware.name,
                gpus=hardware.gpus,
                spot=self.spot,
                role=self.role,
                usd_per_hour=self.usd_per_hour,
                start_s=self.start_s,
                max_nodes=self.max_nodes,
            ),
            profile=hardware,
            start_jitter=self.start_jitter,
            quota=self.quota,
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scaling: dict[str, Any] = {}
    offers: tuple[OfferTable, ...] = ()


def read(path: Path) -> tuple[dict[str, Any], tuple[SimulatedOffer, ...]]:
    """Return the file's `[scaling]` table and its offers. Raises ConfigError."""
    try:
        file = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        return file.scaling, tuple(one.offer() for one in file.offers)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None


def scaling_of(table: dict[str, Any]) -> Scaling:
    """Return the settings, validated like the router's own. Raises ConfigError."""
    return from_table({"scaling": {"enabled": True, **table}}, experiment=True).scaling


def parse_scaler(text: str) -> CreateDecisionMaker | None:
    """Parse a `--scaler` such as `hpa:target=0.8`. Return None for production's own. Raises ConfigError."""
    name, _, rest = text.partition(":")
    if text in (OURS, THRESHOLDS):
        return None
    kind = SCALERS.get(name)
    if kind is None:
        raise ConfigError(f"--scaler {text!r}: choose one of {', '.join(NAMES)}")
    known = [one.name for one in inspect.signature(kind).parameters.values() if one.kind is one.KEYWORD_ONLY]
    parameters: dict[str, float] = {}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        try:
            if key not in known:
                raise ValueError
            parameters[key] = float(value)
            if not 0 <= parameters[key] < float("inf") or (key == "target" and not parameters[key]):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--scaler {text!r}: {word!r} is not like {known[0]}=1; {name} takes {', '.join(known)}"
            ) from None
    return partial(kind, **parameters)
