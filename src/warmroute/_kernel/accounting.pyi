from typing import Final

from warmroute._kernel.first_token_order import FirstTokenOrder

# The outcome of a ticket whose time counts (core.messages.Outcome).
OUTCOME_OK: Final[int]

TTFT_BOUNDS_MS: Final[tuple[float, ...]]
"""Upper bounds of the buckets of `NodeState.ttft_counts`; the last bucket has none."""
LATENCY_WEIGHT: Final[float]
"""Weight of one response in the moving average of a node's latency."""
ARRIVAL_DECAY_S: Final[float]
"""A request that arrived this long ago counts 1/e in the arrival rate."""

# Learning the speed of prefill (core/speeds.py).
ATTENTION_WORK: Final[float]
"""Additional work of a token for each token before it. On an H200: 3.4e-5 (32 B), 4.0e-5 (8 B), 7.2e-5 (1.5 B)."""
FIRST_TOKEN_STEPS: Final[float]
"""Steps of the batch until a first token, without its own work: half of the running step, and the next one."""
STEP_WORK: Final[float]
"""Tokens whose prefill takes about as long as a step without any."""
SPEED_DECAY_S: Final[float]
"""An observation this old counts 1/e, but never less than SPEED_MIN_KEPT of its weight before the next one."""
SPEED_MIN_KEPT: Final[float]
SPEED_MAX_FACTOR: Final[float]
"""One observation counts as at most this many times slower than the estimate. The next ones may confirm it."""
STEP_MAX_FACTOR: Final[float]
"""A step counts as at most this many times as long as an uninterrupted one. The tokens of a short answer that stops for
a prefill seem to take far longer, and nothing of a first token's time would be left for its own prefill."""
CARRIED_MAX_FACTOR: Final[float]
"""A first token that is charged with what the last one's time has left counts as at most this many times slower."""
PREFILL_MIN_SHARE: Final[float]
"""At least this share of the time until a first token counts as prefill. On a busy node, first tokens come with every
step; without this bound nothing would be left for the prefill, and the node would seem infinitely fast."""
DECODE_FACTOR_WEIGHT: Final[float]
"""Weight of one response in a node's decode factor."""
LONG_PREFILL_WORK: Final[float]
"""A prefill with at least this much work takes longer than a step that decodes, on all GPUs: 200 to 430 tokens do."""
STEP_FALL: Final[float]
"""Weight of a response whose tokens came faster than `step_ms`, in this."""
STEP_RISE: Final[float]
"""Weight of one whose tokens came more slowly: so it is a low quantile."""
LONG_PREFILL_WEIGHT: Final[float]
"""Weight of one long prefill in their moving means."""

# Judging a learned speed (core/speeds.py).
REVIEW_WEIGHT: Final[float]
"""Weight of one response in the moving means."""
EARLY_STEPS: Final[float]
"""A first token takes one step of the engine. One that comes within this many steps came too early."""
EARLY_MIN_STEPS: Final[float]
"""A response with fewer further tokens does not show how long a step takes."""

# Learning the decode speed of a model (core/speeds.py).
DECODE_WEIGHT: Final[float]
"""Weight of one response."""
DECODE_MIN_SHARE: Final[float]
"""A token takes at least this share of the mean."""
DECODE_MAX_FACTOR: Final[float]
"""One response counts as at most this many times slower than the estimate."""
REQUEST_CONTEXT: Final[float]
"""Each request of a batch slows it down like this many tokens of context, besides those of its prompt: its output, and
the work that an engine does for each request of a step (300 to 1,300 tokens on an H200)."""
DECODE_FACTOR_NOISE: Final[float]
"""Prices ignore deviations of a node's decode speed from its model's line up to this."""
PREFILLED_MAX_SHARE: Final[float]
"""At most this share of a prompt counts as prefilled before its first token."""
PREFILL_LATE: Final[float]
"""If a first token takes this many times as long as expected, nothing of its prompt counts as prefilled."""

class SpeedState:
    """The learned speed of a node."""

    ms_per_token: float
    learned_ms_per_token: float
    is_replaced: bool
    factor: float
    answers: int
    lone_prefills: int
    lone_work: float
    lone_ms: float
    lone_xx: float
    lone_xy: float
    long_prefills: int
    long_work: float
    long_ms: float
    _step_ms: float
    timed_answers: int
    early_share: float
    _work: float
    _ms: float
    _at_s: float
    _last_first_token_s: float
    _uncharged_ms: float
    _carried_ms_per_token: float
    first_tokens: FirstTokenOrder | None
    """Where the first tokens are kept until they are learned; None: the kernel learns at once."""

    def learn_reported(self, prefills: int, work: float, took_ms: float, step_ms: float, now_s: float, /) -> None:
        """Learn from prefills that the engine reports: each took `took_ms` on average, for this much work."""
    def learn(self, work: float, step_ms: float, sent_s: float, now_s: float, lone: bool, /) -> None:
        """Learn from a first token: a prompt with this much work, sent at `sent_s`, was prefilled at `now_s`."""

