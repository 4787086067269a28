"""The simulated engine's core: continuous batching, paged KV cache and timing, driven by a clock from outside."""

from warmroute.fake_engine.core.config import EngineConfig
from warmroute.fake_engine.core.content import BlockContent, ChainContent, TokenContent, TraceContent, seed64
from warmroute.fake_engine.core.core import EngineCore
from warmroute.fake_engine.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    KvEventSink,
    wire_events,
)
from warmroute.fake_engine.core.request import EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong, Token
from warmroute.fake_engine.core.stats import EngineStats
from warmroute.fake_engine.core.timing import Timing

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
