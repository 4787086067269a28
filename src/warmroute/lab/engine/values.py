"""A request inside the engine, with the scheduler's state of it."""

from enum import IntEnum

from warmroute.fake_engine.core.engine_request import EngineRequest


class State(IntEnum):
    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3


class Sequence:
    """The mutable state of one request.

    A decoding sequence gains one token in each step: it has `token_offset + step` tokens when that step begins. So the
    engine does not have to write to each sequence in each step.
    """

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
        # for the whole request
        self.request = request
        self.arrival = arrival
        self.arrived_ms = arrived_ms
        self.state = State.WAITING
        self.tokens = request.prompt_tokens  # prompt and output so far; not updated while decoding
        self.emitted = 0  # output tokens; not updated while decoding
        self.hashes: list[int] = []  # of its leading full blocks, computed on demand
        self.cached_tokens = -1
        self.reloaded_tokens = 0
        self.preemptions = 0
        self.admitted_ms: float | None = None
        self.first_token_ms: float | None = None
        self.aborting = False
        # from an admission to the end or a preemption
        self.admission = 0  # the order in the running batch
        self.blocks: list[int] = []
        self.stored_blocks = 0
        self.computed_tokens = 0
        # while decoding
        self.token_offset = 0
        self.finish_step = 0
        self.due_step = 0  # the next step in which its blocks change

    def compute_hashes(self, count: int) -> None:
        """Make sure that `hashes` has the first `count` blocks."""
        known = len(self.hashes)
        if known < count:
            self.hashes.extend(self.request.content.hashes(known, count))
