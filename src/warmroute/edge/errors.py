"""The router's own responses and errors, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from warmroute.core.messages import INTERNAL_ERROR, RETRY, Reject, unknown_model

# The errors that the router itself sends to a client: a status and a JSON body, in OpenAI's form or in Anthropic's.
#
# The core writes those of requests that get no node (core/rejections.py); those of malformed heads are in http1.py. No
# error names a node's address, and none repeats what the client sent except a model name or a path.

REASON_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The `type` of Anthropic's errors by status."""


class HttpError(Exception):
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
        key_sha256: str = "",
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
        self.key_sha256 = key_sha256
        """The first characters of the hash of the client's key, for the operator; the client does not get it."""

    def body(self, anthropic: bool = False) -> bytes:
        """`anthropic`: as Anthropic's API writes errors, for its clients."""
        # A model name from a client may contain a lone surrogate.
        message = self.message.encode("utf-8", "replace").decode()
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status) or ("api_error" if self.status >= 500 else "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self, anthropic: bool = False) -> bytes:
        """Return the error as the last event of a stream."""
        return b"event: error\ndata: " + self.body(anthropic) + b"\n\n"


def rendered(why: Reject) -> HttpError:
    """Return the core's error as the client gets it."""
    return HttpError(
        why.status, why.message, code=why.code, kind=why.kind, param=why.param, retry_after_s=why.retry_after_s,
        headers=why.headers,
    )  # fmt: skip


# HTTP: the request cannot be read.


def bad_request(message: str) -> HttpError:
    """The bytes are not valid HTTP, so the connection closes."""
    return HttpError(400, message, code="bad_request", close=True)


def http_on_tls_port() -> HttpError:
    message = "This port speaks TLS, and the request came as plain HTTP. Use a URL that begins with https://."
    return HttpError(400, message, code="http_on_tls_port", close=True)


def tls_on_plain_port() -> HttpError:
    message = "This port speaks plain HTTP, and the client began TLS. Use a URL that begins with http://."
    return HttpError(400, message, code="tls_on_plain_port", close=True)


def header_timeout(seconds: float) -> HttpError:
    message = f"The request headers did not arrive completely within {seconds:g} s. Send them without a pause."
    return HttpError(408, message, code="request_timeout", close=True)


def body_timeout(seconds: float) -> HttpError:
    message = f"The request body did not arrive completely within {seconds:g} s. Send it without a pause."
    return HttpError(408, message, code="request_timeout", close=True)


def body_too_large(limit: int) -> HttpError:
    message = f"The request body is larger than the limit of {limit:,} bytes. Send a smaller body."
    return HttpError(413, message, code="request_too_large", close=True)


def headers_too_large(limit: int) -> HttpError:
    message = f"The request headers are larger than the limit of {limit:,} bytes. Send fewer or shorter headers."
    return HttpError(431, message, code="headers_too_large", close=True)


def too_many_connections() -> HttpError:
    message = f"The router has reached its limit of open connections. {RETRY}"
    return HttpError(
        503, message, code="too_many_connections", kind="server_error", retry_after_s=1, close=True
    )  # fmt: skip


def request_buffer_full() -> HttpError:
    message = f"The router's memory for request bodies is full. {RETRY}"
    return HttpError(503, message, code="request_buffer_full", kind="server_error", retry_after_s=1, close=True)


def tenant_buffer_full() -> HttpError:
    message = (
        f"The request bodies of this API key's tenant take their whole share of the router's memory, half of what "
        f"others leave. {RETRY}"
    )
    return HttpError(503, message, code="tenant_buffer_full", kind="server_error", retry_after_s=1, close=True)


def body_gave_way() -> HttpError:
    """The router ends a request while its body arrives: another tenant needs the memory."""
    message = (
        "The router's memory for request bodies is short. This one had not arrived completely, and its tenant's bodies "
        f"take the most. {RETRY}"
    )
    return HttpError(503, message, code="tenant_buffer_full", kind="server_error", retry_after_s=1, close=True)


# The API: the client has to change the request.


def malformed_json(detail: str) -> HttpError:
    return HttpError(400, f"The request body is not a valid JSON object: {detail}.", code="malformed_json")


def malformed_form(detail: str) -> HttpError:
    return HttpError(400, f"The request body is not a valid form: {detail}.", code="malformed_form")


def invalid_field(field: str, problem: str) -> HttpError:
    return HttpError(400, f"The field `{field}` {problem}.", code="invalid_field", param=field)


def engine_field_not_allowed(field: str) -> HttpError:
    message = (
        f"The field `{field}` controls how engines exchange KV caches. Clients may not set it: remove it, or ask the "
        "operator for a route with `allow_engine_fields = true`."
    )
    return HttpError(400, message, code="engine_field_not_allowed", param=field)


def unsupported_media_type(message: str) -> HttpError:
    return HttpError(415, f"{message} Send `Content-Type: application/json`.", code="unsupported_media_type")


def priority_not_allowed() -> HttpError:
    message = (
        "The API key does not allow a negative `priority`, which the engine would serve before other requests. "
        'Send none, or ask the operator for a key with `max_priority = "high"`.'
    )
    return HttpError(403, message, code="priority_not_allowed", kind="permission_error", param="priority")


def missing_messages() -> HttpError:
    message = "The request has no `messages`. Set `messages` to the list of chat messages."
    return HttpError(400, message, code="missing_messages", param="messages")


def invalid_header(header: str, values: str) -> HttpError:
    return HttpError(400, f"The `{header}` header must be {values}.", code="invalid_header", param=header)


def invalid_api_key(key_sha256: str = "") -> HttpError:
    message = "The API key is missing or unknown. Send a valid key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."
    headers = (("WWW-Authenticate", "Bearer"),)
    return HttpError(401, message, code="invalid_api_key", headers=headers, key_sha256=key_sha256)


def not_found(path: str) -> HttpError:
    message = f"The path {path} does not exist. The API is under /v1, for example POST /v1/chat/completions."
    return HttpError(404, message, code="not_found")


def path_not_served(target: bytes) -> HttpError:
    path = target.partition(b"?")[0].decode("ascii", "replace")[:200]
    message = (
        f"The engine answered 404 to POST {path}: it does not serve this path. Use a path that the engine serves, "
        "or ask the operator for an engine that serves this one."
    )
    return HttpError(404, message, code="path_not_served")


def model_not_found(model: str) -> HttpError:
    return HttpError(404, unknown_model(model), code="model_not_found", param="model")


def method_not_allowed(allowed: str) -> HttpError:
    message = f"This path accepts only {allowed} requests."
    return HttpError(405, message, code="method_not_allowed", headers=(("Allow", allowed),))


# A response that has begun and cannot be completed. Sent as an event.


def upstream_broken() -> HttpError:
    message = "The node broke off its response; it is not complete."
    return HttpError(502, message, kind="server_error", code="upstream_broken")


def router_stopping() -> HttpError:
    """Also the answer to a request whose response has not begun when the router stops."""
    message = "The router is shutting down and did not complete the response. Retry: another router may be running."
    return HttpError(503, message, kind="server_error", code="router_stopping", retry_after_s=1)


def internal_error() -> HttpError:
    return HttpError(500, INTERNAL_ERROR, kind="server_error", code="internal_error")


# Renders the responses that the router sends itself, without a node.

CLOSE_LINE: Final = b"Connection: close\r\n"
Headers = tuple[tuple[str, str], ...]


def render_final_error(error: HttpError, request_id: bytes, anthropic: bool) -> bytes:
    """Return the last response on its connection."""
    headers = with_request_id(error, request_id)
    return render_reply(error.status, error.body(anthropic), headers, "application/json", CLOSE_LINE)


def with_request_id(error: HttpError, request_id: bytes) -> Headers:
    return (*error.headers, ("X-Request-Id", request_id.decode("ascii"))) if request_id else error.headers


def render_reply(
    status: int,
    body: bytes,
    headers: Headers,
    content_type: str,
    connection_line: bytes,
    head_only: bool = False,
) -> bytes:
    """Return the response. `head_only`: the request's method is HEAD."""
    lines = [render_start(status, content_type), b"Content-Length: %d\r\n" % len(body)]
    lines += [f"{name}: {value}\r\n".encode() for name, value in headers]
    lines += (connection_line, b"\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


def render_start(status: int, content_type: str) -> bytes:
    """Return the status line and the content type."""
    phrase = REASON_PHRASES.get(status, b"Status")
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n" % (status, phrase, content_type.encode())
