"""The clients: they send a workload's requests at their times (open loop), or each one its next request when it has its
answer (closed loop), and carry on conversations after the time it takes to think.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from warmroute.replay.workloads.prompt import Prompt

if TYPE_CHECKING:
    from warmroute.replay.world.world import World


class Clients:
    """At most `limit` requests in all, none of them after `until_ms`; `concurrency` None is the open loop."""

    def __init__(
        self,
        world: World,
        prompts: Iterator[Prompt],
        concurrency: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._world = world
        self._prompts = prompts
        self._concurrency = concurrency
        self._left = limit if limit is not None else -1
        self.until_ms: float | None = None
        self.expected = 0
        """Requests that will still arrive: entered in the calendar, not yet sent."""

    def begin(self) -> None:
        for _ in range(self._concurrency or 1):
            self._next()

    def ended(self, prompt: Prompt, answered: bool) -> None:
        """The world is done with a request."""
        world = self._world
        follow_up = prompt.then() if answered and prompt.then is not None else None
        if follow_up is not None:
            self._enter(world.calendar.now_ms + follow_up.think_ms, follow_up.prompt, arrival=False)
        elif self._concurrency is not None:
            if answered:
                self._next()
            else:
                self.expected += 1
                world.calendar.after(world.conditions.refused_pause_ms, self._after_refusal)

    def _after_refusal(self) -> None:
        self.expected -= 1
        self._next()

    def _next(self) -> None:
        if self._left == 0:
            return
        prompt = next(self._prompts, None)
        if prompt is not None:
            now_ms = self._world.calendar.now_ms
            at_ms = max(now_ms, prompt.at_ms) if self._concurrency is None else now_ms
            self._enter(at_ms, prompt, arrival=True)

    def _enter(self, at_ms: float, prompt: Prompt, arrival: bool) -> None:
        if self.until_ms is None or at_ms < self.until_ms:
            self.expected += 1
            self._world.calendar.at(at_ms, self._send, prompt, arrival)

    def _send(self, prompt: Prompt, arrival: bool) -> None:
        self.expected -= 1
        if self._left == 0:
            return
        self._left -= 1
        if arrival and self._concurrency is None:
            self._next()
        self._world.arrive(prompt)
