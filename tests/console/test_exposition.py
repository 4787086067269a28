"""The text format of metrics, read back with prometheus_client; and the list of metrics."""

from __future__ import annotations

from math import inf, isnan, nan

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from warmroute.app.metrics import LABELS, Metric
from warmroute.app.metrics.exposition import MetricLines, bucket_bounds, format_labels
from warmroute.app.metrics.page import METRICS

CHARACTERS = st.characters(exclude_categories=["Cs"])


def gauge() -> MetricLines:
    return MetricLines(Metric("a", "gauge", "Text."))


def read(lines: MetricLines) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(lines.render().decode())
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


@given(st.text(CHARACTERS), st.text(CHARACTERS))
def test_label_values_are_escaped(node: str, state: str) -> None:
    lines = gauge()
    lines.add(1, format_labels(node=node, state=state))
    assert read(lines) == [("a", {"node": node, "state": state}, 1.0)]


@given(st.integers(-(2**53), 2**53) | st.floats(allow_nan=False))
def test_numbers_are_exact(value: float) -> None:
    lines = gauge()
    lines.add(value)
    assert read(lines) == [("a", {}, float(value))]


def test_special_numbers_and_booleans_are_valid() -> None:
    lines = gauge()
    for value in (nan, inf, -inf, True, False):
        lines.add(value)
    values = [value for _, _, value in read(lines)]
    assert isnan(values[0]) and values[1:] == [inf, -inf, 1.0, 0.0]


def test_a_metric_has_its_type_and_help_text() -> None:
    lines = MetricLines(Metric("a_total", "counter", "One\nline \\ more."))
    [family] = text_string_to_metric_families(lines.render().decode())
    assert (family.name, family.type, family.documentation) == ("a", "counter", "One\nline \\ more.")


def test_the_buckets_of_a_histogram_are_cumulative() -> None:
    lines = MetricLines(Metric("a", "histogram", "Text.", ("node",)))
    lines.add_histogram(bucket_bounds((0.005, 1.0)), [2, 0, 3], 7.5, format_labels(node="n"))
    assert read(lines) == [
        ("a_bucket", {"node": "n", "le": "0.005"}, 2.0),
        ("a_bucket", {"node": "n", "le": "1.0"}, 2.0),
        ("a_bucket", {"node": "n", "le": "+Inf"}, 5.0),
        ("a_count", {"node": "n"}, 5.0),
        ("a_sum", {"node": "n"}, 7.5),
    ]


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        prefixes = ("warmroute_", "process_", "inference_")  # the last: those of the Inference Extension
        assert metric.name.startswith(prefixes) and metric.help.endswith("."), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {"ms", "milliseconds", "kb", "mb", "percent"} & set(metric.name.split("_")), metric.name
        assert set(metric.labels) <= LABELS.keys(), metric.name
    assert LABELS.keys() == {label for metric in METRICS for label in metric.labels}
