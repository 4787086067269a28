"""GET /metrics as vLLM 0.32 writes it: the same names, types, labels and bucket bounds, for every rank.

Metrics of what is not simulated (floating point operations, multimodal and external caches) are 0.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf

import msgspec

from warmroute.lab.engine.rank import Histogram, Rank
from warmroute.lab.engine.values import EngineConfig

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_BYTES = resource.getpagesize()
_PHASE = "Histogram of time spent in {} phase for request."

HISTOGRAMS = (
    ("request_prompt_tokens", "Number of prefill tokens processed."),
    ("request_generation_tokens", "Number of generation tokens processed."),
    ("iteration_tokens_total", "Histogram of number of tokens per engine_step."),
    ("request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens."),
    ("request_params_n", "Histogram of the n request parameter."),
    ("request_params_max_tokens", "Histogram of the max_tokens request parameter."),
    ("request_num_preemptions", "Histogram of the number of times a request was preempted."),
    (
        "request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
    ),
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds."),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
    ("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request."),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds."),
    ("request_queue_time_seconds", _PHASE.format("WAITING")),
    ("request_inference_time_seconds", _PHASE.format("RUNNING")),
    ("request_prefill_time_seconds", _PHASE.format("PREFILL")),
    ("request_decode_time_seconds", _PHASE.format("DECODE")),
)
"""The histograms of RankMetrics, by their names there and in vLLM, with vLLM's help texts."""


class ProcessInfo(msgspec.Struct):
    """The parts of the page that describe the process."""

    model: str
    loras: tuple[str, ...]
    engine: EngineConfig
    started: float
    """Start time of the process, or of its last restart in place."""
    http_requests: dict[tuple[str, str, str], int]
    """(handler, method, status class) → requests."""


def _number(value: float) -> str:
    return "+Inf" if value == inf else repr(float(value))


