"""One stream of ext_proc is one request: Envoy's messages, the choice of a node, and what the response shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from google.protobuf.message import DecodeError

from warmroute._kernel import UNTIL_CLOSE, FirstTokenSearch, Outline, RequestHead, ResponseTail, read_usage
from warmroute.core.messages import (
    NO_ENDPOINT,
    AnswerNow,
    Cancel,
    Cut,
    Ended,
    Failed,
    FirstToken,
    Left,
    NodeRow,
    OpenTry,
    Reader,
    Reject,
    RoutingRequest,
    Send,
    Started,
    Verdict,
    Withdraw,
    outcome_of,
)
from warmroute.edge import errors
from warmroute.edge.arrival import Kept, Rights, ScannedBody, is_anthropic
from warmroute.edge.envoy import ext_proc
from warmroute.edge.envoy.ext_proc import BUFFERED, BUFFERED_PARTIAL, NONE, STREAMED, served_endpoint
from warmroute.edge.envoy.ext_proc import FULL_DUPLEX_STREAMED as DUPLEX
from warmroute.edge.envoy.grpc import INVALID_ARGUMENT, Call
from warmroute.edge.errors import Headers, HttpError, with_request_id
from warmroute.edge.exchange import ScanningExchange
from warmroute.edge.http1 import read_request_head
from warmroute.edge.response import MAX_TAIL_BYTES, ErrorBody, has_last_event, may_end, seconds_of
from warmroute.edge.trace_context import EdgeTrace
from warmroute.event_log import where_it_failed
from warmroute.prompt.prompt import Prompt

if TYPE_CHECKING:
    from warmroute.edge.envoy.server import PickerServer
    from warmroute.edge.proxy import Proxy
    from warmroute.prompt.reader import PendingPrompt


# One call that Envoy carries: tells Envoy the node, and the core what Envoy shows of the response.
#
# Envoy sends the request, and sends it again to the next endpoint if one fails. So the core's try is open from the
# answer to Envoy until the end of the response, and moves if another node answered. Where Envoy shows the picker no
# response, the end of the stream is the end of the response, and nothing else is learned from it.

UNRESOLVED: Final = "its name is not resolved"
NODE_HEADER: Final = b"X-Warmroute-Node"
_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Characters of a node's name that need no escape in a header, beside letters and digits."""
_ERROR_CODES: Final = {429: "overloaded", 503: "no_node_available"}
"""Codes under which failed answers that Envoy passes on are counted, as the proxy counts its own errors."""


