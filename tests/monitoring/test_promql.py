"""Reading the metrics and labels that a PromQL query names."""

from __future__ import annotations

import pytest
from support.promql import QueryError, Selector, check, read_names

from warmroute.app.metrics import Metric

EXPORTED = (
    Metric("requests_total", "counter", "", ("route", "status")),
    Metric("wait_seconds", "histogram", "", ("route",)),
    Metric("sum_of_things", "gauge", "", ()),
)


def selectors(query: str) -> list[Selector]:
    return list(read_names(query).selectors)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("requests_total", ["requests_total"]),
        ("sum(requests_total)", ["requests_total"]),
        ("sum by (route) (rate(requests_total[5m]))", ["requests_total"]),
        ("sum(rate(requests_total[5m])) by (route)", ["requests_total"]),
        ("SUM without(status) (requests_total) > bool 0.5e-3", ["requests_total"]),
        ("requests_total / on (route) group_left (status) sum_of_things", ["requests_total", "sum_of_things"]),
        ("requests_total and on (route) sum_of_things or vector(0)", ["requests_total", "sum_of_things"]),
        (
            "histogram_quantile(0.9, sum by (le) (rate(wait_seconds_bucket[1h30m:1m] offset 1d)))",
            ["wait_seconds_bucket"],
        ),
        ("rate(requests_total[$__rate_interval])", ["requests_total"]),
        ('label_replace(requests_total, "a", "$1", "route", "(x.*)")', ["requests_total"]),
        ("time() - sum_of_things unless requests_total == inf", ["sum_of_things", "requests_total"]),
        ("topk(10, sum_of_things) # requests_total", ["sum_of_things"]),
        ("requests_total @ 1700000000 ^ 2 % 3", ["requests_total"]),
        ("-requests_total{}", ["requests_total"]),
    ],
)
def test_only_metrics_are_names_of_metrics(query: str, names: list[str]) -> None:
    assert [selector.name for selector in selectors(query)] == names


def test_text_and_label_names_are_no_metrics() -> None:
    query = """requests_total{route=~"a{b}|sum(x)", status!='5\\'00', job=`j "k`,}"""
    assert selectors(query) == [Selector("requests_total", ("route", "status", "job"))]


def test_labels_of_groupings_are_read() -> None:
    named = read_names("sum by (route, status) (requests_total) / ignoring (status) group_left () sum_of_things")
    assert named.grouping_labels == ("route", "status", "status")


@pytest.mark.parametrize(
    "query",
    [
        "", "1 + 1", "requests_total[5x]", "requests_total[]", "(requests_total", "requests_total)",
        "requests_total{route}", 'requests_total{route=="a"}', 'requests_total{route="a"',
        '{__name__="requests_total"}', "made_up(requests_total)", "sum by (1) (requests_total)",
        "requests_total ; sum_of_things", "$metric", "requests_total[$range]",
    ],
)  # fmt: skip
def test_what_is_not_promql_or_cannot_be_checked_is_an_error(query: str) -> None:
    with pytest.raises(QueryError):
        check(query, EXPORTED)


@pytest.mark.parametrize(
    "query",
    [
        "requests", "wait_seconds", "wait_seconds_total", 'requests_total{node="a"}', "sum by (node) (requests_total)",
        "requests_total_bucket", "sum by (le) (wait_seconds_sum)", 'wait_seconds_count{le="1.0"}',
    ],
)  # fmt: skip
def test_unknown_metrics_and_labels_are_errors(query: str) -> None:
    with pytest.raises(QueryError):
        check(query, EXPORTED)


@pytest.mark.parametrize(
    "query",
    [
        'requests_total{job="a",instance=~".+",route="r"}', "sum by (job, le) (wait_seconds_bucket)",
        "wait_seconds_sum", "sum by (route) (wait_seconds_count)",
    ],
)  # fmt: skip
def test_exported_metrics_with_their_labels_pass(query: str) -> None:
    check(query, EXPORTED)
