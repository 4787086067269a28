"""The lifecycle of a node that a provisioner creates, from the request to its termination: a state machine without
I/O.

    state         event                                next state     time limit
    -----------   ----------------------------------   -----------    ------------------------------------------
    REQUESTED     the provisioner accepts it           BOOTING        REQUEST_TIMEOUT_S
    BOOTING       its machine has an address           LOADING        boot_timeout_s
    LOADING       a health check passes                WARMING        load_timeout_s
    WARMING       the hot prefixes are prefilled       SERVING        PREWARM_TIMEOUT_S; then it serves without them
    SERVING       remove it                            DRAINING
    DRAINING      its last request has ended           TERMINATING    drain_timeout_s; then it is terminated anyway
    TERMINATING   its machine is gone                  TERMINATED
    any before    remove it, or its time limit ends    TERMINATING    (a start that fails makes its offer back off)
    SERVING
    any           its machine is gone                  TERMINATED

An event that does not fit the state changes nothing: a provisioner may report a fact twice, or late.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from math import inf
from typing import Final

from warmroute.config import Scaling
from warmroute.core.node import Node
from warmroute.scaling.offers import Offer

REQUEST_TIMEOUT_S: Final = 120.0
"""Time for a provisioner to accept a request for a node. After a call without an answer, a machine that appears within
this time is used."""
PREWARM_TIMEOUT_S: Final = 60.0
"""Time to prefill hot prefixes on a new node, or to move them from a draining one. A cold node serves, only slower, so
it does not wait longer."""


class LifecycleState(Enum):
    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


class LifecycleEvent(Enum):
    """What happens to a node. The value is the reason that is given where nobody gives another one."""

    ACCEPTED = "the provisioner accepted the request"
    HAS_ADDRESS = "the machine has an address"
    CHECK_PASSED = "a health check passed"
    PREWARMED = "the hot prefixes are prefilled"
    REMOVE = "the node is no longer needed"
    DRAINED = "no requests left"
    GONE = "the machine is gone"
    TIMED_OUT = "the state's time limit ended"


PENDING_STATES = frozenset(
    {LifecycleState.REQUESTED, LifecycleState.BOOTING, LifecycleState.LOADING, LifecycleState.WARMING}
)
"""States of a node that is wanted and does not serve yet."""

TRANSITIONS: dict[tuple[LifecycleState, LifecycleEvent], LifecycleState] = {
    (LifecycleState.REQUESTED, LifecycleEvent.ACCEPTED): LifecycleState.BOOTING,
    (LifecycleState.REQUESTED, LifecycleEvent.HAS_ADDRESS): LifecycleState.LOADING,
    (LifecycleState.BOOTING, LifecycleEvent.HAS_ADDRESS): LifecycleState.LOADING,
    (LifecycleState.LOADING, LifecycleEvent.CHECK_PASSED): LifecycleState.WARMING,
    (LifecycleState.WARMING, LifecycleEvent.PREWARMED): LifecycleState.SERVING,
    (LifecycleState.SERVING, LifecycleEvent.REMOVE): LifecycleState.DRAINING,
    (LifecycleState.DRAINING, LifecycleEvent.DRAINED): LifecycleState.TERMINATING,
    (LifecycleState.DRAINING, LifecycleEvent.TIMED_OUT): LifecycleState.TERMINATING,
    **{(state, LifecycleEvent.REMOVE): LifecycleState.TERMINATING for state in PENDING_STATES},
    **{(state, LifecycleEvent.TIMED_OUT): LifecycleState.TERMINATING for state in PENDING_STATES},
    # After the general rule for pending states, which it replaces: a node with a cold cache is worth more than none.
    (LifecycleState.WARMING, LifecycleEvent.TIMED_OUT): LifecycleState.SERVING,
    **{
        (state, LifecycleEvent.GONE): LifecycleState.TERMINATED
        for state in LifecycleState
        if state is not LifecycleState.TERMINATED
    },
}


class ManagedNode:
    """A node that the autoscaler requested, or adopted from an earlier router process."""

    def __init__(self, token: str, offer: Offer, now_s: float) -> None:
        self.token = token
        """Identifies the request for this node for good, so that a repeated request creates nothing new."""
        self.offer = offer
        self.offer_known = True
        """False while the provisioner has not reported the offer of an adopted machine."""
        self.adopted = False
        """Whether an earlier router process requested the node, so that its start time is unknown."""
        self.state = LifecycleState.REQUESTED
        self.reason = ""
        """Why the node is in this state."""
        self.requested_s = self.state_since_s = now_s
        self.serving_since_s: float | None = None
        self.failed_to_start = False
        """Whether the node ended before it served, although nobody removed it. Its offer backs off."""
        self.node: Node | None = None
        """The node's entry in the fleet. It stays here when somebody removes the node from the fleet."""
        self.url = ""
        self.routing_stopped = False
        """Whether the router sends the node no new requests. Running ones may go on."""
        self.removable = True
        """Whether the node's provisioner could terminate it now."""
        self.reclaimed = False
        """Whether the cloud takes the machine back, whatever the autoscaler does."""
        self.unhealthy_since_s: float | None = None
        self.missing_since_s: float | None = None
        """Since when the provisioner has not reported the machine."""

    @property
    def name(self) -> str:
        """The node's name in the fleet; empty before it has joined."""
        return self.node.name if self.node is not None else ""

    @property
    def log_name(self) -> str:
        """The node's name in the fleet, or the name that it will have there."""
        return self.name or f"{self.offer.provisioner}-{self.token[-8:]}"

    @property
    def pending(self) -> bool:
        return self.state in PENDING_STATES


