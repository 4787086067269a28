"""TensorRT-LLM: its metrics, its KV events, which the router polls, and its KV transfer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from warmroute.core.messages import MAX_PARAMETERS_BYTES, NodeRow
from warmroute.core.node import EngineCounters, LoadReport
from warmroute.core.node_cache import EngineHash
from warmroute.core.reported_values import MAX_BLOCK_TOKENS, MAX_RANKS, MAX_SEQUENCE_NUMBER, decode_json
from warmroute.engines.engine import Engine
from warmroute.engines.kv_events import BadPayload, BlockRemoved, BlockStored, Event
from warmroute.engines.prometheus_page import counter, less, mean, total

# TensorRT-LLM's KV events: JSON that POST /kv_cache_events returns once, to one consumer. They are converted to the
# event types of kv_events.py. No I/O.
#
# A stored block may hold fewer tokens than the block size (the end of a prompt). No other prompt shares it as a whole,
# so it is skipped. Models with several attention windows report each block once for each window; only the widest
# counts.

PATH: Final = "/kv_cache_events"
COMMON_BLOCK_SIZES: Final = (32, 64, 128)
"""Block sizes that the converter accepts from a single block. A chain of one block may be an incomplete one."""
MAX_EVENT_BYTES: Final = 8 << 20
"""Longer events are ignored. A prompt of 128 Ki tokens takes 6 MB."""
MAX_OTHER_BYTES: Final = 1 << 20
"""Largest response that is parsed as a whole: its events do not start with their number, so they cannot be found one by
one."""
_EVENT_START: Final = b'{"event_id"'
_MEDIA: Final = ("GPU", "CPU")

WireHash = int | str


class _Token(msgspec.Struct, gc=False):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct, gc=False):
    block_hash: WireHash
    tokens: Annotated[list[_Token], Meta(max_length=MAX_BLOCK_TOKENS)]
    cache_level: int = 0
    lora_id: int | None = None
    cache_salt: str | None = None
    mm_keys: list[Any] | None = None


class _Created(msgspec.Struct, tag="created", gc=False):
    pass


class _Stored(msgspec.Struct, tag="stored", gc=False):
    blocks: list[_Block]
    parent_hash: WireHash | None = None


class _Removed(msgspec.Struct, tag="removed", gc=False):
    block_hashes: list[WireHash]


class _Change(msgspec.Struct, gc=False):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, tag="updated", gc=False):
    block_hash: WireHash
    cache_level: _Change | None = None


class PolledEvent(msgspec.Struct, gc=False):
    """One event with its sequence number."""

    event_id: Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_NUMBER)]
    data: _Created | _Stored | _Removed | _Updated
    window_size: int = 0
    attention_dp_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] | None = None


_event_list: Final = msgspec.json.Decoder(list[msgspec.Raw])
_event: Final = msgspec.json.Decoder(PolledEvent)


def split_events(body: bytes) -> Iterable[msgspec.Raw]:
    """Return the events of a response, which `decode_event` decodes one by one. Raises BadPayload.

    A response may be large: its events are found one at a time, so that the caller can do other work in between.
    """
    if body[:64].replace(b" ", b"").startswith(b"[" + _EVENT_START) and body[-64:].rstrip().endswith(b"]"):
        return _found_events(body)
    if len(body) > MAX_OTHER_BYTES:
        raise BadPayload("not a list of events that start with event_id")
    try:
        return _event_list.decode(body)
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"not a list of events: {type(error).__name__}") from None


def _found_events(body: bytes) -> Iterator[msgspec.Raw]:
    start = body.index(_EVENT_START)
    while start >= 0:
        # Quotes inside a JSON string are escaped, so the next event is the next place with these bytes.
        following = body.find(_EVENT_START, start + 1, start + MAX_EVENT_BYTES)
        if following < 0 and len(body) - start > MAX_EVENT_BYTES:
            start = body.find(_EVENT_START, start + MAX_EVENT_BYTES)  # this event is too long: it counts as lost
            continue
        end = following if following >= 0 else body.rindex(b"]")
        yield msgspec.Raw(body[start:end].rstrip(b", \t\r\n"))
        start = following


def decode_event(raw: msgspec.Raw) -> PolledEvent:
    """Raises BadPayload."""
    try:
        return _event.decode(raw)
    except (ValueError, RecursionError) as error:
        raise BadPayload(str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__) from None


class EventConverter:
    def __init__(self) -> None:
        self._block_size = 0
        self._window = 0

    def convert(self, event: PolledEvent) -> list[Event]:
        # The widest window decides whether a prefix is a hit: a narrow one drops old blocks by design.
        self._window = max(self._window, event.window_size)
        if event.window_size < self._window:
            return []
        data = event.data
        if isinstance(data, _Stored):
            return self._stored(data)
        if isinstance(data, _Removed):
            hashes = [_hash(name) for name in data.block_hashes]
            return [BlockRemoved(hashes, medium) for medium in _MEDIA]  # the event does not name the medium
        if isinstance(data, _Updated) and data.cache_level is not None:
            change, names = data.cache_level, [_hash(data.block_hash)]
            return [
                BlockStored(names, medium=_medium(change.new_value)),
                BlockRemoved(names, _medium(change.old_value)),
            ]
        return []

    def _stored(self, data: _Stored) -> list[Event]:
        if not self._block_size:
            self._block_size = _block_size(data.blocks)
        parent = None if data.parent_hash is None else _hash(data.parent_hash)
        events: list[Event] = []
        for block in data.blocks:
            # Everything behind an incomplete block hangs on it, and no other prompt has it.
            if len(block.tokens) != self._block_size:
                break
            name = _hash(block.block_hash)
            keys: list[Any] = [token.token_extra_id for token in block.tokens if token.token_extra_id]
            keys += block.mm_keys or ()
            stored = BlockStored([name], parent, [token.token_id for token in block.tokens], self._block_size)
            stored.lora_id, stored.medium = block.lora_id, _medium(block.cache_level)
            # Empty, not None: None would mean that the salt is among the extra keys, as in vLLM.
            stored.cache_salt = block.cache_salt or ""
            if keys:
                stored.extra_keys = msgspec.Raw(msgspec.msgpack.encode([keys]))
            events.append(stored)
            parent = name
        return events


def _block_size(blocks: list[_Block]) -> int:
    """Return the block size of a chain, of which every block but the last is full; 0 if it is uncertain."""
    sizes = [len(block.tokens) for block in blocks]
    return max(sizes, default=0) if len(sizes) > 1 or (sizes and sizes[0] in COMMON_BLOCK_SIZES) else 0


def _hash(name: WireHash) -> EngineHash:
    return name.encode() if isinstance(name, str) else name


def _medium(level: int) -> str:
    return _MEDIA[min(max(level, 0), 1)]


# TensorRT-LLM's KV transfer, as its documentation and its own disaggregated server describe it.
#
#     context request       the client's, not streamed, with disaggregated_params {request_type: context_only}
#     its response          choices[0].disaggregated_params: the request's id, its first token, an opaque state
#     generation request    the client's, with these disaggregated_params and request_type generation_only, and the
#                           prompt's token ids from the response
#
# The first token is the context engine's. A context engine that finishes the answer with it (a stop token) says so in
# its finish_reason; then there is nothing to transfer, and the generation engine gets the client's request as it is.

_CONTEXT_ONLY: Final = b'{"request_type":"context_only"}'
MAX_IDS_BYTES: Final = 8 << 20
"""Token ids of a million tokens. Longer ones are ignored: the router parses them while nothing else runs."""
_NULL: Final = msgspec.Raw(b"null")
_UNFINISHED: Final = ("length", "not_finished", None)


class _Choice(msgspec.Struct):
    disaggregated_params: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL


class _Transfer(msgspec.Struct):
    disaggregated_params: msgspec.Raw
    prompt_token_ids: msgspec.Raw = _NULL


class TrtllmKvTransfer:
    def prefill_fields(self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int) -> Mapping[str, bytes]:
        values = {"disaggregated_params": _CONTEXT_ONLY, "stream": b"false"}
        if "stream_options" in fields:
            values["stream_options"] = b"null"
        return values

    def decode_fields(
        self, fields: Container[str], prefill_node: NodeRow, bootstrap_room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        if transfer is None:
            return {}
        known = msgspec.json.decode(transfer, type=_Transfer)
        values = {"disaggregated_params": bytes(known.disaggregated_params)}
        if bytes(known.prompt_token_ids) != b"null":
            name = "prompt_token_ids" if "messages" in fields else "prompt"
            values[name] = bytes(known.prompt_token_ids)
        return values

    def read_transfer(self, response: bytes) -> bytes | None:
        try:
            found = msgspec.json.decode(response, type=_Response)
            ids = found.prompt_token_ids if bytes(found.prompt_token_ids).startswith(b"[") else _NULL
            if len(bytes(ids)) > MAX_IDS_BYTES:
                return None
            # A Raw field is copied without being parsed.
            msgspec.json.decode(ids)  # the decode node gets these bytes: all of them have to be valid
        except (ValueError, RecursionError):
            return None
        choice = found.choices[0] if len(found.choices) == 1 else None
        if choice is None or not choice.disaggregated_params or choice.finish_reason not in _UNFINISHED:
            return None
        params = msgspec.json.encode({**choice.disaggregated_params, "request_type": "generation_only"})
        if len(params) > MAX_PARAMETERS_BYTES:
            return None
        return msgspec.json.encode(_Transfer(msgspec.Raw(params), ids))


# Reads TensorRT-LLM's metrics.
#
# With `return_perf_metrics` and `enable_iter_perf_stats`, trtllm-serve has a Prometheus page at PROMETHEUS_PATH.
# Without the former, its /metrics returns the statistics of the latest iterations as JSON, each of them once: another
# consumer then misses those that the router has read.

PROMETHEUS_PATH: Final = "/prometheus/metrics"


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


_FILE: Final = "In the file of --extra_llm_api_options of trtllm-serve, set"

ENGINE: Final = Engine(
    title="TensorRT-LLM",
    markers=(b"trtllm_num_requests_running", b"trtllm_request_success_total", b'"numActiveRequests"'),
    parse_load=parse_load,
    metrics_paths=(PROMETHEUS_PATH, "/metrics"),
    owner="tensorrt_llm",
    detected_by_owner=True,
    why_no_subscription="not checked: the engine returns each event once, and the router needs them",
    polls_kv_events=True,
    kv_transfer=TrtllmKvTransfer(),
    to_publish_kv_events=f"""{_FILE}
    kv_cache_config: {{enable_block_reuse: true, event_buffer_max_size: 16384}}""",
    to_report_cached_tokens=f"{_FILE}\n    return_perf_metrics: true",
    to_report_load=f"{_FILE}\n    return_perf_metrics: true\n    enable_iter_perf_stats: true",
    to_cache_prefixes=f"{_FILE}\n    kv_cache_config: {{enable_block_reuse: true}}",
)
