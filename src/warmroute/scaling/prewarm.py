"""Prefills a hot prefix on a node, so that its cache has it before requests need it: a completion request with the
prefix's tokens and a response of one token. Prefixes whose tokens are not exactly the engine's cannot be prefilled,
because the router keeps no text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from warmroute.event_log import EventLog
from warmroute.fleet.node import Node
from warmroute.index.hot_prefixes import HotPrefix

log = EventLog("warmroute.scaling")
Post = Callable[[Node, str, bytes, float], Awaitable[tuple[int, bytes]]]
PREFILL_TIMEOUT_S: Final = 30.0


class PrefixPrefiller:
    def __init__(self, post: Post) -> None:
        self._post = post
        self.prefilled = 0
        """Prefixes that were prefilled."""

    async def prefill(self, node: Node, prefix: HotPrefix) -> bool:
        """Return whether the node has the prefix now."""
        body = completion_body(prefix)
        if body is None:
            return False
        try:
            status, _ = await self._post(node, "/v1/completions", body, PREFILL_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            log.info("prefill_failed", node=node.name, reason=str(error) or "timeout")
            return False
        self.prefilled += status == 200
        return status == 200


def completion_body(prefix: HotPrefix) -> bytes | None:
    """Return the request body that prefills the prefix; None if its tokens are not known exactly."""
    lookup = prefix.example
    if prefix.tokens > lookup.exact_tokens:
        return None
    model = lookup.model_of(prefix.chain)
    if model is None:
        return None
    body = {"model": model, "prompt": lookup.first_tokens(prefix.tokens), "max_tokens": 1, "temperature": 0}
    if lookup.salt:
        body["cache_salt"] = lookup.salt
    return msgspec.json.encode(body)
