"""All metrics of the router: name, type, help text and labels. `warmroute metrics-reference` prints them.

Label values are bounded: nodes, islands, routes, tenants, outcomes, statuses and error codes, never anything a client
sends. Tokens are counted by model and route, by model and tenant, and by model and node, in metrics of different names:
all four labels together would be millions of samples, and a sum over a metric must not count a response twice.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: Final[list[Metric]] = []
"""In the order of the metrics page."""

LABELS: Final = {
    "alert": "name of the alert, such as `node_down`",
    "cause": "`prompts_changed`, `cache_too_small`, `kv_events_lost`, `node_restarted`, `new_traffic` or `unknown`",
    "change": "`added`, `drained`, `removed`, `refused` (the provisioner refused the request) or `lost` (the machine "
    "disappeared)",
    "code": "error code of the response body",
    "direction": "`sent`, `received`, `lost` (of other processes, on the way here) or `rejected` (damaged, or of "
    "another version)",
    "island": "name of the island; for moved conversations, the island they left",
    "kind": "what differs: `time`, `id`, `number`, `order`, `text` or `history`",
    "inference_pool": "name of the InferencePool; `default` without one",
    "model_name": "model that a node serves",
    "name": "name of the InferencePool; `default` without one",
    "model": "model that a node serves; `(other)` beyond the number of counters that the router keeps",
    "node": "name of the node",
    "order": "`work` (priority, tenant and prefill work) or `guarantee` (it had waited for too long)",
    "outcome": "`ok`, `rejected` (4xx), `busy` (429 or 503), `failed` (before the first byte), `broken` (after it) or "
    "`cancelled` (the client disconnected)",
    "policy": "routing policy that decided, or `half_open` for a trial request",
    "priority": "`high`, `normal` or `low`",
    "reading": "`exact` (the engine's tokens), `inexact` (tokens of which the engine may not have all), `text` (no "
    "tokenizer, or it cannot render the request) or `none` (not read)",
    "reason": "why the policy chose the node, why admission rejected the request, why the conversation moved, or why "
    "the node was ejected (`failures` or `slow`); for dropped traces: `queue_full`, `export_failed` or `shutdown`",
    "result": "`success` or `failure`",
    "role": "`prefill` or `decode`",
    "route": "name of the route; empty for requests that match none",
    "severity": "`critical`, `warning` or `info`",
    "source": "name of the source in [[discovery]]",
    "state": "health or lifecycle state of the node",
    "status": "HTTP status",
    "store": "name of the shared KV store",
    "tenant": "tenant of the API key; empty if no keys are configured",
    "to": "island that the conversation moved to",
    "version": "version of Warmroute",
    "worker": "number of the worker, from 0",
    "build": "`compiled` (releases) or `interpreted`: whether the modules of the request path are compiled",
}


Kind = Literal["counter", "gauge", "histogram"]


def _add(kind: Kind, name: str, text: str, labels: tuple[str, ...], prefix: str = "warmroute_") -> Metric:
    metric = Metric(prefix + name, kind, text, labels)
    METRICS.append(metric)
    return metric


def _counter(name: str, text: str, *labels: str) -> Metric:
    return _add("counter", f"{name}_total", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return _add("gauge", name, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return _add("histogram", name, text, labels)


def _extension(name: str, text: str, *labels: str) -> Metric:
    """A gauge under the name that the Gateway API Inference Extension gives it."""
    return _add("gauge", name, text, labels, "inference_")


def _process(kind: Kind, name: str, text: str) -> Metric:
    """A metric under the name that Prometheus' own client libraries give it."""
    return _add(kind, name, text, (), "process_")


BUILD_INFO: Final = _gauge("build_info", "Always 1. The labels are the running version and build.", "version", "build")

