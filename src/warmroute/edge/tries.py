"""One try at the edge: a request to one node, and what comes back until its response goes to the client.

An exchange has one try at a time, or two while the request is hedged or one node prefills for another one. A withdrawn
try closes its connection, so that the engine stops generating.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from warmroute._kernel import CHUNKED, ENGINE_FIELDS, ChunkReader, Outline, ResponseHead, read_usage
from warmroute.core.messages import (
    ERROR_EVENT,
    TOO_LARGE,
    KvTransfer,
    NodeError,
    NodeRow,
    Outcome,
    Reader,
    Send,
    Verdict,
    outcome_of,
)
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.node_connection import NodeConnection
from warmroute.edge.response import (
    ErrorBody,
    FirstTokenDetector,
    detector_for,
    finish_reason_of,
    seconds_of,
    whole_error,
)
from warmroute.prompt.request_body import Endpoint

if TYPE_CHECKING:
    from warmroute.edge.exchange import Exchange

MAX_PREFILL_RESPONSE_BYTES: Final = 16 << 20
"""A longer response of a prefill node counts as a failure. Block ids of 100,000 tokens take about 50 KB."""
MAX_HELD_BYTES: Final = 1 << 20
UNFINISHED: Final = (None, "length", "not_finished")
"""How an answer ends that another node could continue. Else it ended with its first token: nothing is to transfer."""
_ERROR_EVENT: Final = re.compile(
    rb'(?m)^(?:event:[ \t]*(?:error|response\.failed)[ \t]*$|data:[ \t]*\{[ \t]*"(?:error"|type"[ \t]*:[ \t]*"error"))'
)
"""Also those of /v1/messages and /v1/responses."""


_WHOLE: Final = Reader.WHOLE
"""Looking up a member of an enumeration takes three times as long as a global name."""


class NodeTry:
    """A node is asked for the whole answer. Implements node_connection.ResponseHandler, until the exchange takes the
    response over."""

    exchange: Exchange
    command: Send
    pool: ConnectionPool
    connection: NodeConnection | None = None
    error: NodeError | None = None
    """Set if the node answers with an error."""
    error_body: ErrorBody | None = None
    """Set until its whole body has arrived."""
    body: bytes | None = None
    """What the node gets; None: the client's body as it is."""
    reader: Reader
    """By which rule its status counts."""
    _retried_stale: bool = False
    _withdrawn: bool = False

    def __init__(self, exchange: Exchange, command: Send, pool: ConnectionPool) -> None:
        self.exchange = exchange
        self.command = command
        self.pool = pool
        self.reader = _WHOLE

    def withdraw(self) -> None:
        self._withdrawn = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.cancel()

    # From the connection.

    def connected(self, connection: NodeConnection) -> bool:
        """Send the request on this connection."""
        if self._withdrawn:
            return False
        self.connection = connection
        exchange, command, pool, client = self.exchange, self.command, self.pool, self.exchange.client
        body = exchange.body if self.body is None else self.body
        trace, rank = exchange.trace, command.rank
        head = exchange.head.for_node(
            pool.host_line, pool.authorization_line, client.rights.passes_authorization, len(body),
            exchange.request_id, client.peer, rank if rank >= 0 else None,
            exchange.node_fields if trace is None else trace.forwarded_fields(command.try_),
        )  # fmt: skip
        connection.send_request(self, head, body)
        return True

    def connect_failed(self, sign: int, reason: str) -> None:
        if not self._withdrawn:
            self.exchange.try_failed(self, sign, reason)

    def response_failed(self, sign: int, reason: str, stale: bool) -> None:
        self.connection = None
        if stale and not self._retried_stale:
            # The node closed a kept-alive connection just as it was used: not the node's fault, and not another try.
            self._retried_stale = True
            self.exchange.proxy.counters.stale_connections += 1
            self.pool.connect(self)
        else:
            self.exchange.try_failed(self, sign, reason)

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        if head.status < 400:
            return self.exchange.begin_response(self, head, first, whole, now_s)
        return self._error_started(head, first, whole, now_s)

    def _error_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        exchange, status = self.exchange, head.status
        keeps_text, body = exchange.proxy.keeps_error_text, None
        if whole:
            self.error = whole_error(head, first, keeps_text)
        else:
            self.error_body = body = ErrorBody(status, head.length, head.encoded, keeps_text)
            self.error = body.error
            body.feed(first)
        if outcome_of(status, self.reader)[0] is Verdict.ANSWER:
            return exchange.begin_response(self, head, first, whole, now_s)
        connection, self.connection = self.connection, None  # it closes itself, or is kept alive
        exchange.try_failed(self, status, _reason(status, self.reader), seconds_of(head.retry_after))
        # The request has gone on: read the rest of the error's body, if that is worth it.
        return body.follow(connection, now_s) if body is not None and connection is not None else None

    def response_ended(self, now_s: float) -> None:
        raise AssertionError("the exchange has taken the response over")

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        raise AssertionError("the exchange has taken the response over")

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self.exchange.internal_error(error, frames)


