"""SGLang's dialect."""

from __future__ import annotations

from warmroute.engines.report import LoadReport, mean, total

MARK = b"sglang:num_running_reqs"


def read_load(page: bytes) -> LoadReport:
    return LoadReport(
        running=total(page, b"sglang:num_running_reqs"),
        waiting=total(page, b"sglang:num_queue_reqs"),
        kv_usage=mean(page, b"sglang:token_usage"),
        incarnation=mean(page, b"process_start_time_seconds"),
    )
