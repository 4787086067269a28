def digest(text: bytes, start: int, end: int, /) -> bytes:
    """Sixteen bytes that stand for text[start:end], within this process."""

def digests(body: bytes, spans: bytes, /) -> bytes:
    """For each span (uint32 start and end), sixteen bytes that stand for all of them up to it and with it."""
