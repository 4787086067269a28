"""What must be equal for a cache to be shared, as one number that every chain of block hashes begins with.

Two tenants get two numbers unless they are put in one sharing group, so no tenant's prompt can match another's blocks.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=65536)
def namespace_seed(
    model: str,
    *,
    block_size: int,
    tokenizer: str = "",
    lora: str = "",
    tenant: str = "",
    salt: str | bytes = "",
) -> int:
    """64 bits over all fields. `tokenizer` is its fingerprint; `tenant` is the tenant, or the group it shares with."""
    digest = blake2b(digest_size=8, person=b"warmroute-blocks")
    for field in (model, tokenizer, lora, tenant, salt, str(block_size)):
        data = field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")
