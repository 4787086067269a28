"""The simulated engine's core: continuous batching, paged KV cache and timing, driven by a clock from outside."""

from warmroute.fake_engine.core.engine_config import EngineConfig
from warmroute.fake_engine.core.block_content import BlockContent, ChainContent, TokenContent, TraceContent, seed64
from warmroute.fake_engine.core.engine_core import EngineCore
from warmroute.fake_engine.core.kv_event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    KvEventSink,
    wire_events,
)
from warmroute.fake_engine.core.engine_request import EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong, Token
from warmroute.fake_engine.core.engine_stats import EngineStats
from warmroute.fake_engine.core.step_timing import Timing

__all__ = [
    "AllBlocksCleared",
    "BlockContent",
    "BlockRemoved",
    "BlockStored",
    "ChainContent",
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
