"""The life of a node that a provisioner makes, from the request to its end. No I/O: events and a clock go in, the next
state comes out, and who has stayed too long in one.

    state        event                       becomes       limit
    ---------    --------------------------  -----------   ---------------
    REQUESTED    the cloud has it            BOOTING       request_limit_s
    REQUESTED    refused, or lost            TERMINATED
    BOOTING      it has an address           LOADING       boot_limit_s
    LOADING      a check passes              WARMING       load_limit_s
    WARMING      what is hot is there        SERVING       warm_limit_s: then it serves as it is
    SERVING      to be given back, or the    DRAINING
                 cloud takes it back
    DRAINING     nothing runs there          ENDING        drain_limit_s: then it ends all the same
    ENDING       the cloud has ended it      TERMINATED
    any before   asked to end, its limit     ENDING        (a node that never came up is given back,
    SERVING      is over, it is gone                        and its offer rests)

Events that do not fit a state change nothing: a cloud may say a thing twice, or late. A request is named by its token
for good, so that asking again starts nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from warmroute.config import Scaling
from warmroute.scaling.offer import Offer


class State(Enum):
    REQUESTED = "requested"
    BOOTING = "booting"
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"
    TERMINATED = "terminated"


class Event(Enum):
    ACCEPTED = "the cloud has it"
    HAS_ADDRESS = "it has an address"
    CHECK_PASSED = "a check passed"
    WARM = "what is hot is there"
    GIVE_BACK = "to be given back"
    EMPTY = "nothing runs there"
    ENDED = "the cloud has ended it"
    LIMIT = "its time is over"


COMING = frozenset({State.REQUESTED, State.BOOTING, State.LOADING, State.WARMING})
"""Not serving yet, and wanted."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.REQUESTED, Event.ACCEPTED): State.BOOTING,
    (State.REQUESTED, Event.HAS_ADDRESS): State.LOADING,
    (State.BOOTING, Event.HAS_ADDRESS): State.LOADING,
    (State.LOADING, Event.CHECK_PASSED): State.WARMING,
    (State.WARMING, Event.WARM): State.SERVING,
    (State.WARMING, Event.LIMIT): State.SERVING,
    (State.SERVING, Event.GIVE_BACK): State.DRAINING,
    (State.DRAINING, Event.EMPTY): State.ENDING,
    (State.DRAINING, Event.LIMIT): State.ENDING,
    **{(state, Event.GIVE_BACK): State.ENDING for state in COMING},
    **{(state, Event.LIMIT): State.ENDING for state in COMING - {State.WARMING}},
    **{(state, Event.ENDED): State.TERMINATED for state in State if state is not State.TERMINATED},
}


class NodeLife:
    """One node, from its request on."""

    __slots__ = (
        "asked_s",
        "drained",
        "endable",
        "name",
        "never_came_up",
        "offer",
        "reclaimed",
        "serving_s",
        "since_s",
        "state",
        "token",
        "url",
        "why",
    )

    def __init__(self, token: str, offer: Offer, now_s: float) -> None:
        self.token = token
        self.offer = offer
        self.state = State.REQUESTED
        self.asked_s = self.since_s = now_s
        self.serving_s: float | None = None
        """When it began to serve."""
        self.never_came_up = False
        """It ended before it served, and nobody had asked it to: its offer is to rest."""
        self.name = ""
        """In the fleet, once it is there."""
        self.url = ""
        self.drained = False
        """It takes no requests any more; what ran there may still run."""
        self.endable = True
        """Its cloud could end it now."""
        self.reclaimed = False
        """Its cloud takes it back: it goes, whatever is done here."""
        self.why = ""
        """What was last said of it."""

    @property
    def called(self) -> str:
        """What logs call it, from the request on: its name in the fleet, as soon as it is there."""
        return self.name or f"{self.offer.provisioner}-{self.token[-8:]}"

    @property
    def coming(self) -> bool:
        return self.state in COMING

    def take(self, event: Event, now_s: float, why: str = "") -> bool:
        """Whether anything changed."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        if self.coming and event in (Event.LIMIT, Event.ENDED) and after is not State.SERVING:
            self.never_came_up = True
        if after is State.SERVING:
            self.serving_s = now_s
        self.state, self.since_s, self.why = after, now_s, why or event.value
        return True


class Lives:
    """All of them, by token. What has ended is let go of."""

    def __init__(
        self, config: Scaling, on_change: Callable[[NodeLife, State], None] = lambda _life, _was: None
    ) -> None:
        self._config = config
        self._lives: dict[str, NodeLife] = {}
        self._on_change = on_change

    def reconfigure(self, config: Scaling) -> None:
        self._config = config

    def __iter__(self) -> Iterator[NodeLife]:
        return iter(list(self._lives.values()))

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, token: str) -> NodeLife | None:
        return self._lives.get(token)

    def named(self, name: str) -> NodeLife | None:
        """The one that is this node of the fleet."""
        return next((life for life in self._lives.values() if life.name == name), None)

    def ask(self, token: str, offer: Offer, now_s: float) -> NodeLife:
        """Asked again with the same token: the same."""
        life = self._lives.get(token)
        if life is None:
            life = self._lives[token] = NodeLife(token, offer, now_s)
        return life

    def take(self, token: str, event: Event, now_s: float, why: str = "") -> NodeLife | None:
        """What happened to it. None where nothing changed, or nobody knows it."""
        life = self._lives.get(token)
        if life is None:
            return None
        was = life.state
        if not life.take(event, now_s, why):
            return None
        if life.state is State.TERMINATED:
            del self._lives[token]
        self._on_change(life, was)
        return life

    def overdue(self, now_s: float) -> list[NodeLife]:
        """Those that have been in their state for longer than it may take: each is to be told LIMIT."""
        config = self._config
        limits_s = {
            State.REQUESTED: config.request_limit_s,
            State.BOOTING: config.boot_limit_s,
            State.LOADING: config.load_limit_s,
            State.WARMING: config.warm_limit_s,
            State.DRAINING: config.drain_limit_s,
        }
        return [life for life in self if now_s - life.since_s > limits_s.get(life.state, float("inf"))]
