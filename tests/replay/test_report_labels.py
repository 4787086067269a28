"""The labels of the HTML report: all of them are within their picture."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from warmroute.lab import html_report

NAMES = (
    "price",
    "prefix_hash:load_factor=2.5",
    "sglang:balance_abs=64,cache_threshold=0.5,balance_rel=1.5",
    "负载均衡策略",
)
SHORT = ("price", "oracle")


def run(policy: str, rate: float | None, scale: float) -> dict[str, Any]:
    times = {"p50": 900.0 * scale, "p90": 1100.0 * scale, "p99": 123_456.0 * scale}
    return {
        "policy": policy, "rate": rate, "concurrency": None, "queue_threshold": None, "ttft_ms": times,
        "inter_token_ms": times, "hit_rate": 0.5, "load_variation": 12.34, "node_count": 3, "duration_s": 1.0,
        "timeline": {"span_s": 100.0, "hit_rate": [0.1, 0.5, 0.4]},
        "scaling": {"timeline": {"span_s": 100.0, "serving": [1, 12_345, 3]}},
        "nodes": [
            {"node": f"offer-{at}", "mean_in_flight": 12_345.6 * scale, "requests": 5, "hit_rate": 0.5, "busy_s": 3.0}
            for at in range(3)
        ],
    }  # fmt: skip


def pictures(names: tuple[str, ...]) -> dict[str, str]:
    series = {name: at for at, name in enumerate(names)}
    runs = [run(name, rate, rate * (at + 1)) for at, name in enumerate(names) for rate in (1.0, 20_000.0)]
    single = [run(name, None, 1.0) for name in names]
    return {
        "load": html_report.time_against_load(runs, series, "ttft_ms", "p50", "requests per second"),
        "ranges": html_report.time_ranges(single, series, "ttft_ms"),
        "hits": html_report.hits_over_time(single, series),
        "nodes": html_report.nodes_over_time(single, series),
        "by_node": html_report.load_by_node(single, series),
    }


def outside(picture: str) -> list[str]:
    """Return the texts that are not within the picture, at 0.62 em for each character, or 1 em for a wide one."""
    root = ElementTree.fromstring(picture)
    left, _top, width, height = map(float, root.attrib["viewBox"].split())
    found = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        words = text.text or ""
        length = sum(13.0 if ord(character) > 0x2E80 else 8.06 for character in words)
        x = float(text.attrib["x"]) - {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        if x < left or x + length > left + width or not 0 < float(text.attrib["y"]) <= height:
            found.append(words)
    return found


@pytest.mark.parametrize("name", ["load", "ranges", "hits", "nodes", "by_node"])
def test_no_label_is_cut_off(name: str) -> None:
    assert outside(pictures(NAMES)[name]) == []


def test_a_picture_with_short_labels_keeps_its_width() -> None:
    for picture in pictures(SHORT).values():
        found = re.search(r'viewBox="(\S+) 0 (\S+) ', picture)
        assert found is not None and float(found[2]) <= html_report.WIDTH * 1.1


def test_escaped_characters_count_once() -> None:
    one = html_report.picture(10, 10, [html_report.text(0, 5, "&" * 10)], "x")
    other = html_report.picture(10, 10, [html_report.text(0, 5, "x" * 10)], "x")
    assert re.findall("viewBox=.*? role", one) == re.findall("viewBox=.*? role", other)