class EnvoyExchange:
    envoy: Final = True
    # for the whole request
    _proxy: Proxy
    _client: PickerStream
    head: RequestHead
    body: bytes
    request: RoutingRequest
    request_id: bytes
    id: int
    """The number of the call."""
    repeatable: bool = True
    outline: Outline | None = None
    trace: EdgeTrace | None = None
    node_fields: bytes = b""
    kept: Kept | None = None
    pending_prompt: PendingPrompt | None = None
    known: bool = False
    """The core knows of the call, by Charge or Arrive."""
    arrived: bool = False
    """The call has asked for a node."""
    over: bool = False
    """The call has ended, at the edge and in the core."""
    command: Send | None = None
    """Set once Envoy has the request."""
    # the response
    _served: NodeRow | None = None
    """The node that answers, if it is another one than the core's."""
    _status: int = 0
    _started: bool = False
    _first_token: bool = False
    _is_event_stream: bool = False
    _first_token_search: FirstTokenSearch | None = None
    _error_body: ErrorBody | None = None
    """Set if the response is an error whose body Envoy shows."""
    _tail: ResponseTail | None = None
    """The last pieces of the response, where its usage is wanted."""

    def __init__(
        self, proxy: Proxy, client: PickerStream, head: RequestHead, body: bytes, request: RoutingRequest,
        request_id: bytes, id: int,
    ) -> None:  # fmt: skip
        self._proxy = proxy
        self._client = client
        self.head = head
        self.body = body
        self.request = request
        self.request_id = request_id
        self.id = id
        request.subset = client.subset
        if not client.sees_responses:
            request.streams = False  # then nothing is known before the end

    # Before a node is chosen.

    @property
    def has_node(self) -> bool:
        """Whether Envoy has the request."""
        return self.command is not None

    def prompt_read(self, prompt: Prompt | None) -> None:
        """The prompt was read in a thread, or by a node."""
        self.pending_prompt = None
        if self.over:
            return
        try:
            self._proxy.arrive(self, prompt)
        except Exception as error:
            self.internal_error(error)

    def time_is_up(self) -> None:
        """Envoy will not wait longer: the core has to decide now, or to shed the request."""
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
            self.prompt_read(None)
        if not self.over and self.command is None:
            self._proxy.tell(AnswerNow(self.id))

    # What the core says.

    def send(self, command: Send) -> None:
        if not self._client.send_to(command):
            self._proxy.tell(Failed(self.id, command.try_, NO_ENDPOINT, UNRESOLVED))
            return
        self.command = command
        self.body = b""

    def open_tries(self) -> list[OpenTry]:
        """Return what another core has to know of the try that Envoy has."""
        command = self.command
        if command is None:
            return []
        row = self._served or self._proxy.tables().nodes.get(command.node)
        name = row.name if row is not None else ""
        return [OpenTry(command.try_, command.role, name, 0.0, self._status if self._started else 0)]

    def withdraw(self, command: Withdraw) -> None:
        """The request cannot be taken back from Envoy."""

    def cut(self, command: Cut) -> None:
        """Envoy sends the response."""

    def reject(self, command: Reject) -> None:
        error = errors.rendered(command)
        self._end_early(error)
        self._close()
        if self.command is None:  # else the client has the response of the node, or of Envoy
            self._client.send_error(error, self.request_id)

    # The response, as far as Envoy shows it.

    def client_headers(self, head: ObservedHead) -> list[tuple[bytes, bytes]]:
        """Return the headers that the proxy would add to this response. Call it when the response has started."""
        headers, command = [(b"X-Request-Id", self.request_id)], self.command
        if command is not None and not head.by_envoy:
            if command.limit_lines is not None:
                headers += [(name.encode(), value.encode()) for name, value in command.limit_lines]
            if command.node_lines and self._served is not None:  # nothing is known of its hit
                headers.append((NODE_HEADER, quote(self._served.name, safe=_NAME_CHARACTERS).encode("ascii")))
            else:
                headers += command.node_lines
        return headers

    @property
    def replaces_limits(self) -> bool:
        """Whether the tenant has rate limits, which replace those of the node."""
        return self.command is not None and self.command.limit_lines is not None

    def response_started(self, head: ObservedHead, sees_body: bool) -> None:
        proxy, command, status = self._proxy, self.command, head.status
        if self.over or command is None or self._started:
            return
        self._started = True
        self._status = status
        served = head.served
        if served is not None and served.number != command.node:
            self._served = served
        error = None
        if status >= 400 and sees_body and not head.by_envoy:
            self._error_body = ErrorBody(status, UNTIL_CLOSE, head.encoded, proxy.keeps_error_text)
            error = self._error_body.error
        verdict, _ = outcome_of(status, Reader.ENVOY_ITSELF if head.by_envoy else Reader.ENVOY)
        answers = verdict is Verdict.ANSWER
        if not answers:
            self._close()
            proxy.counters.errors[status, _ERROR_CODES.get(status, "upstream_failed")] += 1
        elif sees_body:
            if command.wants_usage and status < 400:
                self._tail = ResponseTail(MAX_TAIL_BYTES)
            if head.is_event_stream and status < 400:
                self._is_event_stream = True
                self._first_token_search = FirstTokenSearch()
        number = self._served.number if self._served is not None else 0
        proxy.tell(Started(self.id, command.try_, status, error, number, head.by_envoy, head.retry_after_s))

    def response_data(self, data: bytes) -> None:
        command = self.command
        if self._error_body is not None:
            self._error_body.feed(data)
        if self.over or not self._started or command is None or not data:
            return
        if self._tail is not None:
            self._tail.keep(data)
        if not self._first_token:
            search = self._first_token_search
            if search is None or search.feed(data):
                self._first_token_search = None
                self._first_token = True
                self._proxy.tell(FirstToken(self.id, command.try_, self._status))
        if self._is_event_stream and may_end(data) and self.has_last_event():
            self.response_ended()  # Envoy shows the end later, perhaps after the client's next request

    def response_ended(self) -> None:
        """The response has ended, or the stream of an Envoy that shows no response."""
        command = self.command
        if self._error_body is not None:
            self._error_body.finish()
        if self.over or command is None:
            return
        usage = read_usage(self._tail.join()) if self._tail is not None else None
        error = self._error_body.error if self._error_body is not None else None
        now_s = self._proxy.now()
        self._close()
        self._proxy.tell(Ended(self.id, command.try_, self._status, now_s, usage, error), now_s)

    def has_last_event(self) -> bool:
        return self._tail is not None and has_last_event(self._tail.join())

    # The end.

    def client_left(self) -> None:
        if self.over:
            return
        if self.has_last_event():
            self.response_ended()
            return
        self._end_early(None)
        self._close()
        if self.known:
            self._proxy.tell(Cancel(self.id, Left.LEFT))
        else:
            self._proxy.counters.disconnects += 1

    def cut_off(self) -> None:
        """The picker stops. Envoy completes a response that has a node without it."""
        if self.over:
            return
        why = errors.router_stopping()
        self._end_early(why)
        self._close()
        if self.known:
            self._proxy.tell(Cancel(self.id, Left.STOPPING))
        if self.command is None:
            self._client.send_error(why, self.request_id)

    def internal_error(self, error: Exception) -> None:
        proxy = self._proxy
        http_error = proxy.internal_error(error, self.request_id)
        if not self.over:
            self._end_early(http_error)
            self._close()
            if self.known:
                proxy.tell(Cancel(self.id, Left.INTERNAL, where_it_failed(error)))
        self._client.send_error(http_error, self.request_id)

    def _close(self) -> None:
        self.over = True
        self._proxy.exchanges.pop(self.id, None)
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
            self.pending_prompt = None
        self.body = b""
        self.outline = self.kept = None

    def _end_early(self, error: HttpError | None) -> None:
        """The call ends. Note it, if the core cannot, as the call has not asked for a node. `error`: None if the client
        has left."""
        if not self.arrived and (self.trace is not None or self.kept is not None):
            self._proxy.end_early(error, self.trace, self.kept, self.request, self.request_id)

    def pause_response(self) -> None:
        """Envoy sends the response to the client."""

    def resume_response(self) -> None:
        pass


