"""Reads vLLM's metrics page."""

from __future__ import annotations

from typing import Final

from warmroute.engines.load_report import (
    LoadReport,
    counter,
    labels,
    latest_labels,
    mean,
    split_names,
    total,
    whole_number,
)
from warmroute.fleet.engine_rates import EngineCounters

MARKERS = (b"vllm:num_requests_running",)


KV_CONNECTOR_METRICS: Final = b"\nvllm:nixl_"
"""In the metrics of an engine with NixlConnector, which can transfer KV cache."""


def parse_load(page: bytes) -> LoadReport:
    block_size, capacity_tokens = _cache_size(page)
    lora = latest_labels(page, b"vllm:lora_requests_info")
    return LoadReport(
        running=total(page, b"vllm:num_requests_running"),
        waiting=total(page, b"vllm:num_requests_waiting"),
        kv_usage=mean(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=block_size,
        capacity_tokens=capacity_tokens,
        adapters=split_names(lora.get(b"running_lora_adapters")),
        adapter_slots=whole_number(lora.get(b"max_lora")),
        counters=EngineCounters(
            queried_tokens=counter(page, b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
            hit_tokens=counter(page, b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
            preemptions=counter(page, b"vllm:num_preemptions_total"),
            queue_time_s=counter(page, b"vllm:request_queue_time_seconds_sum"),
            queue_times=counter(page, b"vllm:request_queue_time_seconds_count"),
            prefill_time_s=counter(page, b"vllm:request_prefill_time_seconds_sum"),
            prefills=counter(page, b"vllm:request_prefill_time_seconds_count"),
            prefilled_tokens=counter(page, b"vllm:request_prefill_kv_computed_tokens_sum"),
        ),
    )


def _cache_size(page: bytes) -> tuple[int, int]:
    """Return the block size, and the tokens that all ranks hold."""
    block_size = capacity_tokens = 0
    for config in labels(page, b"vllm:cache_config_info"):
        block_size = whole_number(config.get(b"block_size"))
        tokens = whole_number(config.get(b"kv_cache_size_tokens"))
        capacity_tokens += tokens or whole_number(config.get(b"num_gpu_blocks")) * block_size
    return block_size, capacity_tokens