@lru_cache(4096)
def _labels(*pairs: tuple[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(pairs)) + "}" if pairs else ""


Samples = Sequence[tuple[str, float]]
"""Labels and values."""


class _Page:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def gauge(self, name: str, text: str, samples: Samples, kind: str = "gauge") -> None:
        self.lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
        self.lines += [f"{name}{labels} {_number(value)}" for labels, value in samples]

    def counter(self, name: str, text: str, samples: Samples, created: float) -> None:
        self.gauge(f"{name}_total", text, samples, "counter")
        self.gauge(f"{name}_created", text, [(labels, created) for labels, _ in samples])


def render(process: ProcessInfo, ranks: Sequence[Rank]) -> bytes:
    page = _Page()
    _write_process(page, process)
    _RankFamilies(page, process, ranks).write()
    _write_http(page, process)
    return ("\n".join(page.lines) + "\n").encode()


def _write_process(page: _Page, process: ProcessInfo) -> None:
    version = platform.python_version_tuple()
    labels = _labels(
        ("implementation", platform.python_implementation()),
        ("major", version[0]),
        ("minor", version[1]),
        ("patchlevel", version[2]),
        ("version", platform.python_version()),
    )
    page.gauge("python_info", "Python platform information", [(labels, 1)])
    with open("/proc/self/statm") as file:
        virtual, resident = file.read().split()[:2]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for name, text, value in (
        ("virtual_memory_bytes", "Virtual memory size in bytes.", float(virtual) * _PAGE_BYTES),
        ("resident_memory_bytes", "Resident memory size in bytes.", float(resident) * _PAGE_BYTES),
        ("start_time_seconds", "Start time of the process since unix epoch in seconds.", process.started),
    ):
        page.gauge(f"process_{name}", text, [("", value)])
    text = "Total user and system CPU time spent in seconds."
    page.gauge("process_cpu_seconds_total", text, [("", usage.ru_utime + usage.ru_stime)], "counter")
    page.gauge("process_open_fds", "Number of open file descriptors.", [("", len(os.listdir("/proc/self/fd")))])
    limit = float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    page.gauge("process_max_fds", "Maximum number of open file descriptors.", [("", limit)])


def _write_http(page: _Page, process: ProcessInfo) -> None:
    samples = [
        (_labels(("handler", handler), ("method", method), ("status", status)), float(count))
        for (handler, method, status), count in process.http_requests.items()
    ]
    text = "Total number of requests by method, status and handler."
    page.counter("http_requests", text, samples, process.started)


class _RankFamilies:
    """Writes the metric families that have an `engine` label."""

    def __init__(self, page: _Page, process: ProcessInfo, ranks: Sequence[Rank]) -> None:
        self._page = page
        self._process = process
        self._ranks = ranks
        self._base = [(("engine", str(rank.number)), ("model_name", process.model)) for rank in ranks]
        self._created = ranks[0].metrics.created

    def _per_rank(self, value: Callable[[Rank], float]) -> list[tuple[str, float]]:
        return [(_labels(*base), value(rank)) for base, rank in zip(self._base, self._ranks, strict=True)]

    def _by_label(self, label: str, values: Callable[[Rank], Mapping[str, float]]) -> list[tuple[str, float]]:
        return [
            (_labels(*base, (label, key)), value)
            for base, rank in zip(self._base, self._ranks, strict=True)
            for key, value in values(rank).items()
        ]

    def _gauge(self, name: str, text: str, value: Callable[[Rank], float]) -> None:
        self._page.gauge(f"vllm:{name}", text, self._per_rank(value))

    def _counter(self, name: str, text: str, value: Callable[[Rank], float]) -> None:
        self._page.counter(f"vllm:{name}", text, self._per_rank(value), self._created)

    def _counter_by_label(
        self, name: str, text: str, label: str, values: Callable[[Rank], Mapping[str, float]]
    ) -> None:
        self._page.counter(f"vllm:{name}", text, self._by_label(label, values), self._created)

    def _histogram(self, attribute: str, text: str) -> None:
        name = f"vllm:{attribute}"
        lines = self._page.lines
        lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
        for base, rank in zip(self._base, self._ranks, strict=True):
            histogram: Histogram = getattr(rank.metrics, attribute)
            total = 0
            for bound, count in zip((*histogram.bounds, inf), histogram.counts, strict=True):
                total += count
                lines.append(f"{name}_bucket{_labels(*base, ('le', _number(bound)))} {float(total)}")
            labels = _labels(*base)
            lines.append(f"{name}_count{labels} {float(total)}")
            lines.append(f"{name}_sum{labels} {_number(histogram.sum)}")
        self._page.gauge(f"{name}_created", text, self._per_rank(lambda _: self._created))

    def write(self) -> None:
        self._estimates()
        self._load()
        self._prefix_caches()
        self._tokens()
        self._outcomes()
        for name, text in HISTOGRAMS:
            self._histogram(name, text)
        self._configuration()

    def _estimates(self) -> None:
        tail = "per GPU (for Model Flops Utilization calculations)."
        for name, what in (
            ("flops", "floating point operations"),
            ("read_bytes", "bytes read from memory"),
            ("write_bytes", "bytes written to memory"),
        ):
            self._counter(f"estimated_{name}_per_gpu", f"Estimated number of {what} {tail}", lambda _: 0)

    def _load(self) -> None:
        self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", lambda r: r.core.num_running
        )
        self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", lambda r: r.core.num_waiting)
        text = (
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
            "Sum of all reasons equals vllm:num_requests_waiting."
        )
        reasons = self._by_label("reason", lambda r: {"capacity": r.core.num_waiting, "deferred": 0})
        self._page.gauge("vllm:num_requests_waiting_by_reason", text, reasons)
        text = (
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
        )
        states = self._by_label("sleep_state", lambda r: _sleep_states(r.core.is_asleep))
        self._page.gauge("vllm:engine_sleep_state", text, states)
        self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda r: r.core.kv_usage)

    def _prefix_caches(self) -> None:
        external = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {}."
        for prefix, text, queries, hits in (
            (
                "prefix",
                "Prefix cache {}, in terms of number of {}.",
                lambda r: r.core.stats.prefix_cache_queries,
                lambda r: r.core.stats.prefix_cache_hits,
            ),
            ("external_prefix", external, lambda _: 0, lambda r: r.core.stats.reloaded_tokens),
        ):
            self._counter(f"{prefix}_cache_queries", text.format("queries", "queried tokens"), queries)
            self._counter(f"{prefix}_cache_hits", text.format("hits", "cached tokens"), hits)
        text = "Multi-modal cache {}, in terms of number of {} items."
        self._counter("mm_cache_queries", text.format("queries", "queried"), lambda _: 0)
        self._counter("mm_cache_hits", text.format("hits", "cached"), lambda _: 0)

    def _tokens(self) -> None:
        text = "Cumulative number of preemption from the engine."
        self._counter("num_preemptions", text, lambda r: r.core.stats.preemptions)
        text = "Number of prefill tokens processed."
        self._counter("prompt_tokens", text, lambda r: r.core.stats.prompt_tokens)
        self._counter_by_label("prompt_tokens_by_source", "Number of prompt tokens by source.", "source", _sources)
        text = "Number of cached prompt tokens (local + external)."
        self._counter("prompt_tokens_cached", text, lambda r: sum(_tiers(r).values()))
        text = (
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to "
            "DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; "
            "sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
        )
        self._counter_by_label("prompt_tokens_cached_by_source", text, "source", _tiers)
        text = "Number of generation tokens processed."
        self._counter("generation_tokens", text, lambda r: r.core.stats.generation_tokens)

    def _outcomes(self) -> None:
        text = "Count of successfully processed requests."
        self._counter_by_label("request_success", text, "finished_reason", lambda r: r.metrics.request_success)
        rejections = [
            (_labels(("model_name", self._process.model), ("reason", reason)), 0.0)
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        ]
        text = "Number of admission attempts rejected by a queue limit, by reason."
        self._page.counter("vllm:admission_rejections", text, rejections, self._created)

    def _configuration(self) -> None:
        engine = self._process.engine
        settings = _cache_config(engine)
        samples = [(_labels(("engine", str(rank.number)), *settings.items()), 1.0) for rank in self._ranks]
        self._page.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", samples)
        if not self._process.loras:
            return
        running = sorted({name for rank in self._ranks for name in rank.core.running_loras})
        waiting = sorted({name for rank in self._ranks for name in rank.core.waiting_loras})
        labels = _labels(
            ("max_lora", str(engine.max_loras)),
            ("running_lora_adapters", ",".join(running)),
            ("waiting_lora_adapters", ",".join(waiting)),
        )
        self._page.gauge("vllm:lora_requests_info", "Running stats on lora requests.", [(labels, time.time())])


