"""What the prompt doctor learns of a request that it sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from warmroute.routing.attempts import Attempts


class SampledPrompt(Protocol):
    """A request whose prompt the prompt doctor compares with others."""

    def completed(
        self, attempts: Attempts, key: tuple[str, str], prompt_tokens: int, cached_tokens: int | None,
        ms_per_token: float, step_ms: float,
    ) -> None:  # fmt: skip
        """The response is complete. `key`: the model and route that its tokens count for. `cached_tokens`: None if
        neither the node nor the router knows them. A prefill takes `ms_per_token`, and at least `step_ms`."""
