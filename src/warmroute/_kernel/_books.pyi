class SpeedState:
    """What is learned of a node's speed."""

    ms_per_token: float
    factor: float
    answers: int
    _work: float
    _ms: float
    _at_s: float
    _last_first_s: float

class PaceState:
    """What is learned of a model's pace."""

    least_ms: float
    mean_ms: float
    slope_ms: float
    mean_context: float
    answers: int
    _xx: float
    _xy: float

class NodeState:
    """What a price takes from a node, and its books."""

    name: str
    speed: SpeedState
    pending_work: float
    kv_usage: float
    kv_delta: float
    distance_ms: float
    round_trip_ms: float
    arrival_rate: float
    arrival_s: float
    polled_s: float
    last_ticket_s: float
    latency_ms: float
    context: int
    kv_new: int
    inflight: int
    other_load: int
    polls: int
    unstarted: int

    @property
    def unseen(self) -> int:
        """Our requests whose first token nobody sees, and whose prefill is not expected to be done."""
    @property
    def outcomes(self) -> list[int]:
        """Tickets that were closed, by their outcome."""
    @property
    def first_byte_counts(self) -> list[int]:
        """First bytes by the bucket of the time they took, the last without a bound."""
    @property
    def first_byte_sum_ms(self) -> float: ...
    def saw_arrival(self, now_s: float, /) -> None:
        """A request was sent there."""
    def saw_latency(self, took_ms: float, /) -> None:
        """An answer has ended so long after its dispatch."""
    def expect_prefilled(self, now_s: float, /) -> None:
        """Told now and then, where there are `unseen` ones: those that are due are taken to be prefilled."""

class TicketState:
    """What a request has in the books of a node. Entered once, and left once."""

    _open: bool
    _new: int
    _work: float

    @property
    def node(self) -> NodeState: ...
    @property
    def opened_s(self) -> float: ...
    @property
    def first_byte_s(self) -> float:
        """0 where none has come."""
    @property
    def tokens(self) -> int:
        """Of its prompt, where that was looked up."""
    def enter(
        self,
        node: NodeState,
        now_s: float,
        pace: PaceState = ...,
        streams: bool = ...,
        tokens: int = ...,
        new: int = ...,
        prefill: float = ...,
        /,
    ) -> None:
        """Enters it in a node's books. Of a prompt that was looked up, all of the rest is told: its model's pace,
        whether its answer is streamed, its tokens, those that the node has to compute, and the work that is."""
    def first_byte(self, now_s: float, served: bool = True, /) -> None:
        """The node has begun its answer, and it is one that goes to the client. `served`: it is not a refusal."""
    def learn(self, output_tokens: int | None, now_s: float, /) -> None:
        """Its answer has ended, with so many tokens, where it says so: what they took is learned from."""
    def leave(self, outcome: int, now_s: float, /) -> bool:
        """Takes it out of the books; False where that was done before."""
