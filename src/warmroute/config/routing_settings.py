"""Settings of routing policies, admission and the cache index."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from warmroute.config.section import NOT_IN_FILE, Count, PolicyName, PrefixKey, Section


class Index(Section, frozen=True):
    """The index of the nodes' KV caches."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Maximum memory. A cached block of a node takes about 48 bytes.")
    ] = 268_435_456
    min_prompt_tokens: Annotated[
        int, Meta(ge=0, description="The router ignores caches for prompts shorter than this and routes them by load.")
    ] = 200
    assumed_cache_tokens: Annotated[
        Count, Meta(description="Size of a node's KV cache if the node does not report it.")
    ] = 131_072


class Routing(Section, frozen=True):
    """The routing policy."""

    policy: Annotated[PolicyName, Meta(description="Policy that picks the node for a request.")] = "price"
    session_headers: Annotated[
        tuple[str, ...], Meta(description="Request headers with a session id. The first one present counts.")
    ] = ("x-session-id", "x-conversation-id")
    prefix_key: Annotated[
        PrefixKey,
        Meta(
            description="What requests of `prefix_hash` share a node by: the start of the system prompt and of the "
            "first user message, of the system prompt alone, or of the whole prompt (system prompt, tools, messages). "
            "The last two also place requests of `session` that name no session."
        ),
    ] = "system_and_user"
    prefix_characters: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="Length of these starts in characters, four of which are about a token. `system_and_user` and "
            "`system` use at most 256.",
        ),
    ] = 256
    seed: Annotated[
        int, Meta(description="Seed of random choices, for reproducible experiments. 0: from the operating system.")
    ] = 0
    load_factor: Annotated[float, Meta(ge=1), NOT_IN_FILE] = 1.25
    """`prefix_hash` and `session` skip a node with more than this × the mean number of requests in flight."""

    @property
    def looks_up_caches(self) -> bool:
        return self.policy in ("approximate", "overlap", "price")

    @property
    def uses_kv_events(self) -> bool:
        """Whether the policy needs the nodes' KV events."""
        return self.policy in ("overlap", "price")


class Pricing(Section, frozen=True):
    """The policy `price`."""

    second_home_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Extra time a request may take on another node in order to cache a hot prefix there, too. "
            "0: only where it takes no longer.",
        ),
    ] = 250.0
    cache_weight: Annotated[
        float, Meta(ge=0, le=1, description="Weight of cached prefix tokens: 1 counts all, 0 routes by load alone.")
    ] = 1.0
    late_penalty_ms: Annotated[
        float, Meta(ge=0, description="Penalty in milliseconds for missing the TTFT deadline.")
    ] = 10_000.0
    adapter_load_ms: Annotated[float, Meta(ge=0, description="Time a node takes to load a LoRA adapter.")] = 200.0
    split: Annotated[
        Literal["by_price", "always", "never"],
        Meta(
            description="When a `prefill` node prefills for another node: where that costs less, always if a prefill "
            "node is up, or never."
        ),
    ] = "by_price"
    max_saving_ms: Annotated[float, Meta(gt=0), NOT_IN_FILE] = 60_000.0
    """Upper limit for the time that a cached prefix saves, so that no prefix keeps its node for ever."""
    room: Annotated[bool, NOT_IN_FILE] = True
    """Count the time to free KV memory on a full node."""
    memory: Annotated[bool, NOT_IN_FILE] = True
    """Count the cost of the blocks that a request evicts from a node's cache."""
    congestion: Annotated[bool, NOT_IN_FILE] = True
    """Count the time that a request adds to those behind it."""


class Admission(Section, frozen=True):
    """Which requests the router sends on, queues or rejects."""

    queue_at_router: Annotated[
        bool,
        Meta(
            description="Queue requests in the router, not in the engine, until their node has room. For the policy "
            "`price`."
        ),
    ] = True
    max_node_backlog_ms: Annotated[
        float,
        Meta(gt=0, description="Prefill work left on a node above which further requests wait in the router."),
    ] = 250.0
    max_waiting: Annotated[
        Count,
        Meta(
            description="Maximum number of requests waiting in the router. Above: 429 for the newest request of the "
            "tenant with the most of them. Low priority: 429 above half of it, and waiting requests make room for "
            "others. High priority: no limit."
        ),
    ] = 4096
    max_wait_s: Annotated[
        float, Meta(ge=0, description="Maximum time a request waits in the router. Above: 503. 0: no limit.")
    ] = 0.0
    queue_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="The router skips nodes with this many requests in their own queue. If all nodes have: 429. "
            "Low priority: half of it. High priority: no limit. 0: no limit. For all policies.",
        ),
    ] = 0
