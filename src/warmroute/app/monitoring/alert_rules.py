"""Prometheus' alert rules, and the file that has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from warmroute.app import metrics
from warmroute.app.metrics import Metric
from warmroute.app.monitoring import check
from warmroute.app.monitoring.error_budget import PERIOD, Objective, objectives

# Prometheus' alert rules: what each one means, and what to do.
#
# A rule reads the metrics of all routers of a job. The names come from app/metrics/__init__.py, so that a rule
# cannot name a metric that does not exist.

GROUP: Final = "warmroute"
CLIENT_ERRORS: Final = 'status=~"4..",status!="429"'
"""Errors that clients have to mend. A 429 is admission's."""
FAST_BURN: Final = 14.4
"""Burn rate that spends 2 % of the budget of 30 days in an hour."""
SLOW_BURN: Final = 6.0
"""Burn rate that spends 5 % of it in six hours."""
MOST_LOST: Final = 0.9
"""A rule fires at this share of bad requests at the latest: a large budget cannot burn 14.4 times as fast."""
MIN_LOST: Final = 10
"""Fewer bad requests in the longer window say nothing."""


class Thresholds(NamedTuple):
    """What an operator may want to change without editing the rules."""

    ttft_s: float = 2.5
    """TTFT objective. It has to be a bucket of the TTFT histogram."""
    ttft_share: float = 0.95
    """Share of the streamed responses that has to meet it."""
    availability: float = 0.999
    """Share of the requests that has to be served."""
    queue_wait_s: float = 1.0
    """90th percentile of the wait in the router's queue."""
    hit_rate_drop: float = 0.3
    """Drop of the hit rate, as a share of that of the last six hours."""


class AlertRule(NamedTuple):
    name: str
    severity: Literal["critical", "warning"]
    expression: str
    lasts: str
    """For how long the expression has to be true."""
    summary: str
    """With the labels of the alert, as a template of Prometheus."""
    meaning: str
    what_to_do: str


def alert_rules(thresholds: Thresholds) -> list[AlertRule]:
    return [
        *_fleet_rules(), *_cache_rules(thresholds), *_request_rules(thresholds), *_budget_rules(thresholds),
        *_router_rules(),
    ]  # fmt: skip


def _rate(metric: Metric, by: str, window: str = "5m", where: str = "", offset: str = "", suffix: str = "") -> str:
    """Return the rate of a counter, or of one sample of a histogram, summed by some labels."""
    braces = f"{{{where}}}" if where else ""
    moved = f" offset {offset}" if offset else ""
    return f"sum by (job, {by}) (rate({metric.name}{suffix}{braces}[{window}]{moved}))"


def _quantile(quantile: float, histogram: Metric, by: str, window: str = "5m") -> str:
    return f"histogram_quantile({quantile}, {_rate(histogram, f'{by}, le', window, suffix='_bucket')})"


def _share(part: str, rest: str, most: float) -> str:
    """Return that `part` is more than a share of both. A counter that never counted has no sample."""
    return f"{part} / ({part} + ({rest} or 0 * {part})) > {most}"