RESPONSES: Final = _counter("responses", "Complete responses of nodes.", "status")
ERRORS: Final = _counter("errors", "Error responses of the router itself.", "code", "status")
REQUESTS_REJECTED: Final = _counter("requests_rejected", "Requests that admission rejected.", "priority", "reason")
REQUESTS_WAITING: Final = _gauge("requests_waiting", "Requests that wait in the router for a node.")
REQUESTS_QUEUED: Final = _counter("requests_queued", "Requests that had to wait in the router.")
QUEUE_ADMISSIONS: Final = _counter(
    "queue_admissions", "Requests that left the router's queue for a node, by what gave them their turn.", "order"
)
QUEUE_GUARANTEE_EXCEEDED: Final = _counter(
    "queue_guarantee_exceeded", "Requests that waited in the router's queue for longer than guaranteed."
)
ROUTE_REQUESTS: Final = _counter("route_requests", "Requests by route.", "route")
RESPONSES_INTERRUPTED: Final = _counter("responses_interrupted", "Responses that failed after their first byte.")
CLIENT_DISCONNECTS: Final = _counter(
    "client_disconnects", "Clients that disconnected before they had their whole response."
)
RETRIES: Final = _counter("retries", "Attempts on another node after a failed one.")
HEDGES: Final = _counter("hedges", "Requests sent to a second node because their first token was overdue.")
HEDGES_WON: Final = _counter("hedges_won", "Hedged requests that the second node answered.")
SPLIT_REQUESTS: Final = _counter(
    "split_requests",
    "Requests that one node prefilled for another one: transferred, or why the other node prefilled itself "
    "(prefill_failed, prefill_slow, not_supported, transfer_failed), or decode_failed.",
    "outcome",
)
CLIENT_CONNECTIONS: Final = _gauge("client_connections", "Open client connections.")
CLIENT_CONNECTIONS_ACCEPTED: Final = _counter("client_connections_accepted", "Accepted client connections.")
REQUEST_BODIES: Final = _gauge("request_bodies_bytes", "Memory for request bodies; `limits.buffered_bytes` limits it.")
CLIENT_UNREAD: Final = _gauge(
    "client_unread_bytes", "Memory for what clients have not read of their responses, at most 1 GiB."
)
CLIENTS_TOO_SLOW: Final = _counter(
    "clients_too_slow", "Clients that the router disconnected because clients had left 1 GiB unread."
)
NODE_CONNECTIONS_STALE: Final = _counter(
    "node_connections_stale", "Requests sent again because the node had closed the kept-alive connection."
)
PROMPTS: Final = _counter("prompts", "Prompts that a policy needed, by how the router read them.", "model", "reading")
PROMPTS_IN_THREADS: Final = _counter("prompts_tokenized_in_thread", "Prompts that a thread tokenized.")
PROMPTS_NOT_TOKENIZED: Final = _counter(
    "prompts_not_tokenized", "Prompts routed by load because too many prompts waited for a thread."
)
PROMPT_TOKENS: Final = _counter("prompt_tokens", "Prompt tokens of complete responses.", "model", "route")
CACHED_TOKENS: Final = _counter(
    "cached_tokens",
    "Prompt tokens that were cached: as nodes reported them, or as predicted where a node reports none.",
    "model",
    "route",
)
PREDICTED_TOKENS: Final = _counter(
    "predicted_cached_tokens", "Cached prompt tokens as the router predicted them.", "model", "route"
)
REPORTED_TOKENS: Final = _counter(
    "reported_cached_tokens", "Cached prompt tokens as nodes reported them.", "model", "route"
)
OUTPUT_TOKENS: Final = _counter("output_tokens", "Output tokens, as nodes reported them.", "model", "route")
ROUND_ROBIN_TOKENS: Final = _counter(
    "estimated_round_robin_cached_tokens",
    "An estimate of the prompt tokens that would have been cached under round robin: the mean over all candidates. "
    "Each counts at most the prompt tokens that the node reported.",
    "model",
    "route",
)
SHORT_REPORTS: Final = _counter(
    "short_prompt_reports",
    "Responses whose nodes reported, for the whole prompt, less than 80 % of the tokens that the router expected to be "
    "cached. Estimates count no more than what the nodes reported.",
    "model",
    "route",
)
SAVED_PREFILL: Final = _counter(
    "estimated_saved_prefill_seconds",
    "An estimate of the prefill time that cached tokens saved, compared with a fleet whose caches are cold.",
    "model",
    "route",
)
SAVED_GPU: Final = _counter(
    "estimated_saved_gpu_seconds", "The same multiplied by the number of GPUs of the node.", "model", "route"
)
ROUND_ROBIN_SAVED_PREFILL: Final = _counter(
    "estimated_round_robin_saved_prefill_seconds",
    "An estimate of the prefill time that round robin would have saved, compared with a fleet whose caches are cold.",
    "model",
    "route",
)
ROUND_ROBIN_SAVED_GPU: Final = _counter(
    "estimated_round_robin_saved_gpu_seconds",
    "The same multiplied by the number of GPUs of the node.",
    "model",
    "route",
)
TTFT: Final = _histogram(
    "time_to_first_token_seconds", "Time from arrival to first token of streamed responses.", "model", "route"
)
INTER_TOKEN: Final = _histogram(
    "inter_token_latency_seconds",
    "Mean time between two output tokens of a streamed response that reports its number of tokens.",
    "model",
    "route",
)
QUEUE_WAIT: Final = _histogram(
    "queue_wait_seconds", "Time in the router's queue, of requests that got a complete response.", "model", "route"
)
DURATION: Final = _histogram(
    "request_duration_seconds", "Time from arrival to the end of a complete response.", "model", "route"
)
TENANT_REQUESTS: Final = _counter("tenant_requests", "Complete responses by tenant.", "model", "tenant")
TENANT_PROMPT_TOKENS: Final = _counter("tenant_prompt_tokens", "Prompt tokens by tenant.", "model", "tenant")
TENANT_CACHED_TOKENS: Final = _counter("tenant_cached_tokens", "Cached prompt tokens by tenant.", "model", "tenant")
TENANT_PREDICTED_TOKENS: Final = _counter(
    "tenant_predicted_cached_tokens", "Cached prompt tokens by tenant, as predicted.", "model", "tenant"
)
TENANT_REPORTED_TOKENS: Final = _counter(
    "tenant_reported_cached_tokens", "Cached prompt tokens by tenant, as nodes reported them.", "model", "tenant"
)
TENANT_OUTPUT_TOKENS: Final = _counter("tenant_output_tokens", "Output tokens by tenant.", "model", "tenant")
TENANT_REJECTED: Final = _counter(
    "tenant_requests_rejected", "Requests of the tenant that admission rejected.", "tenant", "priority", "reason"
)
DECISIONS: Final = _counter(
    "decisions", "Requests sent to a first node, by why the policy chose it.", "policy", "reason"
)

