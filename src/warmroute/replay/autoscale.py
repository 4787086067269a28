"""How a replay is told to scale: by flags, or by a TOML file with `[scaling]` as in the router's own configuration and
`[[offers]]`, one for each kind of node that could be had.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from warmroute.config import ConfigError, Scaling, from_table
from warmroute.fake_engine.profiles import profile
from warmroute.replay.peers.scalers import SCALERS
from warmroute.replay.world.scaling import Decider, SimOffer
from warmroute.scaling.choose_up import Market
from warmroute.scaling.offer import Offer

OURS = "warmroute"
FIXED = "fixed"
"""Not a scaler: the fleet stays as it is."""
NAMES = (OURS, *SCALERS, FIXED)
PROVISIONER = "replay"

Making = Callable[[Scaling, Market, Callable[[], dict[str, float]]], Decider]


class OfferSaid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An offer as a file says it."""

    name: str
    profile: str
    island: str = "local"
    usd_per_hour: float = 0.0
    start_s: float = 120.0
    start_jitter: float = 0.2
    quota: int | None = None
    most: int | None = None
    spot: bool = False

    def offer(self) -> SimOffer:
        """Raises ConfigError."""
        try:
            hardware = profile(self.profile)
        except ValueError as error:
            raise ConfigError(f"offers.profile: {error}") from None
        if not 0.0 <= self.start_jitter < 1.0 or self.start_s < 0:
            raise ConfigError(f"offers: {self.name!r} has a start that can't be; start_jitter is 0 to 1")
        return SimOffer(
            offer=Offer(
                provisioner=PROVISIONER,
                name=self.name,
                island=self.island,
                gpu=hardware.name,
                gpus=hardware.gpus,
                spot=self.spot,
                usd_per_hour=self.usd_per_hour,
                start_s=self.start_s,
                most=self.most,
            ),
            profile=hardware,
            start_jitter=self.start_jitter,
            quota=self.quota,
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scaling: dict[str, Any] = {}
    offers: tuple[OfferSaid, ...] = ()


def read(path: Path) -> tuple[dict[str, Any], tuple[SimOffer, ...]]:
    """The file's `[scaling]` as it stands, and its offers. Raises ConfigError."""
    try:
        said = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        return said.scaling, tuple(one.offer() for one in said.offers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def scaling_of(table: dict[str, Any]) -> Scaling:
    """Checked as the router's own. Raises ConfigError."""
    return from_table({"scaling": {"enabled": True, **table}}).scaling


def scaler(text: str) -> Making | None:
    """`hpa:target=0.8`; None for our own. Raises ConfigError."""
    name, _, rest = text.partition(":")
    if name == OURS and not rest:
        return None
    kind = SCALERS.get(name)
    if kind is None:
        raise ConfigError(f"--scaler {text!r}: there are {', '.join(NAMES)}")
    known = [one.name for one in inspect.signature(kind).parameters.values() if one.kind is one.KEYWORD_ONLY]
    parameters: dict[str, float] = {}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        try:
            if key not in known:
                raise ValueError
            parameters[key] = float(value)
        except ValueError:
            takes = f"takes {', '.join(known)}, as in {name}:{known[0]}=1"
            raise ConfigError(f"--scaler {name} {takes}; not {word!r}") from None
    return partial(kind, **parameters)
