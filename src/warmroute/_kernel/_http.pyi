class RequestHead:
    """A client's request head: what the router reads of it, and the lines that pass on as they are."""

    method: bytes
    target: bytes
    minor: int
    length: int
    """Bytes of the body; 0 without one, -1 where it is chunked."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    authorization: bytes
    api_key: bytes
    """What an X-Api-Key field says, which is how Anthropic's clients send it."""
    request_id: bytes
    """As the client gave it; empty where it gave none that can be used."""
    forwarded_for: bytes
    content_type: bytes
    wishes: bool
    """Whether it has a field of edge/request_headers.py."""
    passing: bytes
    """The header lines that go to the node untouched."""

    def get(self, name: bytes, /) -> bytes: ...

class ResponseHead:
    """A node's response head."""

    status: int
    status_line: bytes
    length: int
    """Bytes of the body; CHUNKED or UNTIL_CLOSE where it does not say."""
    keep_alive: bool
    content_type: bytes
    retry_after: bytes
    passing: bytes

def read_request_head(data: bytes, end: int, max_fields: int, /) -> RequestHead | int: ...
def read_response_head(data: bytes, end: int, /) -> ResponseHead | int: ...
def read_usage(last_bytes: bytes, /) -> tuple[int | None, int | None, int | None] | None:
    """Tokens of the prompt, those of them that were cached, tokens of the answer, as far as an answer's end says; None
    where there is no usage in its last 16 KiB. OpenAI's usage (chat, completions, responses), and Anthropic's, which
    counts as input only what was not cached. Quotes within a text are escaped in JSON, so nothing that a model says can
    pass for it."""

class BadChunk(Exception): ...

class ChunkFrames:
    def feed(self, data: bytes, pieces: list[bytes] | None = None, /) -> int:
        """Takes bytes; returns how many of them belong to the message if it ends in them, else -1.

        The payload's slices are appended to `pieces`, where it is given. Raises BadChunk.
        """
    def rest_of_chunk(self) -> bytes | None: ...