# Turns the headers that Envoy sends into the request head that the HTTP edge would have read.
#
# Envoy has parsed the request and frames it again for the node, so its framing headers say nothing here. The rest goes
# through the same strict parser as a client's own bytes: the same headers are rejected, and the same ones are read.

OBJECTIVES: Final = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
"""Name the InferenceObjective of a request, which has its priority: the extension's header, and llm-d's newer name."""
MODEL: Final = "x-gateway-model-name"
"""The model, where a filter in front has read the body."""
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "expect", "host", "te", "upgrade"})


class EnvoyHead:
    """A request's head, and what only the picker reads of it."""

    __slots__ = ("body_bytes", "head", "model", "rank_given")

    def __init__(self, fields: Iterable[Any], objectives: Mapping[str, str], limit: int) -> None:
        """`objectives`: the priority of each InferenceObjective, as X-Priority has it. `limit`: of the head's bytes.
        Raises HttpError."""
        method = path = b""
        authority = b"envoy"
        lines: list[bytes] = []
        self.model = ""
        self.body_bytes = 0
        self.rank_given = False
        """Whether the client names a data-parallel rank, which only the router may do."""
        objective = ""
        has_priority = False
        for field in fields:
            name, value = field.key, field.raw_value or field.value.encode("utf-8", "surrogateescape")
            if name[:1] == ":":
                if name == ":path":
                    path = value
                elif name == ":method":
                    method = value
                elif name == ":authority" and value:
                    authority = value
                continue
            if name in _FRAMING:
                if name == "content-length" and value.isdigit() and len(value) < 19:
                    self.body_bytes = int(value)
                continue
            if name in OBJECTIVES:
                objective = value.decode("latin-1")
            elif name == MODEL:
                self.model = value.decode("utf-8", "replace")
            elif name == "x-priority":
                has_priority = True
            elif name == "x-data-parallel-rank":
                self.rank_given = True
            lines.append(b"%b: %b\r\n" % (name.encode("latin-1", "replace"), value))
        if not has_priority and (priority := objectives.get(objective, "")):
            lines.append(b"x-priority: %b\r\n" % priority.encode())
        data = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, path, authority, b"".join(lines))
        if len(data) > limit:
            raise errors.headers_too_large(limit)
        if data.count(b"\n") != len(lines) + 3 or data.count(b"\r") != len(lines) + 3:
            raise errors.bad_request("A header contains a line break.")
        self.head: RequestHead = read_request_head(data, len(data) - 4)


