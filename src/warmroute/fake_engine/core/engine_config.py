"""The settings of one simulated engine, named after vLLM's own where vLLM has them."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_blocks: int
    """KV blocks on the GPU, including the null block."""
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    """The token budget of a step."""
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    """Maximum tokens of prompt and output together. None: as many as the blocks hold."""
    by_priority: bool = False
    """Whether the engine admits waiting requests by priority and preempts the lowest one, instead of FCFS."""
    prefix_caching: bool = True
    reuse_cached_blocks: bool = True
    """False: the engine reports stored blocks but computes every prompt completely. Tests routers' trust in events."""
    max_loras: int = 1
    lora_load_ms: float = 20.0
    """Time to load an adapter. An estimate for 100 MB at a few GB/s, not measured."""
    cpu_blocks: int = 0
    """KV blocks in the CPU tier. 0: no CPU tier."""
    every_token: bool = False
    """Whether the engine outputs each token, not only the first. For drivers that stream."""
    fast_forward: bool = True
    """Whether the engine takes many decode steps at once while nothing else happens. The outcome is the same."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_blocks < 2:
            raise ValueError("an engine needs num_blocks ≥ 2 and block_size ≥ 1")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, as in vLLM")

    @property
    def capacity_tokens(self) -> int:
        """The maximum tokens of one request: what fits beside the null block, or max_model_len."""
        held = (self.num_blocks - 1) * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)
