"""Values that edge and core share: a request as routing sees it, the blocks of its prompt, how a try ended, and what
an engine's KV transfer protocol does.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from warmroute._kernel import (
    OUTCOME_BROKEN,
    OUTCOME_BUSY,
    OUTCOME_CANCELLED,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    hash_blocks,
)
from warmroute.config.routing import NORMAL

if TYPE_CHECKING:
    from warmroute.core.node import Node


# What routing knows about a request, besides its prompt. Built once; only the prompt's length may be added later.


class RoutingRequest(msgspec.Struct, eq=False, gc=False):
    model: str
    """Empty where the request names none and the fleet serves several."""
    system: bytes | None = None
    """First characters of the system prompt."""
    user: bytes | None = None
    """First characters of the first user message."""
    session: bytes = b""
    """The conversation's name in a field of the body; empty where there is none."""
    tenant: str = ""
    """Empty where no keys are configured."""
    route: str = ""
    """The name of the route whose settings apply; empty where none matches."""
    priority: int = NORMAL
    may_queue: bool = True
    """False where the client prefers a 429 to waiting."""
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    """When the first token is due, on the router's clock; 0 without a deadline."""
    total_deadline_s: float = 0.0
    """When the whole response is due; 0 without a deadline."""
    session_header: bytes = b""
    streams: bool = True
    """Whether the response is streamed; else the whole of it comes at its end."""
    max_output_tokens: int | None = None
    """The limit that the request sets; None where it sets none."""
    input_tokens: int = 0
    """Length of its longest prompt, set only where the nodes of its model differ in their context window; 0: unknown,
    or the engine truncates it."""
    input_exact: bool = False
    """Whether `input_tokens` is exact; else it is an estimate, rather too high than too low."""

    may_split: bool = False
    """Whether one node may prefill the prompt and another one decode the answer."""
    subset: frozenset[str] | None = None
    """The names of the nodes that may serve it; None: all. Envoy may restrict a request to some of its endpoints."""
    start: bytes = b""
    """First bytes of the prompt's JSON text, where a policy uses them."""
    ends_late: bool = False
    """Whether the request is ended when a deadline cannot be met or has passed (`on_deadline = "end"`)."""
    cache_group: str = ""
    """Whose prompts count as cached for it; empty: everybody's."""

    def prefix_key(self) -> bytes | None:
        """Return model, start of the system prompt and of the first user message; None where there is neither."""
        if self.system is None and self.user is None:
            return None
        return b"%b\0%b\0%b" % (self.model.encode("utf-8", "surrogatepass"), self.system or b"", self.user or b"")

    def session_key(self) -> bytes:
        """Return the conversation's name: from a header, else from the body; empty where there is none."""
        return self.session_header or self.session


# A lookup: one prompt as the index sees it, a chain of block hashes for each block size in the fleet.

TEXT: Final = "text"
"""The tokenizer name of prompts that are matched by text: they match each other and no engine's block."""


@lru_cache(maxsize=65536)
def namespace_seed(model: str, lora: str, block_size: int, tokenizer: str = "") -> int:
    """Return the namespace, with which every chain of block hashes starts: 64 bits over all that must be equal for two
    prompts to share KV blocks. Tenants are not part of it (see tenant_isolation.py). `tokenizer` is empty where the
    tokens are those of the engine."""
    digest = blake2b(digest_size=8, person=b"warmroute-blocks")
    for part in (model, lora, str(block_size), tokenizer):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


class SpecialPrompt(msgspec.Struct, eq=False):
    """What else there is to know of a prompt whose reported cached tokens cannot be compared with a prediction."""

    skips_cache: bool = False
    """Whether the engine prefills the whole prompt, whatever it has cached."""
    others: tuple[Lookup, ...] = ()
    """The request's other prompts, as far as they were read."""
    prompts: int = 1
    """Number of the request's prompts."""
    total_tokens: int = 0
    """Tokens of all of them."""


