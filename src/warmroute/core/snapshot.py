"""What a brain has learned and no engine or edge can tell the next one: speeds of nodes, lengths of answers, what is
left of tenants' limits, homes of conversations. Never the cache index: it comes back by KV events.

A snapshot is at most MAX_BYTES: of the homes, the oldest are left out. What is not right any more is checked when it is
restored: ages are counted, and nodes that do not come back within WAITING_S are forgotten.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from warmroute.core.fleet import Fleet
from warmroute.core.rate_limits import RateLimits
from warmroute.core.router import Router

MAX_BYTES: Final = 8 << 20
HOME_BYTES: Final = 64
"""About what one home takes."""
MAX_HOMES: Final = MAX_BYTES // 2 // HOME_BYTES
WAITING_S: Final = 60.0
MIN_ANSWERS: Final = 3
"""A speed that fewer answers have taught is not taken over."""
VERSION: Final = 1

Positive = Annotated[float, Meta(gt=0, lt=1e9)]
Amount = Annotated[float, Meta(gt=-1e15, lt=1e15)]


class NodeSpeed(msgspec.Struct, array_like=True):
    node: str
    ms_per_token: Positive
    factor: Positive
    answers: Annotated[int, Meta(ge=0)]


class Snapshot(msgspec.Struct, array_like=True):
    version: int
    taken_s: Amount
    """On the clock of all processes of this machine."""
    speeds: list[NodeSpeed]
    lengths: list[tuple[str, Positive]]
    tenant_lengths: list[tuple[str, str, Positive]]
    limits: dict[str, tuple[Amount, Amount]]
    """By tenant, what was left of requests and tokens per minute."""
    homes: list[tuple[int, str, str]]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Snapshot)


def take(fleet: Fleet, router: Router, rate_limits: RateLimits, now_s: float) -> bytes:
    lengths = router.output_lengths
    homes = list(router.island_choice.affinity.entries())[-MAX_HOMES:]
    speeds = [
        NodeSpeed(node.name, node.speed.learned_ms_per_token, node.speed.factor or 1.0, node.speed.answers)
        for node in fleet if node.speed.answers >= MIN_ANSWERS and node.speed.learned_ms_per_token > 0.0
    ]  # fmt: skip
    by_model, by_tenant = lengths.export()
    snapshot = Snapshot(VERSION, now_s, speeds, by_model, by_tenant, rate_limits.levels(now_s), homes)
    data = _encoder.encode(snapshot)
    if len(data) > MAX_BYTES:  # names may be long
        snapshot.homes = []
        data = _encoder.encode(snapshot)
    return data if len(data) <= MAX_BYTES else b""


class Restored:
    """A snapshot that is taken over while nodes become known."""

    def __init__(self, data: bytes, now_s: float) -> None:
        """Raises ValueError for what is no snapshot."""
        try:
            self._snapshot = snapshot = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"it is no snapshot: {error}") from None
        if snapshot.version != VERSION:
            raise ValueError(f"it has version {snapshot.version}, not {VERSION}")
        self._until_s = now_s + WAITING_S
        self._speeds = {one.node: one for one in snapshot.speeds}

    def apply(self, router: Router, rate_limits: RateLimits, now_s: float) -> None:
        """Take over all that belongs to no node."""
        snapshot = self._snapshot
        router.output_lengths.restore(snapshot.lengths, snapshot.tenant_lengths)
        rate_limits.restore(snapshot.limits, max(0.0, now_s - snapshot.taken_s), now_s)
        affinity = router.island_choice.affinity
        for key, home, last in snapshot.homes[-MAX_HOMES:]:
            affinity.remember(key, (home, last), now_s)

    def apply_to_nodes(self, fleet: Fleet, now_s: float) -> bool:
        """Take over the speeds of nodes that are known by now. Return whether any is missing."""
        for name in list(self._speeds):
            node = fleet.find(name)
            if node is not None:
                speed = self._speeds.pop(name)
                if not node.speed.answers:
                    node.speed.guess(speed.ms_per_token)
                    node.speed.factor = speed.factor
        return bool(self._speeds) and now_s < self._until_s
