"""The heads that the kernel writes for nodes and clients are those that plain formatting writes."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import CHUNKED, RequestHead, ResponseHead, read_request_head, read_response_head

VALUES = st.sampled_from([b"", b"x", b"Bearer sk-1", b"1.2.3.4", b"v" * 300])
LINES = st.sampled_from([b"", b"X-A: 1\r\n", b"Host: node:8000\r\n", b"Connection: close\r\n"])


def request_head(fields: dict[bytes, bytes]) -> RequestHead:
    lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in fields.items() if value)
    data = b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: a\r\nX-B: 2\r\n%bContent-Length: 7\r\n\r\n" % lines
    head = read_request_head(data, len(data) - 4, 20)
    assert isinstance(head, RequestHead)
    return head


def response_head(status: int, framing: bytes) -> ResponseHead:
    data = b"HTTP/1.0 %d Fine\r\nserver: x\r\n%b\r\n" % (status, framing)
    head = read_response_head(data, len(data) - 4)
    assert isinstance(head, ResponseHead)
    return head


@given(
    authorization=VALUES, api_key=VALUES, forwarded_for=VALUES, host_line=LINES, authorization_line=LINES,
    passes_keys=st.booleans(), body_bytes=st.integers(0, 1 << 40), request_id=VALUES, peer=VALUES,
    rank=st.none() | st.integers(0, 255), fields=LINES,
)  # fmt: skip
def test_a_request_head_for_a_node(
    authorization: bytes, api_key: bytes, forwarded_for: bytes, host_line: bytes, authorization_line: bytes,
    passes_keys: bool, body_bytes: int, request_id: bytes, peer: bytes, rank: int | None, fields: bytes,
) -> None:  # fmt: skip
    head = request_head({b"Authorization": authorization, b"X-Api-Key": api_key, b"X-Forwarded-For": forwarded_for})
    keys = authorization_line
    if not keys and passes_keys:
        keys += b"Authorization: %b\r\n" % authorization if authorization else b""
        keys += b"X-Api-Key: %b\r\n" % api_key if api_key else b""
    client = b", ".join(address for address in (forwarded_for, peer) if address)
    expected = (
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\n"
        + host_line
        + (fields or head.forwarded_fields)
        + keys
        + b"Content-Length: %d\r\nX-Request-Id: %b\r\n" % (body_bytes, request_id)
        + (b"X-Forwarded-For: %b\r\n" % client if client else b"")
        + (b"X-Data-Parallel-Rank: %d\r\n" % rank if rank is not None else b"")
        + b"\r\n"
    )
    sent = head.for_node(host_line, authorization_line, passes_keys, body_bytes, request_id, peer, rank, fields)
    assert sent == expected


@given(
    status=st.sampled_from([200, 204, 304, 404, 500]),
    framing=st.sampled_from([b"", b"Content-Length: 12\r\n", b"Transfer-Encoding: chunked\r\n"]),
    fields=LINES, accepts_chunked=st.booleans(), request_id=VALUES, more_lines=LINES, body=VALUES,
)  # fmt: skip
def test_a_response_head_for_a_client(
    status: int, framing: bytes, fields: bytes, accepts_chunked: bool, request_id: bytes, more_lines: bytes, body: bytes
) -> None:
    head = response_head(status, framing)
    lines = b""
    if head.length >= 0 and status != 204:
        lines = b"Content-Length: %d\r\n" % head.length
    elif head.length == CHUNKED and accepts_chunked:
        lines = b"Transfer-Encoding: chunked\r\n"
    expected = b"HTTP/1.1 %d Fine\r\n%b%bX-Request-Id: %b\r\n%b\r\n%b" % (
        status, fields, lines, request_id, more_lines, body,
    )  # fmt: skip
    assert head.for_client(fields, accepts_chunked, request_id, more_lines, body) == expected


def test_arguments_of_another_type_are_an_error_not_a_crash() -> None:
    request, response = request_head({}), response_head(200, b"")
    text = cast(bytes, "text")
    with pytest.raises(TypeError):
        request.for_node(text, b"", True, 1, b"", b"", None, b"")
    with pytest.raises(TypeError):
        request.for_node(b"", b"", True, 1, b"", text, None, b"")
    with pytest.raises(TypeError):
        request.for_node(b"", b"", True, 1, b"", b"", None, text)
    with pytest.raises(OverflowError):
        request.for_node(b"", b"", True, 1 << 70, b"", b"", None, b"")
    with pytest.raises(TypeError):
        response.for_client(b"", True, text, b"", b"")
    with pytest.raises(TypeError):
        response.for_client(b"")  # type: ignore[call-arg]
