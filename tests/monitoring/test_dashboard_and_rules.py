"""The committed dashboard and alert rules: they are current, and name only metrics that the router exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.promql import check, read_names

from warmroute.app.main import main
from warmroute.app.metrics.page import METRICS, WAIT_BUCKETS
from warmroute.app.monitoring import ALERT_RULES, Objectives, render

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/warmroute.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_committed_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    reference = ROOT / "docs/reference/alerts.md"
    assert main(["monitoring", str(DEPLOY), "--reference", str(reference), "--check"]) == 0, capsys.readouterr().out


def test_a_file_that_is_not_current_fails_the_check(tmp_path: Path) -> None:
    assert main(["monitoring", str(tmp_path), "--check"]) == 1
    assert main(["monitoring", str(tmp_path)]) == 0
    assert main(["monitoring", str(tmp_path), "--check"]) == 0
    assert main(["monitoring", str(tmp_path), "--check", "--queue-wait-seconds", "3"]) == 1


@pytest.mark.parametrize("query", [*QUERIES, *[rule["expr"] for rule in RULES]])
def test_every_query_names_an_exported_metric(query: str) -> None:
    check(query)


def test_the_variables_of_the_dashboard_name_exported_metrics() -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert found is not None
        check(f"sum by ({found[2]}) ({found[1]})")


def test_panels_do_not_overlap_and_have_distinct_ids() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["targets"] and len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_queries_use_only_variables_that_the_dashboard_has() -> None:
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert {name for query in QUERIES for name in re.findall(r"\$\{?(\w+)", query)} <= known


def test_legends_use_only_labels_that_their_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            named = read_names(target["expr"])
            whole = not re.match(r"(sum|max|min|avg|topk|histogram_quantile|time)\b", target["expr"])
            kept = set(named.grouping_labels) | ({"instance", "job"} if whole else set())
            assert used <= kept, (panel["title"], used - kept)


def test_every_alert_that_an_operator_needs_exists() -> None:
    names = {rule["alert"] for rule in RULES}
    needed = (
        "HitRateDropped", "KvEventsLost", "NodeDown", "NodeEjected", "RequestsRejected", "QueueWait",
        "TtftObjectiveMissed", "ReloadFailed", "EventLoopLag", "RoutingBlind", "ScalingFailed",
    )  # fmt: skip
    assert {f"Warmroute{name}" for name in needed} <= names
    assert len(names) == len(RULES)


def test_the_reference_explains_every_rule() -> None:
    page = (ROOT / "docs/reference/alerts.md").read_text()
    for rule in RULES:
        assert f"## {rule['alert']}\n" in page
        assert all(line in page for line in rule["annotations"]["description"].splitlines())


def test_summaries_use_only_labels_that_their_rule_keeps() -> None:
    for rule in RULES:
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        named = read_names(rule["expr"])
        kept = set(named.grouping_labels) if "by (" in rule["expr"] else {"instance"}
        kept |= set(re.findall(r', "(\w+)", "[^"]*", "", ""\)', rule["expr"]))  # of label_replace
        assert used <= kept | {"instance"} if "by (" not in rule["expr"] else used <= kept, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["description"]


def test_the_ttft_objective_is_a_bucket_of_the_histogram(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert Objectives().ttft_s in WAIT_BUCKETS.bounds_s
    for bound, label in zip(WAIT_BUCKETS.bounds_s, WAIT_BUCKETS.labels, strict=False):
        [group] = yaml.safe_load(render(ALERT_RULES, Objectives(ttft_s=bound)))["groups"]
        [missed] = [rule["expr"] for rule in group["rules"] if rule["alert"] == "WarmrouteTtftObjectiveMissed"]
        assert label in missed, "as the metrics page writes it"
    assert main(["monitoring", str(tmp_path), "--ttft-seconds", "3"]) == 2
    assert "0.5, 1, 2.5" in capsys.readouterr().err


def test_the_objectives_are_those_of_the_operator(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["monitoring", str(tmp_path), "--availability", "0.99", "--ttft-share", "0.9"]) == 0
    rules = (tmp_path / "prometheus/alerts.yaml").read_text()
    assert " > 0.144 and " in rules and " / 0.01 > 1" in rules and " / 0.1 > 1" in rules
    assert " > 0.9 and " in rules, "14.4 times a budget of a tenth can not be lost"
    assert "@" not in rules, "every place has its number"
    assert "Objective 0.99." in (tmp_path / "grafana/warmroute.json").read_text()
    for share in ("1", "0", "nan", "99.9"):
        assert main(["monitoring", str(tmp_path), "--availability", share]) == 2
        assert "expected a number from 0.5" in capsys.readouterr().err


def test_every_kind_of_token_and_time_is_on_the_dashboard() -> None:
    text = json.dumps(QUERIES)
    for metric in METRICS:
        if "model" in metric.labels and not metric.name.startswith(("warmroute_tenant_", "warmroute_node_")):
            assert metric.name in text, metric.name
