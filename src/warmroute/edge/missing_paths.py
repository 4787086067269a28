"""Whether a node's 404 means that the engine lacks the path.

Web frameworks answer 404 with a text of their own, such as `{"detail":"Not Found"}`, which OpenAI's clients cannot read
as an error. An engine that serves the path, and knows no such model or response, says so in an error of OpenAI's form.
"""

from __future__ import annotations

from typing import Final

import msgspec

from warmroute.edge.http1 import CHUNKED, BadChunk, ChunkReader, ResponseHead

MAX_JUDGED_BYTES: Final = 16_384
"""A longer body is no framework's."""
_SAYS_NOTHING: Final = ("", "not found", "file not found")
"""Messages of frameworks that write their own 404 in OpenAI's form."""


def lacks_path(head: ResponseHead, body: bytes) -> bool:
    """Return whether a complete response with status 404 is not an error of the engine's API. `body`: as it arrived."""
    if head.encoded:
        return False
    if head.length == CHUNKED:
        pieces: list[bytes] = []
        try:
            ChunkReader().feed(body, pieces)
        except BadChunk:
            return False
        body = b"".join(pieces)
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    if not isinstance(tree, dict):
        return True
    error = tree if tree.get("object") == "error" else tree.get("error")  # older engines put the fields at the top
    message = error.get("message") if isinstance(error, dict) else error
    return not isinstance(message, str) or message.strip(" .").lower() in _SAYS_NOTHING