def _fleet_rules() -> list[AlertRule]:
    state = metrics.NODE_STATE.name
    desired = f"max by (job) ({metrics.SCALING_DESIRED_NODES.name})"
    serving = f'max by (job) ({metrics.SCALING_NODES.name}{{state="serving"}})'
    return [
        AlertRule(
            "WarmrouteNoNodeUp", "critical", f'sum by (job, instance) ({state}{{state="up"}}) == 0', "30s",
            "No node of {{ $labels.instance }} is up",
            "The router has nodes, and none of them is up. Clients receive 503.",
            "Look at the engines' logs and start them. The router uses a node within a second after its health check "
            "passes.",
        ),
        AlertRule(
            "WarmrouteNodeDown", "warning",
            f'max by (job, node) ({state}{{state=~"down|half_open"}}) == 1', "1m",
            "Node {{ $labels.node }} is down",
            "Health checks or requests fail, and the circuit breaker is open or half open.",
            "Look at the engine's log and at `GET /admin/nodes/NAME` for the reason. The router sends requests again, "
            "slowly at first, once the health check passes.",
        ),
        AlertRule(
            "WarmrouteNodeEjected", "warning",
            f"sum by (job, node, reason) (increase({metrics.NODE_EJECTIONS.name}[15m])) > 0", "0s",
            "Node {{ $labels.node }} was ejected ({{ $labels.reason }})",
            "The node answered far worse than its peers: it failed more requests, or was much slower.",
            "Look at the engine's log, its GPU's clock and other processes on the GPU. Drain the node if it "
            "happens again.",
        ),
        AlertRule(
            "WarmrouteNodePreempts", "warning",
            f"{_rate(metrics.NODE_ENGINE_PREEMPTIONS, 'node')} > 0.1", "10m",
            "Node {{ $labels.node }} preempts requests",
            "The engine's KV memory is full: it stops running requests and computes them again later.",
            "Add nodes, or lower the engine's maximum number of sequences.",
        ),
        AlertRule(
            "WarmrouteScalingFailed", "warning",
            f'sum by (job, change) (increase({metrics.SCALING_CHANGES.name}{{change=~"refused|lost"}}[15m])) > 0', "0s",
            "Scaling: a node was {{ $labels.change }}",
            "A provisioner refused a node (quota, capacity, credentials), or a machine disappeared.",
            "Read the reasons at `GET /admin/scaling` and in the log (`offer_failed`, `scaling_blocked`, `node_lost`).",
        ),
        AlertRule(
            "WarmrouteScalingStuck", "warning",
            f"{desired} > ({serving} or 0 * {desired})", "30m",
            "Fewer nodes serve than the autoscaler wants",
            "For half an hour the fleet has had fewer serving nodes than desired.",
            "Compare the nodes' lifecycle states at `GET /admin/scaling` with the provider's console.",
        ),
    ]  # fmt: skip


def _cache_rules(thresholds: Thresholds) -> list[AlertRule]:
    by = "model, route"
    now = f"{_rate(metrics.CACHED_TOKENS, by, '10m')} / {_rate(metrics.PROMPT_TOKENS, by, '10m')}"
    before = " / ".join(
        _rate(metric, by, "6h", offset="10m") for metric in (metrics.CACHED_TOKENS, metrics.PROMPT_TOKENS)
    )
    busy = f"({now} and {_rate(metrics.PROMPT_TOKENS, by, '10m')} > 100)"
    # No traffic is no recovery: without prompts, the last rate counts that enough of them had.
    last_known = f"({busy} or last_over_time({busy}[6h:5m]))"
    complete = metrics.CACHE_EVENTS_COMPLETE.name
    blind = _rate(metrics.PROMPTS, "model", "10m", 'reading=~"text|none"')
    return [
        AlertRule(
            "WarmrouteHitRateBelowBaseline", "warning",
            f"max by (job, model, route, cause) ({metrics.HIT_RATIO_DROPPED.name}) > 0", "0s",
            "The cache hit rate of {{ $labels.model }} {{ $labels.route }} dropped: {{ $labels.cause }}",
            "The router itself found that the hit rate of the last half minute is far below the route's usual one, and "
            "names the likely cause.",
            "The live page and the log (`hit_rate_dropped`) say what to do. If prompts changed, `warmroute doctor "
            "prompts` shows where.",
        ),
        AlertRule(
            "WarmrouteHitRateDropped", "warning",
            f"{last_known} < {1 - thresholds.hit_rate_drop:g} * ({before})", "2m",
            "The cache hit rate of {{ $labels.model }} {{ $labels.route }} is {{ $value | humanizePercentage }}",
            f"The hit rate is {thresholds.hit_rate_drop:.0%} or more below that of the last six hours. Prompts changed "
            "near their beginning (a date, an id), a cache became too small, KV events are lost, nodes restarted, or "
            "the traffic is new. While hardly any prompts come, the last rate before counts, for up to six hours.",
            "Look at the live page. Compare the predicted with the reported tokens by node, and look for other alerts "
            "about caches.",
        ),
        AlertRule(
            "WarmrouteKvEventsLost", "warning",
            f"sum by (job, node) (increase({metrics.CACHE_EVENT_GAPS.name}[15m])) > 0", "0s",
            "KV events of node {{ $labels.node }} were lost",
            "Events were lost and could not be replayed. The router forgot the node's cache and learns it again.",
            "Enable the engine's event replay (`replay_endpoint`), or enlarge its buffer. Check the network and the "
            "router's load.",
        ),
        AlertRule(
            "WarmrouteKvEventsIncomplete", "warning",
            f"min by (job, node) ({complete}) == 0 and max by (job, node) (max_over_time({complete}[6h])) == 1", "10m",
            "The router no longer receives all KV events of node {{ $labels.node }}",
            "The router had the node's complete events in the last six hours, and has not had them for ten minutes. It "
            "infers the node's cache from routed requests, and does not see evictions.",
            "Check that the engine still publishes events, and that the router reaches their port. `warmroute doctor` "
            "tests both.",
        ),
        AlertRule(
            "WarmrouteTokenMismatch", "warning", f"max by (job, node) ({metrics.CACHE_TOKEN_MISMATCH.name}) == 1", "5m",
            "Node {{ $labels.node }} has other tokens than the router",
            "The engine uses another tokenizer or chat template than the router, so its KV events match no prompt.",
            "Set `tokenizer` and `chat_template` in `[[models]]` to those of the engine.",
        ),
        AlertRule(
            "WarmrouteRoutingBlind", "warning",
            f"{blind} / {_rate(metrics.PROMPTS, 'model', '10m')} > 0.5", "10m",
            "The router does not read the tokens of {{ $labels.model }}",
            "For more than half of the prompts the router has no tokenizer, or cannot render them. It matches text, or "
            "routes by load alone.",
            "Look at `GET /admin/models` and at the log (`tokenizer_missing`), and name the tokenizer in `[[models]]`.",
        ),
    ]  # fmt: skip


