"""Reads the metrics and labels that a PromQL query names, and checks that the router exports them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from warmroute.app.metrics import Metric
from warmroute.app.metrics.page import METRICS

# The reader sees tokens, not the whole grammar: a name is a metric unless it is a keyword, a function or an aggregate,
# or is inside of braces or of a list of labels. Grafana's variables are allowed where Grafana replaces them: in strings
# (`model=~"$model"`) and as ranges (`[$__rate_interval]`).

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
      | (?P<range>\[[^\]]*\])
      | (?P<number>0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?:ms|[smhdwy]\d*)*(?![A-Za-z0-9_.]))
      | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
      | (?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)
_RANGE: Final = re.compile(
    r"\[(?:(?:\d+(?:ms|[smhdwy]))+|\$__(?:rate_interval|interval|range))(?::(?:\d+[smhdwy])?)?\]"
)
_OPERATORS: Final = {"and", "or", "unless", "atan2", "bool", "offset", "inf", "nan"}
_LABEL_LISTS: Final = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_AGGREGATIONS: Final = {
    "sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk", "quantile",
}  # fmt: skip
_FUNCTIONS: Final = {
    "abs", "absent", "absent_over_time", "avg_over_time", "ceil", "changes", "clamp_max", "clamp_min",
    "count_over_time", "delta", "deriv", "floor", "histogram_quantile", "increase", "irate", "label_replace",
    "last_over_time", "max_over_time", "min_over_time", "rate", "resets", "round", "scalar", "sort", "sort_desc",
    "sum_over_time", "time", "vector",
}  # fmt: skip
_ADDED_LABELS: Final = {"job", "instance"}
"""Prometheus adds these to every sample."""
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


class QueryError(ValueError):
    """The query is malformed, or names a metric or a label that the router does not export."""


class Selector(NamedTuple):
    """A metric in a query, with the labels that its braces name."""

    name: str
    labels: tuple[str, ...]


class Named(NamedTuple):
    """What a query names."""

    selectors: tuple[Selector, ...]
    grouping_labels: tuple[str, ...]
    """Labels in lists such as `by (node)`."""


def read_names(query: str) -> Named:
    """Raises QueryError if the query has something that is not PromQL."""
    tokens = _tokens(query)
    selectors: list[Selector] = []
    grouping: list[str] = []
    depth = at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if text == "{":
            raise QueryError(f"a selector without the name of a metric: {query}")
        if text in ("(", ")"):
            depth += 1 if text == "(" else -1
            if depth < 0:
                raise QueryError(f"a parenthesis too many: {query}")
        elif kind == "name":
            lower = text.lower()
            if lower in _LABEL_LISTS:
                found, at = _label_list(tokens, at, query)
                grouping += found
            elif (lower in _AGGREGATIONS and following.lower() in ("(", "by", "without")) or lower in _OPERATORS:
                pass
            elif following == "(":
                if text not in _FUNCTIONS:
                    raise QueryError(f"an unknown function {text}: {query}")
            else:
                labels: tuple[str, ...] = ()
                if following == "{":
                    labels, at = _matchers(tokens, at + 1)
                selectors.append(Selector(text, labels))
    if depth:
        raise QueryError(f"a parenthesis is not closed: {query}")
    if not selectors:
        raise QueryError(f"no metric: {query}")
    return Named(tuple(selectors), tuple(grouping))


def _tokens(query: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(query):
        found = _TOKEN.match(query, at)
        if found is None:
            raise QueryError(f"not PromQL at {query[at : at + 20]!r}: {query}")
        at = found.end()
        kind = str(found.lastgroup)
        if kind == "range" and not _RANGE.fullmatch(found[0]):
            raise QueryError(f"not a range: {found[0]}")
        if kind != "space":
            tokens.append((kind, found[0]))
    return tokens


def _matchers(tokens: list[tuple[str, str]], at: int) -> tuple[tuple[str, ...], int]:
    """Read what follows an opening brace: `label = "text"`, with commas. Return the labels and the next position."""
    labels: list[str] = []
    while at < len(tokens) and tokens[at][1] != "}":
        matcher = tokens[at : at + 3]
        kinds = [kind for kind, _ in matcher]
        if kinds != ["name", "mark", "text"] or matcher[1][1] not in ("=", "!=", "=~", "!~"):
            raise QueryError(f"not a label matcher: {' '.join(text for _, text in matcher)}")
        labels.append(matcher[0][1])
        at += 3
        if at < len(tokens) and tokens[at][1] == ",":
            at += 1
    if at >= len(tokens):
        raise QueryError("a brace is not closed")
    return tuple(labels), at + 1


def _label_list(tokens: list[tuple[str, str]], at: int, query: str) -> tuple[list[str], int]:
    """Read a list of labels in parentheses. `group_left` may come without one."""
    if at >= len(tokens) or tokens[at][1] != "(":
        return [], at
    labels, at = [], at + 1
    while at < len(tokens) and tokens[at][1] != ")":
        kind, text = tokens[at]
        if kind == "name":
            labels.append(text)
        elif text != ",":
            raise QueryError(f"not a list of labels at {text!r}: {query}")
        at += 1
    return labels, at + 1


def check(query: str, exported: Iterable[Metric] = METRICS) -> None:
    """Raises QueryError if the query names a metric or a label that the router does not export."""
    known = samples_of(exported)
    named = read_names(query)
    available = set(_ADDED_LABELS)
    for selector in named.selectors:
        labels = known.get(selector.name)
        if labels is None:
            raise QueryError(f"the router does not export {selector.name}: {query}")
        available |= labels
        if wrong := set(selector.labels) - labels - _ADDED_LABELS:
            raise QueryError(f"{selector.name} has no label {', '.join(sorted(wrong))}: {query}")
    if wrong := set(named.grouping_labels) - available:
        raise QueryError(f"no metric of the query has the label {', '.join(sorted(wrong))}: {query}")


def samples_of(exported: Iterable[Metric]) -> Mapping[str, set[str]]:
    """Return the labels of each sample that the metrics have, by its name: those of a histogram have suffixes."""
    samples: dict[str, set[str]] = {}
    for metric in exported:
        names = [metric.name + suffix for suffix in _SUFFIXES] if metric.kind == "histogram" else [metric.name]
        for name in names:
            samples[name] = {*metric.labels, "le"} if name.endswith("_bucket") else set(metric.labels)
    return samples
