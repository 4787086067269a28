"""Unit tests of the alert rules, for `promtool test rules`: series that fire a rule, and series that must not.

A series is a sample of every minute, in promtool's notation: `0+10x5` are 0, 10, … 50, and `1x5` are six times 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ROUTER = 'job="w",instance="r:1"'
ROUTE = f'{ROUTER},model="m",route="chat"'


class Case(NamedTuple):
    alert: str
    fires: dict[str, str]
    """Series → values."""
    quiet: dict[str, str]
    labels: dict[str, str]
    """Of the alert, without its severity."""
    summary: str
    at: str = "20m"


def tokens(prompt: str, cached: str) -> dict[str, str]:
    return {
        f"warmroute_prompt_tokens_total{{{ROUTE}}}": prompt,
        f"warmroute_cached_tokens_total{{{ROUTE}}}": cached,
    }


def node(metric: str, values: str, more: str = "") -> dict[str, str]:
    return {f'warmroute_{metric}{{{ROUTER},node="gpu-a"{more}}}': values}


def router(metric: str, values: str) -> dict[str, str]:
    return {f"{metric}{{{ROUTER}}}": values}


def times(metric: str, fast: str, all_of_them: str, bound: str) -> dict[str, str]:
    """A histogram with a bucket for fast requests, and one for all."""
    return {
        f'warmroute_{metric}_bucket{{{ROUTE},le="{bound}"}}': fast,
        f'warmroute_{metric}_bucket{{{ROUTE},le="5.0"}}': all_of_them,
        f'warmroute_{metric}_bucket{{{ROUTE},le="+Inf"}}': all_of_them,
        f"warmroute_{metric}_count{{{ROUTE}}}": all_of_them,
    }


def loop_delays(fast: str, all_of_them: str) -> dict[str, str]:
    name = "warmroute_event_loop_delay_seconds_bucket"
    return {
        f'{name}{{{ROUTER},le="0.01"}}': fast,
        f'{name}{{{ROUTER},le="0.25"}}': all_of_them,
        f'{name}{{{ROUTER},le="+Inf"}}': all_of_them,
    }


def responses(count: str) -> dict[str, str]:
    return {f'warmroute_responses_total{{{ROUTER},status="200"}}': count}


def rejected(count: str) -> dict[str, str]:
    return {f'warmroute_requests_rejected_total{{{ROUTER},priority="normal",reason="queue_full"}}': count}


def errors(count: str, code: str = "no_node_available", status: str = "503") -> dict[str, str]:
    return {f'warmroute_errors_total{{{ROUTER},code="{code}",status="{status}"}}': count}


def broken(count: str) -> dict[str, str]:
    return {f"warmroute_responses_interrupted_total{{{ROUTER}}}": count}


def client_errors(count: str, status: str, code: str) -> dict[str, str]:
    return {f'warmroute_errors_total{{{ROUTER},code="{code}",status="{status}"}}': count}


def prompts(text: str, exact: str) -> dict[str, str]:
    name = f'warmroute_prompts_total{{{ROUTER},model="m",reading='
    return {f'{name}"text"}}': text, f'{name}"exact"}}': exact}


def scaling(desired: str, serving: str | None) -> dict[str, str]:
    series = {f"warmroute_scaling_desired_nodes{{{ROUTER}}}": desired}
    if serving is not None:
        series[f'warmroute_scaling_nodes{{{ROUTER},state="serving"}}'] = serving
    return series


CHANGES = f"warmroute_scaling_changes_total{{{ROUTER},change="
FILES = {f"process_max_fds{{{ROUTER}}}": "1000x40", f'warmroute_build_info{{{ROUTER},version="1"}}': "1x40"}
GPU_A = {"job": "w", "node": "gpu-a"}
ON_ROUTE = {"job": "w", "model": "m", "route": "chat"}
INSTANCE = {"job": "w", "instance": "r:1"}

CASES = (
    Case(
        "WarmrouteNoNodeUp",
        node("node_state", "1x3 0x40", ',state="up"') | node("node_state", "0x3 1x40", ',state="down"'),
        node("node_state", "1x40", ',state="up"') | node("node_state", "0x3 1x40", ',state="down"'),
        INSTANCE,
        "No node of r:1 is up",
        "10m",
    ),
    Case(
        "WarmrouteReplicaAlone",
        router("warmroute_cluster_connected", "1x3 0x40"),
        router("warmroute_cluster_connected", "1x40"),
        INSTANCE,
        "r:1 does not hear other replicas",
        "10m",
    ),
    Case(
        "WarmrouteEdgeAlone",
        router("warmroute_edges_alone_total", "0x3 1x40"),
        router("warmroute_edges_alone_total", "1x40"),
        INSTANCE,
        "Edges of r:1 were without a brain",
        "10m",
    ),
    Case(
        "WarmrouteEdgeEnds",
        router("warmroute_edges_ended_total", "0x3 3x40"),
        router("warmroute_edges_ended_total", "0x3 1x40"),
        INSTANCE,
        "Edges of r:1 end again and again",
        "10m",
    ),
    Case(
        "WarmrouteNodeDown",
        node("node_state", "0x3 1x40", ',state="half_open"'),
        node("node_state", "1x40", ',state="draining"') | node("node_state", "0x9 1 0x40", ',state="down"'),
        GPU_A,
        "Node gpu-a is down",
        "10m",
    ),
    Case(
        "WarmrouteNodeEjected",
        node("node_ejections_total", "0x9 1x40", ',reason="slow"'),
        node("node_ejections_total", "4x40", ',reason="slow"'),
        GPU_A | {"reason": "slow"},
        "Node gpu-a was ejected (slow)",
        "12m",
    ),
    Case(
        "WarmrouteNodePreempts",
        node("node_engine_preemptions_total", "0+60x40"),
        node("node_engine_preemptions_total", "0+2x40"),
        GPU_A,
        "Node gpu-a preempts requests",
    ),
    Case(
        "WarmrouteScalingFailed",
        {f'{CHANGES}"refused"}}': "0x9 1x40"},
        {f'{CHANGES}"refused"}}': "2x40", f'{CHANGES}"added"}}': "0+1x40"},
        {"job": "w", "change": "refused"},
        "Scaling: a node was refused",
        "12m",
    ),
    Case(
        "WarmrouteScalingStuck",
        scaling("3x60", "2x60"),
        scaling("3x60", "2x20 3x40"),
        {"job": "w"},
        "Fewer nodes serve than the autoscaler wants",
        "45m",
    ),
    Case(
        "WarmrouteScalingStuck", scaling("1x60", None), scaling("0x60", None), {"job": "w"},
        "Fewer nodes serve than the autoscaler wants", "45m",
    ),
    Case(
        "WarmrouteHitRateBelowBaseline",
        {f'warmroute_route_hit_ratio_dropped{{{ROUTE},cause="prompts_changed"}}': "_x9 1x40"},
        {f"warmroute_route_hit_ratio{{{ROUTE}}}": "0x40"},
        ON_ROUTE | {"cause": "prompts_changed"},
        "The cache hit rate of m chat dropped: prompts_changed",
    ),
    Case(
        "WarmrouteHitRateDropped",  # from 90 % to 0: a time stamp before the system prompt
        tokens("0+60000x200", "0+54000x180 9720000x20"),
        tokens("0+60000x200", "0+54000x180 9720000+45000x20"),
        ON_ROUTE,
        "The cache hit rate of m chat is 0%",
        "196m",
    ),
    Case(
        "WarmrouteHitRateDropped",  # fewer than 100 tokens a second say nothing
        tokens("0+60000x200", "0+54000x180 9720000x20"),
        tokens("0+6x200", "0+5x180 900x20"),
        ON_ROUTE,
        "The cache hit rate of m chat is 0%",
        "196m",
    ),
    Case(
        "WarmrouteHitRateDropped",  # no traffic is no recovery, and no drop
        tokens("0+60000x200 12000000x60", "0+54000x180 9720000x20 9720000x60"),
        tokens("0+60000x200 12000000x60", "0+54000x200 10800000x60"),
        ON_ROUTE,
        "The cache hit rate of m chat is 0%",
        "250m",
    ),
    Case(
        "WarmrouteHitRateDropped",  # it recovers with prompts
        tokens("0+60000x200 12000000x60", "0+54000x180 9720000x20 9720000x60"),
        tokens("0+60000x300", "0+54000x180 9720000x20 9720000+54000x60"),
        ON_ROUTE,
        "The cache hit rate of m chat is 0%",
        "240m",
    ),
    Case(
        "WarmrouteKvEventsLost",
        node("node_cache_event_gaps_total", "0x9 1x40"),
        node("node_cache_event_gaps_total", "7x40"),
        GPU_A,
        "KV events of node gpu-a were lost",
        "12m",
    ),
    Case(
        "WarmrouteKvEventsIncomplete",
        node("node_cache_events_complete", "1x5 0x40"),
        node("node_cache_events_complete", "0x40"),
        GPU_A,
        "The router no longer receives all KV events of node gpu-a",
    ),
    Case(
        "WarmrouteTokenMismatch",
        node("node_cache_token_mismatch", "0x5 1x40"),
        node("node_cache_token_mismatch", "0x40"),
        GPU_A,
        "Node gpu-a has other tokens than the router",
    ),
    Case(
        "WarmrouteRoutingBlind",
        prompts("0+60x40", "0+10x40"),
        prompts("0+10x40", "0+60x40"),
        {"job": "w", "model": "m"},
        "The router does not read the tokens of m",
        "25m",
    ),
    Case(
        "WarmrouteRequestsRejected",
        rejected("0+10x40") | responses("0+90x40"),
        rejected("0+1x40") | responses("0+900x40"),
        {"job": "w"},
        "10% of the requests are rejected",
    ),
    Case("WarmrouteRequestsRejected", rejected("0+10x40"), rejected("5x40"), {"job": "w"},
         "100% of the requests are rejected"),
    Case(
        "WarmrouteClientErrors",
        client_errors("0x18 66879x40", "401", "invalid_api_key"),  # all of them within seconds
        client_errors("0+50x40", "401", "invalid_api_key") | client_errors("0+9000x40", "429", "queue_full"),
        INSTANCE | {"status": "401", "code": "invalid_api_key"},
        "r:1 rejects 222.9 requests/s with 401 (invalid_api_key)",
    ),
    Case(
        "WarmrouteErrors",
        errors("0+20x40") | responses("0+80x40"),
        errors("0+1x40") | responses("0+99x40"),
        {"job": "w"},
        "20% of the requests fail in the router or on all nodes",
    ),
    Case(
        "WarmrouteQueueWait",
        times("queue_wait_seconds", "0+50x40", "0+100x40", "1.0"),
        times("queue_wait_seconds", "0+95x40", "0+100x40", "1.0"),
        ON_ROUTE,
        "Requests of m chat wait 4.2s in the router",
    ),
    Case(
        "WarmrouteTtftObjectiveMissed",
        times("time_to_first_token_seconds", "0+75x40", "0+100x40", "2.5"),
        times("time_to_first_token_seconds", "0+96x40", "0+100x40", "2.5"),
        ON_ROUTE,
        "25% of the first tokens of m chat are late",
    ),
    Case("WarmrouteRouterDown", {}, router("warmroute_build_info", "1x40"), {},
         "No router is running, or Prometheus reaches none"),
    Case(
        "WarmrouteReloadFailed",
        router("warmroute_config_last_reload_successful", "1x5 0x40"),
        router("warmroute_config_last_reload_successful", "0x5 1x40"),
        INSTANCE,
        "r:1 rejected its configuration",
    ),
    Case(
        "WarmrouteEventLoopLag",
        loop_delays("0+300x40", "0+600x40"),
        loop_delays("0+599x40", "0+600x40"),
        INSTANCE,
        "The event loop of r:1 runs 245.2ms late",
    ),
    Case(
        "WarmrouteAvailabilityBudgetBurns",  # 2 % fail for a quarter of an hour: 20 times what may fail
        responses("0+98x40") | errors("0+2x40") | broken("0x40"),
        responses("0+1000x40") | errors("0+2x40") | broken("0+1x40"),
        {"job": "w"},
        "2% of the requests fail: the error budget of 30 days burns too fast",
    ),
    Case(
        "WarmrouteAvailabilityBudgetBurns",  # without a single error of the router; a rate limit is no failure
        responses("0+98x40") | broken("0+2x40"),
        responses("0+98x40") | broken("0x40") | errors("0+20x40", "rate_limit_exceeded", "429"),
        {"job": "w"},
        "2% of the requests fail: the error budget of 30 days burns too fast",
    ),
    Case(
        "WarmrouteAvailabilityBudgetBurns",  # what has ended does not burn, and few failures say nothing
        responses("0+98x40") | errors("0+2x40", "overloaded", "429") | broken("0x40"),
        responses("0+9x5 45x40") | errors("0+1x5 5x40") | broken("0x40"),
        {"job": "w"},
        "2% of the requests fail: the error budget of 30 days burns too fast",
    ),
    Case(
        "WarmrouteTtftBudgetBurns",
        times("time_to_first_token_seconds", "0+20x40", "0+100x40", "2.5"),
        times("time_to_first_token_seconds", "0+90x40", "0+100x40", "2.5"),
        ON_ROUTE,
        "80% of the first tokens of m chat are late: the error budget of 30 days burns too fast",
    ),
    Case(
        "WarmrouteErrorBudgetSpent",
        responses("0+998x40") | errors("0+2x40") | broken("0x40"),
        responses("0+9998x40") | errors("0+2x40") | broken("0x40"),
        {"job": "w", "objective": "availability"},
        "The error budget of 30 days is spent (availability  )",
    ),
    Case(
        "WarmrouteErrorBudgetSpent",
        times("time_to_first_token_seconds", "0+90x40", "0+100x40", "2.5"),
        times("time_to_first_token_seconds", "0+96x40", "0+100x40", "2.5"),
        ON_ROUTE | {"objective": "TTFT"},
        "The error budget of 30 days is spent (TTFT m chat)",
    ),
    Case(
        "WarmrouteOpenFiles",
        router("process_open_fds", "900x40") | FILES,
        router("process_open_fds", "900x40") | {f"process_max_fds{{{ROUTER}}}": "1000x40"},  # another program
        INSTANCE,
        "r:1 has 90% of its open files in use",
    ),
)  # fmt: skip


def promtool_tests(rules_file: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a test file for promtool. `rules`: those of the file, by name."""
    tests = []
    for case in CASES:
        rule = rules[case.alert]
        expected = {
            "exp_labels": {**rule["labels"], **case.labels},
            "exp_annotations": {"summary": case.summary, "description": rule["annotations"]["description"]},
        }
        for series, alerts in ((case.fires, [expected]), (case.quiet, [])):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}],
                }
            )
    return {"rule_files": [rules_file], "evaluation_interval": "1m", "tests": tests}
