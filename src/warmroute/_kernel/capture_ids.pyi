def capture_ids(chain: bytes, key: bytes, /) -> list[int]:
    """Return 48 bits for each block hash (8 bytes each): a pseudorandom function of it under a key of 16 bytes."""
