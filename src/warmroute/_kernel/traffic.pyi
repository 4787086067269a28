from collections.abc import Mapping
from typing import Final

from warmroute._kernel.accounting import TicketState
from warmroute._kernel.hits import Hit

TIME_BOUNDS_MS: Final[tuple[float, ...]]
"""Upper bounds of the buckets of `Histogram.counts`: ten for each power of ten, 1 ms to 1,000 s. The last bucket has
none."""
SAMPLED_HITS: Final[int]
"""The round-robin estimate looks at this many of a prompt's hits, or up to twice as many."""
EXACT_ESTIMATES: Final[int]
"""Responses of a route in a second that the round-robin estimate counts one by one."""
SAMPLED_RESPONSES: Final[int]
"""Of further responses in the same second, it looks at one of this many."""
MAX_COUNTED_TOKENS: Final[int]
"""A response with more tokens counts as one with this many."""

class Histogram:
    """Times, counted in the buckets of TIME_BOUNDS_MS."""

    @property
    def counts(self) -> list[int]:
        """By bucket."""
    @property
    def sum_ms(self) -> float: ...
    def observe(self, ms: float, /) -> None:
        """Count a time. A negative one counts as 0."""

class TokenTraffic:
    """Complete responses with a status below 400, and their tokens. Totals since the start."""

    requests: int
    prompt_tokens: int
    """As the nodes reported them, or as the router counted them; 0 for prompts without a count."""
    cached_tokens: int
    """Those of the prompt tokens that were cached: reported, or predicted where a node reports none."""
    predicted_tokens: int
    """Cached tokens as the router predicted them, at most the prompt's."""
    reported_tokens: int
    """Cached tokens as nodes reported them."""
    output_tokens: int

class RouteTraffic(TokenTraffic):
    """The same for one model and route, with times and saved prefill time."""

    saved_ms: float
    """Prefill time saved, compared with a cold fleet."""
    saved_gpu_ms: float
    """The same in GPU milliseconds: multiplied by the GPUs of the node."""
    round_robin_tokens: float
    """An estimate: cached tokens under round robin."""
    round_robin_saved_ms: float
    """An estimate: prefill time that round robin would have saved."""
    round_robin_saved_gpu_ms: float
    prompt_gpu_ms: float
    """Prefill time of the prompts on a cold fleet, in GPU milliseconds."""
    counted_prompts: int
    """Responses with prompt tokens."""
    short_reports: int
    """Responses whose nodes reported far fewer prompt tokens than the router expected to be cached. The prompt counts
    with the tokens that the node reported."""
    hit_shares: float
    """Sum over these of the share of their prompt tokens that was cached."""
    hit_share_squares: float
    sampled_blocks: int
    """Blocks of their prompts, of those that core/reuse.py samples."""
    known_blocks: int
    """Those that an earlier prompt had, whether or not a node still has them."""
    @property
    def ttft(self) -> Histogram:
        """Time from arrival to first token of streamed responses."""
    @property
    def ttft_counts(self) -> list[int]:
        """`ttft.counts`."""
    @property
    def inter_token(self) -> Histogram:
        """Mean time between two output tokens of each streamed response that reports how many it has."""
    @property
    def queue_wait(self) -> Histogram:
        """Time in the admission queue."""
    @property
    def duration(self) -> Histogram:
        """Time from arrival to the end of the response."""
    def add(self, other: RouteTraffic, /) -> None:
        """Add the counters of another route to these."""

class TrafficRecorder:
    """Counts the responses to one tenant's requests of one route that one node served."""

    def __new__(cls, route: RouteTraffic, tenant: TokenTraffic, node: TokenTraffic, gpus: float) -> TrafficRecorder: ...
    @property
    def route(self) -> RouteTraffic: ...
    def record(
        self,
        ticket: TicketState,
        arrived_s: float,
        waited_s: float,
        now_s: float,
        streams: bool,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        output_tokens: int | None,
        predicted_tokens: int | None,
        hits: dict[str, Hit] | None,
        candidates: Mapping[str, object] | None,
        /,
    ) -> None:
        """Count a complete response, which ended now.

        `waited_s`: in the admission queue. `prompt_tokens`, `cached_tokens` and `output_tokens`: as the node reported
        them. `predicted_tokens`: cached tokens, None if the prompt was not looked up. `hits`: of its prompt, by node;
        None if the policy does not look them up. `candidates`, a dict: the nodes among which round robin would have
        chosen, by name.
        """
