"""vLLM: its metrics and its KV transfer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

import msgspec

from warmroute.core.messages import MAX_PARAMETERS_BYTES, NodeRow
from warmroute.core.node import EngineCounters, LoadReport
from warmroute.engines.engine import Engine
from warmroute.engines.prometheus_page import counter, labels, latest_labels, mean, split_names, total, whole_number

# Reads vLLM's metrics page.

KV_CONNECTOR_METRICS: Final = b"\nvllm:nixl_"
"""The first characters of metrics that an engine has only with NixlConnector, which can transfer KV cache."""


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
        # Not every release reports tokens. Each rank has a sample of its own.
        capacity_tokens += tokens or whole_number(config.get(b"num_gpu_blocks")) * block_size
    return block_size, capacity_tokens


# vLLM's KV transfer with NixlConnector, as vLLM 0.32 does it for chat completions, completions, Anthropic's messages
# and responses.
#
#     prefill request    the client's, with one output token, not streamed, and kv_transfer_params {do_remote_decode}
#     its response       kv_transfer_params: engine, host, port, request and block ids of the KV cache
#     decode request     the client's, with these kv_transfer_params; the decode engine reads the blocks that it lacks
#
# The prefill engine keeps the blocks for 30 s (`kv_lease_duration`) or until the decode engine has read them. If it is
# gone by then, the decode engine answers with status 500, or with an error event behind a first event with a role
# (`kv_load_failure_policy` = `fail`, the default).

_DO_REMOTE_DECODE: Final = b'{"do_remote_decode":true,"do_remote_prefill":false}'


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class VllmKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int) -> Mapping[str, bytes]:
        return {"kv_transfer_params": _DO_REMOTE_DECODE, **one_token_fields(fields)}

    def decode_fields(
        self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        return {} if transfer is None else {"kv_transfer_params": transfer}

    def read_transfer(self, response: bytes) -> bytes | None:
        try:
            transfer = bytes(msgspec.json.decode(response, type=_Response).kv_transfer_params)
            if len(transfer) > MAX_PARAMETERS_BYTES:
                return None
            params = msgspec.json.decode(transfer)  # the decode node gets these bytes: all of them have to be valid
        except (ValueError, RecursionError):
            return None
        return transfer if params and isinstance(params, dict) else None


def one_token_fields(fields: Container[str]) -> dict[str, bytes]:
    """Return the fields that make a request's answer one token that is not streamed."""
    values = {"stream": b"false"}
    if "input" in fields and "messages" not in fields and "prompt" not in fields:  # /v1/responses
        values["max_output_tokens"] = b"1"
        values["store"] = b"false"
        if "stream_options" in fields:
            values["stream_options"] = b"null"
        return values
    if "max_completion_tokens" in fields:
        values["max_completion_tokens"] = b"1"
    # Chat completions have two names for the limit, and vLLM takes whichever is set. Each that the client set has to be
    # overwritten.
    if "max_tokens" in fields or "max_completion_tokens" not in fields:
        values["max_tokens"] = b"1"
    if "stream_options" in fields:
        values["stream_options"] = b"null"  # not allowed without stream
    if "min_tokens" in fields:
        # `min_tokens` above `max_tokens` is an error 400.
        values["min_tokens"] = b"0"
    return values


ENGINE: Final = Engine(
    title="vLLM",
    markers=(b"vllm:num_requests_running",),
    parse_load=parse_load,
    owner="vllm",
    kv_transfer=VllmKvTransfer(),
    tokenizes="chats",
    to_publish_kv_events="""Start vLLM with
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", \
"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'""",
    to_report_cached_tokens="Start vLLM with --enable-prompt-tokens-details",
    to_report_load="Start vLLM without --disable-log-stats",
    to_cache_prefixes="Start vLLM without --no-enable-prefix-caching",
)
