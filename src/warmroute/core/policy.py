"""What a routing policy is."""

from __future__ import annotations

from typing import Protocol

from warmroute.core.decision import Decision
from warmroute.core.routing_context import Query


class Policy(Protocol):
    """Chooses a node. Each policy is one small file; it never gets an empty list of candidates."""

    name: str
    queues_at_router: bool = False
    """Whether requests wait in the admission queue until the chosen node has room."""
    wants_tokens: bool = False
    """Whether it looks up cached prefixes, so that prompts have to be tokenized."""

    def decide(self, query: Query) -> Decision: ...
