def outline(body: bytes, list_name: bytes, /) -> tuple[dict[str, tuple[int, int]], bytes, bytes] | None:
    """Where each field of a JSON body lies (start, end), and for the items of one list: where each lies (uint32 start
    and end), and a digest (16 bytes) of all items up to and with it.

    None where the body is malformed, or where the real parser has to judge.
    """

def digest(text: bytes, start: int, end: int, /) -> bytes:
    """Sixteen bytes that stand for text[start:end], within this process."""
