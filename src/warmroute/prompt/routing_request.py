"""What routing knows about a request, besides its prompt. Built once; only the prompt's length may be added later."""

from __future__ import annotations

import msgspec

from warmroute.config.priority import NORMAL


class RoutingRequest(msgspec.Struct, eq=False, gc=False):
    model: str
    """Empty where the request names none and the fleet serves several."""
    system: bytes | None = None
    """First characters of the system prompt."""
    user: bytes | None = None
    """First characters of the first user message."""
    session: bytes = b""
    """The conversation's name in a field of the body; empty where there is none."""
    tenant: str = ""
    """Empty where no keys are configured."""
    route: str = ""
    """The name of the route whose settings apply; empty where none matches."""
    priority: int = NORMAL
    may_queue: bool = True
    """False where the client prefers a 429 to waiting."""
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    """When the first token is due, on the router's clock; 0 without a deadline."""
    total_deadline_s: float = 0.0
    """When the whole response is due; 0 without a deadline."""
    session_header: bytes = b""
    streams: bool = True
    """Whether the response is streamed; else the whole of it comes at its end."""
    max_output_tokens: int | None = None
    """The limit that the request sets; None where it sets none."""
    input_tokens: int = 0
    """Length of its longest prompt, set only where the nodes of its model differ in their context window; 0: unknown,
    or the engine truncates it."""
    input_exact: bool = False
    """Whether `input_tokens` is exact; else it is an estimate, rather too high than too low."""

    may_split: bool = False
    """Whether one node may prefill the prompt and another one decode the answer."""
    subset: frozenset[str] | None = None
    """The names of the nodes that may serve it; None: all. Envoy may restrict a request to some of its endpoints."""
    start: bytes = b""
    """First bytes of the prompt's JSON text, where a policy uses them."""
    ends_late: bool = False
    """Whether the request is ended when a deadline cannot be met or has passed (`on_deadline = "end"`)."""
    cache_group: str = ""
    """Whose prompts count as cached for it; empty: everybody's."""

    def prefix_key(self) -> bytes | None:
        """Return model, start of the system prompt and of the first user message; None where there is neither."""
        if self.system is None and self.user is None:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), self.system or b"", self.user or b"")

    def session_key(self) -> bytes:
        """Return the conversation's name: from a header, else from the body; empty where there is none."""
        return self.session_header or self.session
