"""One ext_proc stream: one HTTP request, which Envoy describes in messages. To the proxy it is a client.

    Envoy's body mode              answer to the headers          then
    -----------------------------  -----------------------------  --------------------------------------------------
    BUFFERED                       at once: continue              the decision answers the body
    FULL_DUPLEX_STREAMED           the decision, after the body   the body goes back to Envoy in pieces
    STREAMED, sent without waiting the decision, after the body   a `continue` for each piece of the body
    NONE, STREAMED, or no body     the decision, without a prompt

Envoy names its modes in the first message (`protocol_config`). If it does not, the picker assumes the mode that the
Inference Extension requires, FULL_DUPLEX_STREAMED. A request that has no node yet delays the answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from warmroute.edge import errors
from warmroute.edge.api_keys import Rights
from warmroute.edge.body_scanner import ScannedBody
from warmroute.edge.errors import HttpError
from warmroute.edge.large_body import LargeBodyExchange
from warmroute.edge.local_replies import Headers, with_request_id
from warmroute.edge.paths import is_anthropic
from warmroute.edge.proxy_client import RequestExchange
from warmroute.fleet.node import Node
from warmroute.picker import messages
from warmroute.picker.exchange import PickerExchange
from warmroute.picker.ext_proc import BUFFERED, BUFFERED_PARTIAL, NONE, STREAMED
from warmroute.picker.ext_proc import FULL_DUPLEX_STREAMED as DUPLEX
from warmroute.picker.grpc_call import INVALID_ARGUMENT, Call
from warmroute.picker.request_head import EnvoyHead
from warmroute.picker.response_head import rate_limits, read_response_head

if TYPE_CHECKING:
    from warmroute.picker.server import PickerServer

MARGIN: Final = 0.1
"""Share of Envoy's timeout that is left when the picker stops waiting for a node."""

SCAN_S: Final = 0.005
MAX_HELD: Final = 64
"""Messages that may come before a decision. Envoy sends none, or the trailers."""


class PickerStream:
    __slots__ = (
        "_body_bytes", "_body_tenant", "_call", "_chunks", "_deciding", "_envoy", "_exchange", "_has_body", "_held",
        "_in_message", "_mode", "_outbox", "_over", "_pieces", "_response_mode", "_saw_response", "_server", "_subset",
        "_timer", "_trailers", "body_started_s", "peer", "rights",
    )  # fmt: skip

    def __init__(self, server: PickerServer, call: Call) -> None:
        # for the whole request
        self._server = server
        self._call = call
        self.peer = b""
        self.rights: Rights
        self.body_started_s = 0.0
        self._envoy: EnvoyHead | None = None
        self._exchange: RequestExchange | LargeBodyExchange | None = None
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
            message = messages.Request.FromString(data)
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
            self._call.write(messages.more_time(limit_s))
        self._timer = asyncio.get_running_loop().call_later(limit_s * (1.0 - MARGIN), self._time_is_up)

    def _time_is_up(self) -> None:
        exchange = self._exchange
        if not self._deciding:
            return
        if isinstance(exchange, PickerExchange):
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
        exchange, self._exchange = self._exchange, None
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
            if self._exchange is None:
                self._trailers = True
                self._decide()
            else:
                self._outbox.append(messages.CONTINUE_TRAILERS)
        elif kind == "response_trailers":
            if isinstance(self._exchange, PickerExchange):
                self._exchange.response_ended()
            self._outbox.append(messages.CONTINUE_RESPONSE_TRAILERS)

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
        self.rights = server.proxy.admit(envoy.head)
        self._body_tenant = self.rights.body_tenant
        self.body_started_s = server.proxy.now()
        hint = messages.subset_hint(message)
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
                self._outbox.append(messages.CONTINUE_HEADERS)

    def _receive_body(self, http: Any) -> None:
        if self._exchange is not None:  # decided without it
            self._outbox.append(messages.CONTINUE_BODY)
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
        if self._exchange is not None:
            self._leave()
            raise errors.bad_request("The request was complete before.")
        self._deciding = True
        self._server.bodies.arrived(self._body_tenant, self)
        head = envoy.head
        if head.method == b"POST" and not self._has_body and not self._pieces and self._mode == NONE:
            path = head.target.partition(b"?")[0]
            self._exchange = proxy.begin(self, head, path, b"", ScannedBody(envoy.model, b""), None)
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        exchange = proxy.serve(self, head, body)
        if self._exchange is None:
            self._exchange = exchange

    def _leave(self) -> None:
        """Give up the request that the stream has begun."""
        exchange, self._exchange = self._exchange, None
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
        return self._exchange is exchange and self._deciding

    def replace_exchange(self, exchange: object, other: PickerExchange) -> None:
        if self._exchange is exchange:
            self._exchange = other

    def send_to(self, exchange: PickerExchange, node: Node) -> bool:
        """Tell Envoy to send the request to this node. Return False if the node's endpoint is unknown."""
        server, envoy = self._server, self._envoy
        assert envoy is not None
        named = server.named_endpoints(exchange.attempts.decision, node, exchange.attempts)
        if not named:
            return False
        authorization, remove = server.credentials(node, self.rights)
        rank = exchange.rank
        if rank is None and envoy.rank_given:
            remove = (*remove, messages.RANK)
        on_body = self._has_body and self._mode in (BUFFERED, BUFFERED_PARTIAL)
        outbox = self._outbox
        outbox.append(messages.decision(named, on_body, rank, authorization, remove))
        if self._has_body and self._mode == DUPLEX:
            outbox.extend(messages.request_chunks(self._pieces, not self._trailers))
        elif self._has_body and self._mode == STREAMED:
            outbox.extend([messages.CONTINUE_BODY] * self._chunks)
        if self._trailers:
            outbox.append(messages.CONTINUE_TRAILERS)
        self._answer()
        return True

    def reply(self, status: int, body: bytes, headers: Headers = (), content_type: str = "application/json") -> None:
        """Answer in place of a node."""
        self._outbox = [messages.immediate(status, body, headers, content_type)]
        self._over = True
        if isinstance(self._exchange, LargeBodyExchange):  # which has ended with this
            self._exchange = None
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
        exchange, server = self._exchange, self._server
        if not isinstance(exchange, PickerExchange):
            self._outbox.append(messages.CONTINUE_RESPONSE_HEADERS)
            return
        server.shows_responses(self._call.peer_host)
        head = read_response_head(message, server.endpoints.node_at)
        exchange.response_started(head, self.sees_responses)
        headers = exchange.client_headers(head)
        limits = rate_limits(message) if exchange.replaces_limits and not head.by_envoy else ()
        self._outbox.append(messages.response_headers(headers, limits))
        if message.response_headers.end_of_stream:
            exchange.response_ended()

    def _receive_response(self, http: Any) -> None:
        exchange, ends = self._exchange, http.end_of_stream
        if self._response_mode == DUPLEX:
            self._outbox.append(messages.response_chunk(http.body, ends))
        else:
            self._outbox.append(messages.CONTINUE_RESPONSE_BODY)
        if isinstance(exchange, PickerExchange):
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
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            undecided, self._deciding = self._deciding, False
            try:
                if isinstance(exchange, PickerExchange) and not undecided and self._response_is_unseen():
                    exchange.ended_unseen()
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
        exchange = self._exchange
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
        return self._exchange is not None or self._body_bytes > 0
