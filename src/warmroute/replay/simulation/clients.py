"""The simulated clients.

    open      Requests are sent at the workload's arrival times, whatever has been answered.
    turns     The same, but a turn of a conversation waits for the answer of the turn before it and for a think time. A
              trace's turn is sent at its own time or then, whichever is later. Agents and chats do this, and it is the
              default: in a workload without conversations it is the open loop.
    clients   A number of clients; each sends its next request when the last one is answered.

A generator's conversations always wait: their next turn contains the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

if TYPE_CHECKING:
    from warmroute.replay.simulation.world import World


class Clients:
    """Sends at most `limit` requests, none after `until_ms`. `concurrency`: number of clients that send one request
    after the other; None: the workload's arrival times. `waits`: whether turns of a trace wait for answers."""

    def __init__(
        self,
        world: World,
        prompts: Iterator[WorkloadPrompt],
        concurrency: int | None,
        limit: int | None,
        *,
        waits: bool = True,
    ) -> None:
        self._world = world
        self._prompts = prompts
        self._concurrency = concurrency
        self._remaining = limit if limit is not None else -1
        self._waits = waits and concurrency is None
        self._unanswered: dict[int, list[WorkloadPrompt]] = {}
        """Requests of a trace that have arrived and not ended, by number, and the turns that wait for them."""
        self.turns = 0
        """Requests that are a further turn of a conversation."""
        self.until_ms: float | None = None
        self.scheduled = 0
        """Requests in the calendar that are not yet sent."""

    @property
    def closed(self) -> bool:
        """Whether clients wait for answers: they are numbered, or the workload has conversations."""
        return self._concurrency is not None or self.turns > 0

    def limit_to(self, limit: int | None) -> None:
        """Send at most this many requests from now on."""
        self._remaining = limit if limit is not None else -1

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._send_next()

    def request_ended(self, prompt: WorkloadPrompt, answered: bool) -> None:
        """Send the conversation's next turn, or the client's next request."""
        world = self._world
        for turn in self._unanswered.pop(prompt.number, ()):
            self._schedule(world.calendar.now_ms + turn.think_ms, turn, arrival=False, counted=True)
        follow_up = prompt.next_turn() if answered and prompt.next_turn is not None else None
        if follow_up is not None:
            self.turns += 1
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

    def _schedule(self, at_ms: float, prompt: WorkloadPrompt, arrival: bool, *, counted: bool = False) -> None:
        """`counted`: the request counts towards the limit already."""
        if self.until_ms is None or at_ms < self.until_ms:
            self.scheduled += 1
            self._world.calendar.at(at_ms, self._send, prompt, arrival, counted)

    def _send(self, prompt: WorkloadPrompt, arrival: bool, counted: bool) -> None:
        self.scheduled -= 1
        if not counted:
            if self._remaining == 0:
                return
            self._remaining -= 1
        if arrival and self._concurrency is None:
            self._send_next()
            if prompt.number >= 0 and self._waits:
                self._unanswered[prompt.number] = []
                if prompt.follows >= 0:
                    self.turns += 1
                    if (waiting := self._unanswered.get(prompt.follows)) is not None:
                        waiting.append(prompt)
                        return
        self._world.arrive(prompt)
