"""Counters of one engine, for its metrics. Gauges are properties of the engine core."""


class EngineStats:
    """Totals since the start, named after the vLLM metric that each one feeds."""

    __slots__ = (
        "busy_ms",
        "generation_tokens",
        "lora_loads",
        "preemptions",
        "prefill_time_ms",
        "prefilled_tokens",
        "prefills",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_computed",
        "queue_time_ms",
        "queue_times",
        "reloaded_tokens",
        "requests_aborted",
        "requests_finished",
        "requests_submitted",
        "steps",
    )

    def __init__(self) -> None:
        self.requests_submitted = 0
        self.requests_finished = 0
        self.requests_aborted = 0
        self.steps = 0
        self.busy_ms = 0.0
        self.prompt_tokens = 0  # of prompts whose prefill is complete
        self.prompt_tokens_computed = 0  # by prefill, including recomputation after preemption
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # tokens, at first admission only
        self.prefix_cache_hits = 0  # tokens, GPU cache only
        self.reloaded_tokens = 0  # tokens from the CPU tier
        self.preemptions = 0
        self.queue_times = 0  # requests that ended after they were admitted
        self.queue_time_ms = 0.0  # sum of the times until their first admission
        self.prefills = 0  # of requests that finished
        self.prefill_time_ms = 0.0  # sum of the times from their first admission to their first token
        self.prefilled_tokens = 0  # their prompt tokens that were not cached
        self.lora_loads = 0
