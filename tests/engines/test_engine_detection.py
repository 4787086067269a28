"""Engine detection and load reports from metrics pages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.cpu_limit import cpu_limit
from support.engine_scripts import vllm_metrics

from warmroute.config.nodes import EngineName
from warmroute.core.node import EngineCounters
from warmroute.engines import ENGINES, detect_engine, engine_of, engine_of_cards, sglang, vllm
from warmroute.engines.prometheus_page import mean, samples, total

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


def test_a_vllm_page_is_parsed() -> None:
    report = vllm.parse_load(vllm_metrics(running=3, waiting=2, kv_usage=0.5, started_s=1.7e9))
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (3, 2, 0.5, 1.7e9)


def test_a_page_of_vllm_before_v1_is_parsed() -> None:
    page = (
        vllm_metrics(1, 1)
        .replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
        .replace(b"} 0.0", b"} 0.75")
    )
    assert vllm.parse_load(page).kv_usage == 0.75


def test_an_sglang_page_is_parsed() -> None:
    report = sglang.parse_load(SGLANG)
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (7, 2, 0.28, 1.75e9)


def test_block_size_and_cache_capacity_are_parsed() -> None:
    page = vllm_metrics() + (
        b'vllm:cache_config_info{_block_size_resolved="x",block_size="32",engine="0",kv_cache_size_tokens="2048"} 1\n'
        b'vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0\n'
    )
    report = vllm.parse_load(page)
    assert (report.block_size, report.capacity_tokens) == (32, 2368)
    page = SGLANG + b'sglang:max_total_num_tokens{m="x"} 400000.0\nsglang:cache_config_info{page_size="64"} 1.0\n'
    report = sglang.parse_load(page)
    assert (report.block_size, report.capacity_tokens) == (64, 400_000)
    assert vllm.parse_load(b"").block_size == sglang.parse_load(SGLANG).block_size == 0


def test_the_counters_of_an_engine_are_parsed() -> None:
    page = vllm_metrics() + (
        b'vllm:prefix_cache_queries_total{engine="0"} 4096.0\nvllm:prefix_cache_queries_total{engine="1"} 1024.0\n'
        b'vllm:prefix_cache_queries_created{engine="0"} 1.7e+09\nvllm:prefix_cache_hits_total{engine="0"} 2048.0\n'
        b'vllm:num_preemptions_total{engine="0"} 3.0\nvllm:request_queue_time_seconds_sum{engine="0"} 1.5\n'
        b'vllm:request_prefill_time_seconds_sum{engine="0"} 2.5\n'
        b'vllm:request_prefill_time_seconds_count{engine="0"} 4\n'
        b'vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 3072.0\n'
        b'vllm:request_queue_time_seconds_bucket{le="0.3"} 2.0\nvllm:request_queue_time_seconds_count{engine="0"} 4.0\n'
    )
    assert vllm.parse_load(page).counters == EngineCounters(
        5120.0, 2048.0, 3.0, 1.5, 4.0, prefill_time_s=2.5, prefills=4.0, prefilled_tokens=3072.0
    )  # fmt: skip
    page = SGLANG + (
        b'sglang:prompt_tokens_total{m="x"} 900.0\nsglang:cached_tokens_total{cache_source="device"} 300.0\n'
        b'sglang:cached_tokens_total{cache_source="host"} 50.0\nsglang:num_retracted_requests_total{m="x"} 2.0\n'
        b'sglang:queue_time_seconds_sum{m="x"} 6.0\nsglang:queue_time_seconds_count{m="x"} 3.0\n'
        b'sglang:cache_hit_rate{m="x"} 0.25\nsglang:time_to_first_token_seconds_sum{m="x"} 7.5\n'
        b'sglang:time_to_first_token_seconds_count{m="x"} 3.0\n'
    )
    assert sglang.parse_load(page).counters == EngineCounters(
        900.0, 350.0, 2.0, 6.0, 3.0, 0.25, 1.5, 3.0, 550.0, first_tokens_are_late=True
    )  # fmt: skip
    assert vllm.parse_load(b"").counters == sglang.parse_load(SGLANG).counters == EngineCounters()


def test_the_counters_of_a_real_vllm_are_parsed() -> None:
    page = (Path(__file__).parents[1] / "fixtures" / "vllm-0.32" / "metrics.txt").read_bytes()
    counters = vllm.parse_load(page).counters
    assert min(getattr(counters, name) for name in counters.__struct_fields__ if name != "hit_share") >= 0.0
    assert counters.queried_tokens > counters.hit_tokens > 0.0 and counters.queue_times > 0.0
    assert counters.prefills == 25 and counters.prefilled_tokens == 3573 and 0.4 < counters.prefill_time_s < 0.5


def test_engines_are_detected_by_their_metrics() -> None:
    assert detect_engine(vllm_metrics()) == "vllm" and detect_engine(SGLANG) == "sglang"
    assert detect_engine(b"") is None and detect_engine(b"go_goroutines 5\n") is None
    assert engine_of("auto").parse_load(vllm_metrics()) is None


TRTLLM = b"""\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="undefined",model_name="undefined",pid="7"} 5.0
trtllm_num_requests_waiting{engine_type="undefined",model_name="undefined",pid="7"} 2.0
trtllm_kv_cache_utilization{engine_type="undefined",model_name="undefined",pid="7"} 0.25
trtllm_kv_cache_max_blocks{engine_type="undefined",model_name="undefined",pid="7"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="undefined",model_name="undefined",pid="7"} 32.0
trtllm_prompt_tokens_total{engine_type="undefined",model_name="undefined"} 5120.0
trtllm_prompt_cached_tokens_total{engine_type="undefined",model_name="undefined"} 2048.0
"""
TRTLLM_ITERATIONS = b"""[
{"iter": 1, "numActiveRequests": 9, "numQueuedRequests": 9, "kvCacheStats": {}},
{"iter": 2, "numActiveRequests": 5, "numQueuedRequests": 2, "iterLatencyMS": 7.5,
 "kvCacheStats": {"maxNumBlocks": 1000, "freeNumBlocks": 750, "usedNumBlocks": 250, "tokensPerBlock": 32}}]"""


@pytest.mark.parametrize("page", [TRTLLM, TRTLLM_ITERATIONS])
def test_tensorrt_llm_is_detected_and_parsed(page: bytes) -> None:
    assert detect_engine(page) == "trtllm"
    report = engine_of("trtllm").parse_load(page)
    assert report is not None and (report.running, report.waiting, report.kv_usage) == (5, 2, 0.25)
    assert (report.block_size, report.capacity_tokens, report.incarnation) == (32, 32_000, 0.0)


def test_the_hit_counters_of_tensorrt_llm_are_parsed() -> None:
    report = engine_of("trtllm").parse_load(TRTLLM)
    assert report is not None
    assert (report.counters.queried_tokens, report.counters.hit_tokens, report.counters.preemptions) == (5120, 2048, -1)


def test_tensorrt_llm_without_iterations_is_idle_and_known_by_its_models() -> None:
    assert detect_engine(b"[]") is None
    report = engine_of("trtllm").parse_load(b"[]")
    assert report is not None and (report.running, report.waiting, report.block_size) == (0, 0, 0)
    assert engine_of("trtllm").parse_load(b"{}") is None and engine_of("trtllm").parse_load(b"[7") is None
    assert engine_of_cards([{"id": "m", "owned_by": "tensorrt_llm"}]) == "trtllm"
    assert engine_of_cards([{"id": "m", "owned_by": "vllm"}]) is None
    assert engine_of("vllm").metrics_paths == engine_of("sglang").metrics_paths == ("/metrics",)
    assert engine_of("auto").metrics_paths == ("/metrics", "/prometheus/metrics")


def test_every_engine_of_the_configuration_is_known() -> None:
    assert {"auto", *ENGINES} == set(get_args(EngineName))


def test_loads_of_ranks_are_summed_and_usages_averaged() -> None:
    page = b'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
    page += b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
    report = vllm.parse_load(page)
    assert report.running == 5 and report.kv_usage == pytest.approx(0.3)


def test_a_page_without_the_metrics_means_no_load() -> None:
    report = vllm.parse_load(b"")
    assert (report.running, report.waiting, report.kv_usage, report.incarnation) == (0, 0, 0.0, 0.0)


def test_only_samples_of_the_metric_itself_count() -> None:
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
def test_samples_match_the_prometheus_parser(lines: list[tuple[str, dict[str, str], float]]) -> None:
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


def test_an_infinite_value_is_ignored() -> None:
    total(b"a 1e999\n", b"a")


@pytest.mark.parametrize("odd", [b"a NaN\n", b"a +Inf\n", b"a -\n", b"a e\n", b"a\n", b"a{\n", b'a{x="}\n'])
def test_malformed_values_are_ignored(odd: bytes) -> None:
    try:
        assert math.isfinite(total(odd, b"a"))
    except ValueError:
        pass  # the node watcher skips the page


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:cache_config_info{" + b"a" * 65_000 + b"} 1",
        b"vllm:cache_config_info{" + b'a="' * 21_000 + b"} 1",
        b'vllm:lora_requests_info{a="' + b"a" * 65_000 + b"} 1",
        b"vllm:num_requests_running{" + b"} 1 " * 16_000 + b"x",
        b"vllm:num_requests_running" + b" " * 65_000 + b"x",
        b"vllm:num_requests_running 1" + b" 1" * 32_000 + b"x",
    ],
)
def test_a_metrics_page_is_read_in_time_that_grows_with_its_length(line: bytes) -> None:
    with cpu_limit(2.0):
        engine_of("vllm").parse_load(b"\nvllm:num_requests_running 1\n" + line + b"\n")
