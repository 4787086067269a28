"""Every error that Warmroute itself says to a client: a status and an OpenAI-style JSON body.

No error names a node's address, and none repeats what the client sent beyond a model's name or a path.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class Refusal(Exception):
    """A request that is answered by the router itself, with an error."""

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
        """The connection can't be used further: what follows on it is not known to be a request."""

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    readable = message.encode("utf-8", "replace").decode()  # what a client sent may hold half a character
    return msgspec.json.encode({"error": {"message": readable, "type": kind, "param": param, "code": code}})


def bad_request(message: str) -> Refusal:
    """HTTP itself is broken: nothing after it can be trusted."""
    return Refusal(400, message, code="bad_request", close=True)


def malformed_json(detail: str) -> Refusal:
    return Refusal(400, f"The request body is not valid JSON: {detail}", code="malformed_json")


def missing_model() -> Refusal:
    return Refusal(
        400,
        "The request names no model, and more than one is served here: set `model`. GET /v1/models lists them.",
        code="missing_model",
        param="model",
    )


def missing_messages() -> Refusal:
    return Refusal(400, "The request has no `messages`.", code="missing_messages", param="messages")


def unauthorized() -> Refusal:
    return Refusal(
        401,
        "No valid API key was given: send it as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers=(("WWW-Authenticate", "Bearer"),),
    )


def not_found(path: str) -> Refusal:
    return Refusal(
        404, f"Nothing is served at {path}. The API is under /v1, for example /v1/chat/completions.", code="not_found"
    )


def unknown_model(model: str) -> Refusal:
    return Refusal(
        404,
        f"The model `{model[:200]}` does not exist here. GET /v1/models lists those that do.",
        code="model_not_found",
        param="model",
    )


def method_not_allowed(allowed: str) -> Refusal:
    return Refusal(405, f"This path takes {allowed} only.", code="method_not_allowed", headers=(("Allow", allowed),))


def header_timeout(seconds: float) -> Refusal:
    return Refusal(408, f"The request's head did not arrive within {seconds:g} s.", code="request_timeout", close=True)


def body_timeout(seconds: float) -> Refusal:
    return Refusal(408, f"The request's body did not arrive within {seconds:g} s.", code="request_timeout", close=True)


def body_too_large(limit: int) -> Refusal:
    return Refusal(
        413,
        f"The request body is larger than {limit:,} bytes, the most that is taken here.",
        code="request_too_large",
        close=True,
    )


def head_too_large(limit: int) -> Refusal:
    return Refusal(
        431,
        f"The request's head is larger than {limit:,} bytes, the most that is taken here.",
        code="head_too_large",
        close=True,
    )


def too_many_headers(limit: int) -> Refusal:
    return Refusal(
        431,
        f"The request has more than {limit:,} header fields, the most that are taken here.",
        code="too_many_headers",
        close=True,
    )


def expectation_failed() -> Refusal:
    return Refusal(417, "The only expectation met here is 100-continue.", code="expectation_failed", close=True)


def unsupported_version() -> Refusal:
    return Refusal(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.", code="unsupported_version", close=True)


def unsupported_coding() -> Refusal:
    return Refusal(501, "The only transfer coding taken here is `chunked`.", code="unsupported_coding", close=True)


def all_nodes_failed(tried: int, retry_after_s: int | None) -> Refusal:
    return Refusal(
        502,
        f"all upstream nodes failed ({tried} tried)",
        code="upstream_failed",
        kind="server_error",
        retry_after_s=retry_after_s,
    )


def nobody_can_serve(model: str, retry_after_s: int) -> Refusal:
    what = f"the model `{model[:200]}`" if model else "this request"
    return Refusal(
        503,
        f"No node can serve {what} right now; try again shortly.",
        code="no_node_available",
        kind="server_error",
        retry_after_s=retry_after_s,
    )


def too_many_connections() -> Refusal:
    return Refusal(
        503,
        "Too many connections are open; try again shortly.",
        code="too_many_connections",
        kind="server_error",
        retry_after_s=1,
        close=True,
    )


def memory_full() -> Refusal:
    return Refusal(
        503,
        "Too many request bodies are being held; try again shortly.",
        code="bodies_full",
        kind="server_error",
        retry_after_s=1,
        close=True,
    )


def broke_inside() -> Refusal:
    return Refusal(
        500,
        "The router failed at this request; its log says where. Other requests are not affected.",
        code="internal_error",
        kind="server_error",
    )


REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def too_many_waiting(retry_after_s: int) -> Refusal:
    return Refusal(
        429,
        "Too many requests wait for a node already. Try again in a while.",
        kind="rate_limit_error",
        code="overloaded",
        retry_after_s=retry_after_s,
    )


def displaced(retry_after_s: int) -> Refusal:
    return Refusal(
        429,
        "The request waited for a node, and made room for one of a higher priority. Try again in a while.",
        kind="rate_limit_error",
        code="overloaded",
        retry_after_s=retry_after_s,
    )


def queues_full(retry_after_s: int) -> Refusal:
    return Refusal(
        429,
        "Every node has a long queue already. Try again in a while.",
        kind="rate_limit_error",
        code="overloaded",
        retry_after_s=retry_after_s,
    )


def would_wait(retry_after_s: int) -> Refusal:
    return Refusal(
        429,
        "No node has room for the request right now, and it asks not to wait (`X-Queue: no`).",
        kind="rate_limit_error",
        code="would_wait",
        retry_after_s=retry_after_s,
    )


def deadline_unreachable(first_token: bool, expected_ms: float, left_ms: float, retry_after_s: int) -> Refusal:
    what, header = ("first token", "X-Deadline-Ttft-Ms") if first_token else ("whole answer", "X-Deadline-Ms")
    if expected_ms > left_ms:
        why = f"is due in {left_ms:,.0f} ms and expected after {expected_ms:,.0f} ms"
    else:
        why = "is due, and no node has had room for the request yet"
    return Refusal(
        429,
        f"The deadline can't be met: the {what} {why}. Try again in a while, or allow more time (`{header}`).",
        kind="rate_limit_error",
        code="deadline_unreachable",
        retry_after_s=retry_after_s,
    )


def bad_deadline(header: str) -> Refusal:
    return Refusal(
        400,
        f"`{header}` must be a number of milliseconds above 0.",
        code="bad_deadline",
        param=header,
    )


def bad_wish(header: str, values: str) -> Refusal:
    return Refusal(400, f"`{header}` must be {values}.", code="bad_header", param=header)


def rate_limited(what: str, limit: int, needed: int, retry_after_s: int, told: tuple[tuple[str, str], ...]) -> Refusal:
    """`told`: header fields that say what is left."""
    needs = f"; this request needs about {needed:,}" if what == "tokens" and needed > 1 else ""
    return Refusal(
        429,
        f"The limit of {limit:,} {what} a minute is reached{needs}. Try again in {retry_after_s:,} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
        headers=told,
    )


def waited_too_long(retry_after_s: int) -> Refusal:
    return Refusal(
        503,
        "No node had room for the request in time. Try again in a while.",
        kind="server_error",
        code="waited_too_long",
        retry_after_s=retry_after_s,
    )
