"""The core of the simulated engine: continuous batching, a paged KV cache and step timing, without a clock or I/O.

engine_core.py      EngineCore: takes requests, runs steps, returns tokens
scheduler.py        what each step computes: admission, chunked prefill, preemption
decode_batch.py     the decoding sequences, and the duration of decode steps
block_pool.py       allocation and eviction of KV blocks
block_content.py    block hashes of prompts and outputs
step_timing.py      the duration of a step
"""

from warmroute.fake_engine.core.block_content import BlockContent, TokenContent, TraceContent, seed64
from warmroute.fake_engine.core.engine_config import EngineConfig
from warmroute.fake_engine.core.engine_core import EngineCore
from warmroute.fake_engine.core.engine_request import (
    EngineOutput,
    EngineRequest,
    Finished,
    FirstToken,
    RequestTooLong,
    Token,
)
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fake_engine.core.kv_event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    KvEventSink,
    wire_events,
)
from warmroute.fake_engine.core.step_timing import Timing

__all__ = [
    "AllBlocksCleared",
    "BlockContent",
    "BlockRemoved",
    "BlockStored",
    "EngineConfig",
    "EngineCore",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "EventBatch",
    "Finished",
    "FirstToken",
    "KvEvent",
    "KvEventSink",
    "RequestTooLong",
    "Timing",
    "Token",
    "TokenContent",
    "TraceContent",
    "seed64",
    "wire_events",
]
