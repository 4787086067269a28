"""One request between Envoy and the attempt machine: tells Envoy the node, and observes the response.

Envoy sends the request, and sends it again to the next endpoint if one fails. So the machine's ticket is open from the
answer to Envoy until the end of the response, and moves if another node answered. Where Envoy shows the picker no
response, the end of the stream is the end of the response, and nothing else is learned from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from warmroute._kernel import FirstTokenSearch, ResponseTail, read_usage
from warmroute.edge import errors
from warmroute.edge.error_body import ErrorBody
from warmroute.edge.http1 import UNTIL_CLOSE, RequestHead
from warmroute.edge.last_event import MAX_TAIL_BYTES, has_last_event, may_end
from warmroute.edge.node_headers import names_node, node_headers
from warmroute.fleet.node import Node, Outcome
from warmroute.prompt.prompt import Prompt
from warmroute.routing.attempts import Attempts
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.held_requests import send_or_shed, served_by
from warmroute.routing.routing_errors import RoutingError
from warmroute.telemetry.tracing.request_trace import RequestTrace

if TYPE_CHECKING:
    from warmroute.edge.prompt_reader import PendingPrompt
    from warmroute.edge.proxy import Proxy
    from warmroute.picker.response_head import ObservedHead
    from warmroute.picker.stream import PickerStream

_NOT_YET: Final[Any] = None
NO_ENDPOINT: Final = "its name is not resolved"


class PickerExchange(msgspec.Struct, eq=False):
    # for the whole request
    _proxy: Proxy
    _client: PickerStream
    _head: RequestHead
    body: bytes
    attempts: Attempts = _NOT_YET
    trace: RequestTrace | None = None
    node_fields: bytes = b""
    pending_prompt: PendingPrompt | None = None
    # the response
    _sent: bool = False
    """Whether Envoy has the request."""
    _is_event_stream: bool = False
    _first_token_search: FirstTokenSearch | None = None
    _error_body: ErrorBody | None = None
    """Set if the response is an error whose body Envoy shows."""
    _tail: ResponseTail | None = None
    """The last pieces of the response, where its usage is wanted."""

    # Before a node is chosen.

    def prompt_read(self, prompt: Prompt | None) -> None:
        self.pending_prompt = None
        if self.attempts.done:
            return
        try:
            self._proxy.enter(self.attempts, prompt)
        except errors.HttpError as error:
            self.send_error(error)
        except Exception as error:
            self.internal_error(error)

    def time_is_up(self) -> None:
        """Envoy will not wait longer: decide now, or shed the request."""
        proxy, attempts = self._proxy, self.attempts
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
            self.prompt_read(None)
        if not attempts.done and not attempts.tried:
            send_or_shed(proxy.admission, proxy.router, attempts, proxy.now())

    def send_error(self, error: errors.HttpError) -> None:
        """End a request that has no node with an error."""
        self.attempts.done = True
        self._client.send_error(error, self.attempts.request_id)
        self._end_trace(error)
        self.forget()

    def reject(self, why: RoutingError) -> int:
        if self._sent:  # the client has the response of the node, or of Envoy
            return self.attempts.status
        error = self._proxy.to_http_error(why, self.attempts.request)
        self._client.send_error(error, self.attempts.request_id)
        self._end_trace(error)
        self.forget()
        return error.status

    # To a node.

    def send(self, node: Node) -> None:
        attempts, proxy, client = self.attempts, self._proxy, self._client
        proxy.dispatcher.waiting.pop(attempts, None)  # Envoy has the request: it cannot be moved or hedged
        if not client.send_to(self, node):
            attempts.node_failed(Outcome.FAILED, NO_ENDPOINT, proxy.now())
            return
        self._sent = attempts.envoy_retries = True
        self.body = b""

    def withdraw(self) -> None:
        """The request cannot be taken back from Envoy."""

    withdraw_hedge = promote_hedge = withdraw_prefill = withdraw

    def send_hedge(self, node: Node) -> None:
        raise AssertionError("Envoy sends a request to one node at a time")

    def send_prefill(self, prefill_node: Node, node: Node) -> None:
        raise AssertionError("Envoy sends a request to one node at a time")

    def cut(self, why: RoutingError) -> bool:
        raise AssertionError("Envoy sends the response")

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that holds the prompt."""
        ticket = self.attempts.ticket
        return ticket.rank if isinstance(ticket, Dispatch) else None

    # The response, as far as Envoy shows it.

    def client_headers(self, head: ObservedHead) -> list[tuple[bytes, bytes]]:
        """Return the headers that the proxy would add to this response. Call it when the response has started."""
        attempts, proxy = self.attempts, self._proxy
        headers = [(b"X-Request-Id", attempts.request_id)]
        if self._sent and not head.by_envoy:
            if attempts.charge is not None:
                limits = attempts.charge.headers(proxy.now())
                headers += [(name.encode(), value.encode()) for name, value in limits]
            if proxy.node_headers and names_node(proxy.node_headers, self._head):
                headers += node_headers(attempts)
        return headers

    @property
    def replaces_limits(self) -> bool:
        """Whether the tenant has rate limits, which replace those of the node."""
        return self.attempts.charge is not None

    def response_started(self, head: ObservedHead, sees_body: bool) -> None:
        attempts, now_s, status = self.attempts, self._proxy.now(), head.status
        if attempts.done:
            return
        if head.served is not None and head.served is not attempts.ticket.node:
            served_by(attempts, self._proxy.dispatcher, head.served, now_s)
        if self.trace is not None:
            self.trace.node_answered(attempts.ticket, status)
        attempts.status = status
        error = None
        if status >= 400 and sees_body and not head.by_envoy:
            self._error_body = ErrorBody(status, UNTIL_CLOSE, head.encoded, self._proxy.keeps_error_text)
            error = self._error_body.error
        if head.by_envoy and status < 500:  # another filter rejects the request
            attempts.abandon(now_s)
        elif head.by_envoy:
            attempts.node_failed(Outcome.FAILED, f"Envoy answered {status}", now_s)
        elif attempts.response_started(status, head.retry_after_s, now_s, error):
            self._observe(head.is_event_stream, sees_body)
            return
        self._proxy.counters.responses[status] += 1  # it failed, and Envoy tried all others
        self._finish("failed")

    def _observe(self, is_event_stream: bool, sees_body: bool) -> None:
        attempts = self.attempts
        if not sees_body:
            return
        if attempts.wants_usage:
            self._tail = ResponseTail(MAX_TAIL_BYTES)
        if is_event_stream and attempts.status < 400:
            self._is_event_stream = True
            self._first_token_search = FirstTokenSearch()

    def response_data(self, data: bytes) -> None:
        attempts = self.attempts
        if self._error_body is not None:
            self._error_body.feed(data)
        if attempts.done or not attempts.answering or not data:
            return
        if self._tail is not None:
            self._tail.keep(data)
        if not attempts.ticket.first_token_s:
            search = self._first_token_search
            if search is None or search.feed(data):
                self._first_token_search = None
                attempts.first_token(self._proxy.now())
        if self._is_event_stream and may_end(data) and self.has_last_event():
            self.response_ended()  # Envoy shows the end later, perhaps after the client's next request

    def response_ended(self) -> None:
        attempts, proxy = self.attempts, self._proxy
        if self._error_body is not None:
            self._error_body.finish()
        if attempts.done:
            return
        usage = None
        if self._tail is not None:
            usage = read_usage(self._tail.join())
            if usage is not None:
                usage = attempts.ticket.node.reported.usage(*usage)
        attempts.response_ended(usage, proxy.now())
        self._finish("complete")

    def ended_unseen(self) -> None:
        """The response has ended, and Envoy did not show it."""
        attempts = self.attempts
        if not attempts.done and not attempts.answering:
            attempts.response_started(0, None, self._proxy.now())
        self.response_ended()

    def _finish(self, how: str) -> None:
        proxy = self._proxy
        if self.trace is not None:
            self.trace.end(proxy.now(), self.attempts.status)
        if proxy.log_requests:
            proxy.log_request(self.attempts, how)
        self.forget()

    # The end.

    def client_left(self) -> None:
        self._proxy.client_left(self)

    def has_last_event(self) -> bool:
        return self._tail is not None and has_last_event(self._tail.join())

    def response_complete(self) -> None:
        self.response_ended()

    def release(self) -> None:
        """Give up what the request holds: its prompt, its place in the queue, its ticket."""
        if self.pending_prompt is not None:
            self.pending_prompt.cancel()
        if not self.attempts.done:
            self.attempts.abandon(self._proxy.now())
        self.forget()

    def forget(self) -> None:
        """Drop the body, and what leads from the attempts back to this exchange."""
        self.body = b""
        self.attempts.driver = self._proxy.ended

    def internal_error(self, error: Exception) -> None:
        request_id = self.attempts.request_id
        http_error = self._proxy.internal_error(error, request_id)
        try:
            self.release()
        except Exception as another:
            self._proxy.internal_error(another, request_id)
        self._end_trace(http_error)
        self._client.send_error(http_error, request_id)

    def cut_off(self) -> None:
        """The picker stops. Envoy completes a response that has a node without it."""
        self.release()
        why = errors.router_stopping()
        self._end_trace(why)
        if not self._sent:
            self._client.send_error(why, self.attempts.request_id)

    def pause_response(self) -> None:
        """Envoy sends the response to the client."""

    resume_response = pause_response

    def _end_trace(self, error: errors.HttpError) -> None:
        if self.trace is not None:
            self.trace.end(self._proxy.now(), error.status, error.code)
