class BodyBuffer:
    """Collects a body piece by piece, and returns it without another copy."""

    def append(self, data: bytes, missing: int, /) -> None:
        """Add bytes. `missing`: how many more will come, as far as that is known, else 0."""
    def take(self) -> bytes:
        """Return all bytes, and empty the buffer."""
    def __len__(self) -> int: ...
