"""The metrics' text format, against prometheus_client's reader."""

from __future__ import annotations

from math import inf, isnan, nan

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from warmroute.telemetry.exposition import Family, Histogram, counter, gauge, labels, page

SCALARS = st.characters(exclude_categories=["Cs"])


def read(*families: Family) -> list[tuple[str, dict[str, str], float]]:
    text = page(families).decode()
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


@given(st.text(SCALARS), st.text(SCALARS))
def test_labels_are_read_as_they_were_given(node: str, state: str) -> None:
    family = gauge("a", "Text.")
    family.add(1, labels(node=node, state=state))
    assert read(family) == [("a", {"node": node, "state": state}, 1.0)]


@given(st.integers(-(2**53), 2**53) | st.floats(allow_nan=False))
def test_numbers_are_read_as_they_were_given(value: float) -> None:
    family = counter("a", "Text.")
    family.add(value)
    assert read(family) == [("a_total", {}, float(value))]


def test_what_is_no_number_and_what_is_true_or_false() -> None:
    family = gauge("a", "Text.")
    for value in (nan, inf, -inf, True, False):
        family.add(value)
    values = [value for _, _, value in read(family)]
    assert isnan(values[0]) and values[1:] == [inf, -inf, 1.0, 0.0]


def test_a_family_says_what_it_is() -> None:
    [family] = text_string_to_metric_families(page([counter("a", "One\nline \\ more.")]).decode())
    assert (family.name, family.type, family.documentation) == ("a", "counter", "One\nline \\ more.")


def test_a_histogram_counts_upwards() -> None:
    histogram = Histogram("a", "Text.", (0.005, 1.0))
    histogram.add_counts([2, 0, 3], 7.5, labels(node="n"))
    assert read(histogram) == [
        ("a_bucket", {"node": "n", "le": "0.005"}, 2.0),
        ("a_bucket", {"node": "n", "le": "1.0"}, 2.0),
        ("a_bucket", {"node": "n", "le": "+Inf"}, 5.0),
        ("a_count", {"node": "n"}, 5.0),
        ("a_sum", {"node": "n"}, 7.5),
    ]