# The head of a response, as far as Envoy shows it.


class ObservedHead(NamedTuple):
    status: int
    """0 if it cannot be read."""
    served: NodeRow | None
    """The node that answers; None if it is unknown."""
    by_envoy: bool
    """No node answers, but Envoy itself."""
    retry_after_s: int | None
    encoded: bool
    """Whether the body has a content coding, such as gzip."""
    is_event_stream: bool
    """Whether its tokens can be seen one by one."""


def read_response_head(message: Any, node_at: Callable[[str], NodeRow | None]) -> ObservedHead:
    """`node_at`: returns the node at an endpoint."""
    status, content_type, retry_after = 0, b"", b""
    encoded = from_node = False
    for field in message.response_headers.headers.headers:
        name = field.key
        if name == ":status":
            value = field.raw_value or field.value.encode()
            status = int(value) if value.isdigit() and len(value) == 3 else 0
        elif name == "content-type":
            content_type = field.raw_value
        elif name == "retry-after":
            retry_after = field.raw_value
        elif name == "content-encoding":
            encoded = True
        elif name == "x-envoy-upstream-service-time":  # Envoy's own answers do not have it
            from_node = True
    served = served_endpoint(message)
    return ObservedHead(
        status,
        node_at(served) if served else None,
        not from_node and (status >= 500 or status == 429),
        seconds_of(retry_after) if status in (429, 503) else None,
        encoded,
        not encoded and content_type[:17].lower() == b"text/event-stream",
    )


def rate_limits(message: Any) -> list[str]:
    """Return the names of the node's headers about its rate limits."""
    fields = message.response_headers.headers.headers
    return [field.key for field in fields if field.key.startswith("x-ratelimit-")]


# One ext_proc stream: one HTTP request, which Envoy describes in messages. To the proxy it is a client.
#
#     Envoy's body mode              answer to the headers          then
#     -----------------------------  -----------------------------  --------------------------------------------------
#     BUFFERED                       at once: continue              the decision answers the body
#     FULL_DUPLEX_STREAMED           the decision, after the body   the body goes back to Envoy in pieces
#     STREAMED, sent without waiting the decision, after the body   a `continue` for each piece of the body
#     NONE, STREAMED, or no body     the decision, without a prompt
#
# Envoy names its modes in the first message (`protocol_config`). If it does not, the picker assumes the mode that the
# Inference Extension requires, FULL_DUPLEX_STREAMED. A request that has no node yet delays the answer.

MARGIN: Final = 0.1
"""Share of Envoy's timeout that is left when the picker stops waiting for a node."""

SCAN_S: Final = 0.005
MAX_HELD: Final = 64
"""Messages that may come before a decision. Envoy sends none, or the trailers."""


