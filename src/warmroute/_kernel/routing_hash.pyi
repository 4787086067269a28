from array import array

def key_hash(key: bytes, /) -> int:
    """Return the 64-bit hash of a routing key."""

def rendezvous_home(hash: int, seeds: array[int], /) -> int:
    """Return the index of the seed with the highest score for this hash."""

def rendezvous_order(hash: int, seeds: array[int], /) -> list[int]:
    """Return the indices of all seeds by falling score for this hash."""
