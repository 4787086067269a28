from typing import Final

FIRST_TOKEN_SEARCH_BYTES: Final[int]
"""How many bytes of a stream are searched. What comes then counts as the first token."""
FIRST_TOKEN_EMPTY_CHUNKS: Final[int]
"""After this many chunks without role and text, the next one counts as a token."""

class FirstTokenSearch:
    """Searches the server-sent events of one response for its first token: the first content, or its end."""

    def feed(self, data: bytes, /) -> bool:
        """Search the next bytes of the stream, without chunk framing; return whether it had its first token."""
