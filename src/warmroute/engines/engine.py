"""What the router knows of an engine: one Engine for each, in the file of that engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from warmroute.core.messages import KvTransfer
from warmroute.core.node import LoadReport


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    title: str
    """As its makers write its name."""
    # what it reports
    markers: tuple[bytes, ...] = ()
    """A metrics page with one of these is the engine's."""
    parse_load: Callable[[bytes], LoadReport | None] = lambda _page: None
    metrics_paths: tuple[str, ...] = ("/metrics",)
    """Where it may have its metrics page, the likeliest path first."""
    owner: str = ""
    """`owned_by` of the models that it lists; empty if that says nothing."""
    detected_by_owner: bool = False
    """Whether `owner` is enough to detect it: its metrics page may be empty."""
    why_no_subscription: str = ""
    """Why the router does not look for KV events that it publishes, as the doctor says it; empty: the router does."""
    polls_kv_events: bool = False
    """Whether the router asks for them instead, as TensorRT-LLM has them (trtllm.py)."""
    kv_transfer: KvTransfer | None = None
    """Its protocol, if one node can prefill for another one."""
    tokenizes: Literal["chats", "text", ""] = ""
    """What its /tokenize takes; empty: it has none."""
    # what to change in its start, as its own flags and options
    to_publish_kv_events: str = ""
    to_report_cached_tokens: str = "Let the engine report usage.prompt_tokens_details.cached_tokens"
    to_report_load: str = ""
    to_cache_prefixes: str = "Turn on prefix caching in the engine"