class ManagedNodes:
    """All managed nodes by token. Terminated nodes are forgotten."""

    def __init__(self, config: Scaling) -> None:
        self.config = config
        self._nodes: dict[str, ManagedNode] = {}

    def __iter__(self) -> Iterator[ManagedNode]:
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, token: str) -> ManagedNode | None:
        return self._nodes.get(token)

    def named(self, name: str) -> ManagedNode | None:
        """Return the managed node that has this name in the fleet."""
        return next((managed for managed in self._nodes.values() if managed.name == name), None)

    def add(self, token: str, offer: Offer, now_s: float) -> ManagedNode:
        """Return a new node in the state REQUESTED, or the one that already has this token."""
        managed = self._nodes.get(token)
        if managed is None:
            managed = self._nodes[token] = ManagedNode(token, offer, now_s)
        return managed

    def discard(self, managed: ManagedNode) -> None:
        """Forget a node that was never requested."""
        self._nodes.pop(managed.token, None)

    def clear(self) -> None:
        """Manage nothing any more: another process does."""
        self._nodes.clear()

    def apply(self, managed: ManagedNode, event: LifecycleEvent, now_s: float, reason: str = "") -> bool:
        """Return whether the event changed the node's state."""
        # A task may still hold a node that was discarded, or one that the next leader's state replaced.
        if self._nodes.get(managed.token) is not managed:
            return False
        after = TRANSITIONS.get((managed.state, event))
        if after is None:
            return False
        if after is LifecycleState.SERVING:
            managed.serving_since_s = now_s
        elif managed.pending and event in (LifecycleEvent.TIMED_OUT, LifecycleEvent.GONE):
            managed.failed_to_start = True
        managed.state, managed.state_since_s, managed.reason = after, now_s, reason or event.value
        if after is LifecycleState.TERMINATED:
            del self._nodes[managed.token]
        return True

    def timed_out(self, now_s: float) -> list[ManagedNode]:
        """Return the nodes that have been in their state for longer than its time limit."""
        config = self.config
        limits_s = {
            LifecycleState.REQUESTED: REQUEST_TIMEOUT_S,
            LifecycleState.BOOTING: config.boot_timeout_s,
            LifecycleState.LOADING: config.load_timeout_s,
            LifecycleState.WARMING: PREWARM_TIMEOUT_S,
            LifecycleState.DRAINING: config.drain_timeout_s,
        }
        return [managed for managed in self if now_s - managed.state_since_s > limits_s.get(managed.state, inf)]