JOURNAL_WRITTEN: Final = _counter("journal_decisions_written", "Decisions written to the journal file.")
JOURNAL_DROPPED: Final = _counter(
    "journal_decisions_dropped", "Decisions that could not be written to the journal file."
)
CAPTURE_WRITTEN: Final = _counter("capture_requests_written", "Requests written to captures of traffic.")
CAPTURE_DROPPED: Final = _counter("capture_requests_dropped", "Requests that could not be written to a capture.")
TRACES_EXPORTED: Final = _counter("traces_exported", "Traces of requests that the collector received.")
TRACES_DROPPED: Final = _counter("traces_dropped", "Recorded traces that the collector did not receive.", "reason")
TRACES_LIMITED: Final = _counter(
    "traces_limited", "Requests not traced because clients asked for more than 100 per second."
)
LOOP_DELAY: Final = _histogram("event_loop_delay_seconds", "How late the event loop ran a timer, ten times a second.")
LOOP_DELAY_MAX: Final = _gauge(
    "event_loop_delay_max_seconds", "Longest delay of the event loop in the last one to two minutes."
)
ALERTS: Final = _gauge("alerts", "Alerts that the live page shows now, by name.", "alert", "severity")
ALERTS_SENT: Final = _counter(
    "alert_webhook_changes", "Alerts that began or ended, by what became of them at `alerts.webhook_url`.", "outcome"
)
CONFIG_RELOADS: Final = _counter("config_reloads", "Reloads of configuration and certificates.", "result")
CONFIG_RELOAD_OK: Final = _gauge(
    "config_last_reload_successful", "1 if the last reload succeeded, or there was none; 0 if it was rejected."
)
CONFIG_RELOADED: Final = _gauge(
    "config_last_reload_success_timestamp_seconds", "Unix time of the last reload that succeeded, or of the start."
)
# Of `warmroute picker` alone, beside its own.
POOL_KV_USAGE: Final = _extension(
    "pool_average_kv_cache_utilization",
    "Picker only: mean fraction of KV blocks in use, of nodes that are up.",
    "name",
)
POOL_QUEUE: Final = _extension(
    "pool_average_queue_size", "Picker only: mean requests in the engines' own queues, of nodes that are up.", "name"
)
POOL_RUNNING: Final = _extension(
    "pool_average_running_requests", "Picker only: mean requests that the engines run, of nodes that are up.", "name"
)
POOL_READY: Final = _extension("pool_ready_pods", "Picker only: nodes that are up and not draining.", "name")
OBJECTIVE_RUNNING: Final = _extension(
    "objective_running_requests", "Picker only: requests in flight on the nodes that serve the model.", "model_name"
)
EXTENSION_QUEUE: Final = _extension(
    "extension_flow_control_queue_size", "Picker only: requests that wait in the picker for a node.", "inference_pool"
)