class DecodeSpeedState:
    """The learned decode speed of a model."""

    least_ms: float
    mean_ms: float
    slope_ms: float
    mean_context: float
    answers: int
    _xx: float
    _xy: float

class NodeState:
    """A node's figures, as tickets change them and prices read them. fleet.node.Node describes them."""

    name: str
    speed: SpeedState
    pending_work: float
    kv_usage: float
    kv_delta: float
    kv_pressure: float
    queue_ms: float
    distance_ms: float
    round_trip_ms: float
    arrival_rate: float
    arrival_s: float
    polled_s: float
    last_ticket_s: float
    latency_ms: float
    context_tokens: int
    """Prompt tokens of its requests, and REQUEST_CONTEXT for each of them."""
    kv_new: int
    inflight: int
    other_load: int
    polls: int
    unstarted: int

    @property
    def kv_sum(self) -> float:
        """The sum of all changes that tickets made to `kv_delta`. Polls do not reset it."""
    @property
    def changes(self) -> int:
        """How often tickets changed these figures."""
    @property
    def peer_inflight(self) -> int:
        """The part of `inflight` that is the peers' (core/cluster/peer.py). Likewise the next three."""
    @property
    def peer_context_tokens(self) -> int: ...
    @property
    def peer_kv_new(self) -> int: ...
    @property
    def peer_pending_work(self) -> float: ...
    @property
    def own_pending_work(self) -> float:
        """The part of `pending_work` that is this process's."""
    published_work: float
    """`own_pending_work` when it was last published."""
    published_changes: int
    """`changes` at that time."""
    @property
    def unstreamed_prefills(self) -> int:
        """Our requests without streaming whose prefill is not due yet."""
    @property
    def unstreamed(self) -> int:
        """Our requests without streaming whose prompt was looked up."""
    @property
    def outcomes(self) -> list[int]:
        """Released tickets by outcome."""
    @property
    def ttft_counts(self) -> list[int]:
        """First tokens by bucket of TTFT_BOUNDS_MS."""
    @property
    def ttft_sum_ms(self) -> float: ...
    @property
    def streamed_ttft_ms(self) -> float:
        """Sum of the times to first token of streamed responses to prompts that were looked up."""
    @property
    def streamed_work(self) -> float:
        """Sum over the same responses of the prefill work until their first token, as of their dispatch."""
    @property
    def streamed_steps_ms(self) -> float:
        """Sum over the same responses of what the first token takes beside that work."""
    def record_arrival(self, now_s: float, /) -> None:
        """Count a request that is sent to the node now."""
    def record_latency(self, took_ms: float, /) -> None:
        """Add a response's time from dispatch to end to the moving average."""
    def add_context(self, tokens: int, /) -> None:
        """Add to `context_tokens`; a negative number takes some away. It counts as one of the `changes`."""
    def assume_prefilled(self, now_s: float, /) -> None:
        """End the unstreamed prefills that are due by now. To be called now and then while there are some."""
    def remaining_work(self, now_s: float, /) -> float:
        """Return `pending_work` without what the node should have prefilled of its first prompt by now: at most
        PREFILLED_MAX_SHARE of it, since the estimate may be wrong, and nothing if its first token is very late."""

class TicketState:
    """One request in the accounting of one node. Opened once, and released once."""

    has_hidden_hits: bool
    """Whether the node may have more of the prompt than its work says, which nobody may learn. The node's speed is not
    learned from it before `reveal_hits`."""
    _is_open: bool
    _new_tokens: int
    _pending_work: float

    @property
    def node(self) -> NodeState: ...
    @property
    def opened_s(self) -> float: ...
    @property
    def first_token_s(self) -> float:
        """0 before the first token."""
    @property
    def expected_ttft_ms(self) -> float:
        """Time to first token that the router expected at dispatch; 0 if the prompt was not looked up."""
    @property
    def tokens(self) -> int:
        """Tokens of its prompt, if that was looked up."""
    def open(
        self,
        node: NodeState,
        now_s: float,
        decode_speed: DecodeSpeedState = ...,
        streams: bool = ...,
        tokens: int = ...,
        new_tokens: int = ...,
        work: float = ...,
        /,
    ) -> None:
        """Add the ticket to a node's figures. For a prompt that was looked up, all arguments are given: the decode
        speed of its model, whether the response is streamed, the prompt's tokens, those of them that the node has to
        prefill, and the work of that."""
    def first_token(self, now_s: float, served: bool = True, /) -> None:
        """Record that the first token arrived. `served`: the response is not an error."""
    def reveal_hits(self, work: float, /) -> None:
        """Learn from a prompt with hidden hits, whose work was this by what the engine reports. To be called between
        `first_token` and `record_answer`."""
    def record_answer(self, output_tokens: int | None, now_s: float, /) -> None:
        """Learn from a response that has ended. `output_tokens`: None if it did not report them."""
    def release(self, outcome: int, now_s: float, /) -> bool:
        """Remove the ticket from its node's figures; return False if that was done before."""
