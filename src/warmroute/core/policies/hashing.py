"""prefix_hash: requests with the same prefix go to the same node, without knowledge of its cache.

The key is the model and, by `routing.prefix_key`,

    system_and_user    the first characters of the system prompt and of the first user message: a conversation stays on
                       its node
    system             the first characters of the system prompt: all users of an application share a node, until its
                       load spills; as `system_and_user` for a request without a system prompt
    start              the first characters of the whole prompt: system prompt, tools, messages

It is hashed by FNV-1a and Murmur3's finalizer, and placed by rendezvous hashing with bounded load.
"""

from __future__ import annotations

from warmroute._kernel import KEY_CHARACTERS
from warmroute.config import Routing
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.policies.bounded_rendezvous import BoundedRendezvous
from warmroute.routing.policies.least_loaded import LeastLoaded


class PrefixHash(BoundedRendezvous):
    name = "prefix_hash"

    def __init__(self, config: Routing, without_key: LeastLoaded) -> None:
        super().__init__(config.load_factor, without_key)
        self._kind = config.prefix_key
        self._characters = config.prefix_characters

    def key(self, request: RoutingRequest) -> bytes | None:
        if self._kind == "system_and_user" and self._characters >= KEY_CHARACTERS:
            return request.prefix_key()
        return self._configured_key(request)

    def _configured_key(self, request: RoutingRequest) -> bytes | None:
        whole = request.prefix_key()  # a simulated request makes its text here
        model, most = request.model.encode("utf-8", "surrogatepass"), self._characters
        if self._kind == "start" and request.start:
            return b"%b\0\0\0%b" % (model, request.start[:most])
        system, user = _first(request.system or b"", most), _first(request.user or b"", most)
        if self._kind == "system" and system:
            return b"%b\0%b" % (model, system)
        return None if whole is None else b"%b\0%b\0%b" % (model, system, user)


def _first(text: bytes, characters: int) -> bytes:
    """Return the first characters of a text of at most KEY_CHARACTERS."""
    if characters >= KEY_CHARACTERS:
        return text
    return text.decode("utf-8", "surrogatepass")[:characters].encode("utf-8", "surrogatepass")
