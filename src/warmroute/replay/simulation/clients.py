"""The simulated clients.

Open loop: requests are sent at the workload's arrival times. Closed loop: each client sends its next request when the
last one is answered. In both, a conversation's next turn follows its answer after a think time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

if TYPE_CHECKING:
    from warmroute.replay.simulation.world import World


class Clients:
    """Sends at most `limit` requests, none after `until_ms`. With `concurrency` None the loop is open."""

    def __init__(
        self, world: World, prompts: Iterator[WorkloadPrompt], concurrency: int | None, limit: int | None
    ) -> None:
        self._world = world
        self._prompts = prompts
        self._concurrency = concurrency
        self._remaining = limit if limit is not None else -1
        self.until_ms: float | None = None
        self.scheduled = 0
        """Requests in the calendar that are not yet sent."""

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._send_next()

    def request_ended(self, prompt: WorkloadPrompt, answered: bool) -> None:
        """Send the conversation's next turn, or the client's next request."""
        world = self._world
        follow_up = prompt.next_turn() if answered and prompt.next_turn is not None else None
        if follow_up is not None:
            self._schedule(world.calendar.now_ms + follow_up.think_ms, follow_up.prompt, arrival=False)
        elif self._concurrency is not None:
            if answered:
                self._send_next()
            else:
                self.scheduled += 1
                world.calendar.after(world.conditions.refused_pause_ms, self._retry_after_refusal)

    def _retry_after_refusal(self) -> None:
        self.scheduled -= 1
        self._send_next()

    def _send_next(self) -> None:
        if self._remaining == 0:
            return
        prompt = next(self._prompts, None)
        if prompt is not None:
            now_ms = self._world.calendar.now_ms
            at_ms = max(now_ms, prompt.at_ms) if self._concurrency is None else now_ms
            self._schedule(at_ms, prompt, arrival=True)

    def _schedule(self, at_ms: float, prompt: WorkloadPrompt, arrival: bool) -> None:
        if self.until_ms is None or at_ms < self.until_ms:
            self.scheduled += 1
            self._world.calendar.at(at_ms, self._send, prompt, arrival)

    def _send(self, prompt: WorkloadPrompt, arrival: bool) -> None:
        self.scheduled -= 1
        if self._remaining == 0:
            return
        self._remaining -= 1
        if arrival and self._concurrency is None:
            self._send_next()
        self._world.arrive(prompt)
