"""The simulated engine's core: continuous batching, paged KV cache and timing, driven by a clock from outside."""

from warmroute.sim.engine.config import EngineConfig
from warmroute.sim.engine.content import BlockContent, ChainContent, TokenContent, TraceContent, seed64
from warmroute.sim.engine.core import EngineCore
from warmroute.sim.engine.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    KvEventSink,
    wire_events,
)
from warmroute.sim.engine.request import EngineOutput, EngineRequest, Finished, FirstToken, RequestTooLong, Token
from warmroute.sim.engine.stats import EngineStats
from warmroute.sim.engine.timing import Timing

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
