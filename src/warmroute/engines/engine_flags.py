"""What to change in the start of each engine, as its own flags and options."""

from __future__ import annotations

from typing import Final

ENGINE_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}

_TRTLLM_FILE: Final = "In the file of --extra_llm_api_options of trtllm-serve, set"

_KV_EVENTS: Final = {
    "vllm": """Start vLLM with
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", \
"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'""",
    "sglang": """Start SGLang with
    --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'""",
    "trtllm": f"""{_TRTLLM_FILE}
    kv_cache_config: {{enable_block_reuse: true, event_buffer_max_size: 16384}}""",
}
_CACHE_REPORT: Final = {
    "vllm": "Start vLLM with --enable-prompt-tokens-details",
    "sglang": "Start SGLang with --enable-cache-report",
    "trtllm": f"{_TRTLLM_FILE}\n    return_perf_metrics: true",
}
_METRICS: Final = {
    "vllm": "Start vLLM without --disable-log-stats",
    "sglang": "Start SGLang with --enable-metrics",
    "trtllm": f"{_TRTLLM_FILE}\n    return_perf_metrics: true\n    enable_iter_perf_stats: true",
}
_PREFIX_CACHING: Final = {
    "vllm": "Start vLLM without --no-enable-prefix-caching",
    "sglang": "Start SGLang without --disable-radix-cache",
    "trtllm": f"{_TRTLLM_FILE}\n    kv_cache_config: {{enable_block_reuse: true}}",
}


def kv_events(engine: str) -> str:
    return _KV_EVENTS.get(engine, _KV_EVENTS["vllm"].replace("vLLM", "the engine, if it is vLLM,"))


def replay(engine: str) -> str:
    return f"Add a replay_endpoint. {kv_events(engine)}"


def cache_report(engine: str) -> str:
    return _CACHE_REPORT.get(engine, "Let the engine report usage.prompt_tokens_details.cached_tokens")


def metrics(engine: str) -> str:
    return _METRICS.get(engine, 'Name the engine in [[nodes]]: engine = "vllm", "sglang" or "trtllm"')


def prefix_caching(engine: str) -> str:
    return _PREFIX_CACHING.get(engine, "Turn on prefix caching in the engine")


def nodes_line(name: str, line: str) -> str:
    """Return a line to add to the [[nodes]] table of a node."""
    return f"In the [[nodes]] table of {name}, set\n    {line}"
