"""Every error that the router itself sends to a client: a status and an OpenAI-style JSON body.

No error names a node's address, and none repeats what the client sent except a model name or a path.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

REASON_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_RETRY: Final = "Retry after the time in the `Retry-After` header."


class HttpError(Exception):
    """An error that the router answers a request with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param
        self.headers = headers if retry_after_s is None else (*headers, ("Retry-After", str(retry_after_s)))
        self.close = close
        """The router closes the connection: it cannot tell where the next request would start."""

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    readable = message.encode("utf-8", "replace").decode()  # a model name from a client may contain a lone surrogate
    return msgspec.json.encode({"error": {"message": readable, "type": kind, "param": param, "code": code}})


# HTTP: the request cannot be read.


def bad_request(message: str) -> HttpError:
    """The bytes are not valid HTTP, so the connection closes."""
    return HttpError(400, message, code="bad_request", close=True)


def header_timeout(seconds: float) -> HttpError:
    message = f"The request headers did not arrive completely within {seconds:g} s. Send them without a pause."
    return HttpError(408, message, code="request_timeout", close=True)


def body_timeout(seconds: float) -> HttpError:
    message = f"The request body did not arrive completely within {seconds:g} s. Send it without a pause."
    return HttpError(408, message, code="request_timeout", close=True)


def body_too_large(limit: int) -> HttpError:
    message = f"The request body is larger than the limit of {limit:,} bytes. Send a smaller body."
    return HttpError(413, message, code="request_too_large", close=True)


def expectation_failed() -> HttpError:
    message = "The router supports only `Expect: 100-continue`. Send that value, or no `Expect` header."
    return HttpError(417, message, code="expectation_failed", close=True)


def headers_too_large(limit: int) -> HttpError:
    message = f"The request headers are larger than the limit of {limit:,} bytes. Send fewer or shorter headers."
    return HttpError(431, message, code="headers_too_large", close=True)


def too_many_headers(limit: int) -> HttpError:
    message = f"The request has more headers than the limit of {limit:,}. Send fewer headers."
    return HttpError(431, message, code="too_many_headers", close=True)


def unsupported_transfer_encoding() -> HttpError:
    message = "The router supports only `Transfer-Encoding: chunked`. Send that value, or a `Content-Length` instead."
    return HttpError(501, message, code="unsupported_transfer_encoding", close=True)


def unsupported_http_version() -> HttpError:
    message = "The router supports only HTTP/1.1 and HTTP/1.0. Use one of these versions."
    return HttpError(505, message, code="unsupported_http_version", close=True)


def too_many_connections() -> HttpError:
    message = f"The router has reached its limit of open connections. {_RETRY}"
    return HttpError(
        503, message, code="too_many_connections", kind="server_error", retry_after_s=1, close=True
    )  # fmt: skip


def request_buffer_full() -> HttpError:
    message = f"The router's memory for request bodies is full. {_RETRY}"
    return HttpError(503, message, code="request_buffer_full", kind="server_error", retry_after_s=1, close=True)


# The API: the client has to change the request.


def malformed_json(detail: str) -> HttpError:
    return HttpError(400, f"The request body is not a valid JSON object: {detail}.", code="malformed_json")


def missing_model() -> HttpError:
    message = (
        "The request has no `model`, and the router serves several models. "
        "Set `model` to one of the names that GET /v1/models lists."
    )
    return HttpError(400, message, code="missing_model", param="model")


def missing_messages() -> HttpError:
    message = "The request has no `messages`. Set `messages` to the list of chat messages."
    return HttpError(400, message, code="missing_messages", param="messages")


def invalid_header(header: str, values: str) -> HttpError:
    return HttpError(400, f"The `{header}` header must be {values}.", code="invalid_header", param=header)


def invalid_api_key() -> HttpError:
    message = "The API key is missing or unknown. Send a valid key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."
    return HttpError(401, message, code="invalid_api_key", headers=(("WWW-Authenticate", "Bearer"),))


