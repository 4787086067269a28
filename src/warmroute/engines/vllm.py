"""vLLM's dialect."""

from __future__ import annotations

from warmroute.engines.report import LoadReport, mean, total

MARK = b"vllm:num_requests_running"


def read_load(page: bytes) -> LoadReport:
    return LoadReport(
        running=total(page, b"vllm:num_requests_running"),
        waiting=total(page, b"vllm:num_requests_waiting"),
        kv_usage=mean(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        incarnation=mean(page, b"process_start_time_seconds"),
    )
