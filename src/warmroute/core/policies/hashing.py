"""The policies `prefix_hash` and `session`: rendezvous hashing with bounded load."""

from __future__ import annotations

import math
from abc import abstractmethod

from warmroute._kernel import KEY_CHARACTERS, key_hash, rendezvous_home, rendezvous_order
from warmroute.config import Routing
from warmroute.core.decision import Decision
from warmroute.core.messages import RoutingRequest
from warmroute.core.policies.by_load import LeastLoaded
from warmroute.core.policy import Policy
from warmroute.core.routing_context import Query

# Rendezvous hashing with bounded load.
#
# The hash of a key orders the nodes by their names. A node that joins or leaves moves only its own share of the keys,
# and a key returns to its home node when that recovers. A node is skipped while it has at least load_factor × (requests
# in flight + 1) / nodes requests. Requests without a key go to the least loaded node.


class BoundedRendezvous(Policy):
    def __init__(self, load_factor: float, without_key: LeastLoaded) -> None:
        self._load_factor = load_factor
        self._without_key = without_key

    @abstractmethod
    def key(self, request: RoutingRequest) -> bytes | None:
        """Return what decides the home node. Without a key the request goes to the least loaded node."""

    def decide(self, query: Query) -> Decision:
        key, group = self.key(query.request), query.group
        if not key:
            return self._without_key.decide(query)
        hashed = key_hash(key)
        nodes, seeds = query.candidates.nodes, query.candidates.seeds
        home = nodes[rendezvous_home(hashed, seeds)]
        all_members = len(nodes) == len(group.members)
        inflight = group.inflight if all_members else sum(node.inflight for node in nodes)
        limit = math.ceil(self._load_factor * (inflight + 1) / len(nodes))
        if home.inflight < limit:
            return Decision(
                home, self.name, "home", lambda: [nodes[index] for index in rendezvous_order(hashed, seeds)]
            )
        order = [nodes[index] for index in rendezvous_order(hashed, seeds)]
        next_node = next((node for node in order if node.inflight < limit), home)
        return Decision(next_node, self.name, "home overloaded", lambda: order)


# prefix_hash: requests with the same prefix go to the same node, without knowledge of its cache.
#
# The key is the model and, by `Routing.prefix_key`,
#
#     system_and_user    the first characters of the system prompt and of the first user message: a conversation stays
#     on
#                        its node
#     system             the first characters of the system prompt: all users of an application share a node, until its
#                        load spills; as `system_and_user` for a request without a system prompt
#     start              the first characters of the whole prompt: system prompt, tools, messages
#
# It is hashed by FNV-1a and Murmur3's finalizer, and placed by rendezvous hashing with bounded load.


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


# session: a conversation stays on its node, placed by rendezvous hashing with bounded load.
#
# A session header identifies it, or `session_id`, `conversation_id`, `prompt_cache_key` or `user` in the body. A
# request that names no session goes to the least loaded node; with `Routing.prefix_key` = `system` or `start`, it is
# placed by that key, as `prefix_hash` does.


class Session(PrefixHash):
    name = "session"

    def key(self, request: RoutingRequest) -> bytes | None:
        session = request.session_key()
        return session if session or self._kind == "system_and_user" else super().key(request)