@lru_cache(1024)
def _reason(status: int, reader: Reader) -> str:
    """Return what an error says of the node. Many decisions keep the same string."""
    verdict, outcome = outcome_of(status, reader)
    if outcome is Outcome.BUSY:
        return f"HTTP status {status}: the node is busy"
    if verdict is Verdict.ALONE and reader is not Reader.PREFILL:
        return f"the decode node answered with HTTP status {status}"
    return f"HTTP status {status}"


# One node prefills, another one decodes.


class KvHandover:
    """The KV cache that a prefill try leaves to a decode try."""

    __slots__ = ("bootstrap_room", "prefill_node", "protocol", "transfer")

    def __init__(self, protocol: KvTransfer, prefill_node: NodeRow, bootstrap_room: int) -> None:
        self.protocol = protocol
        self.prefill_node = prefill_node
        self.bootstrap_room = bootstrap_room
        """A random number with which the two engines find each other."""
        self.transfer: bytes | None = None
        """What the prefill node's answer says about its KV cache."""


class PrefillTry(NodeTry):
    """A node prefills for another one. Its whole response is read here, which is small, and tells the core."""

    handover: KvHandover
    _frames: ChunkReader | None = None
    _received: list[bytes]
    _received_bytes: int = 0
    _readable: bool = True

    def __init__(
        self, exchange: Exchange, command: Send, pool: ConnectionPool, body: bytes, handover: KvHandover
    ) -> None:
        NodeTry.__init__(self, exchange, command, pool)
        self.reader = Reader.PREFILL
        self.body = body
        self.handover = handover
        self._received = []

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        if head.status >= 400:
            return self._error_started(head, first, whole, now_s)
        self._readable = not head.encoded
        if head.length == CHUNKED:
            self._frames = ChunkReader()
        self._receive(first)
        return None if self._withdrawn else self._receive

    def _receive(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > MAX_PREFILL_RESPONSE_BYTES:
            self.withdraw()
            self.exchange.try_failed(self, TOO_LARGE, "the response is too large")
        elif self._frames is not None:
            self._frames.feed(data, self._received)
        else:
            self._received.append(data)

    def response_ended(self, now_s: float) -> None:
        self.connection = None
        if self._withdrawn:
            return
        body, self._received = b"".join(self._received), []
        usage = transfer = finish_reason = None
        if self._readable:
            usage = read_usage(body)
            transfer = self.handover.transfer = self.handover.protocol.read_transfer(body)
            if transfer is None:
                finish_reason = finish_reason_of(body)
        self.exchange.prefilled(self, transfer is not None, finish_reason in UNFINISHED, usage, now_s)

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        self.connection = None
        self.exchange.try_failed(self, sign, reason)

    def internal_error(self, error: Exception, frames: ChunkReader | None) -> None:
        self.exchange.internal_error(error)


class DecodeTry(NodeTry):
    """A node decodes what another one has prefilled.

    The beginning of a stream is held until its first token: an engine that cannot fetch the KV cache may say so in an
    event, after it has sent a status of 200 and an event with a role. The client sees none of that.
    """

    _head: ResponseHead | None = None
    """Set while the beginning of a stream is held."""
    _held: list[bytes]
    _held_bytes: int = 0
    _detector: FirstTokenDetector

    def __init__(self, exchange: Exchange, command: Send, pool: ConnectionPool, body: bytes) -> None:
        NodeTry.__init__(self, exchange, command, pool)
        self.reader = Reader.DECODE_ONLY if command.needs_partner else Reader.DECODE
        self.body = body
        self._held = []

    def response_started(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        detector = detector_for(head) if head.content_type[:17].lower() == b"text/event-stream" else None
        if detector is None:
            return NodeTry.response_started(self, head, first, whole, now_s)
        self._head, self._detector = head, detector
        if not self._hold(first) and not whole:
            return self._receive
        return self._release(whole, now_s)

    def _hold(self, data: bytes) -> bool:
        """Keep these bytes. Return whether the first token is among them, or they are too many."""
        self._held.append(data)
        self._held_bytes += len(data)
        return self._detector.feed(data) or self._held_bytes > MAX_HELD_BYTES

    def _receive(self, data: bytes) -> None:
        connection = self.connection
        if self._hold(data):
            sink = self._release(False, self.exchange.proxy.now())
            if connection is None:
                return
            if sink is None:
                connection.cancel()
            else:
                connection.replace_sink(sink)

    def _release(self, whole: bool, now_s: float) -> Callable[[bytes], object] | None:
        """Pass on what was held, unless it is an error of the transfer."""
        head, self._head = self._head, None
        assert head is not None
        held, self._held = b"".join(self._held), []
        if _has_error(head, held):
            self.connection = None
            self.exchange.try_failed(self, ERROR_EVENT, "the decode node's stream began with an error")
            return None
        self.body = b""  # it will not be sent again, and the stream may take minutes
        return self.exchange.begin_response(self, head, held, whole, now_s)

    def response_ended(self, now_s: float) -> None:
        self.connection = None
        if not self._withdrawn and self._release(True, now_s) is not None:
            self.exchange.response_ended(now_s)

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        self.connection = None
        self.exchange.try_failed(self, sign, reason)  # the client has received nothing


def _has_error(head: ResponseHead, held: bytes) -> bool:
    if b"error" not in held and b"response.failed" not in held:
        return False
    if head.length == CHUNKED:
        pieces: list[bytes] = []
        ChunkReader().feed(held, pieces)
        held = b"".join(pieces)
    return _ERROR_EVENT.search(held) is not None


# Which requests may be split into a prefill and a decode request.

_SPLITTABLE: Final = (Endpoint.CHAT.value, Endpoint.COMPLETION.value)
ONLY_VLLM: Final = (Endpoint.MESSAGES.value, Endpoint.RESPONSES.value)
"""Of the engines, only vLLM has its KV transfer parameters in these requests."""
_EXCLUDED: Final = (*ENGINE_FIELDS, "prompt_logprobs", "echo", "use_beam_search", "truncate_prompt_tokens")
"""The last four need the whole prompt on one node."""
_EXCLUDED_RESPONSES: Final = ("previous_response_id", "previous_input_messages", "conversation", "prompt")
"""Fields of /v1/responses whose meaning depends on what a node has stored."""
_ONE_ANSWER: Final = ("n", "best_of")
_FREE_CHOICES: Final = (b'"auto"', b'"none"', b"null")
"""Values of tool_choice for which an answer of one token is valid."""
_FREE_ANTHROPIC_CHOICE: Final = re.compile(rb'\{\s*"type"\s*:\s*"(?:auto|none)"\s*\}')


def may_split(path: bytes, body: bytes, outline: Outline | None) -> bool:
    """Return whether one node may prefill the prompt, and another one decode the answer. On the paths of ONLY_VLLM,
    both nodes have to run vLLM."""
    if outline is None or not (path in _SPLITTABLE or path in ONLY_VLLM):
        return False
    if outline.engine_field is not None or outline.has_any(_EXCLUDED):
        return False
    fields = outline.fields
    for name in _ONE_ANSWER:
        span = fields.get(name)
        if span is not None and body[span[0] : span[1]] not in (b"1", b"null"):
            return False
    if path == Endpoint.RESPONSES.value and not _is_plain_response(body, outline):
        return False
    span = fields.get("tool_choice")
    if span is None:
        return True
    choice = body[span[0] : span[1]]
    return choice in _FREE_CHOICES or (
        path == Endpoint.MESSAGES.value and _FREE_ANTHROPIC_CHOICE.fullmatch(choice) is not None
    )


def _is_plain_response(body: bytes, outline: Outline) -> bool:
    """Return whether a request of /v1/responses is one prompt and one answer: tools that the engine itself calls make
    several."""
    if outline.has_any(_EXCLUDED_RESPONSES):
        return False
    fields = outline.fields
    span = fields.get("background")
    if span is not None and body[span[0] : span[1]] not in (b"false", b"null"):
        return False
    span = fields.get("tools")
    if span is None or body[span[0] : span[1]] == b"null":
        return True
    try:
        tools = msgspec.json.decode(body[span[0] : span[1]])
    except (ValueError, RecursionError):
        return False
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    )  # fmt: skip
