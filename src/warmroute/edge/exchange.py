"""One proxied request at the edge: its tries, the response that is relayed, and its end."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import getrandbits
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from warmroute._kernel import (
    CHUNKED,
    UNTIL_CLOSE,
    USAGE_TAIL_BYTES,
    ChunkReader,
    Outline,
    RequestHead,
    ResponseHead,
    ResponseTail,
    read_usage,
)
from warmroute.core.calls import Attempts, SplitRequest
from warmroute.core.messages import Outcome
from warmroute.core.node import Node, Ticket
from warmroute.core.rejections import RoutingError
from warmroute.core.tickets import DecodeDispatch, Dispatch
from warmroute.edge import errors
from warmroute.edge.arrival import is_anthropic
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.first_token import FirstTokenDetector, detector_for
from warmroute.edge.node_connection import ConnectFailure, NodeConnection
from warmroute.edge.response import MAX_JUDGED_BYTES, MAX_TAIL_BYTES, ErrorBody, has_last_event, lacks_path, seconds_of
from warmroute.edge.trace_context import RequestTrace
from warmroute.edge.tries import DecodeAttempt, NodeAttempt, PrefillAttempt
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.request_body import splice

if TYPE_CHECKING:
    from warmroute.edge.client_connection import ClientConnection
    from warmroute.edge.proxy import Proxy
    from warmroute.prompt.reader import PendingPrompt


# Response headers that name the node, the prefill node and the predicted cache hit, for clients that may know.

EXPLAIN_HEADER: Final = b"x-warmroute-explain"
_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Characters of a node's name that need no escape in a header, beside letters and digits."""


def names_node(setting: str, head: RequestHead) -> bool:
    """Return whether the response to this request names its node. `setting`: journal.response_headers, empty if off."""
    return bool(setting) and (setting == "always" or head.get(EXPLAIN_HEADER) == b"1")


def node_headers(attempts: Attempts) -> list[tuple[bytes, bytes]]:
    ticket, split = attempts.ticket, attempts.split
    found = [(b"X-Warmroute-Node", _name(ticket.node))]
    if not isinstance(ticket, Dispatch):
        return found
    cached = ticket.cached
    if split is not None and isinstance(ticket, DecodeDispatch):
        found.append((b"X-Warmroute-Prefill-Node", _name(split.pair.prefill_node)))
        if isinstance(split.prefill_ticket, Dispatch):
            cached = split.prefill_ticket.cached
    found.append((b"X-Warmroute-Hit", b"%d/%d" % (cached, ticket.tokens)))
    return found


def node_lines(attempts: Attempts) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in node_headers(attempts)])


def _name(node: Node) -> bytes:
    return quote(node.name, safe=_NAME_CHARACTERS).encode("ascii")


# The I/O of one request: sends it to the node that its attempts name, and streams the response to the client.
#
# core/calls.py decides which node comes next and when the request has ended. A client that disconnects closes the
# connection to the node. A response that breaks off is ended so that no client takes it for complete.

_NODE_LIMITS: Final = re.compile(rb"(?im)^x-ratelimit-[^\r\n]*\r\n")
"""Rate limits of a node, which the router replaces with its own where the tenant has some."""


