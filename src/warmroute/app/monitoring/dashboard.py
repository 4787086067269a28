"""Grafana's dashboard."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple

from warmroute.app import metrics
from warmroute.app.metrics import Metric
from warmroute.app.monitoring import check
from warmroute.app.monitoring.alert_rules import CLIENT_ERRORS, Thresholds
from warmroute.app.monitoring.error_budget import PERIOD, Objective, objectives

# The panels of the dashboard: for each row a question, and the queries that answer it.

MODEL_AND_ROUTE: Final = 'job=~"$job",model=~"$model",route=~"$route"'
MODEL: Final = 'job=~"$job",model=~"$model"'
JOB: Final = 'job=~"$job"'


class Query(NamedTuple):
    expression: str
    legend: str = ""
    """With labels as `{{model}}`."""


class Panel(NamedTuple):
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """As Grafana names it."""
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    """Of 24 columns."""
    help: str = ""
    most: float | None = None
    """The upper end of the axis."""
    stacked: bool = False


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def _rate(metric: Metric, where: str = JOB, by: str = "", suffix: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric.name}{suffix}{{{where}}}[$__rate_interval]))"


def _increase(metric: Metric, where: str = JOB, by: str = "") -> str:
    return f"sum by ({by}) (increase({metric.name}{{{where}}}[$__rate_interval]))"


def _gauge(metric: Metric, by: str, where: str = JOB, combine: str = "sum") -> str:
    return f"{combine} by ({by}) ({metric.name}{{{where}}})"


def _percentiles(metric: Metric, where: str, *quantiles: float) -> tuple[Query, ...]:
    buckets = _rate(metric, where, "le", "_bucket")
    return tuple(Query(f"histogram_quantile({one}, {buckets})", f"p{100 * one:g}") for one in quantiles)


def _ratio(part: Metric, whole: Metric, where: str, by: str = "") -> str:
    return f"{_rate(part, where, by)} / {_rate(whole, where, by)}"


def error_budget_row(availability: float, ttft_share: float, ttft_s: float) -> Row:
    """Return the row about the objectives, which an operator may change."""
    served, in_time = objectives(availability, ttft_share, ttft_s)
    needs = f"Prometheus has to keep {PERIOD} of samples; with less, the panel shows what there is."

    def left(objective: Objective, where: str) -> str:
        return f"1 - {objective.burn_rate(PERIOD, where)}"

    return Row(
        "Error budget: how much may still fail in these 30 days?",
        (
            Panel(
                "Availability, 30 days",
                (Query(f"1 - {served.lost_share(PERIOD, JOB)}", "{{job}}"),),
                "percentunit",
                "stat",
                6,
                f"Objective {availability:.6g}. Lost: 5xx of the router, 429 because of its load, "
                f"responses that break off. {needs}",
            ),
            Panel(
                "Availability budget left",
                (Query(left(served, JOB), "{{job}}"),),
                "percentunit",
                "stat",
                6,
                "100 %: nothing failed. 0: the budget is spent. Below 0: the objective is missed.",
            ),
            Panel(
                "TTFT budget left",
                (Query(left(in_time, MODEL_AND_ROUTE), "{{model}} {{route}}"),),
                "percentunit",
                "stat",
                12,
                f"Objective: {ttft_share:.6g} of the first tokens within {ttft_s:g} s. {needs}",
            ),
            Panel(
                "Availability budget: burn rate",
                (
                    Query(served.burn_rate("1h", JOB), "{{job}}, last hour"),
                    Query(served.burn_rate("6h", JOB), "{{job}}, last 6 hours"),
                ),
                width=12,
                help="With 1, the budget lasts 30 days. Alerts: 14.4 over an hour, 6 over six hours.",
            ),
            Panel(
                "TTFT budget: burn rate",
                (
                    Query(in_time.burn_rate("1h", MODEL_AND_ROUTE), "{{model}} {{route}}, last hour"),
                    Query(in_time.burn_rate("6h", MODEL_AND_ROUTE), "{{model}} {{route}}, last 6 hours"),
                ),
                width=12,
                help="With 1, the budget lasts 30 days.",
            ),
        ),
    )


HIT_RATE: Final = _ratio(metrics.CACHED_TOKENS, metrics.PROMPT_TOKENS, MODEL_AND_ROUTE)
ROUND_ROBIN: Final = _ratio(metrics.ROUND_ROBIN_TOKENS, metrics.PROMPT_TOKENS, MODEL_AND_ROUTE)

ROWS: Final[tuple[Row, ...]] = (
    Row(
        "Does routing help?",
        (
            Panel("Hit rate", (Query(HIT_RATE),), "percentunit", "stat", 4),
            Panel("Hit rate under round robin (estimate)", (Query(ROUND_ROBIN),), "percentunit", "stat", 4),
            Panel("GPUs saved (estimate)", (Query(_rate(metrics.SAVED_GPU, MODEL_AND_ROUTE)),), "short", "stat", 4,
                  "GPU seconds of prefill saved per second, compared with cold caches."),
            Panel("of these by routing (estimate)",
                  (Query(f"{_rate(metrics.SAVED_GPU, MODEL_AND_ROUTE)} - "
                         f"{_rate(metrics.ROUND_ROBIN_SAVED_GPU, MODEL_AND_ROUTE)}"),), "short", "stat", 4,
                  "Compared with round robin."),
            Panel("TTFT p90", _percentiles(metrics.TTFT, MODEL_AND_ROUTE, 0.9), "s", "stat", 4),
            Panel("Requests", (Query(_rate(metrics.DURATION, MODEL_AND_ROUTE, suffix="_count")),), "reqps", "stat", 4),
            Panel("Hit rate", (
                Query(HIT_RATE, "this router"), Query(ROUND_ROBIN, "round robin (estimate)"),
                Query(_ratio(metrics.PREDICTED_TOKENS, metrics.PROMPT_TOKENS, MODEL_AND_ROUTE), "predicted"),
            ), "percentunit", most=1.0),
            Panel("GPUs saved (estimate)", (
                Query(_rate(metrics.SAVED_GPU, MODEL_AND_ROUTE), "this router"),
                Query(_rate(metrics.ROUND_ROBIN_SAVED_GPU, MODEL_AND_ROUTE), "round robin"),
            ), help="GPU seconds of prefill saved per second, compared with cold caches."),
            Panel("Prefill time saved (estimate)", (
                Query(_rate(metrics.SAVED_PREFILL, MODEL_AND_ROUTE), "this router"),
                Query(_rate(metrics.ROUND_ROBIN_SAVED_PREFILL, MODEL_AND_ROUTE), "round robin"),
            ), "s", help="Seconds per second."),
        ),
    ),
    Row(
        "Traffic by model and route",
        (
            Panel("Requests", (
                Query(_rate(metrics.DURATION, MODEL_AND_ROUTE, "model, route", "_count"), "{{model}} {{route}}"),
                Query(_rate(metrics.SHORT_REPORTS, MODEL_AND_ROUTE), "prompts that nodes report too short"),
            ), "reqps"),
            Panel("Hit rate by route", (
                Query(_ratio(metrics.CACHED_TOKENS, metrics.PROMPT_TOKENS, MODEL_AND_ROUTE, "model, route"),
                      "{{model}} {{route}}"),
            ), "percentunit", most=1.0),
            Panel("Tokens", (
                Query(_rate(metrics.PROMPT_TOKENS, MODEL_AND_ROUTE), "prompt"),
                Query(_rate(metrics.CACHED_TOKENS, MODEL_AND_ROUTE), "cached"),
                Query(_rate(metrics.REPORTED_TOKENS, MODEL_AND_ROUTE), "cached, as reported"),
                Query(_rate(metrics.OUTPUT_TOKENS, MODEL_AND_ROUTE), "output"),
            ), help="Tokens per second."),
            Panel("Time to first token", _percentiles(metrics.TTFT, MODEL_AND_ROUTE, 0.5, 0.9, 0.99), "s", width=6),
            Panel("Inter-token latency", _percentiles(metrics.INTER_TOKEN, MODEL_AND_ROUTE, 0.5, 0.9, 0.99), "s",
                  width=6),
            Panel("Queue wait", _percentiles(metrics.QUEUE_WAIT, MODEL_AND_ROUTE, 0.5, 0.9, 0.99), "s", width=6),
            Panel("Request duration", _percentiles(metrics.DURATION, MODEL_AND_ROUTE, 0.5, 0.9, 0.99), "s", width=6),
        ),
    ),
    Row(
        "Why is the hit rate low?",
        (
            Panel("Hit rate and its baseline", (
                Query(_gauge(metrics.HIT_RATIO, "model, route", MODEL_AND_ROUTE, "avg"), "{{model}} {{route}}"),
                Query(_gauge(metrics.HIT_RATIO_BASELINE, "model, route", MODEL_AND_ROUTE, "avg"),
                      "{{model}} {{route}}: usual"),
            ), "percentunit", most=1.0, help="A baseline exists after the first minutes of a route's traffic."),
            Panel("Drops by likely cause", (
                Query(_gauge(metrics.HIT_RATIO_DROPPED, "model, route, cause", MODEL_AND_ROUTE, "max"),
                      "{{model}} {{route}}: {{cause}}, now"),
                Query(_increase(metrics.HIT_RATIO_DROPS, MODEL_AND_ROUTE, "cause"), "{{cause}}"),
            ), help="Empty without drops."),
            Panel("GPUs lost", (
                Query(_rate(metrics.HIT_RATIO_LOST, MODEL_AND_ROUTE, "model, route"), "{{model}} {{route}}: drops"),
                Query(_gauge(metrics.PROMPTS_LOST, "model, route, kind", MODEL_AND_ROUTE),
                      "{{model}} {{route}}: prompts differ by {{kind}}"),
            ), help="GPU seconds per second: by drops of the hit rate, and by what the prompt doctor found."),
        ),
    ),
    Row(
        "Queue, rejections and errors",
        (
            Panel("Requests waiting", (Query(_gauge(metrics.REQUESTS_WAITING, "instance"), "{{instance}}"),)),
            Panel("Rejections by reason", (
                Query(_rate(metrics.REQUESTS_REJECTED, JOB, "reason, priority"), "{{reason}} {{priority}}"),
            ), "reqps", stacked=True),
            Panel("Errors of the router by code", (Query(_rate(metrics.ERRORS, JOB, "code"), "{{code}}"),), "reqps",
                  stacked=True),
            Panel("Errors of clients by code", (
                Query(_rate(metrics.ERRORS, f"{JOB},{CLIENT_ERRORS}", "status, code"), "{{status}} {{code}}"),
            ), "reqps", stacked=True, help="GET /admin/alerts names the addresses that they come from."),
            Panel("Retries, hedges, interruptions", (
                Query(_rate(metrics.RETRIES), "retries"), Query(_rate(metrics.HEDGES), "hedges"),
                Query(_rate(metrics.RESPONSES_INTERRUPTED), "interrupted responses"),
                Query(_rate(metrics.CLIENT_DISCONNECTS), "client disconnects"),
            ), "reqps"),
            Panel("Rejections by tenant", (
                Query(f"topk(10, {_rate(metrics.TENANT_REJECTED, JOB, 'tenant')})", "{{tenant}}"),
            ), "reqps", stacked=True),
            Panel("Alerts of the live page", (
                Query(_gauge(metrics.ALERTS, "alert, severity", combine="max"), "{{alert}} ({{severity}})"),
            )),
        ),
    ),
    Row(
        "Tenants",
        (
            Panel("Prompt tokens by tenant", (
                Query(f"topk(10, {_rate(metrics.TENANT_PROMPT_TOKENS, MODEL, 'tenant')})", "{{tenant}}"),
            ), stacked=True),
            Panel("Output tokens by tenant", (
                Query(f"topk(10, {_rate(metrics.TENANT_OUTPUT_TOKENS, MODEL, 'tenant')})", "{{tenant}}"),
            ), stacked=True),
            Panel("Hit rate by tenant", (
                Query(_ratio(metrics.TENANT_CACHED_TOKENS, metrics.TENANT_PROMPT_TOKENS, MODEL, "tenant"),
                      "{{tenant}}"),
            ), "percentunit", most=1.0),
        ),
    ),
    Row(
        "Nodes",
        (
            Panel("Nodes by state", (Query(_gauge(metrics.NODE_STATE, "state"), "{{state}}"),), stacked=True,
                  help="As each router sees them."),
            Panel("Requests in flight", (Query(_gauge(metrics.NODE_IN_FLIGHT, "node"), "{{node}}"),), stacked=True),
            Panel("KV memory in use", (
                Query(_gauge(metrics.NODE_KV_USAGE, "node", combine="max"), "{{node}}"),
            ), "percentunit", most=1.0),
            Panel("TTFT p90 by node", (
                Query(f"histogram_quantile(0.9, {_rate(metrics.NODE_TTFT, JOB, 'node, le', '_bucket')})", "{{node}}"),
            ), "s"),
            Panel("Hit rate by node", (
                Query(_ratio(metrics.NODE_CACHED_TOKENS, metrics.NODE_PROMPT_TOKENS, MODEL, "node"), "{{node}}"),
            ), "percentunit", most=1.0),
            Panel("Hit rate by the engines' own counters", (
                Query(_ratio(metrics.NODE_ENGINE_HIT_TOKENS, metrics.NODE_ENGINE_QUERIES, JOB, "node"), "{{node}}"),
            ), "percentunit", most=1.0),
            Panel("Failed requests by node", (
                Query(_rate(metrics.NODE_REQUESTS, JOB + ',outcome=~"failed|broken|busy"', "node, outcome"),
                      "{{node}} {{outcome}}"),
            ), "reqps"),
            Panel("Preemptions", (Query(_rate(metrics.NODE_ENGINE_PREEMPTIONS, JOB, "node"), "{{node}}"),), "ops"),
            Panel("Prefill time per token", (
                Query(_gauge(metrics.NODE_PREFILL, "node", combine="avg"), "{{node}}"),
            ), "s", help="As the router learned it."),
        ),
    ),
    Row(
        "What the router knows of caches",
        (
            Panel("Predictions that agree with reports", (
                Query(_gauge(metrics.CACHE_AGREEMENT, "node", combine="min"), "{{node}}"),
            ), "percentunit", most=1.0),
            Panel("KV events complete", (
                Query(_gauge(metrics.CACHE_EVENTS_COMPLETE, "node", combine="min"), "{{node}}"),
            ), help="1: the router receives the node's KV events and missed none."),
            Panel("KV events lost", (Query(_increase(metrics.CACHE_EVENT_GAPS, JOB, "node"), "{{node}}"),)),
            Panel("Prompts by how the router reads them", (
                Query(_rate(metrics.PROMPTS, MODEL, "reading"), "{{reading}}"),
            ), "reqps", stacked=True),
            Panel("Decisions by reason", (
                Query(_rate(metrics.DECISIONS, JOB, "policy, reason"), "{{policy}}: {{reason}}"),
            ), "reqps", stacked=True),
            Panel("Memory of the cache index", (
                Query(_gauge(metrics.INDEX_BYTES, "instance"), "{{instance}}"),
                Query(_gauge(metrics.INDEX_MAX_BYTES, "instance"), "{{instance}}: maximum"),
            ), "bytes"),
        ),
    ),
    Row(
        "Routers",
        (
            Panel("CPU", (
                Query(f"{_rate(metrics.PROCESS_CPU, JOB, 'instance')} and on (instance) "
                      f"{metrics.BUILD_INFO.name}{{{JOB}}}", "{{instance}}"),
            ), "percentunit", width=6),
            Panel("Memory", (
                Query(f"{metrics.PROCESS_RSS.name}{{{JOB}}} and on (instance) {metrics.BUILD_INFO.name}{{{JOB}}}",
                      "{{instance}}"),
            ), "bytes", width=6),
            Panel("Event loop delay p99", (
                Query(f"histogram_quantile(0.99, {_rate(metrics.LOOP_DELAY, JOB, 'instance, le', '_bucket')})",
                      "{{instance}}"),
                Query(_gauge(metrics.LOOP_DELAY_MAX, "instance", combine="max"), "{{instance}}: longest"),
            ), "s", width=6),
            Panel("Connections and open files", (
                Query(_gauge(metrics.CLIENT_CONNECTIONS, "instance"), "{{instance}}: clients"),
                Query(f"{metrics.PROCESS_FDS.name}{{{JOB}}} and on (instance) {metrics.BUILD_INFO.name}{{{JOB}}}",
                      "{{instance}}: files"),
            ), width=6),
            Panel("Conversations that left their island", (
                Query(_rate(metrics.CONVERSATIONS_MOVED, JOB, "island, to, reason"), "{{island}} → {{to}}: {{reason}}"),
            ), "ops", width=6, help="Empty if all nodes are on one island."),
            Panel("Last reload successful", (
                Query(_gauge(metrics.CONFIG_RELOAD_OK, "instance", combine="min"), "{{instance}}"),
            ), width=6),
            Panel("Time since the last successful reload", (
                Query(f"time() - {_gauge(metrics.CONFIG_RELOADED, 'instance', combine='max')}", "{{instance}}"),
            ), "s", width=6),
            Panel("Traces", (
                Query(_rate(metrics.TRACES_EXPORTED), "exported"),
                Query(_rate(metrics.TRACES_DROPPED, JOB, "reason"), "dropped: {{reason}}"),
            ), "ops", width=6, help="Empty if the router does not trace requests."),
        ),
    ),
    Row(
        "Scaling",
        (
            Panel("Nodes", (
                Query(f"max({metrics.SCALING_DESIRED_NODES.name}{{{JOB}}})", "desired"),
                Query(_gauge(metrics.SCALING_NODES, "state", combine="max"), "{{state}}"),
            ), help="Empty if the router does not scale the fleet."),
            Panel("Changes", (Query(_increase(metrics.SCALING_CHANGES, JOB, "change"), "{{change}}"),)),
            Panel("Utilisation and cost", (
                Query(f"max({metrics.SCALING_UTILISATION.name}{{{JOB}}})", "utilisation"),
                Query(f"max({metrics.SCALING_COST.name}{{{JOB}}})", "USD per hour"),
            )),
        ),
    ),
)  # fmt: skip


# Writes the dashboard as Grafana's JSON, for Grafana 10 or later.

TITLE: Final = "Warmroute"
UID: Final = "warmroute"
SCHEMA_VERSION: Final = 38
"""Of Grafana 10.0. Later ones read it, too."""
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_STAT_HEIGHT: Final = 4
_HEIGHT: Final = 8


def render_dashboard(thresholds: Thresholds) -> str:
    """Raises QueryError if a panel names a metric that the router does not export."""
    dashboard = {
        "title": TITLE,
        "uid": UID,
        "description": "Fleets of LLM engines behind Warmroute. Generated by `warmroute monitoring`.",
        "tags": ["warmroute", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": _panels(thresholds),
    }
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0,
        "multi": False, "includeAll": False, "current": {}, "options": [], "refresh": 1, "regex": "",
    }  # fmt: skip
    return [
        source,
        _label_variable("job", f"label_values({metrics.BUILD_INFO.name}, job)"),
        _label_variable("model", f'label_values({metrics.PROMPT_TOKENS.name}{{job=~"$job"}}, model)'),
        _label_variable("route", f'label_values({metrics.PROMPT_TOKENS.name}{{job=~"$job",model=~"$model"}}, route)'),
    ]


def _label_variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "regex": "",
        "hide": 0,
    }


def _panels(thresholds: Thresholds) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    budget = error_budget_row(thresholds.availability, thresholds.ttft_share, thresholds.ttft_s)
    for row in (*ROWS[:2], budget, *ROWS[2:]):
        position = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        head = {"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": position}
        panels.append({**head, "collapsed": False, "panels": []})
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            of_panel = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            position = {"x": x, "y": y, "w": panel.width, "h": of_panel}
            panels.append(_panel(panel, len(panels) + 1, position))
            x, height = x + panel.width, max(height, of_panel)
        y += height
    return panels


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    for query in panel.queries:
        check(query.expression)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0 if panel.kind == "timeseries" else None}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "stat":
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "area",
        }
    else:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "stacking": stacking,
        }  # fmt: skip
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {key: one for key, one in defaults.items() if one is not None}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "range": True,
                "instant": False,
            }
            for at, query in enumerate(panel.queries)
        ],
    }
