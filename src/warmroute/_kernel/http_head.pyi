from typing import Final

CHUNKED: Final[int]
"""As `ResponseHead.length`: the body is chunked."""
UNTIL_CLOSE: Final[int]
"""As `ResponseHead.length`: the body ends when the connection is closed."""

# Why a head is rejected.
MALFORMED_START_LINE: Final[int]
BAD_TARGET: Final[int]
UNSUPPORTED_VERSION: Final[int]
MALFORMED_FIELD: Final[int]
TOO_MANY_FIELDS: Final[int]
BAD_CONTENT_LENGTH: Final[int]
REPEATED_TRANSFER_ENCODING: Final[int]
UNSUPPORTED_TRANSFER_ENCODING: Final[int]
UNSUPPORTED_EXPECTATION: Final[int]
BAD_HOST: Final[int]
LENGTH_AND_TRANSFER_ENCODING: Final[int]
TRANSFER_ENCODING_IN_HTTP_1_0: Final[int]
TOO_MANY_CONNECTION_OPTIONS: Final[int]
REPEATED_FIELD: Final[int]
FIELD_NAMED_IN_CONNECTION: Final[int]
AMBIGUOUS_FIELD_NAME: Final[int]
UNSUPPORTED_CONTENT_ENCODING: Final[int]

class RequestHead:
    """A client's request head: what the router reads of it, and the lines that it forwards unchanged."""

    method: bytes
    target: bytes
    minor_version: int
    length: int
    """Bytes of the body: 0 without a body, -1 if it is chunked."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    authorization: bytes
    api_key: bytes
    """The X-Api-Key field, which Anthropic's clients use."""
    request_id: bytes
    """The client's X-Request-Id; empty if it sent none that can be used."""
    forwarded_for: bytes
    content_type: bytes
    has_routing_headers: bool
    """Whether it has one of the fields that edge/arrival.py reads."""
    forwarded_fields: bytes
    """The header lines that go to the node unchanged."""

    def get(self, name: bytes, /) -> bytes:
        """Return the first value of a field, or b""."""
    def for_node(
        self,
        host_line: bytes,
        authorization_line: bytes,
        passes_keys: bool,
        body_bytes: int,
        request_id: bytes,
        peer: bytes,
        rank: int | None,
        fields: bytes,
        /,
    ) -> bytes:
        """Return the head to send to a node. `passes_keys`: the client's keys are sent, if the node has none of its
        own (`authorization_line`). `rank`: the data-parallel rank that holds the prompt. `fields`: header lines
        instead of `forwarded_fields`; empty for those."""

class ResponseHead:
    """A node's response head."""

    status: int
    status_line: bytes
    length: int
    """Bytes of the body, or CHUNKED, or UNTIL_CLOSE."""
    keep_alive: bool
    content_type: bytes
    retry_after: bytes
    encoded: bool
    """Whether the body has a content coding, such as gzip."""
    forwarded_fields: bytes
    """The header lines that go to the client unchanged."""

    def for_client(
        self, fields: bytes, accepts_chunked: bool, request_id: bytes, more_lines: bytes, body: bytes, /
    ) -> bytes:
        """Return the head to send to a client, and the start of the body. `fields`: header lines, instead of
        `forwarded_fields`. A chunked body is framed so only where the client accepts it."""

def read_request_head(data: bytes, end: int, max_fields: int, /) -> RequestHead | int:
    """Return the head in data[:end + 4], or why it is rejected. data[end:end + 4] is the blank line after it."""

def read_response_head(data: bytes, end: int, /) -> ResponseHead | int:
    """Return the head in data[:end + 4], or why it is rejected. data[end:end + 4] is the blank line after it."""
