"""Reads TensorRT-LLM's metrics.

With `return_perf_metrics` and `enable_iter_perf_stats`, trtllm-serve has a Prometheus page at PROMETHEUS_PATH. Without
the former, its /metrics returns the statistics of the latest iterations as JSON, each of them once: another consumer
then misses those that the router has read.
"""

from __future__ import annotations

from typing import Any, Final

from warmroute.engines.load_report import LoadReport, counter, less, mean, total
from warmroute.fleet.engine_rates import EngineCounters
from warmroute.fleet.reported_values import decode_json

PROMETHEUS_PATH: Final = "/prometheus/metrics"
OWNER: Final = "tensorrt_llm"
"""`owned_by` of its models."""
MARKERS: Final = (b"trtllm_num_requests_running", b"trtllm_request_success_total", b'"numActiveRequests"')


def parse_load(page: bytes) -> LoadReport | None:
    if page.lstrip()[:1] in (b"[", b"{"):
        return _parse_iterations(page)
    block_size = int(mean(page, b"trtllm_kv_cache_tokens_per_block"))
    prompt_tokens = counter(page, b"trtllm_prompt_tokens_total")
    cached_tokens = counter(page, b"trtllm_prompt_cached_tokens_total")
    queue_time_s = counter(page, b"trtllm_request_queue_time_seconds_sum")
    return LoadReport(
        running=total(page, b"trtllm_num_requests_running"),
        waiting=total(page, b"trtllm_num_requests_waiting"),
        kv_usage=mean(page, b"trtllm_kv_cache_utilization"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=block_size,
        capacity_tokens=total(page, b"trtllm_kv_cache_max_blocks") * block_size,
        counters=EngineCounters(
            queried_tokens=prompt_tokens,
            hit_tokens=cached_tokens,
            queue_time_s=queue_time_s,
            queue_times=counter(page, b"trtllm_request_queue_time_seconds_count"),
            prefill_time_s=less(counter(page, b"trtllm_time_to_first_token_seconds_sum"), queue_time_s),
            prefills=counter(page, b"trtllm_time_to_first_token_seconds_count"),
            prefilled_tokens=less(prompt_tokens, cached_tokens),
        ),
    )


def _parse_iterations(page: bytes) -> LoadReport | None:
    """Return the load of the latest iteration. Without an iteration since the last request, the engine was idle."""
    try:
        iterations = decode_json(page)
    except ValueError:
        return None
    if not isinstance(iterations, list):
        return None
    latest = iterations[-1] if iterations else {}
    if not isinstance(latest, dict):
        return None
    cache = latest.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    blocks, block_size = _number(cache.get("maxNumBlocks")), _number(cache.get("tokensPerBlock"))
    return LoadReport(
        running=_number(latest.get("numActiveRequests")),
        waiting=_number(latest.get("numQueuedRequests")),
        kv_usage=_number(cache.get("usedNumBlocks")) / blocks if blocks else 0.0,
        incarnation=0.0,
        block_size=block_size,
        capacity_tokens=blocks * block_size,
    )


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
