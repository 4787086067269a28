"""What a metric is. page.py and fleet_metrics.py declare each one beside its reader.

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


_declared: Final[list[Metric]] = []

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
    "inference_pool": "the InferencePool; `default` without one",
    "model_name": "model that a node serves",
    "name": "the InferencePool; `default` without one",
    "model": "model that a node serves; `(other)` beyond the number of counters that the router keeps",
    "node": "name of the node",
    "order": "`work` (priority, tenant and prefill work) or `guarantee` (it had waited for too long)",
    "outcome": "`ok`, `rejected` (4xx), `busy` (429 or 503), `failed` (before the first byte), `broken` (after it) or "
    "`cancelled` (the client disconnected)",
    "policy": "routing policy that decided, or `half_open` for a trial request",
    "priority": "`high`, `normal` or `low`",
    "reading": "`exact` (the engine's tokens), `inexact` (the engine may not have all of them), `text` (no tokens) or "
    "`none` (not read)",
    "reason": "why: of a decision, a rejection, a move, an ejection (`failures` or `slow`) or a dropped trace "
    "(`queue_full`, `export_failed` or `shutdown`)",
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
    "build": "`compiled` or `interpreted`",
}


Kind = Literal["counter", "gauge", "histogram"]


def _add(kind: Kind, name: str, text: str, labels: tuple[str, ...], prefix: str = "warmroute_") -> Metric:
    metric = Metric(prefix + name, kind, text, labels)
    _declared.append(metric)
    return metric


def counter(name: str, text: str, *labels: str) -> Metric:
    return _add("counter", f"{name}_total", text, labels)


def gauge(name: str, text: str, *labels: str) -> Metric:
    return _add("gauge", name, text, labels)


def histogram(name: str, text: str, *labels: str) -> Metric:
    return _add("histogram", name, text, labels)


def extension(name: str, text: str, *labels: str) -> Metric:
    """A gauge under the name that the Gateway API Inference Extension gives it."""
    return _add("gauge", name, text, labels, "inference_")


def process(kind: Kind, name: str, text: str) -> Metric:
    """A metric under the name that Prometheus' own client libraries give it."""
    return _add(kind, name, text, (), "process_")


def declared() -> tuple[Metric, ...]:
    """Return what the modules that are loaded have declared, in the order of the metrics page."""
    return tuple(_declared)
