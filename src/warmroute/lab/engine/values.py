"""What goes into the engine and comes out of it: settings, requests, sequences, counters."""

from enum import IntEnum

import msgspec

from warmroute.lab.engine.blocks import BlockContent

# Inputs and outputs of an engine core, as plain values. Times are in ms on the driver's clock.


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. The driver decides the length of its output."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    content: BlockContent
    priority: int = 0
    """A lower number is served first, if the engine schedules by priority."""
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    remote_tokens: int = 0
    """Prompt tokens whose KV cache another engine has computed and transferred."""


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first output token of a request."""

    request_id: str
    at_ms: float
    cached_tokens: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """A further output token. Only engines with `every_token` emit it."""

    request_id: str
    at_ms: float


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The end of a request, with its statistics. A time that the request did not reach is None."""

    request_id: str
    at_ms: float
    reason: str
    """`length` or `abort`."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, from the GPU cache or the CPU tier."""
    reloaded_tokens: int
    """The part of `cached_tokens` that came from the CPU tier."""
    output_tokens: int
    preemptions: int
    arrived_ms: float
    admitted_ms: float | None
    first_token_ms: float | None


EngineOutput = FirstToken | Token | Finished


class RequestTooLong(ValueError):
    """The request does not fit even into an empty engine."""


# Counters of one engine, for its metrics. Gauges are properties of the engine core.


class EngineStats:
    """Totals since the start, named after the vLLM metric that each one feeds."""

    __slots__ = (
        "busy_ms",
        "generation_tokens",
        "lora_loads",
        "preemptions",
        "prefill_time_ms",
        "prefilled_tokens",
        "prefills",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_computed",
        "queue_time_ms",
        "queue_times",
        "reloaded_tokens",
        "requests_aborted",
        "requests_finished",
        "requests_submitted",
        "steps",
    )

    def __init__(self) -> None:
        self.requests_submitted = 0
        self.requests_finished = 0
        self.requests_aborted = 0
        self.steps = 0
        self.busy_ms = 0.0
        self.prompt_tokens = 0  # of prompts whose prefill is complete
        self.prompt_tokens_computed = 0  # by prefill, including recomputation after preemption
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens, at first admission only
        self.prefix_cache_hits = 0  # tokens, GPU cache only
        self.reloaded_tokens = 0  # tokens from the CPU tier
        self.preemptions = 0
        self.queue_times = 0  # requests that ended after they were admitted
        self.queue_time_ms = 0.0  # sum of the times until their first admission
        self.prefills = 0  # of requests that finished
        self.prefill_time_ms = 0.0  # sum of the times from their first admission to their first token
        self.prefilled_tokens = 0  # their prompt tokens that were not cached
        self.lora_loads = 0


# The settings of one simulated engine, named after vLLM's own where vLLM has them.


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_blocks: int
    """KV blocks on the GPU, including the null block."""
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    """The token budget of a step."""
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    """Maximum tokens of prompt and output together. None: as many as the blocks hold."""
    by_priority: bool = False
    """Whether the engine admits waiting requests by priority and preempts the lowest one, instead of FCFS."""
    prefix_caching: bool = True
    reuse_cached_blocks: bool = True
    """False: the engine reports stored blocks but computes every prompt completely. Tests routers' trust in events."""
    max_loras: int = 1
    lora_load_ms: float = 20.0
    """Time to load an adapter. An estimate for 100 MB at a few GB/s, not measured."""
    cpu_blocks: int = 0
    """KV blocks in the CPU tier. 0: no CPU tier."""
    every_token: bool = False
    """Whether the engine outputs each token, not only the first. For drivers that stream."""
    fast_forward: bool = True
    """Whether the engine takes many decode steps at once while nothing else happens. The outcome is the same."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_blocks < 2:
            raise ValueError("an engine needs num_blocks ≥ 2 and block_size ≥ 1")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, as in vLLM")

    @property
    def capacity_tokens(self) -> int:
        """The maximum tokens of one request: what fits beside the null block, or max_model_len."""
        held = (self.num_blocks - 1) * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)


# A request inside the engine, with the scheduler's state of it.


class SequenceState(IntEnum):
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
        self.state = SequenceState.WAITING
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
