"""One request's way through the fleet: from its prompt over the decision to the last byte of the answer.

The rules it keeps: a node's failure before the first byte has gone to the client leads to the next node of the
decision; after it, the answer ends visibly unfinished. The ticket is closed however the request ends. A client that
leaves takes its upstream connection with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from warmroute._kernel._http import read_usage
from warmroute.edge import errors
from warmroute.edge.chunked import ChunkFrames
from warmroute.edge.head import CHUNKED, UNTIL_CLOSE, RequestHead, ResponseHead
from warmroute.edge.upstream import ConnectFault, Connection
from warmroute.event_log import where_it_failed
from warmroute.fleet.node import Node, Outcome
from warmroute.fleet.ticket import Ticket
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.lookups import Lookup
from warmroute.routing.rate_limits import Charge
from warmroute.routing.refusals import Undecided
from warmroute.telemetry.journal import Entry

if TYPE_CHECKING:
    from warmroute.edge.client import Client
    from warmroute.edge.proxy import Proxy
    from warmroute.edge.reading import PendingPrompt

log = logging.getLogger("warmroute")

_BROKEN_EVENT: Final = (
    b"event: error\ndata: "
    + errors.error_body("The node broke off its answer; it is not complete.", "server_error", "upstream_broken")
    + b"\n\n"
)
TAIL_PIECES: Final = 8
"""Of an answer that are kept: its usage, the [DONE] behind it, the last chunk's end, each may come by itself."""
EXPLAIN_HEADER: Final = b"x-warmroute-explain"
_NAME_CHARACTERS: Final = " !#$&'()*+,/:;<=>?@[]^`{|}"
"""Of a node's name, those that stand in a header as they are, beside letters and digits."""
_CHUNKED_LINE: Final = b"Transfer-Encoding: chunked\r\n"


