"""The endpoints that the router answers itself: /health, /ready and /v1/models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import unquote

import msgspec

from warmroute.edge import errors
from warmroute.edge.admission_errors import RETRY_AFTER_S
from warmroute.edge.proxy_client import ProxyClient
from warmroute.fleet.fleet import Fleet


class OwnEndpoints:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.starting = False
        self.stopping = False
        self.waits_for_first_node: Callable[[], bool] = lambda: False
        """Whether requests wait while the fleet is empty, because the autoscaler will add a node."""

    def serve(self, client: ProxyClient, path: bytes) -> None:
        """Raises HttpError for a model that no node serves."""
        if path == b"/health":
            client.reply(200, b'{"status":"alive"}')
        elif path == b"/ready":
            status, text = self.readiness()
            client.reply(status, text, () if status == 200 else (("Retry-After", str(RETRY_AFTER_S)),))
        elif path == b"/v1/models":
            client.reply(200, msgspec.json.encode({"object": "list", "data": self.model_cards()}))
        else:
            name = unquote(path.removeprefix(b"/v1/models/").decode("ascii", "replace"))
            card = next((card for card in self.model_cards() if card["id"] == name), None)
            if card is None:
                raise errors.model_not_found(name)
            client.reply(200, msgspec.json.encode(card))

    def readiness(self) -> tuple[int, bytes]:
        if self.stopping:
            return 503, b'{"status":"stopping"}'
        if self.starting:
            return 503, b'{"status":"starting"}'
        if not self._fleet.can_serve and not (self.waits_for_first_node() and self._is_scaled_to_zero()):
            return 503, b'{"status":"no node can serve"}'
        return 200, b'{"status":"ready"}'

    def _is_scaled_to_zero(self) -> bool:
        return all(node.draining for node in self._fleet)

    def model_cards(self) -> Sequence[dict[str, object]]:
        """Every model of the fleet, as the first node with the longest context window describes it."""
        cards: dict[str, dict[str, object]] = {}
        for node in self._fleet:
            if node.draining:
                continue
            described = {str(card.get("id")): card for card in node.model_cards}
            for model in node.models or ():
                plain = {"id": model, "object": "model", "created": 0, "owned_by": "warmroute"}
                card = described.get(model, plain)
                if model not in cards or _window(card) > _window(cards[model]):
                    cards[model] = card
        return list(cards.values())


def _window(card: dict[str, object]) -> int:
    window = card.get("max_model_len")
    return window if isinstance(window, int) else 0
