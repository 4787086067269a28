"""The errors that the router itself sends to a client: a status and an OpenAI-style JSON body.

Those of requests that get no node are in admission_errors.py, those of malformed heads in http1.py. No error names a
node's address, and none repeats what the client sent except a model name or a path.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

REASON_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
RETRY: Final = "Retry after the time in the `Retry-After` header."


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


# The API: the client has to change the request.


def malformed_json(detail: str) -> HttpError:
    return HttpError(400, f"The request body is not a valid JSON object: {detail}.", code="malformed_json")


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


def internal_error() -> HttpError:
    message = (
        "The server failed while it handled this request. Other requests are not affected. "
        "Retry. If it fails again, tell the operator: the server's log has the details."
    )
    return HttpError(500, message, kind="server_error", code="internal_error")
