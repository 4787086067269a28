"""How a replay scales: `--scaler`, and a TOML file with `[scaling]` as in the router's configuration and `[[offers]]`,
one for each kind of node that is available.

    [scaling]
    max_nodes = 24
    [[offers]]
    name = "h100-spot"
    profile = "2xh100-32b"
    usd_per_hour = 4.2
    start_s = 150
    quota = 6
"""

from __future__ import annotations

import inspect
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from warmroute.config import ConfigError, Scaling, from_table
from warmroute.config.node_settings import Role
from warmroute.fake_engine.profiles import profile
from warmroute.replay.peers.scalers import SCALERS
from warmroute.replay.simulation.simulated_scaling import CreateDecisionMaker, SimulatedOffer
from warmroute.scaling.offer import Offer, is_quantity

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