PROCESS_CPU: Final = _process("counter", "cpu_seconds_total", "User and system CPU time of the router's process.")
PROCESS_RSS: Final = _process("gauge", "resident_memory_bytes", "Resident memory of the router's process.")
PROCESS_VIRTUAL: Final = _process("gauge", "virtual_memory_bytes", "Virtual memory of the router's process.")
PROCESS_FDS: Final = _process("gauge", "open_fds", "Open file descriptors.")
PROCESS_MAX_FDS: Final = _process("gauge", "max_fds", "Maximum number of open file descriptors.")
PROCESS_START: Final = _process("gauge", "start_time_seconds", "Unix time of the process's start.")

NODE_REQUESTS: Final = _counter("node_requests", "Requests sent to the node, by how they ended.", "node", "outcome")
NODE_STATE: Final = _gauge("node_state", "1 for the node's current state, 0 for all others.", "node", "state")
NODE_EJECTIONS: Final = _counter(
    "node_ejections", "Times that the node was ejected because it answered far worse than its peers.", "node", "reason"
)
NODE_IN_FLIGHT: Final = _gauge("node_requests_in_flight", "Requests of this router on the node.", "node")
NODE_MAX_IN_FLIGHT: Final = _gauge(
    "node_max_requests_in_flight", "Requests that the router sends to the node at a time, if it is limited.", "node"
)
NODE_CONCURRENCY_LIMIT: Final = _gauge(
    "node_concurrency_limit",
    "Learned limit of the requests on a node that has some without streaming, while there is one.",
    "node",
)
NODE_OTHER_REQUESTS: Final = _gauge("node_other_requests", "Requests of other clients on the node.", "node")
NODE_WAITING: Final = _gauge("node_requests_waiting", "Requests in the engine's own queue.", "node")
NODE_KV_USAGE: Final = _gauge("node_kv_usage_ratio", "Fraction of the KV blocks in use.", "node")
NODE_PROMPT_TOKENS: Final = _counter("node_prompt_tokens", "Prompt tokens by node.", "model", "node")
NODE_CACHED_TOKENS: Final = _counter("node_cached_tokens", "Cached prompt tokens by node.", "model", "node")
NODE_PREDICTED_TOKENS: Final = _counter(
    "node_predicted_cached_tokens", "Cached prompt tokens by node, as predicted.", "model", "node"
)
NODE_REPORTED_TOKENS: Final = _counter(
    "node_reported_cached_tokens", "Cached prompt tokens by node, as it reported them.", "model", "node"
)
NODE_OUTPUT_TOKENS: Final = _counter("node_output_tokens", "Output tokens by node.", "model", "node")
NODE_TTFT: Final = _histogram(
    "node_time_to_first_token_seconds",
    "Time from sending a request to its first token, or to the end of a response that is not streamed.",
    "node",
)
NODE_LATENCY: Final = _gauge("node_latency_seconds", "Moving average of the response time.", "node")
NODE_PREFILL: Final = _gauge(
    "node_prefill_seconds_per_token", "Time to prefill a token of a short prompt, as routing uses it.", "node"
)
NODE_PREFILL_IMPLAUSIBLE: Final = _gauge(
    "node_prefill_speed_implausible", "1 while routing uses the peers' speed because the learned one cannot be.", "node"
)
NODE_DECODE: Final = _gauge(
    "node_decode_seconds_per_token", "Learned time between two output tokens, at the current load.", "node"
)
NODE_ENGINE_HITS: Final = _gauge(
    "node_engine_hit_ratio",
    "Fraction of prompt tokens that the engine found in its cache in the last half minute.",
    "node",
)
NODE_PREDICTED_HITS: Final = _gauge(
    "node_predicted_hit_ratio",
    "Fraction of prompt tokens that the router predicted to be cached, at the same time.",
    "node",
)
NODE_ENGINE_QUERIES: Final = _counter(
    "node_engine_prefix_cache_queries",
    "Prompt tokens that the engine looked up in its cache, by its own counter, since the router knows the node.",
    "node",
)
NODE_ENGINE_HIT_TOKENS: Final = _counter(
    "node_engine_prefix_cache_hits",
    "Prompt tokens that the engine found in its cache, by its own counter, since the router knows the node.",
    "node",
)
NODE_ENGINE_PREEMPTIONS: Final = _counter(
    "node_engine_preemptions",
    "Requests that the engine preempted, by its own counter, since the router knows the node.",
    "node",
)
NODE_PREEMPTIONS: Final = _gauge(
    "node_preemptions_per_second",
    "Requests that the engine preempted for lack of KV memory, in the last ten seconds.",
    "node",
)
NODE_QUEUE_TIME: Final = _gauge(
    "node_queue_time_seconds", "Mean time in the engine's own queue, as it reported it in the last half minute.", "node"
)
NODE_LORA_ADAPTERS: Final = _gauge("node_lora_adapters", "LoRA adapters that the node probably has loaded.", "node")
NODE_LORA_LOADS: Final = _counter("node_lora_loads", "Requests for which the node had to load an adapter.", "node")

