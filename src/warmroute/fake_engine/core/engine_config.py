"""How one simulated engine is set up, named after vLLM's own settings where it has them."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_blocks: int
    """KV blocks on the GPU, the null block among them."""
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    """The token budget of a step."""
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    """Prompt and answer together; None for what the blocks can hold."""
    by_priority: bool = False
    """Waiting requests by priority instead of first come first served, and preemption of the lowest."""
    prefix_caching: bool = True
    reuse_cached_blocks: bool = True
    """False: it tells of blocks that it stored and computes everything anew. To see who believes it."""
    max_loras: int = 1
    lora_load_ms: float = 20.0
    """An estimate: an adapter of 100 MB at a few GB/s. Not measured."""
    cpu_blocks: int = 0
    """Blocks that the CPU tier holds; 0 for no such tier."""
    every_token: bool = False
    """Tell each token of an answer, not only the first. For drivers that stream."""
    fast_forward: bool = True
    """Take many decode steps at once where nothing else happens. Same outcome, less work."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_blocks < 2:
            raise ValueError("an engine needs blocks: num_blocks ≥ 2 and block_size ≥ 1")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, as in vLLM")

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request may come to: what fits beside the null block, or max_model_len."""
        held = (self.num_blocks - 1) * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)