class ProxyExchange:
    __slots__ = (
        "_begun",
        "_body",
        "_client",
        "_connection",
        "_dechunk",
        "_decision",
        "_done",
        "_entry",
        "_events",
        "_fallbacks",
        "_framing",
        "_head",
        "_keep_alive",
        "_later",
        "_pool",
        "_proxy",
        "_request_id",
        "_retried_stale",
        "_retry_after_s",
        "_status",
        "_tail",
        "_ticket",
        "_tried",
        "arrived_s",
        "charge",
        "entered_s",
        "lookup",
        "request",
        "waits",
    )

    def __init__(
        self, proxy: Proxy, client: Client, head: RequestHead, body: bytes, request: RoutingRequest, request_id: bytes
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._head = head
        self._body = body
        self._request_id = request_id
        # what admission asks of a guest
        self.request = request
        self.lookup: Lookup | None = None
        self.arrived_s = self.entered_s = proxy.now()
        """`entered_s`: when it asked for a node, its prompt read."""
        self.charge: Charge | None = None
        """What it took of its tenant's rate limits."""
        self.waits = False
        """It entered, and its node may be told later."""
        self._later: PendingPrompt | None = None
        """Its prompt is still being read."""
        self._decision: Decision
        self._entry: Entry | None = None
        """What the journal keeps of it."""
        self._fallbacks: list[Node] | None = None
        self._tried = 0
        self._retried_stale = False
        self._retry_after_s: int | None = None
        self._done = False
        self._ticket: Ticket
        self._connection: Connection | None = None
        # the answer
        self._begun = False
        self._status = 0
        self._framing = 0
        self._events = False
        self._keep_alive = True
        self._dechunk: ChunkFrames | None = None
        self._tail: deque[bytes] | bytes | None = None
        """The last pieces of the answer, or all of it, where they may tell of cached tokens."""

    # To a decision.

    def wait_for(self, later: PendingPrompt) -> None:
        """Its prompt is being read in a thread."""
        self._later = later

    def prompt_read(self, prompt: Prompt | None) -> None:
        self._later = None
        if self._done:
            return
        try:
            self._proxy.enter(self, prompt)
        except errors.Refusal as refusal:
            self._done = True
            self._client.refuse(refusal, self._request_id)

    def go(self, decision: Decision) -> None:
        """Admission lets it through."""
        self._decision = decision
        proxy, request = self._proxy, self.request
        now_s = proxy.now()
        try:
            if proxy.journal.on:
                held_ms = (now_s - self.entered_s) * 1000.0
                self._entry = entry = Entry(
                    self._request_id, request.tenant, request.model, request.route, request.priority, self.arrived_s, held_ms,
                    decision.grounds(),
                )  # fmt: skip
                proxy.journal.decided(entry)
            self._try(decision.node, now_s)
        except Exception as error:
            if not self.waits:  # whoever let it enter hears of it
                raise
            self._client.refuse(self.broke(error), self._request_id)

    def broke(self, error: Exception) -> errors.Refusal:
        """The router itself failed: gives back what it holds."""
        log.error("a request broke inside the router (%s); it is answered with 500", where_it_failed(error))
        self._give_back(Outcome.LEFT)
        return errors.broke_inside()

    def refuse(self, why: Undecided) -> None:
        """Admission has kept it waiting in vain."""
        if not self._done:
            self._done = True
            if self.charge is not None:
                self.charge.cancel()
            self._client.refuse(self._proxy.refusal(why, self.request), self._request_id)

    # To a node.

    def _try(self, node: Node, now_s: float) -> None:
        proxy = self._proxy
        self._ticket = proxy.router.dispatch(self._decision, node, now_s)
        self._tried += 1
        self._pool = pool = proxy.pools.of(node)
        connection = pool.take()
        if connection is None:
            pool.open(self)
        else:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        proxy, head, pool = self._proxy, self._head, self._pool
        peer, ticket = self._client.peer, self._ticket
        rank = ticket.rank if isinstance(ticket, Dispatch) else None
        forwarded = head.forwarded_for
        if peer:
            forwarded = forwarded + b", " + peer if forwarded else peer
        authorization = pool.key_line
        if not authorization and proxy.passes_authorization:
            if head.authorization:
                authorization = b"Authorization: %b\r\n" % head.authorization
            if head.api_key:
                authorization += b"X-Api-Key: %b\r\n" % head.api_key
        connection.begin(
            self,
            b"%b %b HTTP/1.1\r\n%b%b%bContent-Length: %d\r\nX-Request-Id: %b\r\n%b%b\r\n"
            % (
                head.method,
                head.target,
                pool.host_line,
                head.passing,
                authorization,
                len(self._body),
                self._request_id,
                b"X-Forwarded-For: %b\r\n" % forwarded if forwarded else b"",
                # where one data-parallel rank of the node holds the prompt, the request is to go to that one
                b"" if rank is None else b"X-Data-Parallel-Rank: %d\r\n" % rank,
            ),
            self._body,
        )

    def connected(self, connection: Connection) -> bool:
        if self._done:
            return False
        self._send(connection)
        return True

    def connect_failed(self, fault: ConnectFault, reason: str) -> None:
        if self._done:
            return
        if fault is ConnectFault.REFUSED:
            self._proxy.fleet.check_refused(self._ticket.node, self._proxy.now(), reason)
        # What this machine lacks says nothing about the node.
        self._node_failed(Outcome.BUSY if fault is ConnectFault.OURS else Outcome.FAILED, reason)

    def answer_failed(self, reason: str, stale: bool) -> None:
        self._connection = None
        if stale and not self._retried_stale:
            # The node closed a kept-alive connection just as it was used: no fault of the node's, and no try of ours.
            self._retried_stale = True
            self._proxy.counters.stale_connections += 1
            self._pool.open(self)
            return
        self._node_failed(Outcome.FAILED, reason)

    def _node_failed(self, outcome: Outcome, reason: str) -> None:
        """Nothing has gone to the client: the next node may do better."""
        proxy = self._proxy
        now_s = proxy.now()
        proxy.close_ticket(self._ticket, outcome, now_s, reason)
        if self._fallbacks is None:
            self._fallbacks = self._decision.fallbacks()
            self._fallbacks.reverse()
        while self._fallbacks and self._tried < proxy.attempts:
            node = self._fallbacks.pop()
            if node.draining or node.health.certain_open:
                continue
            proxy.counters.retries += 1
            self._try(node, now_s)
            return
        self._done = True
        if self.charge is not None:
            self.charge.cancel()
        refusal = errors.all_nodes_failed(self._tried, self._retry_after_s)
        self._settle_journal(outcome, refusal.status, now_s)
        self._client.refuse(refusal, self._request_id)

    # From a node.

    def answer_began(
        self, head: ResponseHead, first: bytes, whole: bool, now_s: float
    ) -> Callable[[bytes], object] | None:
        status = head.status
        if status >= 500 or status == 429:
            self._connection = None
            if status in (429, 503):
                self._retry_after_s = _seconds(head.retry_after) or self._retry_after_s or 1
                self._node_failed(Outcome.BUSY, "the node is busy")
            else:
                self._node_failed(Outcome.FAILED, f"the node answered {status}")
            return None
        self._begun = True
        self._status = status
        proxy, ticket, client = self._proxy, self._ticket, self._client
        ticket.first_byte(now_s, status < 400)
        if proxy.admission.room.waiting:
            proxy.freed(ticket.node, now_s)
        length = head.length
        self._framing = length
        self._body = b""
        client.release_body()
        keep_alive = client.keeps_alive and length != UNTIL_CLOSE
        write: Callable[[bytes], object] = client.write
        if length >= 0:
            framing = b"" if status == 204 else b"Content-Length: %d\r\n" % length
        elif length == CHUNKED:
            framing = _CHUNKED_LINE
            self._events = head.content_type[:17].lower() == b"text/event-stream"
            if not client.speaks_chunked:
                framing, keep_alive = b"", False
                self._dechunk = ChunkFrames()
                write = self._write_dechunked
        else:
            framing = b""
            self._events = head.content_type[:17].lower() == b"text/event-stream"
        self._keep_alive = keep_alive
        passing = head.passing
        if 300 <= status < 400:
            passing = self._pool.own_origin.sub(rb"\1", passing)
        answer_head = b"%b%b%bX-Request-Id: %b\r\n%b%b\r\n" % (
            head.status_line,
            passing,
            framing,
            self._request_id,
            self._where_lines() if proxy.tells_where else b"",
            b"" if keep_alive and self._head.minor else client.connection_line(keep_alive),
        )
        if self._dechunk is None:
            client.write(answer_head + first)
        else:
            client.write(answer_head)
            write(first)
        if status < 400 and (isinstance(ticket, Dispatch) or (self.charge is not None and self.charge.wants_usage)):
            if not whole:
                self._tail = deque((first,), TAIL_PIECES)
                return self._tailed(write, self._tail)
            self._tail = first
        return write

    def _where_lines(self) -> bytes:
        """Which node it is that answers, and what was expected to be cached there, for clients who may know."""
        if self._proxy.tells_where == "asked" and self._head.get(EXPLAIN_HEADER) != b"1":
            return b""
        ticket = self._ticket
        node = quote(ticket.node.name, safe=_NAME_CHARACTERS).encode("ascii")
        if not isinstance(ticket, Dispatch):
            return b"X-Warmroute-Node: %b\r\n" % node
        return b"X-Warmroute-Node: %b\r\nX-Warmroute-Hit: %d/%d\r\n" % (node, ticket.cached, ticket.tokens)

    @staticmethod
    def _tailed(write: Callable[[bytes], object], tail: deque[bytes]) -> Callable[[bytes], object]:
        keep = tail.append

        def write_and_keep(data: bytes) -> None:
            keep(data)
            write(data)

        return write_and_keep

    def _write_dechunked(self, data: bytes) -> None:
        assert self._dechunk is not None
        pieces: list[bytes] = []
        self._dechunk.feed(data, pieces)
        if pieces:
            self._client.write(b"".join(pieces))

    def answer_ended(self, now_s: float) -> None:
        self._done = True
        proxy, tail = self._proxy, self._tail
        if tail is not None:
            now_s = proxy.now()  # later than the first byte, though both came at once: no answer flows in no time
            self._read_usage(tail if isinstance(tail, bytes) else b"".join(tail), now_s)
        rejected = self._status >= 400
        if rejected and self.charge is not None:
            self.charge.refused_by_node()
        outcome = Outcome.REJECTED if rejected else Outcome.OK
        proxy.close_ticket(self._ticket, outcome, now_s)
        self._settle_journal(outcome, self._status, now_s)
        proxy.counters.answered[self._status] += 1
        self._client.answered(self._keep_alive, now_s)
        if proxy.log_requests:
            self._log(str(self._status))

    def _read_usage(self, last_bytes: bytes, now_s: float) -> None:
        usage = read_usage(last_bytes)
        if usage is None:
            return
        prompt_tokens, cached_tokens, output_tokens = usage
        if self.charge is not None:
            self.charge.settle(prompt_tokens, output_tokens)
        if isinstance(self._ticket, Dispatch):
            self._ticket.answered(prompt_tokens, cached_tokens, output_tokens, now_s)
        if self._entry is not None:
            self._entry.reported = usage

    def _settle_journal(self, outcome: Outcome, status: int, now_s: float) -> None:
        if self._entry is not None:
            self._proxy.journal.ended(self._entry, outcome, self._ticket, self._tried, status, now_s)

    def answer_broke(self, reason: str, frames: ChunkFrames | None) -> None:
        """The client has a part of the answer: end it so that nobody takes it for the whole."""
        self._done = True
        proxy = self._proxy
        now_s = proxy.now()
        proxy.close_ticket(self._ticket, Outcome.BROKEN, now_s, reason)
        self._settle_journal(Outcome.BROKEN, self._status, now_s)
        proxy.counters.broken += 1
        client = self._client
        if self._events:
            self._say_broken(frames)
        # Where nothing but the end of the connection ends an answer, and no event says that it broke, that end must not
        # be a clean one.
        unframed = self._framing == UNTIL_CLOSE or self._dechunk is not None
        client.break_off(reset=unframed and not self._events)
        if proxy.log_requests:
            self._log(f"{self._status}, broken off")

    def _say_broken(self, frames: ChunkFrames | None) -> None:
        write = self._client.write
        if self._framing == UNTIL_CLOSE or self._dechunk is not None:
            write(b"\n\n" + _BROKEN_EVENT)
            return
        # Fill up the chunk that broke off and end its event, then say what happened in a chunk of its own. The chunk of
        # length 0 that would end the answer never comes.
        rest = frames.rest_of_chunk() if frames is not None else None
        if rest is not None:
            event = b"\n\n" + _BROKEN_EVENT if rest else _BROKEN_EVENT
            write(rest + b"%x\r\n%b\r\n" % (len(event), event))

    # From the client.

    def client_left(self) -> None:
        if self._done:
            return
        self._give_back(Outcome.LEFT)
        self._proxy.counters.left += 1
        if self._tried and self._proxy.log_requests:
            self._log("the client left")

    def _give_back(self, outcome: Outcome) -> None:
        """Whatever it holds, wherever it is on its way."""
        self._done = True
        proxy = self._proxy
        if self._later is not None:
            self._later.cancel()
        if not self._tried:
            proxy.admission.leave(self)
            if self.charge is not None:
                self.charge.cancel()
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cancel()
        now_s = proxy.now()
        proxy.close_ticket(self._ticket, outcome, now_s)
        self._settle_journal(outcome, self._status, now_s)

    def _log(self, ended: str) -> None:
        self._proxy.log_request(self._request_id, self._client.tenant, self._ticket, self._tried, ended)

    def client_full(self) -> None:
        if self._connection is not None and self._begun and not self._done:
            self._connection.hold()

    def client_ready(self) -> None:
        if self._connection is not None and self._begun and not self._done:
            self._connection.go_on()


def _seconds(retry_after: bytes) -> int | None:
    return min(int(retry_after), 3600) if retry_after.isdigit() and len(retry_after) < 10 else None
