from typing import Final

DIGEST_BYTES: Final[int]

def digest(text: bytes, start: int, end: int, /) -> bytes:
    """Return the digest of text[start:end], which is valid within this process."""

def prefix_digests(body: bytes, spans: bytes, /) -> bytes:
    """Return, for each span (uint32 start and end), the digest of all spans up to and including it."""