def not_found(path: str) -> HttpError:
    message = f"The path {path} does not exist. The API is under /v1, for example POST /v1/chat/completions."
    return HttpError(404, message, code="not_found")


def model_not_found(model: str) -> HttpError:
    message = f"The model `{model[:200]}` does not exist. GET /v1/models lists the models that do."
    return HttpError(404, message, code="model_not_found", param="model")


def method_not_allowed(allowed: str) -> HttpError:
    message = f"This path accepts only {allowed} requests."
    return HttpError(405, message, code="method_not_allowed", headers=(("Allow", allowed),))


# Admission: the request is valid, but the router does not send it to a node now.


def rate_limited(
    what: str, limit: int, needed: int, retry_after_s: int, headers: tuple[tuple[str, str], ...]
) -> HttpError:
    """`what` is "requests" or "tokens". `headers` tell what is left of the limits."""
    needs = f", and this request needs about {needed:,}" if what == "tokens" and needed > 1 else ""
    return HttpError(
        429,
        f"The rate limit of {limit:,} {what} per minute is reached{needs}. Retry in {retry_after_s:,} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
        headers=headers,
    )


def queue_full(retry_after_s: int) -> HttpError:
    return _overloaded("The router's queue is full: too many requests already wait for a node.", retry_after_s)


def displaced(retry_after_s: int) -> HttpError:
    return _overloaded(
        "The queue is full, and a request with a higher priority took this request's place.", retry_after_s
    )


def node_queues_full(retry_after_s: int) -> HttpError:
    return _overloaded("Every node already has a long queue.", retry_after_s)


def _overloaded(reason: str, retry_after_s: int) -> HttpError:
    return HttpError(
        429, f"{reason} {_RETRY}", kind="rate_limit_error", code="overloaded", retry_after_s=retry_after_s
    )  # fmt: skip


def would_queue(retry_after_s: int) -> HttpError:
    message = (
        "No node has room for the request now, and its header `X-Queue: no` forbids queueing. "
        "Retry after the time in the `Retry-After` header, or send `X-Queue: yes`."
    )
    return HttpError(429, message, kind="rate_limit_error", code="would_queue", retry_after_s=retry_after_s)


def deadline_unreachable(first_token: bool, expected_ms: float, left_ms: float, retry_after_s: int) -> HttpError:
    what, header = ("first token", "X-Deadline-Ttft-Ms") if first_token else ("whole response", "X-Deadline-Ms")
    if expected_ms > left_ms:
        why = f"is due in {left_ms:,.0f} ms, but the router expects it after {expected_ms:,.0f} ms"
    else:
        why = "is due, but no node has had room for the request yet"
    return HttpError(
        429,
        f"The deadline cannot be met: the {what} {why}. Retry later, or allow more time with the `{header}` header.",
        kind="rate_limit_error",
        code="deadline_unreachable",
        retry_after_s=retry_after_s,
    )


def queue_timeout(retry_after_s: int) -> HttpError:
    message = f"The request waited in the router's queue, and no node had room for it in time. {_RETRY}"
    return HttpError(503, message, kind="server_error", code="queue_timeout", retry_after_s=retry_after_s)


def no_node_available(model: str, retry_after_s: int) -> HttpError:
    what = f"the model `{model[:200]}`" if model else "this request"
    message = f"No node can serve {what} now. {_RETRY}"
    return HttpError(503, message, kind="server_error", code="no_node_available", retry_after_s=retry_after_s)


# Failures of nodes and of the router.


def all_nodes_failed(tried: int, retry_after_s: int | None) -> HttpError:
    nodes = "node" if tried == 1 else "nodes"
    message = f"The router tried {tried} {nodes}, and none of them completed the request. Retry later."
    return HttpError(502, message, kind="server_error", code="upstream_failed", retry_after_s=retry_after_s)


def internal_error() -> HttpError:
    message = (
        "The server failed while it handled this request. Other requests are not affected. "
        "Retry. If it fails again, tell the operator: the server's log has the details."
    )
    return HttpError(500, message, kind="server_error", code="internal_error")