def _request_rules(thresholds: Thresholds) -> list[AlertRule]:
    by = "model, route"
    rejected = f"sum by (job) (rate({metrics.REQUESTS_REJECTED.name}[5m]))"
    responses = f"sum by (job) (rate({metrics.RESPONSES.name}[5m]))"
    failed = f'sum by (job) (rate({metrics.ERRORS.name}{{status=~"5.."}}[5m]))'
    met = _rate(metrics.TTFT, by, where=f'le="{float(thresholds.ttft_s)}"', suffix="_bucket")
    return [
        AlertRule(
            "WarmrouteRequestsRejected", "warning", _share(rejected, responses, 0.01), "5m",
            "{{ $value | humanizePercentage }} of the requests are rejected",
            "Admission rejects requests: a rate limit, a full queue, or a deadline that no node can meet.",
            "Compare the reasons on the dashboard. Add nodes, raise limits in `[[keys]]`, or let clients send less.",
        ),
        AlertRule(
            "WarmrouteClientErrors", "warning",
            f"sum by (job, instance, status, code) (rate({metrics.ERRORS.name}{{{CLIENT_ERRORS}}}[5m])) > 1", "0s",
            "{{ $labels.instance }} rejects {{ $value | humanize }} requests/s with {{ $labels.status }} "
            "({{ $labels.code }})",
            "For five minutes the router has rejected more than one request per second on average because of what "
            "clients send: a wrong key, path, model, body or protocol.",
            "`GET /admin/alerts`, the live page and the log (`client_errors`) name the addresses that the requests "
            "come from, and for 401 the beginning of the key's hash.",
        ),
        AlertRule(
            "WarmrouteErrors", "critical", _share(failed, responses, 0.05), "5m",
            "{{ $value | humanizePercentage }} of the requests fail in the router or on all nodes",
            "The router answers with 5xx itself: no node is up, all nodes failed, or a node broke off its response.",
            "Compare the error codes on the dashboard with docs/reference/errors.md.",
        ),
        AlertRule(
            "WarmrouteQueueWait", "warning",
            f"{_quantile(0.9, metrics.QUEUE_WAIT, by)} > {thresholds.queue_wait_s:g}", "5m",
            "Requests of {{ $labels.model }} {{ $labels.route }} wait {{ $value | humanizeDuration }} in the router",
            f"The 90th percentile of the wait in the router's queue is above {thresholds.queue_wait_s:g} s: all nodes "
            "are full.",
            "Add nodes, or let the autoscaler add them. Give urgent traffic a route with a higher priority.",
        ),
        AlertRule(
            "WarmrouteTtftObjectiveMissed", "warning",
            f"1 - {met} / {_rate(metrics.TTFT, by, suffix='_count')} > {1 - thresholds.ttft_share:.6g}", "5m",
            "{{ $value | humanizePercentage }} of the first tokens of {{ $labels.model }} {{ $labels.route }} are late",
            f"Fewer than {thresholds.ttft_share:.0%} of the streamed responses have their first token within "
            f"{thresholds.ttft_s:g} s.",
            "Compare queue wait, hit rate and the nodes' TTFT on the dashboard: the cause is a queue, lost cache hits, "
            "or a slow node.",
        ),
    ]  # fmt: skip