class ProxyExchange:
    # for the whole request
    _proxy: Proxy
    _client: ClientConnection
    _head: RequestHead
    body: bytes
    attempts: Attempts
    trace: RequestTrace | None = None
    """None if the request is not recorded."""
    node_fields: bytes = b""
    """Header lines for a node; empty: the client's as they are."""
    pending_prompt: PendingPrompt | None = None
    """Set while the prompt is being read in a thread or by a node."""
    outline: Outline | None = None
    """The positions of the body's fields, if the request may be split."""
    _prefill: PrefillAttempt | None = None
    _room: int = 0
    _attempt: NodeAttempt | None = None
    _hedge: NodeAttempt | None = None
    # the response
    _head_sent: bool = False
    """Whether the client has received anything."""
    _ended: bool = False
    """Whether the client has received the whole response."""
    _framing: int = 0
    _events: bool = False
    _keep_alive: bool = True
    _dechunk: ChunkReader | None = None
    _tail: ResponseTail | bytes | None
    """The end of the response, or all of it, where its usage is wanted."""
    _first_token_detector: FirstTokenDetector
    _sink: Callable[[bytes], object]
    """Where the body goes once its first token was found."""
    _not_found: bytearray | None = None
    """A node's 404 that the client has not received yet: the node may lack the path."""
    _not_found_head: ResponseHead

    def __init__(self, proxy: Proxy, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        self._proxy = proxy
        self._client = client
        self._head = head
        self.body = body
        self._tail = None

    # Before a node is chosen.

    def prompt_read(self, prompt: Prompt | None) -> None:
        self.pending_prompt = None
        attempts = self.attempts
        if attempts.done:
            return
        try:
            self._proxy.enter(attempts, prompt)
        except errors.HttpError as error:
            self.send_error(error)
        except Exception as error:
            self.internal_error(error)

    def send_error(self, error: errors.HttpError) -> None:
        """End a request that has no node with an error."""
        self.attempts.done = True
        self._client.send_error(error, self.attempts.request_id)
        if self.trace is not None:
            self.trace.end(self._proxy.now(), error.status, error.code)
        self.forget()

    def reject(self, why: RoutingError) -> int:
        error = self._proxy.to_http_error(why, self.attempts.request)
        self._client.send_error(error, self.attempts.request_id)
        if self.trace is not None:
            self.trace.end(self._proxy.now(), error.status, error.code)
        self.forget()
        return error.status

    # To nodes.

    def send(self, node: Node) -> None:
        ticket, pool, split = self.attempts.ticket, self._proxy.pools.for_node(node), self.attempts.split
        if split is None or split.prefill_node is None:
            self._attempt = attempt = NodeAttempt(self, ticket, pool)
        else:
            self._attempt = attempt = DecodeAttempt(self, ticket, pool, split)
            attempt.body = self._decode_body(split)
        attempt.start()

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        proxy, split, outline = self._proxy, self.attempts.split, self.outline
        assert split is not None and outline is not None
        self._room = getrandbits(63)
        transfer = proxy.kv_transfer(prefill_node)
        pool = proxy.pools.for_node(prefill_node)
        self._prefill = attempt = PrefillAttempt(self, split.prefill_ticket, pool, split=split, transfer=transfer)
        attempt.body = splice(self.body, outline, transfer.prefill_fields(outline.fields, prefill_node, self._room))
        attempt.start()

    def withdraw_prefill(self) -> None:
        attempt, self._prefill = self._prefill, None
        if attempt is not None:
            attempt.withdraw()

    def _decode_body(self, split: SplitRequest) -> bytes:
        prefill_node, outline = split.pair.prefill_node, self.outline
        assert outline is not None
        transfer = self._proxy.kv_transfer(prefill_node)
        fields = transfer.decode_fields(outline.fields, prefill_node, self._room, split.transfer)
        return splice(self.body, outline, fields)

    def now(self) -> float:
        return self._proxy.now()

    @property
    def keeps_error_text(self) -> bool:
        return self._proxy.keeps_error_text

    def withdraw(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.withdraw()

    def send_hedge(self, node: Node) -> None:
        ticket = self.attempts.hedge
        assert ticket is not None
        self._hedge = hedge = NodeAttempt(self, ticket, self._proxy.pools.for_node(node))
        hedge.start()

    def withdraw_hedge(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.withdraw()

    def promote_hedge(self) -> None:
        self._attempt, self._hedge = self._hedge, None

    def request_head(self, pool: ConnectionPool, ticket: Ticket, body_bytes: int) -> bytes:
        """Return the head for a node."""
        rank = ticket.rank if isinstance(ticket, Dispatch) else None  # the one that holds the prompt
        fields = self.node_fields if self.trace is None else self.trace.forwarded_fields(ticket)
        return self._head.for_node(
            pool.host_line, pool.authorization_line, self._client.rights.passes_authorization, body_bytes,
            self.attempts.request_id, self._client.peer, rank, fields,
        )  # fmt: skip

    def count_stale_connection(self) -> None:
        self._proxy.counters.stale_connections += 1

    # From a node that failed.

    def connect_failed(self, attempt: NodeAttempt, failure: ConnectFailure, reason: str) -> None:
        attempts, now_s = self.attempts, self._proxy.now()
        if attempts.split is not None:
            attempts.split.decode_sent = False
        # A local failure, such as too many open files, says nothing about the node.
        outcome = Outcome.BUSY if failure is ConnectFailure.LOCAL else Outcome.FAILED
        if attempt is self._hedge:
            self._hedge = None
            if failure is ConnectFailure.REFUSED:
                attempts.hedge_refused(reason, now_s)
            else:
                attempts.hedge_failed(outcome, reason, now_s)
        elif failure is ConnectFailure.REFUSED:
            attempts.connection_refused(reason, now_s)
        else:
            attempts.node_failed(outcome, reason, now_s)

    def response_failed(self, attempt: NodeAttempt, reason: str) -> None:
        if attempt is self._hedge:
            self._hedge = None
            self.attempts.hedge_failed(Outcome.FAILED, reason, self._proxy.now())
        else:
            self.attempts.node_failed(Outcome.FAILED, reason, self._proxy.now())

    # From a node that answers.

    def response_started(
        self, attempt: NodeAttempt, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        status, attempts = head.status, self.attempts
        if self.trace is not None:
            self.trace.node_answered(attempt.ticket, status)
        retry_after_s = seconds_of(head.retry_after) if status in (429, 503) else None
        error = attempt.error
        if attempt is self._hedge:
            if not attempts.hedge_started(status, retry_after_s, now_s, error):
                self._hedge = None
                return None
        elif not attempts.response_started(status, retry_after_s, now_s, error):
            return None
        if status == 404 and len(first) <= MAX_JUDGED_BYTES:
            self._not_found, self._not_found_head = bytearray(first), head
            return self._keep_not_found
        return self._begin_response(attempt, head, first, whole, now_s)

    def _begin_response(
        self, attempt: NodeAttempt, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object]:
        """Pass on the head with the part of the body that has arrived. Return what takes the rest."""
        status, attempts = head.status, self.attempts
        proxy, client = self._proxy, self._client
        length = head.length
        self._framing = length
        self.body = b""
        client.release_body()
        keep_alive = client.keeps_alive and length != UNTIL_CLOSE
        write: Callable[[bytes], object] = client.write
        accepts_chunked = True
        if length < 0:
            self._events = head.content_type[:17].lower() == b"text/event-stream"
            accepts_chunked = client.accepts_chunked
            if length == CHUNKED and not accepts_chunked:
                keep_alive = False
                self._dechunk = ChunkReader()
                write = self._write_dechunked
        self._keep_alive = keep_alive
        passing = head.forwarded_fields
        if 300 <= status < 400:
            passing = attempt.pool.own_address.sub(rb"\1", passing)
        more_lines = b""
        if attempts.charge is not None:
            passing, more_lines = _NODE_LIMITS.sub(b"", passing), _header_lines(attempts.charge.headers(now_s))
        if proxy.node_headers and names_node(proxy.node_headers, self._head):
            more_lines += node_lines(attempts)
        if not keep_alive or not self._head.minor_version:
            more_lines += client.connection_line(keep_alive)
        self._head_sent = True
        as_it_is = first if self._dechunk is None else b""
        client.write(head.for_client(passing, accepts_chunked, attempts.request_id, more_lines, as_it_is))
        if self._dechunk is not None:
            write(first)
        if client.paused and not whole:  # it has not read the response before this one
            self.pause_response()
        if attempts.wants_usage:
            if whole:
                self._tail = first
            else:
                self._tail = tail = ResponseTail(MAX_TAIL_BYTES if self._events else USAGE_TAIL_BYTES)
                tail.keep(first)
                write = self._keeping_tail(write, tail)
        if attempt.error_body is not None:
            attempts.first_token(now_s)
            return self._keeping_error(write, attempt.error_body)
        detector = detector_for(head) if self._events else None
        if detector is None or detector.feed(first):
            attempts.first_token(now_s)
            if length == CHUNKED and not whole:
                self._relay(attempt)
            return write
        self._first_token_detector = detector
        self._sink = write
        return self._write_until_first_token

    def _keep_not_found(self, data: bytes) -> None:
        held, attempt = self._not_found, self._attempt
        assert held is not None and attempt is not None
        held += data
        if attempt.error_body is not None:
            attempt.error_body.feed(data)
        if len(held) > MAX_JUDGED_BYTES:
            sink = self._pass_not_found(attempt, False)
            if attempt.connection is not None:
                attempt.connection.replace_sink(sink)

    def _pass_not_found(self, attempt: NodeAttempt, whole: bool) -> Callable[[bytes], object]:
        held, self._not_found = self._not_found, None
        assert held is not None
        return self._begin_response(attempt, self._not_found_head, bytes(held), whole, self._proxy.now())

    def _write_until_first_token(self, data: bytes) -> None:
        self._sink(data)
        if self._first_token_detector.feed(data):
            attempt = self._attempt
            if attempt is not None and attempt.connection is not None:
                attempt.connection.replace_sink(self._sink)
                self._relay(attempt)
            self.attempts.first_token(self._proxy.now())

    def _relay(self, attempt: NodeAttempt) -> None:
        """The rest of the response's chunks needs nothing but to be passed on."""
        if attempt.connection is not None and self._dechunk is None:
            keep = self._tail.keep if isinstance(self._tail, ResponseTail) else None
            attempt.connection.relay(self._client.transport, keep)

    @staticmethod
    def _keeping_tail(write: Callable[[bytes], object], tail: ResponseTail) -> Callable[[bytes], object]:
        keep = tail.keep

        def write_and_keep(data: bytes) -> None:
            keep(data)
            write(data)

        return write_and_keep

    @staticmethod
    def _keeping_error(write: Callable[[bytes], object], error: ErrorBody) -> Callable[[bytes], object]:
        def write_and_keep(data: bytes) -> None:
            error.feed(data)
            write(data)

        return write_and_keep

    def _write_dechunked(self, data: bytes) -> None:
        assert self._dechunk is not None
        pieces: list[bytes] = []
        self._dechunk.feed(data, pieces)
        if pieces:
            self._client.write(b"".join(pieces))

    def response_ended(self, now_s: float) -> None:
        held, attempt = self._not_found, self._attempt
        if held is not None and attempt is not None:
            if lacks_path(self._not_found_head, bytes(held)):
                self._not_found = None
                self._end_response(now_s)
                self._client.send_error(errors.path_not_served(self._head.target), self.attempts.request_id)
                self.forget()
                return
            self._pass_not_found(attempt, True)
        self._ended = True
        if self._tail is not None:
            now_s = self._proxy.now()  # later than the first byte, though both came at once: no response takes no time
        self._end_response(now_s)
        self._client.response_sent(self._keep_alive, now_s)
        self.forget()

    def _end_response(self, now_s: float) -> None:
        """The client has the whole response."""
        proxy, attempts, tail = self._proxy, self.attempts, self._tail
        usage = None
        if tail is not None:
            usage = read_usage(tail if isinstance(tail, bytes) else tail.join())
            if usage is not None:
                usage = attempts.ticket.node.reported.usage(*usage)
        attempts.response_ended(usage, now_s)
        if self.trace is not None:
            self.trace.end(now_s, attempts.status)
        if proxy.log_requests:
            proxy.log_request(attempts, "complete")

    def response_broke(self, reason: str, frames: ChunkReader | None) -> None:
        """The client has a part of the response: end it so that no client takes it for complete."""
        proxy = self._proxy
        if self._not_found is not None and self._attempt is not None:
            self._pass_not_found(self._attempt, False)
        self.attempts.response_broke(reason, proxy.now())
        why = errors.upstream_broken()
        if self.trace is not None:
            self.trace.end(proxy.now(), self.attempts.status, why.code)
        self._break_off(why, frames)
        if proxy.log_requests:
            proxy.log_request(self.attempts, "broken")
        self.forget()

    def cut(self, why: RoutingError) -> bool:
        if self.has_last_event():
            return False
        proxy, error = self._proxy, self._proxy.to_http_error(why, self.attempts.request)
        connection = self._connection
        frames = connection.frames if connection is not None else None
        self.withdraw()
        if self.trace is not None:
            self.trace.end(proxy.now(), self.attempts.status, error.code)
        if self._head_sent:
            self._break_off(error, frames)
        else:  # a 404 that may be replaced (`_not_found`)
            self._client.send_error(error, self.attempts.request_id)
        if proxy.log_requests:
            proxy.log_request(self.attempts, "late")
        self.forget()
        return True

    def _break_off(self, why: errors.HttpError, frames: ChunkReader | None) -> None:
        """End the response so that no client takes it for complete."""
        if self._events:
            self._write_event(why.event(is_anthropic(self._head.target)), frames)
        # Where only the end of the connection ends a response, and no error event is sent, that end must be a reset.
        unframed = self._framing == UNTIL_CLOSE or self._dechunk is not None
        self._client.close_unfinished(reset=unframed and not self._events)

    def _write_event(self, event: bytes, frames: ChunkReader | None) -> None:
        write = self._client.write
        if self._framing == UNTIL_CLOSE or self._dechunk is not None:
            write(b"\n\n" + event)
            return
        # Fill up the chunk that broke off and end its event, then send the error in a chunk of its own. The chunk of
        # length 0 that would end the response is never sent.
        rest = frames.padding_to_chunk_end() if frames is not None else None
        if rest is not None:
            event = b"\n\n" + event if rest else event
            write(rest + b"%x\r\n%b\r\n" % (len(event), event))

    # From the client.

    def client_left(self) -> None:
        self._proxy.client_left(self)

    def has_last_event(self) -> bool:
        return self._events and isinstance(self._tail, ResponseTail) and has_last_event(self._tail.join())

    def response_complete(self) -> None:
        self._end_response(self._proxy.now())
        self.release()

    def release(self) -> None:
        """Give up what the request holds: its prompt, its connection to a node, its ticket."""
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
        self.withdraw()
        self.withdraw_hedge()
        self.withdraw_prefill()
        if not self.attempts.done:
            self.attempts.abandon(self._proxy.now())
        self.forget()

    def forget(self) -> None:
        """Drop the body of a request that has ended, and the references that lead back to this exchange: what it holds
        must not stay in memory until the next garbage collection."""
        self.body = b""
        self.outline = None
        self._attempt = self._prefill = self._not_found = None
        self.attempts.driver = self._proxy.ended
        if self._dechunk is not None:
            self._sink = self._client.write

    def internal_error(self, error: Exception, frames: ChunkReader | None = None) -> None:
        """The router itself failed at this request: answer with 500, or break off a response that has begun."""
        proxy, client, request_id = self._proxy, self._client, self.attempts.request_id
        http_error = proxy.internal_error(error, request_id)
        try:
            self.release()
        except Exception as another:
            proxy.internal_error(another, request_id)
        if self.trace is not None:
            status = self.attempts.status if self._head_sent else http_error.status
            self.trace.end(proxy.now(), status, http_error.code)
        if not client.is_serving(self):
            return
        if not self._head_sent:
            client.send_error(http_error, request_id)
        elif self._ended:
            client.close_unfinished()
        else:
            proxy.counters.interrupted += 1
            self._break_off(http_error, frames)

    def cut_off(self) -> None:
        connection = self._connection
        frames = connection.frames if connection is not None else None
        self.release()
        why = errors.router_stopping()
        if self.trace is not None:
            status = self.attempts.status if self._head_sent else why.status
            self.trace.end(self._proxy.now(), status, why.code)
        if self._head_sent:
            self._proxy.counters.interrupted += 1
            self._break_off(why, frames)
        else:
            self._client.send_error(why, self.attempts.request_id)

    @property
    def _connection(self) -> NodeConnection | None:
        """The connection that the response comes from."""
        return self._attempt.connection if self._attempt is not None else None

    def pause_response(self) -> None:
        connection = self._connection
        if connection is not None and self.attempts.answering and not self.attempts.done:
            connection.pause()

    def resume_response(self) -> None:
        connection = self._connection
        if connection is not None and self.attempts.answering and not self.attempts.done:
            connection.resume()


def _header_lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    return b"".join([f"{name}: {value}\r\n".encode() for name, value in headers])
