"""The ticket of a request whose node loads a part of the prompt's KV cache from a shared KV store.

Its time to first token contains the loading, so it says nothing about the node's prefill speed. The router learns from
it how fast the store is: by how much the first token came later than expected, if the node had no other request.
"""

from __future__ import annotations

from warmroute._kernel import TicketState
from warmroute.fleet.group import Group
from warmroute.fleet.kv_transfer import LATENCY_MS, TransferSpeed
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.index.prediction import Prediction
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.output_length import OutputLengthEstimate


class StoreDispatch(Dispatch):
    __slots__ = ("_expected_load_ms", "_load_speed")

    def __init__(
        self, request: RoutingRequest, node: Node, now_s: float, cache_view: CacheView,
        output_lengths: OutputLengthEstimate, group: Group, prediction: Prediction, tokens: int, new: int, work: float,
    ) -> None:  # fmt: skip
        Dispatch.__init__(
            self, request, node, now_s, cache_view, output_lengths, group.decode_speed, prediction, tokens, new, work,
            prediction.tokens,
        )  # fmt: skip
        store = prediction.cache.store
        self._load_speed: TransferSpeed | None = None
        self._expected_load_ms = 0.0
        if store is not None and node.load == 1 and request.streams and not prediction.has_hidden_hits:
            self._load_speed = group.transfer_speeds.from_store(store.name, node.island)
            # What is expected of the node does not exceed a prefill, even if it loads more slowly.
            ms_per_token = min(self._load_speed.ms_per_token(now_s), node.speed.ms_per_token)
            self._expected_load_ms = prediction.store_tokens * ms_per_token

    def first_token(self, now_s: float, served: bool = True) -> None:
        TicketState.first_token(self, now_s, False)
        prediction = self.prediction
        if not served or prediction is None:
            return
        self._cache_view.first_token(prediction, now_s)
        if self._load_speed is not None:
            late_ms = (now_s - self.opened_s) * 1000.0 - self.expected_ttft_ms
            self._load_speed.learn(prediction.store_tokens, LATENCY_MS + self._expected_load_ms + late_ms, now_s)
