"""A request inside the engine: the scheduler's notes on it."""

from enum import IntEnum

from warmroute.fake_engine.core.engine_request import EngineRequest


class State(IntEnum):
    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    GONE = 3


class Sequence:
    """Mutable, one for each request. While it decodes, its length is a function of the step number alone:
    `token_offset + step` tokens exist when that step begins, so that nothing needs to be written each step."""

    __slots__ = (
        "aborting",
        "admission",
        "admitted_ms",
        "arrival",
        "arrived_ms",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "due_step",
        "emitted",
        "finish_step",
        "first_token_ms",
        "hashes",
        "preemptions",
        "reloaded_tokens",
        "request",
        "state",
        "stored_blocks",
        "token_offset",
        "tokens",
    )

    def __init__(self, request: EngineRequest, arrival: int, arrived_ms: float) -> None:
        # for its whole life
        self.request = request
        self.arrival = arrival
        self.arrived_ms = arrived_ms
        self.state = State.WAITING
        self.tokens = request.prompt_tokens  # prompt and answer so far; kept while not decoding
        self.emitted = 0  # tokens of the answer; kept while not decoding
        self.hashes: list[int] = []  # of its full blocks, as far as they were needed
        self.cached_tokens = -1
        self.reloaded_tokens = 0
        self.preemptions = 0
        self.admitted_ms: float | None = None
        self.first_token_ms: float | None = None
        self.aborting = False
        # from one admission to its end or preemption
        self.admission = 0  # the order in the running batch
        self.blocks: list[int] = []
        self.stored_blocks = 0
        self.computed_tokens = 0
        # while decoding
        self.token_offset = 0
        self.finish_step = 0
        self.due_step = 0  # the next step in which its blocks change

    def know_hashes(self, count: int) -> None:
        """Asks the content for the hashes of the first `count` blocks."""
        known = len(self.hashes)
        if known < count:
            self.hashes.extend(self.request.content.hashes(known, count))
