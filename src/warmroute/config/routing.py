"""Which node a request goes to, and whether it goes at all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from warmroute.config.section import Count, PolicyName, Seconds, Section


class Index(Section, frozen=True):
    """What the router keeps of its nodes' caches, and how much that counts."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Memory for all blocks of all nodes; about 48 bytes a block of a node.")
    ] = 268_435_456
    min_tokens: Annotated[
        int, Meta(ge=0, description="Prompts shorter than this are routed by load: there is nothing to win.")
    ] = 200
    assumed_cache_tokens: Annotated[
        Count, Meta(description="What a node's cache is believed to hold where it does not say.")
    ] = 131_072
    expected_s: Annotated[
        Seconds,
        Meta(description="How long after a first token its blocks are expected to be told of by the node's events."),
    ] = 1.0
    stale_s: Annotated[
        Seconds, Meta(description="Silence of a node after which what it told counts less and less.")
    ] = 5.0
    gone_s: Annotated[Seconds, Meta(description="Silence of a node after which what it told counts nothing.")] = 30.0


class Routing(Section, frozen=True):
    """Which node a request goes to."""

    policy: Annotated[PolicyName, Meta(description="The policy that ranks the nodes of a model.")] = "price"
    load_factor: Annotated[
        float,
        Meta(
            ge=1, description="`prefix_hash` and `session` pass over a node with more than this × the mean in flight."
        ),
    ] = 1.25
    session_headers: Annotated[
        tuple[str, ...], Meta(description="Request headers that name a session, in the order they are looked for.")
    ] = ("x-session-id", "x-conversation-id")
    seed: Annotated[int, Meta(description="Seed of the random choices; 0 takes one from the system.")] = 0

    @property
    def uses_events(self) -> bool:
        """Whether the policy wants to know what nodes tell of their caches."""
        return self.policy in ("overlap", "price")


class Pricing(Section, frozen=True):
    """What counts in the price of a node, for the policy `price`."""

    room: Annotated[bool, Meta(description="Whether finding KV memory on a full node counts.")] = True
    memory: Annotated[bool, Meta(description="Whether it counts what a request pushes out of a node's cache.")] = True
    congestion: Annotated[bool, Meta(description="Whether it counts what a request costs those behind it.")] = True
    second_home_ms: Annotated[
        float,
        Meta(ge=0, description="What a request may pay to give a beginning that crowds a node another home."),
    ] = 250.0
    locality: Annotated[
        float, Meta(ge=0, le=1, description="How much of a cached prefix counts: 1 for all of it, 0 for load alone.")
    ] = 1.0
    late_ms: Annotated[
        float, Meta(ge=0, description="What it costs that a first token comes after its deadline, as time.")
    ] = 10_000.0
    adapter_load_ms: Annotated[
        float, Meta(ge=0, description="What a node takes to load a LoRA adapter that it has not loaded.")
    ] = 200.0
    max_saving_ms: Annotated[
        float, Meta(gt=0, description="The most that a cached prefix may save, so that no prefix owns a node for ever.")
    ] = 60_000.0


class Admission(Section, frozen=True):
    """Who is let through to a node, who waits for one, and who is refused."""

    hold: Annotated[
        bool,
        Meta(
            description="Whether requests wait here until the node they are meant for has room, and not in its queue; "
            "for the policy `price`."
        ),
    ] = True
    ahead_ms: Annotated[
        float, Meta(gt=0, description="Prefill work that may be queued on a node before others wait here.")
    ] = 250.0
    max_waiting: Annotated[
        Count,
        Meta(
            description="Requests that wait here; above it 429, from half of it for low priority; high passes. Low "
            "ones that wait make room for others."
        ),
    ] = 4096
    max_wait_s: Annotated[
        float, Meta(ge=0, description="How long a request may wait here; above it 503. 0 for as long as it takes.")
    ] = 0.0
    queue_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests in a node's own queue. Nodes with so many are passed over; where all have, 429, from "
            "half of it for low priority; high passes. 0 for no limit. For every policy.",
        ),
    ] = 0
