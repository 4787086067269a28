"""Puts a hot prefix into a node's cache: a completion of its tokens with an answer of one token. Only prompts whose
tokens are the engine's own can be put there; of others the router keeps no text.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from warmroute.fleet.node import Node
from warmroute.index.hot import HotPrefix

log = logging.getLogger("warmroute.scaling")
Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
PREFILL_TIMEOUT_S: Final = 30.0


class Warmer:
    def __init__(self, post: Post) -> None:
        self._post = post
        self.prefilled = 0
        """Prefixes that were put somewhere."""

    async def put(self, node: Node, prefix: HotPrefix) -> bool:
        """Whether it is there now."""
        body = completion(prefix)
        if body is None:
            return False
        try:
            status, _ = await self._post(node, "/v1/completions", body, PREFILL_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            log.info("node %s was not given a hot prefix: %s", node.name, error or "it was too slow")
            return False
        self.prefilled += status == 200
        return status == 200


def completion(prefix: HotPrefix) -> bytes | None:
    """The request that has it prefilled; None where its tokens are not known."""
    lookup = prefix.example
    if prefix.tokens > lookup.sure_tokens:
        return None
    model = lookup.model_of(prefix.chain)
    if model is None:
        return None
    asked = {"model": model, "prompt": lookup.first_tokens(prefix.tokens), "max_tokens": 1, "temperature": 0}
    if lookup.salt:
        asked["cache_salt"] = lookup.salt
    return msgspec.json.encode(asked)