def _sleep_states(asleep: bool) -> dict[str, float]:
    return {"awake": float(not asleep), "weights_offloaded": float(asleep), "discard_all": 0.0}


def _sources(rank: Rank) -> dict[str, float]:
    stats = rank.core.stats
    return {
        "local_compute": stats.prompt_tokens_computed,
        "local_cache_hit": stats.prefix_cache_hits,
        "external_kv_transfer": stats.reloaded_tokens,
    }


def _tiers(rank: Rank) -> dict[str, float]:
    stats = rank.core.stats
    return {
        "device": stats.prefix_cache_hits,
        "host": stats.reloaded_tokens,
        "p2p": 0,
        "disk": 0,
        "external_unspecified": 0,
    }


def _cache_config(engine: EngineConfig) -> dict[str, str]:
    """Return vLLM's labels. Those of features that are not simulated have the values of a CPU build of vLLM 0.32."""
    held = engine.num_blocks * engine.block_size
    return {
        "_block_size_resolved": "True",
        "block_size": str(engine.block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(engine.block_size),
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": str(engine.prefix_caching),
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": str(held / engine.capacity_tokens),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(held),
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": str(engine.cpu_blocks or None),
        "num_gpu_blocks": str(engine.num_blocks),
        "num_gpu_blocks_override": str(engine.num_blocks),
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "True",
    }
