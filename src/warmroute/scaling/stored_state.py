"""The autoscaler's state as bytes, for the process that scales the fleet next: which nodes were requested, drained and
terminated, what was refused, and when the fleet last changed. Times are ages, since clocks of machines differ."""

from __future__ import annotations

from typing import Final

import msgspec

from warmroute.scaling.autoscaler import Autoscaler
from warmroute.scaling.node_lifecycle import LifecycleState, ManagedNode
from warmroute.scaling.offer import Offer

VERSION: Final = 1
MAX_AGE_S: Final = 1e9


class StoredNode(msgspec.Struct, frozen=True):
    token: str
    offer: Offer
    offer_known: bool
    state: LifecycleState
    state_age_s: float
    requested_age_s: float
    serving_age_s: float | None
    node: str
    """Its name in the fleet; empty before it is there."""
    url: str
    reason: str
    adopted: bool
    reclaimed: bool
    routing_stopped: bool


class StoredBackoff(msgspec.Struct, frozen=True):
    provisioner: str
    offer: str
    left_s: float
    duration_s: float
    reason: str


class StoredScaling(msgspec.Struct, frozen=True):
    version: int
    stored: float
    """Unix time."""
    added_age_s: float
    removed_age_s: float
    nodes: list[StoredNode]
    backoffs: list[StoredBackoff]
    terminated: list[tuple[str, str, float]]
    """Provisioner, token and age of machines that were terminated, and that a provisioner may still report."""


Terminated = dict[tuple[str, str], float]
"""By provisioner and token: when a machine was terminated."""


def encode_state(autoscaler: Autoscaler, terminated: Terminated, now_s: float, wall_s: float) -> bytes:
    added_s, removed_s = autoscaler.changed_s
    return msgspec.json.encode(
        StoredScaling(
            VERSION,
            wall_s,
            min(MAX_AGE_S, now_s - added_s),
            min(MAX_AGE_S, now_s - removed_s),
            [_stored(managed, now_s) for managed in autoscaler.managed],
            [StoredBackoff(*row) for row in autoscaler.offers.backoff_rows(now_s)],
            [(*key, now_s - terminated_s) for key, terminated_s in terminated.items()],
        )
    )


def _stored(managed: ManagedNode, now_s: float) -> StoredNode:
    serving_s = managed.serving_since_s
    return StoredNode(
        managed.token, managed.offer, managed.offer_known, managed.state, now_s - managed.state_since_s,
        now_s - managed.requested_s, None if serving_s is None else now_s - serving_s, managed.name, managed.url,
        managed.reason, managed.adopted, managed.reclaimed, managed.routing_stopped,
    )  # fmt: skip


def restore_state(
    autoscaler: Autoscaler, terminated: Terminated, stored: bytes, now_s: float, wall_s: float
) -> list[tuple[ManagedNode, str]]:
    """Take over the state of the process that led before. Return the managed nodes, each with its name in the fleet.
    Raises ValueError if the state cannot be read."""
    try:
        state = msgspec.json.decode(stored, type=StoredScaling)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if state.version != VERSION:
        raise ValueError(f"it has version {state.version}")
    then_s = now_s - max(0.0, wall_s - state.stored)
    autoscaler.changed_s = (then_s - state.added_age_s, then_s - state.removed_age_s)
    for backoff in state.backoffs:
        key = (backoff.provisioner, backoff.offer)
        autoscaler.offers.restore_backoff(key, then_s + backoff.left_s, backoff.duration_s, backoff.reason)
    terminated.update({(provisioner, token): then_s - age_s for provisioner, token, age_s in state.terminated})
    restored = []
    for one in state.nodes:
        if one.state is LifecycleState.TERMINATED:
            continue
        managed = autoscaler.managed.add(one.token, one.offer, then_s - one.requested_age_s)
        managed.state, managed.state_since_s = one.state, then_s - one.state_age_s
        managed.serving_since_s = None if one.serving_age_s is None else then_s - one.serving_age_s
        managed.reason, managed.url, managed.offer_known = one.reason, one.url, one.offer_known
        managed.adopted, managed.reclaimed = one.adopted, one.reclaimed
        managed.routing_stopped = one.routing_stopped
        restored.append((managed, one.node))
    return restored