def _budget_rules(thresholds: Thresholds) -> list[AlertRule]:
    availability, ttft = objectives(thresholds.availability, thresholds.ttft_share, thresholds.ttft_s)
    spent = " or ".join(
        f'label_replace({one.burn_rate(PERIOD)} > 1 and {one.lost(PERIOD)} >= {MIN_LOST}, "objective", "{one.name}", '
        '"", "")'
        for one in (availability, ttft)
    )
    return [
        AlertRule(
            "WarmrouteAvailabilityBudgetBurns", "critical", _burns(availability), "2m",
            "{{ $value | humanizePercentage }} of the requests fail: the error budget of 30 days burns too fast",
            f"More requests fail than the objective of {thresholds.availability:.6g} allows: 5xx of the router, 429 "
            "because of its load, responses that break off. At this rate the budget of 30 days lasts "
            f"{30 / FAST_BURN:.1f} days (window of one hour) or {30 / SLOW_BURN:g} (six hours).",
            "Look at the other alerts and at the error codes on the dashboard: nodes down, a full queue, a node that "
            "breaks off its responses.",
        ),
        AlertRule(
            "WarmrouteTtftBudgetBurns", "warning", _burns(ttft), "2m",
            "{{ $value | humanizePercentage }} of the first tokens of {{ $labels.model }} {{ $labels.route }} are "
            "late: the error budget of 30 days burns too fast",
            f"Far more streamed responses than {ttft.budget:.6g} have their first token after {thresholds.ttft_s:g} s: "
            "over an hour and over five minutes, or over six hours and over half an hour.",
            "Compare queue wait, hit rate and the nodes' TTFT on the dashboard. Add nodes if the queue is the cause.",
        ),
        AlertRule(
            "WarmrouteErrorBudgetSpent", "warning", spent, "15m",
            "The error budget of 30 days is spent ({{ $labels.objective }} {{ $labels.model }} {{ $labels.route }})",
            f"In the last 30 days more requests failed than the objective of {thresholds.availability:.6g} allows, or "
            f"more first tokens than {ttft.budget:.6g} were late. Prometheus has to keep 30 days of samples "
            "(`--storage.tsdb.retention.time`); with less, the rule judges what it has.",
            "Put off changes that risk more failures, or correct the objective. The dashboard's row about the error "
            "budget shows when it was spent.",
        ),
    ]  # fmt: skip


def _burns(objective: Objective) -> str:
    """Return that a budget burns too fast, over a longer window and still over a shorter one."""
    pairs = []
    for rate, long, short in ((FAST_BURN, "1h", "5m"), (SLOW_BURN, "6h", "30m")):
        most = f"{min(MOST_LOST, rate * objective.budget):.6g}"
        pairs.append(
            f"({objective.lost_share(long)} > {most} and {objective.lost_share(short)} > {most} "
            f"and {objective.lost(long)} >= {MIN_LOST})"
        )
    return " or ".join(pairs)


