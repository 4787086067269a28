class ResponseTail:
    """The last bytes of a response: of its last eight pieces, at most `limit_bytes`."""

    def __new__(cls, limit_bytes: int) -> ResponseTail: ...
    def keep(self, data: bytes, /) -> None:
        """Add the next piece of the response."""
    def join(self) -> bytes:
        """Return what is kept."""