INDEX_BYTES: Final = _gauge("index_bytes", "Memory of the cache index.")
INDEX_MAX_BYTES: Final = _gauge("index_max_bytes", "Maximum memory of the cache index.")
INDEX_BLOCKS: Final = _gauge("index_blocks", "Distinct blocks in the cache index.")
INDEX_BLOCK_COPIES: Final = _gauge("index_block_copies", "Blocks in the cache index, once for each node and rank.")
LOOKUP_ERRORS: Final = _counter(
    "lookup_errors", "Requests routed by load because the cache index failed at their prompt."
)
STORE_BLOCKS: Final = _gauge("kv_store_blocks", "Blocks that a shared KV store should hold.", "store")
STORE_PREDICTED: Final = _counter(
    "kv_store_predicted_tokens", "Prompt tokens that nodes should load from a shared KV store.", "store"
)
STORE_LOADED: Final = _counter("kv_store_loaded_tokens", "Those of them that the engines reported as cached.", "store")
INDEX_EVICTIONS: Final = _counter("index_evictions", "Block copies evicted from the index to stay below its maximum.")

CACHE_EVENTS_COMPLETE: Final = _gauge(
    "node_cache_events_complete", "1 if the router receives the node's KV events and missed none.", "node"
)
CACHE_TOKEN_MISMATCH: Final = _gauge(
    "node_cache_token_mismatch", "1 if the node's tokens differ from the router's for the same prompts.", "node"
)
CACHE_CONFIDENCE: Final = _gauge("node_cache_confidence_ratio", "Weight of predicted cache hits on the node.", "node")
CACHE_AGREEMENT: Final = _gauge(
    "node_cache_prediction_agreement_ratio",
    "Cached tokens both predicted and reported, as a fraction of those predicted or reported; 1 before the first.",
    "node",
)
CACHE_EVENT_LAG: Final = _gauge("node_cache_event_lag_seconds", "Delay of the node's KV events.", "node")
CACHE_PREDICTED: Final = _counter(
    "node_cache_predicted_tokens", "Cached tokens that the router predicted for responses that report them.", "node"
)
CACHE_REPORTED: Final = _counter(
    "node_cache_reported_tokens", "Cached tokens that the node reported, for prompts with a prediction.", "node"
)
CACHE_PREDICTIONS: Final = _counter(
    "node_cache_predictions", "Predictions that could be compared with a report of the node.", "node"
)
CACHE_EXACT: Final = _counter("node_cache_exact_predictions", "Predictions equal to the node's report.", "node")
CACHE_EVENT_GAPS: Final = _counter("node_cache_event_gaps", "Times that KV events were lost for good.", "node")

HIT_RATIO: Final = _gauge(
    "route_hit_ratio", "Fraction of the prompt tokens that was cached, in the last half minute.", "model", "route"
)
HIT_RATIO_BASELINE: Final = _gauge(
    "route_hit_ratio_baseline", "The usual hit ratio of the route, decayed over about an hour.", "model", "route"
)
HIT_RATIO_DROPPED: Final = _gauge(
    "route_hit_ratio_dropped",
    "1 while the hit ratio is far below its baseline, for the likely cause.",
    "model",
    "route",
    "cause",
)
HIT_RATIO_DROPS: Final = _counter(
    "route_hit_ratio_drops", "Drops of the hit ratio below its baseline, by likely cause.", "model", "route", "cause"
)
HIT_RATIO_LOST: Final = _counter(
    "route_hit_ratio_lost_gpu_seconds",
    "Prefill time during drops beyond that at the baseline's hit ratio.",
    "model",
    "route",
)
PROMPTS_LOST: Final = _gauge(
    "prompt_doctor_lost_gpus",
    "GPU seconds per second spent because prompts differ before common text.",
    "model",
    "route",
    "kind",
)

