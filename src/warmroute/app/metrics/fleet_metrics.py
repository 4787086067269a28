"""What the metrics page says of the fleet: nodes, their caches, the index, islands and scaling. Each metric is declared
above the function that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from warmroute._kernel import TTFT_BOUNDS_MS
from warmroute.app.metrics import counter, gauge, histogram
from warmroute.app.metrics.exposition import Page, bucket_bounds, format_labels, label_value
from warmroute.core.cache_view import EVENT_AGES_S, CacheView
from warmroute.core.fleet import Fleet
from warmroute.core.health import HealthState
from warmroute.core.islands import IslandRegistry
from warmroute.core.messages import Outcome
from warmroute.core.node import EngineRates

NODE_REQUESTS: Final = counter("node_requests", "Requests sent to the node, by how they ended.", "node", "outcome")
NODE_STATE: Final = gauge("node_state", "1 for the node's current state, 0 for all others.", "node", "state")
NODE_EJECTIONS: Final = counter(
    "node_ejections", "Times that the node was ejected because it answered far worse than its peers.", "node", "reason"
)
NODE_IN_FLIGHT: Final = gauge("node_requests_in_flight", "Requests of this router on the node.", "node")
NODE_MAX_IN_FLIGHT: Final = gauge(
    "node_max_requests_in_flight", "Requests that the router sends to the node at a time, if it is limited.", "node"
)
NODE_CONCURRENCY_LIMIT: Final = gauge(
    "node_concurrency_limit",
    "Learned limit of the requests on a node that has some without streaming, while there is one.",
    "node",
)
NODE_OTHER_REQUESTS: Final = gauge("node_other_requests", "Requests of other clients on the node.", "node")
NODE_WAITING: Final = gauge("node_requests_waiting", "Requests in the engine's own queue.", "node")
NODE_KV_USAGE: Final = gauge("node_kv_usage_ratio", "Fraction of the KV blocks in use.", "node")
NODE_TTFT: Final = histogram(
    "node_time_to_first_token_seconds",
    "Time from sending a request to its first token, or to the end of a response that is not streamed.",
    "node",
)
NODE_LATENCY: Final = gauge("node_latency_seconds", "Moving average of the response time.", "node")
NODE_PREFILL: Final = gauge(
    "node_prefill_seconds_per_token", "Time to prefill a token of a short prompt, as routing uses it.", "node"
)
NODE_PREFILL_IMPLAUSIBLE: Final = gauge(
    "node_prefill_speed_implausible", "1 while routing uses the peers' speed because the learned one cannot be.", "node"
)
NODE_DECODE: Final = gauge(
    "node_decode_seconds_per_token", "Learned time between two output tokens, at the current load.", "node"
)
NODE_LORA_ADAPTERS: Final = gauge("node_lora_adapters", "LoRA adapters that the node probably has loaded.", "node")
NODE_LORA_LOADS: Final = counter("node_lora_loads", "Requests for which the node had to load an adapter.", "node")
NODE_ENGINE_HITS: Final = gauge(
    "node_engine_hit_ratio",
    "Fraction of prompt tokens that the engine found in its cache in the last half minute.",
    "node",
)
NODE_PREDICTED_HITS: Final = gauge(
    "node_predicted_hit_ratio",
    "Fraction of prompt tokens that the router predicted to be cached, at the same time.",
    "node",
)
NODE_ENGINE_QUERIES: Final = counter(
    "node_engine_prefix_cache_queries",
    "Prompt tokens that the engine looked up in its cache, by its own counter, since the router knows the node.",
    "node",
)
NODE_ENGINE_HIT_TOKENS: Final = counter(
    "node_engine_prefix_cache_hits",
    "Prompt tokens that the engine found in its cache, by its own counter, since the router knows the node.",
    "node",
)
NODE_ENGINE_PREEMPTIONS: Final = counter(
    "node_engine_preemptions",
    "Requests that the engine preempted, by its own counter, since the router knows the node.",
    "node",
)
NODE_PREEMPTIONS: Final = gauge(
    "node_preemptions_per_second",
    "Requests that the engine preempted for lack of KV memory, in the last ten seconds.",
    "node",
)
NODE_QUEUE_TIME: Final = gauge(
    "node_queue_time_seconds", "Mean time in the engine's own queue, as it reported it in the last half minute.", "node"
)

_HEALTH_STATES: Final = [(state, f',state="{state.value}"') for state in HealthState]
_OUTCOMES: Final = [(outcome, f',outcome="{outcome.name.lower()}"') for outcome in Outcome]
_TTFT_BOUNDS: Final = bucket_bounds(bound / 1000 for bound in TTFT_BOUNDS_MS)


def add_nodes(page: Page, fleet: Fleet) -> None:
    in_flight, other_requests = page[NODE_IN_FLIGHT], page[NODE_OTHER_REQUESTS]
    waiting, kv_usage = page[NODE_WAITING], page[NODE_KV_USAGE]
    latency, prefill, decode = page[NODE_LATENCY], page[NODE_PREFILL], page[NODE_DECODE]
    adapters, adapter_loads = page[NODE_LORA_ADAPTERS], page[NODE_LORA_LOADS]
    states, requests = page[NODE_STATE], page[NODE_REQUESTS]
    ttft, implausible = page[NODE_TTFT], page[NODE_PREFILL_IMPLAUSIBLE]
    for node in list(fleet):
        name = f'node="{label_value(node.name)}"'
        in_flight.add(node.own_inflight, name)
        if node.max_inflight:
            page[NODE_MAX_IN_FLIGHT].add(node.max_inflight, name)
        if node.concurrency.most:
            page[NODE_CONCURRENCY_LIMIT].add(node.concurrency.most, name)
        other_requests.add(node.other_load, name)
        waiting.add(node.waiting, name)
        kv_usage.add(node.kv_usage, name)
        latency.add(node.latency_ms / 1000, name)
        prefill.add(node.speed.ms_per_token / 1000, name)
        implausible.add(bool(node.speed.implausible), name)
        for group in node.groups[:1]:
            decode.add(node.speed.factor * group.decode_speed.token_ms(node.context_tokens) / 1000, name)
        _add_rates(page, node.rates, name)
        adapters.add(len(node.loaded_adapters), name)
        adapter_loads.add(node.loaded_adapters.load_count, name)
        draining, current = node.draining, node.health.state
        for state, label in _HEALTH_STATES:
            states.add(state is current and not draining, name + label)
        states.add(draining, name + ',state="draining"')
        for reason, count in node.recent_requests.ejections.copy().items():
            page[NODE_EJECTIONS].add(count, f'{name},reason="{reason}"')
        for outcome, label in _OUTCOMES:
            requests.add(node.outcomes[outcome], name + label)
        ttft.add_histogram(_TTFT_BOUNDS, node.ttft_counts, node.ttft_sum_ms / 1000, name)


def _add_rates(page: Page, rates: EngineRates, name: str) -> None:
    if (hit_share := rates.hit_share) is not None:
        page[NODE_ENGINE_HITS].add(hit_share, name)
    if (predicted := rates.predicted_share) is not None:
        page[NODE_PREDICTED_HITS].add(predicted, name)
    page[NODE_PREEMPTIONS].add(rates.preemptions_per_s, name)
    for metric, total in (
        (NODE_ENGINE_QUERIES, rates.queries_total),
        (NODE_ENGINE_HIT_TOKENS, rates.hits_total),
        (NODE_ENGINE_PREEMPTIONS, rates.preemptions_total),
    ):
        if total is not None:
            page[metric].add(total, name)
    if (queue_ms := rates.queue_time_ms) is not None:
        page[NODE_QUEUE_TIME].add(queue_ms / 1000, name)


INDEX_BYTES: Final = gauge("index_bytes", "Memory of the cache index.")
INDEX_MAX_BYTES: Final = gauge("index_max_bytes", "Maximum memory of the cache index.")
INDEX_BLOCKS: Final = gauge("index_blocks", "Distinct blocks in the cache index.")
INDEX_BLOCK_COPIES: Final = gauge("index_block_copies", "Blocks in the cache index, once for each node and rank.")
LOOKUP_ERRORS: Final = counter(
    "lookup_errors", "Requests routed by load because the cache index failed at their prompt."
)
STORE_BLOCKS: Final = gauge("kv_store_blocks", "Blocks that a shared KV store should hold.", "store")
STORE_PREDICTED: Final = counter(
    "kv_store_predicted_tokens", "Prompt tokens that nodes should load from a shared KV store.", "store"
)
STORE_LOADED: Final = counter("kv_store_loaded_tokens", "Those of them that the engines reported as cached.", "store")
INDEX_EVICTIONS: Final = counter("index_evictions", "Block copies evicted from the index to stay below its maximum.")


def add_index(page: Page, cache_view: CacheView) -> None:
    stats = cache_view.index.stats()
    page[INDEX_BYTES].add(stats["bytes"])
    page[INDEX_MAX_BYTES].add(stats["budget_bytes"])
    page[INDEX_BLOCKS].add(stats["blocks"])
    page[INDEX_BLOCK_COPIES].add(stats["pairs"])
    page[INDEX_EVICTIONS].add(stats["evicted"])
    page[LOOKUP_ERRORS].add(cache_view.lookup_errors)
    for store in list(cache_view.stores.values()):
        labels = format_labels(store=store.name)
        page[STORE_BLOCKS].add(store.blocks, labels)
        page[STORE_PREDICTED].add(store.accuracy.predicted_tokens, labels)
        page[STORE_LOADED].add(store.accuracy.reported_tokens, labels)


CACHE_EVENTS_COMPLETE: Final = gauge(
    "node_cache_events_complete", "1 if the router receives the node's KV events and missed none.", "node"
)
CACHE_TOKEN_MISMATCH: Final = gauge(
    "node_cache_token_mismatch", "1 if the node's tokens differ from the router's for the same prompts.", "node"
)
CACHE_CONFIDENCE: Final = gauge("node_cache_confidence_ratio", "Weight of predicted cache hits on the node.", "node")
CACHE_AGREEMENT: Final = gauge(
    "node_cache_prediction_agreement_ratio",
    "Cached tokens both predicted and reported, as a fraction of those predicted or reported; 1 before the first.",
    "node",
)
CACHE_EVENT_LAG: Final = gauge("node_cache_event_lag_seconds", "Delay of the node's KV events.", "node")
CACHE_PREDICTED: Final = counter(
    "node_cache_predicted_tokens", "Cached tokens that the router predicted for responses that report them.", "node"
)
CACHE_REPORTED: Final = counter(
    "node_cache_reported_tokens", "Cached tokens that the node reported, for prompts with a prediction.", "node"
)
CACHE_PREDICTIONS: Final = counter(
    "node_cache_predictions", "Predictions that could be compared with a report of the node.", "node"
)
CACHE_EXACT: Final = counter("node_cache_exact_predictions", "Predictions equal to the node's report.", "node")
CACHE_EVENT_GAPS: Final = counter("node_cache_event_gaps", "Times that KV events were lost for good.", "node")


def add_caches(page: Page, cache_view: CacheView, now_s: float) -> None:
    for cache in list(cache_view):
        node, accuracy = format_labels(node=cache.name), cache.accuracy
        page[CACHE_EVENTS_COMPLETE].add(cache.complete, node)
        page[CACHE_TOKEN_MISMATCH].add(cache.token_mismatch, node)
        page[CACHE_CONFIDENCE].add(cache.confidence(now_s, *EVENT_AGES_S), node)
        page[CACHE_AGREEMENT].add(accuracy.agreement(), node)
        page[CACHE_EVENT_LAG].add(cache.event_lag_s, node)
        page[CACHE_PREDICTED].add(accuracy.predicted_tokens, node)
        page[CACHE_REPORTED].add(accuracy.reported_tokens, node)
        page[CACHE_PREDICTIONS].add(accuracy.compared, node)
        page[CACHE_EXACT].add(accuracy.exact, node)
        page[CACHE_EVENT_GAPS].add(cache.gaps, node)


ISLAND_ROUND_TRIP: Final = gauge(
    "island_round_trip_seconds", "Configured or measured round trip to the island.", "island"
)
ISLAND_DISTANCE: Final = gauge(
    "island_distance_seconds", "Cost of the island's distance in a price: network, egress and queue.", "island"
)
ISLAND_QUEUE: Final = gauge(
    "island_queue_seconds", "Time for which requests waiting in the router will occupy the island's nodes.", "island"
)
CONVERSATIONS_STARTED: Final = counter("conversations_started", "New conversations.", "island")
TURNS_AT_HOME: Final = counter("conversation_turns_at_home", "Turns served on their conversation's island.", "island")
TURNS_AWAY: Final = counter("conversation_turns_away", "Turns served on another island.", "island")
CONVERSATIONS_RETURNED: Final = counter(
    "conversations_returned", "Conversations that returned to their island.", "island"
)
CONVERSATIONS_MOVED: Final = counter(
    "conversations_moved", "Conversations that left their island.", "island", "reason", "to"
)


def add_islands(page: Page, islands: IslandRegistry) -> None:
    for island in list(islands):
        name = format_labels(island=island.name)
        page[ISLAND_ROUND_TRIP].add(island.round_trip_ms / 1000, name)
        page[ISLAND_DISTANCE].add(island.distance_ms / 1000, name)
        page[ISLAND_QUEUE].add(island.queue_ms / 1000, name)
    conversations = islands.conversations
    for metric, counts in (
        (CONVERSATIONS_STARTED, conversations.started),
        (TURNS_AT_HOME, conversations.served_at_home),
        (TURNS_AWAY, conversations.served_away),
        (CONVERSATIONS_RETURNED, conversations.returned),
    ):
        for name, count in sorted(counts.copy().items()):
            page[metric].add(count, format_labels(island=name))
    for (home, to, reason), count in sorted(conversations.moved.copy().items()):
        page[CONVERSATIONS_MOVED].add(count, format_labels(island=home, reason=reason, to=to))


class PlannerStats(Protocol):
    """What the searches by replay did."""

    searches: int
    failures: int
    replays: int
    cpu_s: float
    predicted_ms: float
    observed_ms: float
    trusted: bool


class PoolStats(Protocol):
    @property
    def desired_nodes(self) -> int: ...
    @property
    def utilisation(self) -> float: ...


class ScalingStats(Protocol):
    @property
    def pools(self) -> Mapping[Any, PoolStats]: ...
    @property
    def desired_nodes(self) -> int: ...
    @property
    def states(self) -> dict[str, int]: ...
    @property
    def usd_per_hour(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def added(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def leading(self) -> bool: ...
    @property
    def replay(self) -> PlannerStats | None: ...


SCALING_DESIRED_NODES: Final = gauge(
    "scaling_desired_nodes", "Number of nodes that the fleet should have; 0 if another process scales it."
)
SCALING_POOL_DESIRED_NODES: Final = gauge("scaling_pool_desired_nodes", "Nodes that a pool should have.", "role")
SCALING_POOL_UTILISATION: Final = gauge("scaling_pool_utilisation_ratio", "Fraction of a pool's time in use.", "role")
SCALING_UTILISATION: Final = gauge("scaling_utilisation_ratio", "Fraction of the fleet's time that its load takes.")
SCALING_COST: Final = gauge("scaling_cost_usd_per_hour", "Cost of all nodes with a known price.")
SCALING_LEADER: Final = gauge("scaling_leader", "1 if this process scales the fleet.")
SCALING_NODES: Final = gauge("scaling_nodes", "Nodes of provisioners by lifecycle state.", "state")
SCALING_CHANGES: Final = counter("scaling_changes", "Changes of the fleet.", "change")
SCALING_SEARCHES: Final = counter(
    "scaling_replay_searches", "Searches for a better fleet by replay of the recent traffic, by their result.", "result"
)
SCALING_REPLAYS: Final = counter("scaling_replays", "Fleets on which the recent traffic was replayed.")
SCALING_REPLAY_CPU: Final = counter("scaling_replay_cpu_seconds", "CPU time of the replaying process.")
SCALING_REPLAY_TRUSTED: Final = gauge(
    "scaling_replay_trusted", "1 unless replay's predictions were wrong, and the autoscaler goes by thresholds."
)
SCALING_REPLAY_TTFT: Final = gauge(
    "scaling_replay_ttft_p90_seconds",
    "TTFT p90 of the last comparison: as replay predicted it for the current fleet, and as observed. 0: none yet.",
    "source",
)


def add_scaling(page: Page, stats: ScalingStats) -> None:
    page[SCALING_DESIRED_NODES].add(stats.desired_nodes)
    page[SCALING_UTILISATION].add(stats.utilisation)
    for role, pool in stats.pools.items():
        page[SCALING_POOL_DESIRED_NODES].add(pool.desired_nodes, format_labels(role=role))
        page[SCALING_POOL_UTILISATION].add(pool.utilisation, format_labels(role=role))
    page[SCALING_COST].add(stats.usd_per_hour)
    page[SCALING_LEADER].add(stats.leading)
    for state, count in stats.states.items():
        page[SCALING_NODES].add(count, format_labels(state=state))
    for change, count in (
        ("added", stats.added), ("removed", stats.removed), ("refused", stats.refused), ("lost", stats.lost),
    ):  # fmt: skip
        page[SCALING_CHANGES].add(count, format_labels(change=change))
    replay = stats.replay
    if replay is None:
        return
    page[SCALING_SEARCHES].add(replay.searches - replay.failures, format_labels(result="ended"))
    page[SCALING_SEARCHES].add(replay.failures, format_labels(result="failed"))
    page[SCALING_REPLAYS].add(replay.replays)
    page[SCALING_REPLAY_CPU].add(replay.cpu_s)
    page[SCALING_REPLAY_TRUSTED].add(replay.trusted)
    for source, ms in (("predicted", replay.predicted_ms), ("observed", replay.observed_ms)):
        page[SCALING_REPLAY_TTFT].add(ms / 1000.0, format_labels(source=source))
