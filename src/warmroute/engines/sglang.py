"""SGLang: its metrics and its KV transfer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from warmroute.core.messages import NodeRow
from warmroute.core.node import EngineCounters, LoadReport
from warmroute.engines.engine import Engine
from warmroute.engines.prometheus_page import counter, labels, less, mean, samples, total, whole_number

# Reads SGLang's metrics page.


def parse_load(page: bytes) -> LoadReport:
    prompt_tokens = counter(page, b"sglang:prompt_tokens_total")
    cached_tokens = counter(page, b"sglang:cached_tokens_total")
    queue_time_s = counter(page, b"sglang:queue_time_seconds_sum")
    # SGLang's TTFT begins at arrival. Less the time in the queue, it is about the prefill.
    prefill_time_s = less(counter(page, b"sglang:time_to_first_token_seconds_sum"), queue_time_s)
    return LoadReport(
        running=total(page, b"sglang:num_running_reqs"),
        waiting=total(page, b"sglang:num_queue_reqs"),
        kv_usage=mean(page, b"sglang:token_usage"),
        incarnation=mean(page, b"process_start_time_seconds"),
        block_size=_page_size(page),
        capacity_tokens=total(page, b"sglang:max_total_num_tokens"),
        counters=EngineCounters(
            queried_tokens=prompt_tokens,
            hit_tokens=cached_tokens,
            preemptions=counter(page, b"sglang:num_retracted_requests_total"),
            queue_time_s=queue_time_s,
            queue_times=counter(page, b"sglang:queue_time_seconds_count"),
            prefill_time_s=prefill_time_s,
            prefills=counter(page, b"sglang:time_to_first_token_seconds_count"),
            prefilled_tokens=less(prompt_tokens, cached_tokens),
            first_tokens_are_late=prefill_time_s >= 0.0,  # without streaming, the scheduler passes tokens on in groups
            hit_share=_hit_share(page),
        ),
    )


def _hit_share(page: bytes) -> float:
    """Return the hit rate of the last batches; below 0 if it is not reported."""
    values = samples(page, b"sglang:cache_hit_rate")
    return sum(values) / len(values) if values else -1.0


def _page_size(page: bytes) -> int:
    """Return the page size; 0 in releases that report it only in /server_info."""
    for config in labels(page, b"sglang:cache_config_info"):
        return whole_number(config.get(b"page_size")) or whole_number(config.get(b"block_size"))
    return 0


# SGLang's KV transfer: both requests name the prefill node's bootstrap server and a room, and are sent at once.
#
# The two engines meet in the room: the prefill engine pushes the KV cache, and the decode engine begins to answer. A
# decode engine (`--disaggregation-mode decode`) cannot prefill: it waits until the prefill engine has sent its KV
# cache.


class SglangKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int) -> Mapping[str, bytes]:
        return self._fields(prefill_node, bootstrap_room)

    def decode_fields(
        self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        return self._fields(prefill_node, bootstrap_room)

    # Nothing to carry over: the engines meet at the bootstrap server. Not None, which would mean that the prefill
    # failed.
    def read_transfer(self, response: bytes) -> bytes | None:
        return b"{}"

    @staticmethod
    def _fields(prefill_node: NodeRow, bootstrap_room: int) -> Mapping[str, bytes]:
        host = prefill_node.host
        return {
            "bootstrap_host": msgspec.json.encode(f"[{host}]" if ":" in host else host),
            "bootstrap_port": b"%d" % prefill_node.bootstrap_port,
            "bootstrap_room": b"%d" % bootstrap_room,
        }


ENGINE: Final = Engine(
    title="SGLang",
    markers=(b"sglang:num_running_reqs",),
    parse_load=parse_load,
    owner="sglang",
    kv_transfer=SglangKvTransfer(),
    tokenizes="text",
    to_publish_kv_events="""Start SGLang with
    --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'""",
    to_report_cached_tokens="Start SGLang with --enable-cache-report",
    to_report_load="Start SGLang with --enable-metrics",
    to_cache_prefixes="Start SGLang without --disable-radix-cache",
)