class Lookup(msgspec.Struct, eq=False):
    """One prompt to look up. Its first `exact_tokens` tokens are those that the engine will compute."""

    tokens: bytes
    token_count: int
    exact_tokens: int
    salt: str = ""
    cache_group: str = ""
    """The tenant, or the group of tenants it shares caches with; empty where all tenants share."""
    media: tuple[tuple[int, bytes], ...] = ()
    text: bool = False
    """Whether the prompt matches only prompts like itself, not the engine's blocks: `tokens` are bytes of its text, or
    the engine may truncate it."""
    special: SpecialPrompt | None = None
    """Set where the request is not a single prompt that the engine takes as it is."""
    _chains: dict[tuple[str, str, int], bytes] = {}
    """The result of `blocks`."""

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        """Return the hashes of the prompt's full blocks, 8 bytes each. They are computed once for each block size."""
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            extra = self._extra(block_size) if self.media or self.salt else None
            seed = namespace_seed(model, lora, block_size, TEXT if self.text else "")
            found = self._chains[key] = hash_blocks(seed, None, self.tokens, block_size, extra)
        return found

    def prefix(self, tokens: int) -> Lookup:
        """Return a lookup of the first `tokens` tokens. It keeps no reference to the rest of the prompt."""
        return Lookup(
            self.tokens[: 4 * tokens],
            min(tokens, self.token_count),
            min(tokens, self.exact_tokens),
            self.salt,
            self.cache_group,
            tuple([one for one in self.media if one[0] < tokens]),
            self.text,
            _chains={key: chain[: tokens // key[2] * 8] for key, chain in self._chains.items()},
        )

    def first_tokens(self, count: int) -> list[int]:
        return array("I", self.tokens[: 4 * count]).tolist()

    def model_of(self, prefix: bytes) -> str | None:
        """Return the model or adapter whose blocks `prefix` is; None if this prompt does not start with them, or if
        it is more than tokens (media, text)."""
        if self.media or self.text:
            return None
        return next(
            (lora or model for (model, lora, _), chain in self._chains.items() if chain.startswith(prefix)), None
        )

    def _extra(self, block_size: int) -> list[bytes | None] | None:
        blocks = self.token_count // block_size
        if not blocks:
            return None
        extra: list[bytes | None] = [None] * blocks
        for at, content in self.media:
            block = at // block_size
            if block < blocks:
                extra[block] = (extra[block] or b"") + content
        return salted(extra, blocks, self.salt)


def salted(extra: Sequence[bytes | None] | None, blocks: int, salt: str) -> list[bytes | None] | None:
    """Add the salt to the first block, as engines do. The blocks after it depend on it through their parent."""
    whole: list[bytes | None] | None = None
    if extra is not None:
        whole = list(extra)
    elif salt:
        whole = [None] * blocks
    if salt and whole:
        whole[0] = (whole[0] or b"") + b"salt " + salt.encode("utf-8", "surrogatepass")
    return whole


# What the KV transfer protocol of an engine does: one file in engines/ for each.

MAX_PARAMETERS_BYTES: Final = 1 << 20
"""Longer parameters of a prefill node are ignored. Block ids of 100,000 tokens take about 50 KB."""


class KvTransfer(Protocol):
    """The fields that the prefill request and the decode request have beside the client's: JSON text by name."""

    def prefill_fields(self, fields: Container[str], prefill_node: Node, room: int) -> Mapping[str, bytes]:
        """`fields`: those of the client's body. `room`: a random number, the same for both requests."""

    def decode_fields(
        self, fields: Container[str], prefill_node: Node, room: int, transfer: bytes | None
    ) -> Mapping[str, bytes]:
        """`transfer`: what `read_transfer` returned; None if the protocol sends both requests at the same time."""

    def read_transfer(self, response: bytes) -> bytes | None:
        """Return what the prefill node's response says about its KV cache; None if it says nothing valid."""


class Outcome(enum.IntEnum):
    """How a ticket ended. The values index `Node.outcomes`."""

    OK = OUTCOME_OK
    REJECTED = OUTCOME_REJECTED  # the node answered 4xx: the client's mistake
    BUSY = OUTCOME_BUSY  # the node answered 429 or 503
    FAILED = OUTCOME_FAILED  # connection error, timeout, other 5xx or an invalid response, before the first byte
    BROKEN = OUTCOME_BROKEN  # the response broke off after its first byte
    CANCELLED = OUTCOME_CANCELLED  # the client disconnected