class PickerStream:
    __slots__ = (
        "_body_bytes", "_body_tenant", "_call", "_chunks", "_deciding", "_envoy", "_has_body", "_held",
        "_in_message", "_mode", "_outbox", "_over", "_pieces", "_response_mode", "_saw_response", "_server", "_subset",
        "_timer", "_trailers", "body_started_s", "exchange", "peer", "rights",
    )  # fmt: skip

    def __init__(self, server: PickerServer, call: Call) -> None:
        # for the whole request
        self._server = server
        self._call = call
        self.peer = b""
        self.rights: Rights
        self.body_started_s = 0.0
        self._envoy: EnvoyHead | None = None
        self.exchange: EnvoyExchange | ScanningExchange | None = None
        self._mode = DUPLEX
        self._response_mode = NONE
        self._subset: frozenset[str] | None = None
        self._over = False
        """Whether the picker has nothing more to say about the request."""
        self._outbox: list[bytes] = []
        """Messages for Envoy."""
        self._in_message = False
        """Whether a message is being handled. The stream sends its answers after that."""
        # until it has a node
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._body_tenant: str | None = None
        """Whose share of the memory for bodies it takes from."""
        self._chunks = 0
        """Pieces of the body that wait for an answer."""
        self._has_body = self._trailers = self._deciding = False
        self._timer: asyncio.TimerHandle | None = None
        self._held: list[bytes] | None = None
        """Messages that came before the decision."""
        # the response
        self._saw_response = False

    # From gRPC.

    def received(self, data: bytes) -> None:
        if self._deciding or self._held is not None:
            self._hold(data)
            return
        try:
            message = ext_proc.Request.FromString(data)
        except DecodeError:
            self._call.end(INVALID_ARGUMENT, "not a ProcessingRequest")
            self._end()
            return
        self._in_message = True
        is_answered = self._safely(message)
        self._in_message = False
        if is_answered:
            self._speak()
        else:
            self._wait()

    def too_large(self) -> None:
        self._in_message = True
        self._leave()
        limits = self._server.limits
        full = self._server.partial_bytes > limits.buffered_bytes
        self.send_error(errors.request_buffer_full() if full else errors.body_too_large(limits.body_bytes))
        self._speak()

    def give_way(self) -> None:
        """The body has not arrived completely, and another tenant needs the memory."""
        self.send_error(errors.body_gave_way())

    def client_finished(self) -> None:
        """Envoy has ended the stream: with the response, or with the client."""
        self._call.end()
        self._end()

    def cancelled(self) -> None:
        self._end()

    def _hold(self, data: bytes) -> None:
        """Keep a message until the decision is sent."""
        if self._held is None:
            self._held = []
        if len(self._held) < MAX_HELD:
            self._held.append(data)
        else:
            self._call.reset()
            self._end()

    def _receive_held(self) -> None:
        held, self._held = self._held, None
        for data in held or ():
            if not self._over:
                self.received(data)

    def _speak(self) -> None:
        """Send what there is to say. End the stream if that was all."""
        self._in_message = False
        outbox, self._outbox = self._outbox, []
        write = self._call.write
        for one in outbox:
            write(one)
        if self._over:
            self._call.end()
            self._end()

    def _wait(self) -> None:
        """Let the decision come later, as late as Envoy waits."""
        if self._mode == DUPLEX:  # which has no timeout
            return
        config = self._server.config
        limit_s = config.message_timeout_s
        if config.max_message_timeout_s and self._mode != STREAMED:
            limit_s = config.max_message_timeout_s
            self._call.write(ext_proc.more_time(limit_s))
        self._timer = asyncio.get_running_loop().call_later(limit_s * (1.0 - MARGIN), self._time_is_up)

    def _time_is_up(self) -> None:
        exchange = self.exchange
        if not self._deciding:
            return
        if isinstance(exchange, EnvoyExchange):
            exchange.time_is_up()
        else:  # its body is still being scanned
            self._timer = asyncio.get_running_loop().call_later(SCAN_S, self._time_is_up)

    # Messages.

    def _safely(self, message: Any) -> bool:
        """Handle a message. Return False if its answer has to wait for a decision."""
        try:
            self._receive(message)
        except HttpError as error:
            self.send_error(error)
        except Exception as error:
            self._fail(error)
        return not self._deciding

    def _fail(self, error: Exception) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.internal_error(error)
        else:
            self.send_error(self._server.proxy.internal_error(error))
        self._over = True

    def _receive(self, message: Any) -> None:
        """Raises HttpError."""
        kind = message.WhichOneof("request")
        if kind == "response_body":
            self._receive_response(message.response_body)
        elif kind == "request_headers":
            self._receive_head(message)
        elif kind == "request_body":
            self._receive_body(message.request_body)
        elif kind == "response_headers":
            self._receive_response_head(message)
        elif kind == "request_trailers":
            if self.exchange is None:
                self._trailers = True
                self._decide()
            else:
                self._outbox.append(ext_proc.CONTINUE_TRAILERS)
        elif kind == "response_trailers":
            if isinstance(self.exchange, EnvoyExchange):
                self.exchange.response_ended()
            self._outbox.append(ext_proc.CONTINUE_RESPONSE_TRAILERS)

    def _receive_head(self, message: Any) -> None:
        server, http = self._server, message.request_headers
        if self._envoy is not None:
            self._leave()
            raise errors.bad_request("A second request came in the same stream.")
        if message.HasField("protocol_config"):
            protocol = message.protocol_config
            self._mode, self._response_mode = protocol.request_body_mode, protocol.response_body_mode
            if self._mode == STREAMED and not protocol.send_body_without_waiting_for_header_response:
                self._mode = NONE
        self._envoy = envoy = EnvoyHead(http.headers.headers, server.objectives(), server.limits.header_bytes)
        if len(server.connections) > server.limits.connections:
            raise errors.too_many_connections()
        self.rights = server.proxy.check_head(envoy.head)
        self._body_tenant = self.rights.body_tenant
        self.body_started_s = server.proxy.now()
        hint = ext_proc.subset_hint(message)
        if hint is not None:
            self._subset = server.endpoints.names_at(hint)
        if http.end_of_stream or self._mode == NONE:
            if not http.end_of_stream:
                server.warn_without_bodies()
            self._decide()
        else:
            self._has_body = True
            if envoy.body_bytes > server.limits.body_bytes:
                raise errors.body_too_large(server.limits.body_bytes)
            if self._mode in (BUFFERED, BUFFERED_PARTIAL):
                self._outbox.append(ext_proc.CONTINUE_HEADERS)

    def _receive_body(self, http: Any) -> None:
        if self.exchange is not None:  # decided without it
            self._outbox.append(ext_proc.CONTINUE_BODY)
            return
        server, piece, tenant = self._server, http.body, self._body_tenant
        self._chunks += 1
        limits = server.limits
        if self._body_bytes + len(piece) > limits.body_bytes:
            raise errors.body_too_large(limits.body_bytes)
        server.bodies.reserve(tenant, len(piece), limits.buffered_bytes)
        self._body_bytes += len(piece)
        if piece:
            self._pieces.append(piece)
        if not http.end_of_stream:
            server.bodies.arrives(tenant, self, self._body_bytes)
        if self._mode == BUFFERED_PARTIAL and not http.end_of_stream:
            raise errors.body_too_large(self._body_bytes)  # Envoy's buffer is smaller than the body
        if http.end_of_stream or self._mode == BUFFERED:
            self._decide()

    def _decide(self) -> None:
        """The request is complete: ask for a node. Raises HttpError."""
        envoy, proxy = self._envoy, self._server.proxy
        if envoy is None:
            raise errors.bad_request("The body came before the headers.")
        if self.exchange is not None:
            self._leave()
            raise errors.bad_request("The request was complete before.")
        self._deciding = True
        self._server.bodies.arrived(self._body_tenant, self)
        head = envoy.head
        if head.method == b"POST" and not self._has_body and not self._pieces and self._mode == NONE:
            path = head.target.partition(b"?")[0]
            proxy.begin(self, head, path, b"", ScannedBody(envoy.model, b""), None, EnvoyExchange)
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        proxy.serve(self, head, body, EnvoyExchange)

    def _leave(self) -> None:
        """Give up the request that the stream has begun."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()

    # From the proxy.

    @property
    def subset(self) -> frozenset[str] | None:
        """The names of the nodes that Envoy allows; None: all."""
        return self._subset

    @property
    def sees_responses(self) -> bool:
        """Whether Envoy shows the picker the bodies of responses."""
        return bool(self._response_mode != NONE)

    def is_serving(self, exchange: object) -> bool:
        return self.exchange is exchange and self._deciding

    def send_to(self, command: Send) -> bool:
        """Tell Envoy to send the request to the command's node. Return False if the node's endpoint is unknown."""
        server, envoy = self._server, self._envoy
        assert envoy is not None
        row = server.proxy.tables().nodes.get(command.node)
        named = server.named_endpoints(row, command.fallbacks) if row is not None else ""
        if row is None or not named:
            return False
        authorization, remove = server.credentials(row, self.rights)
        rank = command.rank if command.rank >= 0 else None
        if rank is None and envoy.rank_given:
            remove = (*remove, ext_proc.RANK)
        on_body = self._has_body and self._mode in (BUFFERED, BUFFERED_PARTIAL)
        outbox = self._outbox
        outbox.append(ext_proc.decision(named, on_body, rank, authorization, remove))
        if self._has_body and self._mode == DUPLEX:
            outbox.extend(ext_proc.request_chunks(self._pieces, not self._trailers))
        elif self._has_body and self._mode == STREAMED:
            outbox.extend([ext_proc.CONTINUE_BODY] * self._chunks)
        if self._trailers:
            outbox.append(ext_proc.CONTINUE_TRAILERS)
        self._answer()
        return True

    def reply(self, status: int, body: bytes, headers: Headers = (), content_type: str = "application/json") -> None:
        """Answer in place of a node."""
        self._outbox = [ext_proc.immediate(status, body, headers, content_type)]
        self._over = True
        if isinstance(self.exchange, ScanningExchange):  # which has ended with this
            self.exchange = None
        self._answer()

    def send_error(self, error: HttpError, request_id: bytes = b"") -> None:
        proxy, envoy = self._server.proxy, self._envoy
        head = envoy.head if envoy is not None else None
        request_id = request_id or (head.request_id if head is not None else b"") or proxy.new_request_id()
        forwarded_for = head.forwarded_for if head is not None else b""
        proxy.error_sent(error, request_id, self._call.peer_host.encode(), forwarded_for)
        anthropic = head is not None and is_anthropic(head.target)
        self.reply(error.status, error.body(anthropic), with_request_id(error, request_id))

    def _answer(self) -> None:
        """The request has its decision."""
        self._deciding = False
        self._release_body()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._in_message:
            self._speak()
            if self._held is not None:
                asyncio.get_running_loop().call_soon(self._receive_held)

    def _release_body(self) -> None:
        self._server.bodies.arrived(self._body_tenant, self)
        self._server.bodies.release(self._body_tenant, self._body_bytes)
        self._body_bytes = 0
        self._pieces = []

    # The response.

    def _receive_response_head(self, message: Any) -> None:
        self._saw_response = True
        exchange, server = self.exchange, self._server
        if not isinstance(exchange, EnvoyExchange):
            self._outbox.append(ext_proc.CONTINUE_RESPONSE_HEADERS)
            return
        server.shows_responses(self._call.peer_host)
        head = read_response_head(message, server.endpoints.node_at)
        exchange.response_started(head, self.sees_responses)
        headers = exchange.client_headers(head)
        limits = rate_limits(message) if exchange.replaces_limits and not head.by_envoy else ()
        self._outbox.append(ext_proc.response_headers(headers, limits))
        if message.response_headers.end_of_stream:
            exchange.response_ended()

    def _receive_response(self, http: Any) -> None:
        exchange, ends = self.exchange, http.end_of_stream
        if self._response_mode == DUPLEX:
            self._outbox.append(ext_proc.response_chunk(http.body, ends))
        else:
            self._outbox.append(ext_proc.CONTINUE_RESPONSE_BODY)
        if isinstance(exchange, EnvoyExchange):
            exchange.response_data(http.body)
            if ends:
                exchange.response_ended()

    # The end.

    def _end(self) -> None:
        """The stream has ended: with the response, with the client, or because Envoy does not wait longer."""
        self._over = True
        self._release_body()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            undecided, self._deciding = self._deciding, False
            try:
                if isinstance(exchange, EnvoyExchange) and not undecided and self._response_is_unseen():
                    exchange.response_ended()
                else:
                    exchange.client_left()
            except Exception as error:
                self._server.proxy.internal_error(error)
        self._server.stream_ended(self)

    def _response_is_unseen(self) -> bool:
        """Return whether the response has ended, as far as the picker can know: Envoy does not show the end. If it
        shows the head and there was none, the client has left."""
        if self.sees_responses:
            return False
        return self._saw_response or not self._server.sees_heads_of(self._call.peer_host)

    def cut_off(self) -> None:
        """The picker stops: end the stream, so that Envoy continues without it."""
        self._in_message = True
        exchange = self.exchange
        if exchange is not None:
            exchange.cut_off()
        else:
            self.send_error(errors.router_stopping())
        self._over = True
        self._speak()

    def abort(self) -> None:
        self._call.reset()
        self._end()

    @property
    def busy(self) -> bool:
        return self.exchange is not None or self._body_bytes > 0

    @property
    def has_node(self) -> bool:
        return self.exchange is not None and self.exchange.has_node
