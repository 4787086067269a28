class BadChunk(Exception):
    """The chunk framing is malformed."""

class ChunkReader:
    """Follows the chunks of one message through bytes that arrive in any pieces."""

    def feed(self, data: bytes, pieces: list[bytes] | None = None, /) -> int:
        """Follow bytes; return how many of them belong to the message if it ends in them, else -1.

        The payload is appended to `pieces`. Raises BadChunk, after which the reader is in the state before the call.
        """
    def padding_to_chunk_end(self) -> bytes | None:
        """Return blank bytes that complete the current chunk, so that another chunk may follow; None if there are
        none."""
