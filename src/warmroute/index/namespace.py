"""The namespace: what must be equal for two prompts to share KV blocks, as one 64-bit number.

Every chain of block hashes starts with it, so prompts of two namespaces never match. Tenants are not part of it: see
tenant_isolation.py.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=65536)
def namespace_seed(model: str, lora: str, block_size: int, tokenizer: str = "") -> int:
    """Return 64 bits over all fields. `tokenizer` is empty where the tokens are those of the engine."""
    digest = blake2b(digest_size=8, person=b"warmroute-blocks")
    for field in (model, lora, str(block_size), tokenizer):
        data = field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")
