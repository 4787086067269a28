"""Random schedules for property tests of an engine: requests, aborts, cache resets and waiting times."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from warmroute.lab.engine.blocks import TokenContent
from warmroute.lab.engine.timing import Timing
from warmroute.lab.engine.values import EngineConfig, EngineRequest

TIMING = Timing(
    m=2.3, a=1.1, b=0.07, d=1.3e-3, h=2.1e-4, e=1.9, f=0.013, e2=1.2, f2=0.17, g=3.1e-4, reload_us_per_token=7.0
)


@dataclass(frozen=True)
class Submit:
    prompt_tokens: int
    output_tokens: int
    family: int
    unique_tail: int
    priority: int
    lora_name: str | None
    cache_salt: str | None

    def request(self, request_id: str, block_size: int) -> EngineRequest:
        """Requests of one family share their tokens, including the output, except for a unique tail."""
        total = self.prompt_tokens + self.output_tokens
        shared = max(0, self.prompt_tokens - self.unique_tail) if self.unique_tail else total
        tokens = [self.family] * shared + [1000 + int(request_id)] * (total - shared)
        return EngineRequest(
            request_id,
            self.prompt_tokens,
            self.output_tokens,
            TokenContent(tokens, block_size, lora_name=self.lora_name, cache_salt=self.cache_salt),
            self.priority,
            self.lora_name,
            self.cache_salt,
        )


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Wait:
    ms: float


@dataclass(frozen=True)
class Reset:
    pass


Action = Submit | Abort | Wait | Reset

SUBMITS = st.builds(
    Submit,
    prompt_tokens=st.integers(1, 60),
    output_tokens=st.integers(1, 40),
    family=st.integers(0, 2),
    unique_tail=st.sampled_from([0, 0, 1, 3, 8, 30]),
    priority=st.integers(0, 2),
    lora_name=st.sampled_from([None, None, None, "x", "y", "z"]),
    cache_salt=st.sampled_from([None, None, None, "s"]),
)
WAITS = st.builds(Wait, st.floats(0.0, 60.0, allow_nan=False))
ACTIONS = st.lists(
    st.one_of(SUBMITS, SUBMITS, SUBMITS, WAITS, st.builds(Abort, st.integers(0, 30)), st.just(Reset())), max_size=40
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 8))
    block_size = draw(st.integers(1, 8))
    return EngineConfig(
        num_blocks=draw(st.integers(2 + 40 // block_size, 2 + 200 // block_size)),
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 64)),
        max_num_seqs=max_num_seqs,
        by_priority=draw(st.booleans()),
        max_loras=draw(st.integers(1, 2)),
    )
