"""One line of a trace in Mooncake's format, and what a capture adds to it.

    {"timestamp": 1200, "input_length": 1950, "output_length": 130, "hash_ids": [4, 5, 17, 18], "block_size": 512, …}

The first four fields are Mooncake's, and every reader of such traces understands them. All others are optional.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from warmroute.config.routing import PriorityName

CaptureOutcome = Literal["ok", "cancelled", "broken", "failed", "not_admitted", "mirrored"]


class TraceRow(msgspec.Struct, gc=False, omit_defaults=True):
    timestamp: float
    """Arrival, in milliseconds since the start of the trace. Whole ones in a capture: some readers accept no others."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    hash_ids: list[int] = []
    """Prefix-chained ids of the prompt's blocks: two prompts have an id in common only if they are equal up to the end
    of that block."""
    block_size: int = 0
    """Tokens that one id covers; 0: the reader infers it from the lengths."""
    timestamp_us: int = 0
    """Microseconds to add to `timestamp`. They decide the order of requests that arrive almost at once."""
    session_id: str | int | None = None
    """The conversation, as the client names it (hashed in a capture)."""
    follows: int = 0
    """The prompt begins with the whole of an earlier prompt, which had this many tokens: it is the next turn of that
    conversation. 0: it is not, or the router does not know."""
    answer_length: int = 0
    """Of a mirrored request: the estimated tokens of the last answer that the prompt contains."""
    input_estimated: bool = False
    """Whether `input_length` counts four bytes of text as a token, because the router has no tokenizer."""
    output_estimated: bool = False
    """Whether `output_length` is a guess, because no response reported it."""
    model: str = ""
    tenant: str = ""
    """Hashed in a capture."""
    route: str = ""
    priority: PriorityName = "normal"
    outcome: CaptureOutcome = "ok"
    node: str = ""
    """The node that answered."""
    attempts: int = 1
    """Nodes that the request was sent to."""
    prompt_tokens: int | None = None
    """As the node reported them."""
    cached_tokens: int | None = None
    """Of these, the ones that the node found in its cache, as it reported them."""
    predicted_tokens: int | None = None
    """Cached tokens as the router predicted them."""
    ttft_ms: float | None = None
    """From arrival to the first token; only of streamed responses."""
    duration_ms: float | None = None
    """From arrival to the end."""
