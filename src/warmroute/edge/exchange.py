"""One call at the edge: carries out the core's commands, and tells it what its nodes and its client do.

The core decides which node comes next; the edge decides which answer the client gets: the first that begins. A client
that disconnects closes the connections to nodes. A response that breaks off is ended so that no client takes it for
complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from random import getrandbits
from typing import TYPE_CHECKING, Final

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
from warmroute.core.messages import (
    UNKNOWN,
    Cancel,
    Cut,
    Ended,
    Failed,
    FirstToken,
    Left,
    OpenTry,
    Prefilled,
    Reject,
    Role,
    RoutingRequest,
    Send,
    Started,
    Usage,
    Withdraw,
    Withdrawn,
)
from warmroute.edge import errors
from warmroute.edge.arrival import Kept, ScannedBody, is_anthropic
from warmroute.edge.connection_pool import ConnectionPool
from warmroute.edge.errors import HttpError
from warmroute.edge.response import (
    MAX_JUDGED_BYTES,
    MAX_TAIL_BYTES,
    FirstTokenDetector,
    has_last_event,
    lacks_path,
)
from warmroute.edge.trace_context import EdgeTrace
from warmroute.edge.tries import DecodeTry, KvHandover, NodeTry, PrefillTry
from warmroute.event_log import where_it_failed
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.request_body import splice

if TYPE_CHECKING:
    from warmroute.edge.client_connection import ClientConnection
    from warmroute.edge.proxy import Client, Proxy
    from warmroute.prompt.reader import PendingPrompt

_NODE_LIMITS: Final = re.compile(rb"(?im)^x-ratelimit-[^\r\n]*\r\n")
"""Rate limits of a node, which the router replaces with its own where the tenant has some."""
_PREFILL: Final = Role.PREFILL
"""Looking up a member of an enumeration takes three times as long as a global name."""
_UNKNOWN_NODE: Final = "the edge does not know this node"
_UNKNOWN_KV_CACHE: Final = "the edge does not know this KV cache"


class Exchange:
    envoy: Final = False
    # for the whole request
    proxy: Proxy
    client: ClientConnection
    head: RequestHead
    body: bytes
    """Empty once no node can get it any more."""
    request: RoutingRequest
    request_id: bytes
    id: int
    """The number of the call."""
    repeatable: bool = True
    """Whether it may be sent again while a node may still execute it."""
    outline: Outline | None = None
    """The positions of the body's fields, if one node may prefill for another one."""
    trace: EdgeTrace | None = None
    """None if the request is not recorded."""
    node_fields: bytes = b""
    """Header lines for a node; empty: the client's as they are."""
    kept: Kept | None = None
    """What others want back from the core when the call has ended."""
    pending_prompt: PendingPrompt | None = None
    """Set while the prompt is being read in a thread or by a node."""
    known: bool = False
    """The core knows of the call, by Charge or Arrive."""
    arrived: bool = False
    """The call has asked for a node."""
    over: bool = False
    """The call has ended, at the edge and in the core."""
    tries: dict[int, NodeTry]
    """The open ones, by their number."""
    _handovers: dict[int, KvHandover] | None = None
    """KV caches by the number of the prefill try."""
    # the response
    winner: NodeTry | None = None
    """The try whose response goes to the client."""
    _status: int = 0
    _first_s: float = 0.0
    """When its first byte came, if the core does not know that yet."""
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
    _keep: Callable[[bytes], object] | None = None
    """Takes the pieces of the body for `_tail`."""
    _detector: FirstTokenDetector | None = None
    """Set while the first token is looked for."""
    _not_found: bytearray | None = None
    """A node's 404 that the client has not received yet: the node may lack the path."""
    _not_found_head: ResponseHead | None = None

    def __init__(
        self, proxy: Proxy, client: ClientConnection, head: RequestHead, body: bytes, request: RoutingRequest,
        request_id: bytes, id: int,
    ) -> None:  # fmt: skip
        self.proxy = proxy
        self.client = client
        self.head = head
        self.body = body
        self.request = request
        self.request_id = request_id
        self.id = id
        self.tries = {}
        self._tail = None

    @property
    def has_node(self) -> bool:
        return bool(self.tries)

    def open_tries(self) -> list[OpenTry]:
        """Return what another core has to know of the tries that run now."""
        winner = self.winner
        return [
            OpenTry(number, attempt.command.role, attempt.pool.name, 0.0, self._status if attempt is winner else 0)
            for number, attempt in self.tries.items()
        ]  # fmt: skip

    def prompt_read(self, prompt: Prompt | None) -> None:
        """The prompt was read in a thread, or by a node."""
        self.pending_prompt = None
        if self.over:
            return
        try:
            self.proxy.arrive(self, prompt)
        except Exception as error:
            self.internal_error(error)

    # What the core says.

    def send(self, command: Send) -> None:
        proxy, role = self.proxy, command.role
        if self.winner is not None or command.try_ in self.tries:
            return
        pool = proxy.pools.by_number.get(command.node)
        if pool is None:
            row = proxy.tables().nodes.get(command.node)
            if row is None:
                self._unknown(command, _UNKNOWN_NODE)
                return
            pool = proxy.pools.for_node(row)
        if role < _PREFILL:
            attempt: NodeTry | None = NodeTry(self, command, pool)
        elif role == _PREFILL:
            attempt = self._prefill_try(command, pool)
        else:
            attempt = self._decode_try(command, pool)
        if attempt is None:
            return
        self.tries[command.try_] = attempt
        # A kept-alive connection may close just as it is used: then the request would have to be sent again.
        idle = pool.idle
        connection = idle.pop() if idle and self.repeatable else None
        if connection is not None and connection.transport.is_closing():
            connection = pool.take_idle()
        if connection is None:
            pool.connect(attempt)
        else:
            attempt.connected(connection)

    def _prefill_try(self, command: Send, pool: ConnectionPool) -> NodeTry | None:
        proxy, outline = self.proxy, self.outline
        row = proxy.tables().nodes.get(command.node)
        if row is None or outline is None:
            self._unknown(command, _UNKNOWN_NODE)
            return None
        handover = KvHandover(proxy.kv_transfer(row.engine), row, getrandbits(63))
        if self._handovers is None:
            self._handovers = {}
        self._handovers[command.try_] = handover
        body = splice(
            self.body, outline, handover.protocol.prefill_fields(outline.fields, row, handover.bootstrap_room)
        )
        return PrefillTry(self, command, pool, body, handover)

    def _decode_try(self, command: Send, pool: ConnectionPool) -> NodeTry | None:
        handover = self._handovers.get(command.kv_from) if self._handovers is not None else None
        outline = self.outline
        if handover is None or outline is None:
            self._unknown(command, _UNKNOWN_KV_CACHE)
            return None
        fields = handover.protocol.decode_fields(
            outline.fields, handover.prefill_node, handover.bootstrap_room, handover.transfer
        )  # fmt: skip
        return DecodeTry(self, command, pool, splice(self.body, outline, fields))

    def _unknown(self, command: Send, reason: str) -> None:
        self.proxy.tell(Failed(self.id, command.try_, UNKNOWN, reason), self.proxy.now())

    def withdraw(self, command: Withdraw) -> None:
        if self.winner is not None:
            return
        attempt = self.tries.pop(command.try_, None)
        if attempt is not None:
            attempt.withdraw()
        self.proxy.tell(Withdrawn(self.id, command.try_), self.proxy.now())

    def reject(self, command: Reject) -> None:
        error = errors.rendered(command)
        self._end_early(error)
        self._end_with(error, self._give_up())

    def cut(self, command: Cut) -> None:
        if self.has_last_event():
            return
        error, frames = errors.rendered(command.error), self._give_up()
        self.proxy.tell(Cancel(self.id, Left.CUT), self.proxy.now())
        self._end_with(error, frames)

    # From nodes.

    def try_failed(self, attempt: NodeTry, status: int, reason: str, retry_after_s: int | None = None) -> None:
        """A node failed before the client has received anything of it."""
        proxy, number = self.proxy, attempt.command.try_
        self.tries.pop(number, None)
        proxy.tell(Failed(self.id, number, status, reason, retry_after_s, attempt.error), proxy.now())

    def prefilled(
        self, attempt: PrefillTry, has_transfer: bool, is_unfinished: bool, usage: Usage | None, now_s: float
    ) -> None:
        """The prefill node has answered."""
        number = attempt.command.try_
        del self.tries[number]
        self.proxy.tell(Prefilled(self.id, number, has_transfer, is_unfinished, usage), now_s)

    def begin_response(
        self, attempt: NodeTry, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        """This try's response goes to the client: pass its head on, with the part of the body that has arrived. Return
        what takes the rest."""
        self.winner = attempt
        tries, command, connection = self.tries, attempt.command, attempt.connection
        if len(tries) > 1:
            self.tries = {command.try_: attempt}
            for other in tries.values():
                if other is not attempt:
                    other.withdraw()
        if connection is not None:
            connection.reader = self
        status = self._status = head.status
        proxy, client = self.proxy, self.client
        if status == 404 and self._not_found_head is None and len(first) <= MAX_JUDGED_BYTES:
            self._not_found, self._not_found_head = bytearray(first), head
            if not whole:
                proxy.tell(Started(self.id, command.try_, status, attempt.error), now_s)
            return self._keep_not_found
        length = head.length
        self._framing = length
        self.body = b""
        client.release_body()
        http_1_1 = self.head.minor_version != 0
        keep_alive = client.keep_alive and not client.listener.closes_after_response and length != UNTIL_CLOSE
        accepts_chunked = True
        if length < 0:
            self._events = head.content_type[:17].lower() == b"text/event-stream"
            accepts_chunked = http_1_1
            if length == CHUNKED and not accepts_chunked:
                keep_alive = False
                self._dechunk = ChunkReader()
        self._keep_alive = keep_alive
        passing = head.forwarded_fields
        if 300 <= status < 400:
            passing = attempt.pool.own_address.sub(rb"\1", passing)
        more_lines = b""
        if command.limit_lines is not None:
            passing = _NODE_LIMITS.sub(b"", passing)
            more_lines = b"".join([f"{name}: {value}\r\n".encode() for name, value in command.limit_lines])
        if command.node_lines:
            more_lines += b"".join([b"%b: %b\r\n" % line for line in command.node_lines])
        if not keep_alive or not http_1_1:
            more_lines += client.connection_line(keep_alive)
        self._head_sent = True
        as_it_is = first if self._dechunk is None else b""
        client.write(head.for_client(passing, accepts_chunked, self.request_id, more_lines, as_it_is))
        if self._dechunk is not None:
            self._write_dechunked(self._dechunk, first)
        if whole:
            self._first_s = now_s
            if command.wants_usage and status < 400:
                self._tail = first
            write: Callable[[bytes], object] = client.write
            return write
        if client.paused:  # it has not read the response before this one
            self.pause_response()
        if command.wants_usage and status < 400:
            self._tail = tail = ResponseTail(MAX_TAIL_BYTES if self._events else USAGE_TAIL_BYTES)
            tail.keep(first)
            self._keep = tail.keep
        if self._events and status < 400 and not head.encoded:  # as detector_for
            detector = FirstTokenDetector(length == CHUNKED)
            if not detector.feed(first):
                self._detector = detector
                answer = proxy.handle(Started(self.id, command.try_, status), now_s)
                if answer:
                    proxy.obey(answer)
                return self._pass
        if length == CHUNKED and connection is not None and attempt.error_body is None and self._dechunk is None:
            # The rest of the response's chunks needs nothing but to be passed on.
            connection.relay(client.transport, self._keep)
        answer = proxy.handle(FirstToken(self.id, command.try_, status, attempt.error), now_s)
        if answer:
            proxy.obey(answer)
        is_plain = self._keep is None and self._dechunk is None and attempt.error_body is None
        return client.write if is_plain else self._pass

    def _pass(self, data: bytes) -> None:
        """Pass on a piece of the body, and look at it where somebody wants to know what is in it."""
        if self._keep is not None:
            self._keep(data)
        if self._dechunk is None:
            self.client.write(data)
        else:
            self._write_dechunked(self._dechunk, data)
        winner = self.winner
        if winner is None:
            return
        if winner.error_body is not None:
            winner.error_body.feed(data)
        if self._detector is not None and self._detector.feed(data):
            self._detector = None
            connection, proxy = winner.connection, self.proxy
            if connection is not None and self._dechunk is None:
                if self._keep is None:
                    connection.replace_sink(self.client.write)
                connection.relay(self.client.transport, self._keep)
            answer = proxy.handle(FirstToken(self.id, winner.command.try_, self._status), proxy.now())
            if answer:
                proxy.obey(answer)

    def _write_dechunked(self, dechunk: ChunkReader, data: bytes) -> None:
        pieces: list[bytes] = []
        dechunk.feed(data, pieces)
        if pieces:
            self.client.write(b"".join(pieces))

    def _keep_not_found(self, data: bytes) -> None:
        held, winner = self._not_found, self.winner
        assert held is not None and winner is not None
        held += data
        if winner.error_body is not None:
            winner.error_body.feed(data)
        if len(held) > MAX_JUDGED_BYTES:
            connection = winner.connection
            sink = self._pass_not_found(winner, False)
            if connection is not None and sink is not None:
                connection.replace_sink(sink)

    def _pass_not_found(self, winner: NodeTry, whole: bool) -> Callable[[bytes], object] | None:
        held, self._not_found = self._not_found, None
        assert held is not None and self._not_found_head is not None
        return self.begin_response(winner, self._not_found_head, bytes(held), whole, self.proxy.now())

    def response_ended(self, now_s: float) -> None:
        proxy, client, winner, held = self.proxy, self.client, self.winner, self._not_found
        assert winner is not None
        winner.connection = None
        if winner.error_body is not None:
            winner.error_body.finish()
        replaced = False
        if held is not None:
            head = self._not_found_head
            assert head is not None
            replaced = lacks_path(head, bytes(held))
            if not replaced:
                self._pass_not_found(winner, True)
        self._ended = not replaced
        usage, tail = None, self._tail
        if tail is not None:
            now_s = proxy.now()  # later than the first byte, though both came at once: no response takes no time
            usage = read_usage(tail if isinstance(tail, bytes) else tail.join())
        number = winner.command.try_
        self._close()
        ended = Ended(self.id, number, self._status, self._first_s or now_s, usage, winner.error)
        answer = proxy.handle(ended, now_s)
        if answer:
            proxy.obey(answer)
        if replaced:
            client.send_error(errors.path_not_served(self.head.target), self.request_id)
        else:
            client.response_sent(self._keep_alive, now_s)

    def response_broke(self, sign: int, reason: str, frames: ChunkReader | None) -> None:
        """The client has a part of the response."""
        proxy, winner = self.proxy, self.winner
        assert winner is not None
        winner.connection = None
        if winner.error_body is not None:
            winner.error_body.finish()
        if self._not_found is not None:
            self._pass_not_found(winner, False)
        self._close()
        proxy.tell(Failed(self.id, winner.command.try_, sign, reason, None, winner.error, True), proxy.now())
        self._break_off(errors.upstream_broken(), frames)

    # From the client.

    def client_left(self) -> None:
        if self.over:
            return
        proxy = self.proxy
        if self.has_last_event():
            self._complete()
            return
        self._end_early(None)
        self._give_up()
        if self.known:
            proxy.tell(Cancel(self.id, Left.LEFT), proxy.now())
        else:
            proxy.counters.disconnects += 1

    def _complete(self) -> None:
        """The client has left after the last event: it has the whole response."""
        proxy, winner, tail, now_s = self.proxy, self.winner, self._tail, self.proxy.now()
        assert winner is not None and isinstance(tail, ResponseTail)
        usage = read_usage(tail.join())
        self._give_up()
        proxy.tell(Ended(self.id, winner.command.try_, self._status, now_s, usage), now_s)

    def has_last_event(self) -> bool:
        """Return whether the client has all events of its response, though the response has not ended."""
        return self._events and isinstance(self._tail, ResponseTail) and has_last_event(self._tail.join())

    def cut_off(self) -> None:
        """The router stops."""
        error = errors.router_stopping()
        self._end_early(error)
        frames = self._give_up()
        if self.known:
            self.proxy.tell(Cancel(self.id, Left.STOPPING), self.proxy.now())
        self._end_with(error, frames)

    def pause_response(self) -> None:
        winner = self.winner
        if winner is not None and winner.connection is not None:
            winner.connection.pause()

    def resume_response(self) -> None:
        winner = self.winner
        if winner is not None and winner.connection is not None:
            winner.connection.resume()

    # The end.

    def internal_error(self, error: Exception, frames: ChunkReader | None = None) -> None:
        """The edge itself failed at this call: answer with 500, or break off a response that has begun."""
        proxy, client = self.proxy, self.client
        http_error = proxy.internal_error(error, self.request_id)
        was_over, serves = self.over, client.is_serving(self)
        if not was_over:
            self._end_early(http_error)
            try:
                frames = self._give_up() or frames
            except Exception as another:
                proxy.internal_error(another, self.request_id)
                self._close()
            if self.known:
                proxy.tell(Cancel(self.id, Left.INTERNAL, where_it_failed(error)), proxy.now())
        if not serves:
            return
        if was_over or self._ended:
            client.close_unfinished()
        else:
            self._end_with(http_error, frames)

    def _give_up(self) -> ChunkReader | None:
        """Give up all that the call holds. Return the position of a chunked response that breaks off."""
        winner, tries = self.winner, self.tries
        connection = winner.connection if winner is not None else None
        frames = connection.frames if connection is not None else None
        self.tries = {}
        for attempt in tries.values():
            attempt.withdraw()
        self._close()
        return frames

    def _close(self) -> None:
        """The call is over. What it holds must not stay in memory until the next garbage collection."""
        self.over = True
        self.proxy.exchanges.pop(self.id, None)
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
            self.pending_prompt = None
        self.body = b""
        self.outline = self.kept = self.winner = self._handovers = self._not_found = self._detector = None
        self.tries = {}

    def _end_early(self, error: HttpError | None) -> None:
        """The call ends. Note it, if the core cannot, as the call has not asked for a node. `error`: None if the client
        has left."""
        if not self.arrived and (self.trace is not None or self.kept is not None):
            self.proxy.end_early(error, self.trace, self.kept, self.request, self.request_id)

    def _end_with(self, error: HttpError, frames: ChunkReader | None) -> None:
        if self._head_sent:
            self._break_off(error, frames)
        else:
            self.client.send_error(error, self.request_id)

    def _break_off(self, why: HttpError, frames: ChunkReader | None) -> None:
        """End the response so that no client takes it for complete."""
        if self._events:
            self._write_event(why.event(is_anthropic(self.head.target)), frames)
        # Where only the end of the connection ends a response, and no error event is sent, that end must be a reset.
        unframed = self._framing == UNTIL_CLOSE or self._dechunk is not None
        self.client.close_unfinished(reset=unframed and not self._events)

    def _write_event(self, event: bytes, frames: ChunkReader | None) -> None:
        write = self.client.write
        if self._framing == UNTIL_CLOSE or self._dechunk is not None:
            write(b"\n\n" + event)
            return
        # Fill up the chunk that broke off and end its event, then send the error in a chunk of its own. The chunk of
        # length 0 that would end the response is never sent.
        rest = frames.padding_to_chunk_end() if frames is not None else None
        if rest is not None:
            event = b"\n\n" + event if rest else event
            write(rest + b"%x\r\n%b\r\n" % (len(event), event))


class ScanningExchange:
    """A request whose body is scanned in a thread. It is served like any other once that is done."""

    has_node: Final = False
    scanning: Future[ScannedBody] | None = None

    def __init__(
        self, proxy: Proxy, client: Client, head: RequestHead, path: bytes, body: bytes,
        trace: EdgeTrace | bytes | None, kind: type,
    ) -> None:  # fmt: skip
        self._proxy = proxy
        self._client = client
        self._head = head
        self._path = path
        self._body = body
        self._trace = trace
        self._kind = kind

    def scanned(self, done: Future[ScannedBody]) -> None:
        client, proxy = self._client, self._proxy
        body, self._body = self._body, b""
        self.scanning = None  # it refers to this exchange
        if done.cancelled() or not client.is_serving(self):
            return
        try:
            found = done.result()
        except Exception as error:
            failed = error if isinstance(error, HttpError) else proxy.internal_error(error, self._head.request_id)
            self._end_trace(failed)
            client.send_error(failed)
            return
        try:
            proxy.begin(client, self._head, self._path, body, found, self._trace, self._kind)
        except Exception as error:
            failed = error if isinstance(error, HttpError) else proxy.internal_error(error, self._head.request_id)
            client.send_error(failed)

    def client_left(self) -> None:
        self._give_up()
        self._end_trace(None)
        self._proxy.counters.disconnects += 1

    def cut_off(self) -> None:
        error = errors.router_stopping()
        self._give_up()
        self._end_trace(error)
        self._client.send_error(error)

    def internal_error(self, error: Exception) -> None:
        http_error = self._proxy.internal_error(error, self._head.request_id)
        self._give_up()
        self._end_trace(http_error)
        self._client.send_error(http_error)

    def _give_up(self) -> None:
        if self.scanning is not None:
            self.scanning.cancel()
        self._body = b""

    def _end_trace(self, error: HttpError | None) -> None:
        if isinstance(self._trace, EdgeTrace):
            self._proxy.end_early(error, self._trace)

    def pause_response(self) -> None:
        """There is no response yet."""

    def resume_response(self) -> None:
        pass
