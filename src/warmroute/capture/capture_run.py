"""One capture: turns finished requests into the lines of a trace. A thread calls it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from warmroute.capture.conversation import Conversations
from warmroute.capture.pseudonyms import Pseudonyms
from warmroute.capture.trace_row import CaptureOutcome, TraceRow
from warmroute.config.priority import PRIORITY_NAMES
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.routing_request import RoutingRequest

BYTES_PER_TOKEN: Final = 4
"""Of a prompt that was not read. English text has about as many."""
MAX_NAME: Final = 200
"""Characters of a model's name in a line: a client may invent any name."""


class EndedRequest(msgspec.Struct, gc=False, eq=False):
    """What a capture needs of a request that has ended."""

    request: RoutingRequest
    prompt: Prompt | None
    body_bytes: int
    outcome: CaptureOutcome
    ended_s: float
    output_tokens: float
    """As the node reported them, or an estimate."""
    output_estimated: bool
    reported: tuple[int | None, int | None, int | None] = (None, None, None)
    """Prompt tokens, cached tokens and output tokens that the node reported."""
    predicted: int | None = None
    node: str = ""
    attempts: int = 1
    first_token_s: float = 0.0
    answer_tokens: int = 0
    """Of a mirrored request: the estimated tokens of the last answer that its prompt contains."""


class CaptureRun:
    def __init__(self, block_size: int, now_s: float) -> None:
        """`now_s`: the start on the router's clock. Requests that arrived before it are left out."""
        self.started_s = now_s
        self.started_unix_s = time.time()
        self._block_size = block_size
        self._pseudonyms = Pseudonyms()
        self._conversations = Conversations(block_size)
        self._encoder = msgspec.json.Encoder()
        self.requests = 0
        """Requests that became lines."""

    def lines(self, ended: Sequence[EndedRequest]) -> bytes:
        """Return a line for each request that arrived after the start."""
        encode = self._encoder.encode
        rows = [encode(self._row(one)) for one in ended if one.request.arrived_s >= self.started_s]
        self.requests += len(rows)
        return b"\n".join([*rows, b""])

    def _row(self, ended: EndedRequest) -> TraceRow:
        request, prompt = ended.request, ended.prompt
        prompt_tokens, cached_tokens, _ = ended.reported
        ids: list[int] = []
        follows = 0
        if prompt is None:
            tokens = prompt_tokens or ended.body_bytes // BYTES_PER_TOKEN
        else:
            ids = self._pseudonyms.blocks(request.model, prompt, self._block_size)
            tokens = prompt.total_tokens
            if not prompt.others:
                follows = self._conversations.follows(prompt.tokens, ids, not prompt.exact)
                if prompt.exact and prompt_tokens:
                    tokens = prompt_tokens
        arrived_s = request.arrived_s
        arrived_us = int((arrived_s - self.started_s) * 1e6 + 0.5)
        first_token_s = ended.first_token_s if request.streams else 0.0
        return TraceRow(  # by position, in the order of its fields: by name it would take five times as long
            arrived_us // 1000,
            tokens if tokens > 1 else 1,
            max(1, round(ended.output_tokens)),
            ids,
            self._block_size,
            arrived_us % 1000,
            self._pseudonyms.name(request.session_key()) or None,
            follows,
            ended.answer_tokens if follows else 0,
            prompt_tokens is None if prompt is None else not prompt.exact,
            ended.output_estimated,
            request.model[:MAX_NAME].encode("utf-8", "replace").decode(),
            self._pseudonyms.name(request.tenant.encode("utf-8", "surrogatepass")),
            request.route,
            PRIORITY_NAMES[request.priority],
            ended.outcome,
            ended.node,
            ended.attempts,
            prompt_tokens,
            cached_tokens,
            ended.predicted,
            _tenths_ms(first_token_s - arrived_s) if first_token_s else None,
            _tenths_ms(ended.ended_s - arrived_s) if ended.outcome != "mirrored" else None,
        )


def _tenths_ms(seconds: float) -> float:
    """Return milliseconds with one digit after the point. Faster than `round`."""
    return int(seconds * 10_000.0 + 0.5) / 10.0