def _router_rules() -> list[AlertRule]:
    files = f"{metrics.PROCESS_FDS.name} / {metrics.PROCESS_MAX_FDS.name}"
    return [
        AlertRule(
            "WarmrouteRouterDown", "critical", f"absent({metrics.BUILD_INFO.name})", "2m",
            "No router is running, or Prometheus reaches none",
            "Prometheus has no sample of any router.",
            "Look at the router's log and at the targets page of Prometheus.",
        ),
        AlertRule(
            "WarmrouteReloadFailed", "warning", f"{metrics.CONFIG_RELOAD_OK.name} == 0", "1m",
            "{{ $labels.instance }} rejected its configuration",
            "The last reload failed. The router works with the previous configuration or certificates, and a restart "
            "would fail.",
            "Read the reason in the log (`config_rejected`, `certificates_rejected`), or run `warmroute check-config "
            "FILE`.",
        ),
        AlertRule(
            "WarmrouteEventLoopLag", "warning", f"{_quantile(0.99, metrics.LOOP_DELAY, 'instance')} > 0.1", "5m",
            "The event loop of {{ $labels.instance }} runs {{ $value | humanizeDuration }} late",
            "The router's process does not get enough CPU time, so that every request waits for it.",
            "Give the router a core of its own, or start more routers. Look for other processes on the machine.",
        ),
        AlertRule(
            "WarmrouteWorkerHangs", "critical",
            f"min by (job, instance, worker) ({metrics.WORKER_ANSWERS.name}) == 0", "30s",
            "Worker {{ $labels.worker }} of {{ $labels.instance }} does not answer",
            "A worker of `serve --workers` has stopped working without ending. The requests on its connections wait; "
            "new connections go to the other workers.",
            "Look at the process that the log names (`worker_hung`), for example with `py-spy dump`, and kill it: the "
            "router starts it again.",
        ),
        AlertRule(
            "WarmrouteReplicaAlone", "warning",
            f"min by (job, instance) ({metrics.CLUSTER_CONNECTED.name}) == 0", "1m",
            "{{ $labels.instance }} does not hear other replicas",
            "Redis is down, slow or unreachable. Requests go on: the replica knows its own load, uses its share of the "
            "rate limits, and does not scale.",
            "Read the reason at `GET /admin/cluster` or in the log (`cluster_disconnected`), and repair Redis or the "
            "network.",
        ),
        AlertRule(
            "WarmrouteOpenFiles", "warning", f"{files} > 0.8 and on (job, instance) {metrics.BUILD_INFO.name}", "5m",
            "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its open files in use",
            "Each connection is an open file. Beyond the limit the router refuses connections.",
            "Raise the limit (`ulimit -n`, `LimitNOFILE`), or start more routers.",
        ),
    ]  # fmt: skip


# Writes alert rules as a rule file of Prometheus, in YAML.

_HEAD: Final = """\
# Alert rules for Prometheus. `warmroute monitoring` generates this file; docs/reference/alerts.md explains each rule.
"""


def render_rules(rules: Iterable[AlertRule]) -> str:
    """Raises QueryError if a rule names a metric that the router does not export."""
    lines = [_HEAD + "groups:", f"  - name: {GROUP}", "    rules:"]
    for rule in rules:
        check(rule.expression)
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {_quoted(rule.expression)}",
            f"        for: {rule.lasts}",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {_quoted(rule.summary)}",
            f"          description: {_quoted(f'{rule.meaning} {rule.what_to_do}')}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A JSON string is a YAML string."""
    return json.dumps(text, ensure_ascii=False)


def render_reference(rules: Iterable[AlertRule]) -> str:
    """Return the page docs/reference/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "`make monitoring` generates this page and the rules in [alerts.yaml](../../deploy/prometheus/alerts.yaml).",
        "[Dashboards and alerts](../guides/dashboards-and-alerts.md) tells how to install them. The live page has",
        "alerts of its own, which need no Prometheus; `warmroute_alerts` exports them.",
    ]
    for rule in rules:
        lasts = "at once" if rule.lasts == "0s" else f"after {rule.lasts}"
        lines += [
            "",
            f"## {rule.name}",
            "",
            f"{rule.severity.capitalize()}, {lasts}. {rule.meaning}",
            "",
            f"**Do**: {rule.what_to_do}",
        ]
    return "\n".join(lines) + "\n"
