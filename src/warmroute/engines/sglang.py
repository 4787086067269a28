"""Reads SGLang's metrics page."""

from __future__ import annotations

from warmroute.engines.load_report import LoadReport, labels, mean, total, whole_number

MARKER = b"sglang:num_running_reqs"


def parse_load(page: bytes) -> LoadReport:
    return LoadReport(
        running=total(page, b"sglang:num_running_reqs"),
        waiting=total(page, b"sglang:num_queue_reqs"),
        kv_usage=mean(page, b"sglang:token_usage"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=_page_size(page),
        capacity_tokens=total(page, b"sglang:max_total_num_tokens"),
    )


def _page_size(page: bytes) -> int:
    """Return the page size; 0 in releases that report it only in /server_info."""
    for config in labels(page, b"sglang:cache_config_info"):
        return whole_number(config.get(b"page_size")) or whole_number(config.get(b"block_size"))
    return 0