ISLAND_ROUND_TRIP: Final = _gauge(
    "island_round_trip_seconds", "Configured or measured round trip to the island.", "island"
)
ISLAND_DISTANCE: Final = _gauge(
    "island_distance_seconds", "Cost of the island's distance in a price: network, egress and queue.", "island"
)
ISLAND_QUEUE: Final = _gauge(
    "island_queue_seconds", "Time for which requests waiting in the router will occupy the island's nodes.", "island"
)
CONVERSATIONS_STARTED: Final = _counter("conversations_started", "New conversations.", "island")
TURNS_AT_HOME: Final = _counter("conversation_turns_at_home", "Turns served on their conversation's island.", "island")
TURNS_AWAY: Final = _counter("conversation_turns_away", "Turns served on another island.", "island")
CONVERSATIONS_RETURNED: Final = _counter(
    "conversations_returned", "Conversations that returned to their island.", "island"
)
CONVERSATIONS_MOVED: Final = _counter(
    "conversations_moved", "Conversations that left their island.", "island", "reason", "to"
)

DISCOVERY_UP: Final = _gauge("discovery_up", "1 if the source could be read the last time.", "source")
DISCOVERY_TARGETS: Final = _gauge("discovery_targets", "Engines that the source lists.", "source")
DISCOVERY_FAILURES: Final = _counter("discovery_failures", "Failed attempts to read the source.", "source")
DISCOVERY_CHANGES: Final = _counter(
    "discovery_changes", "Nodes that discovery added, drained and removed.", "source", "change"
)

SCALING_DESIRED_NODES: Final = _gauge(
    "scaling_desired_nodes", "Number of nodes that the fleet should have; 0 if another process scales it."
)
SCALING_POOL_DESIRED_NODES: Final = _gauge("scaling_pool_desired_nodes", "Nodes that a pool should have.", "role")
SCALING_POOL_UTILISATION: Final = _gauge("scaling_pool_utilisation_ratio", "Fraction of a pool's time in use.", "role")
SCALING_UTILISATION: Final = _gauge("scaling_utilisation_ratio", "Fraction of the fleet's time that its load takes.")
SCALING_COST: Final = _gauge("scaling_cost_usd_per_hour", "Cost of all nodes with a known price.")
SCALING_LEADER: Final = _gauge("scaling_leader", "1 if this process scales the fleet.")
SCALING_NODES: Final = _gauge("scaling_nodes", "Nodes of provisioners by lifecycle state.", "state")
SCALING_CHANGES: Final = _counter("scaling_changes", "Changes of the fleet.", "change")
SCALING_SEARCHES: Final = _counter(
    "scaling_replay_searches", "Searches for a better fleet by replay of the recent traffic, by their result.", "result"
)
SCALING_REPLAYS: Final = _counter("scaling_replays", "Fleets on which the recent traffic was replayed.")
SCALING_REPLAY_CPU: Final = _counter("scaling_replay_cpu_seconds", "CPU time of the replaying process.")
SCALING_REPLAY_TRUSTED: Final = _gauge(
    "scaling_replay_trusted", "1 unless replay's predictions were wrong, and the autoscaler goes by thresholds."
)
SCALING_REPLAY_TTFT: Final = _gauge(
    "scaling_replay_ttft_p90_seconds",
    "TTFT p90 of the last comparison: as replay predicted it for the current fleet, and as observed. 0: none yet.",
    "source",
)

CLUSTER_PEERS: Final = _gauge("cluster_peers", "Other router processes that this one hears: workers and replicas.")
CLUSTER_MESSAGES: Final = _counter("cluster_messages", "Messages between router processes.", "direction")
CLUSTER_LIMIT_FRACTION: Final = _gauge(
    "cluster_limit_fraction",
    "Fraction of the rate limits that this router and those it hears may use: below 1 while others cannot be heard.",
)
CLUSTER_CONNECTED: Final = _gauge("cluster_connected", "1 if messages of other replicas arrive through Redis, else 0.")
CLUSTER_WRITABLE: Final = _gauge("cluster_writable", "1 if Redis takes writes, else 0: no replica scales.")
CLUSTER_DELAY: Final = _gauge("cluster_delay_seconds", "How long the last message took through Redis.")

WORKERS: Final = _gauge("workers", "Workers that serve (`serve --workers`).")
WORKER_ANSWERS: Final = _gauge("worker_answers", "0: the worker hangs (`serve --workers`).", "worker")
WORKER_RESTARTS: Final = _counter("worker_restarts", "Workers that ended and were started again.")
