"""What engines say of their load, in their own words."""

from __future__ import annotations

import math

import pytest
from harness import vllm_metrics
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from warmroute.engines import sglang, vllm
from warmroute.engines.dialects import load_reader, recognise
from warmroute.engines.report import mean, samples, total

SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_running_reqs_offline_batch{model_name="m"} 100.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
process_start_time_seconds 1.75e+09
"""


def test_vllm_is_read() -> None:
    report = vllm.read_load(vllm_metrics(running=3, waiting=2, kv_usage=0.5, started_s=1.7e9))
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (3, 2, 0.5, 1.7e9)


def test_vllm_of_before_v1_is_read() -> None:
    page = (
        vllm_metrics(1, 1)
        .replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
        .replace(b"} 0.0", b"} 0.75")
    )
    assert vllm.read_load(page).kv_usage == 0.75


def test_sglang_is_read() -> None:
    report = sglang.read_load(SGLANG)
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (7, 2, 0.28, 1.75e9)


def test_what_the_caches_are_is_read() -> None:
    page = vllm_metrics() + (
        b'vllm:cache_config_info{_block_size_resolved="x",block_size="32",engine="0",kv_cache_size_tokens="2048"} 1\n'
        b'vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0\n'
        b'vllm:prefix_cache_queries_total{engine="0"} 4661.0\nvllm:prefix_cache_queries_created{engine="0"} 1.7e+09\n'
        b'vllm:prefix_cache_hits_total{engine="0"} 1088.0\nvllm:num_preemptions_total{engine="0"} 3.0\n'
    )
    report = vllm.read_load(page)
    assert (report.block_size, report.capacity_tokens) == (32, 2368)
    assert (report.prefix_queries, report.prefix_hits, report.preemptions) == (4661, 1088, 3)
    page = SGLANG + b'sglang:max_total_num_tokens{m="x"} 400000.0\nsglang:cache_config_info{page_size="64"} 1.0\n'
    report = sglang.read_load(page + b"sglang:prompt_tokens_total 50.0\nsglang:cached_tokens_total 20.0\n")
    assert (report.block_size, report.capacity_tokens, report.prefix_queries, report.prefix_hits) == (
        64,
        400_000,
        50,
        20,
    )
    assert vllm.read_load(b"").block_size == sglang.read_load(SGLANG).block_size == 0


def test_engines_are_told_by_their_pages() -> None:
    assert recognise(vllm_metrics()) == "vllm" and recognise(SGLANG) == "sglang"
    assert recognise(b"") is None and recognise(b"go_goroutines 5\n") is None
    assert load_reader("trtllm") is None and load_reader("auto") is None


def test_ranks_are_summed_and_usages_averaged() -> None:
    page = b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
    page += b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
    report = vllm.read_load(page)
    assert report.running == 5 and report.kv_usage == pytest.approx(0.3)


def test_a_page_without_the_metrics_is_no_load() -> None:
    report = vllm.read_load(b"")
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (0, 0, 0.0, 0.0)


def test_only_the_metric_itself_is_read() -> None:
    page = b'# a b 5\na_total 9\na 1\nb a 7\nxa 8\na{l="a 3"} 2 1700000000\na'
    assert samples(page, b"a") == [1.0, 2.0]
    assert total(page, b"none", b"a") == 3 and mean(page, b"none") == 0.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "ab", "a:b"]),
            st.dictionaries(
                st.sampled_from(["x", "y"]),
                st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=5),
            ),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
        max_size=8,
    )
)
def test_samples_are_those_that_prometheus_own_parser_finds(lines: list[tuple[str, dict[str, str], float]]) -> None:
    page = ""
    for name, labels, value in lines:
        shown = ",".join(
            '{}="{}"'.format(key, text.replace("\\", "\\\\").replace('"', '\\"')) for key, text in labels.items()
        )
        page += f"{name}{{{shown}}} {value!r}\n" if labels else f"{name} {value!r}\n"
    for name in ("a", "ab", "a:b"):
        expected = [
            s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name
        ]
        assert sorted(samples(page.encode(), name.encode())) == pytest.approx(sorted(expected))


def test_an_infinite_value_does_no_harm() -> None:
    total(b"a 1e999\n", b"a")


@pytest.mark.parametrize("odd", [b"a NaN\n", b"a +Inf\n", b"a -\n", b"a e\n", b"a\n", b"a{\n", b'a{x="}\n'])
def test_odd_values_do_no_harm(odd: bytes) -> None:
    try:
        assert math.isfinite(total(odd, b"a"))
    except ValueError:
        pass  # the page is not taken; the watcher knows
