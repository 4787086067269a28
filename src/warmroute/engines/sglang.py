"""SGLang's dialect."""

from __future__ import annotations

from warmroute.engines.report import LoadReport, info, mean, total, whole

MARK = b"sglang:num_running_reqs"


def read_load(page: bytes) -> LoadReport:
    return LoadReport(
        running=total(page, b"sglang:num_running_reqs"),
        waiting=total(page, b"sglang:num_queue_reqs"),
        kv_usage=mean(page, b"sglang:token_usage"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=_page_size(page),
        capacity_tokens=total(page, b"sglang:max_total_num_tokens"),
        prefix_queries=total(page, b"sglang:prompt_tokens_total"),
        prefix_hits=total(page, b"sglang:cached_tokens_total"),
        preemptions=total(page, b"sglang:num_retracted_requests_total", b"sglang:num_retracted_reqs"),
    )


def _page_size(page: bytes) -> int:
    """Only some releases say it here; /server_info always does."""
    for labels in info(page, b"sglang:cache_config_info"):
        return whole(labels.get(b"page_size")) or whole(labels.get(b"block_size"))
    return 0
