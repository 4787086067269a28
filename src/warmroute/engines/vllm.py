"""vLLM's dialect."""

from __future__ import annotations

from warmroute.engines.report import LoadReport, info, latest, mean, names, total, whole

MARK = b"vllm:num_requests_running"


def read_load(page: bytes) -> LoadReport:
    block_size, capacity_tokens = _cache(page)
    lora = latest(page, b"vllm:lora_requests_info")
    return LoadReport(
        running=total(page, b"vllm:num_requests_running"),
        waiting=total(page, b"vllm:num_requests_waiting"),
        kv_usage=mean(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=block_size,
        capacity_tokens=capacity_tokens,
        prefix_queries=total(page, b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=total(page, b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
        preemptions=total(page, b"vllm:num_preemptions_total"),
        adapters=names(lora.get(b"running_lora_adapters")),
        adapter_slots=whole(lora.get(b"max_lora")),
    )


def _cache(page: bytes) -> tuple[int, int]:
    """Block size, and tokens held by all ranks."""
    block_size = capacity_tokens = 0
    for labels in info(page, b"vllm:cache_config_info"):
        block_size = whole(labels.get(b"block_size"))
        held = whole(labels.get(b"kv_cache_size_tokens"))
        capacity_tokens += held or whole(labels.get(b"num_gpu_blocks")) * block_size
    return block_size, capacity_tokens
