"""A conversation: turn by turn, each prompt made of all that was said before and a new message."""

from __future__ import annotations

from random import Random

from warmroute.replay.workloads.draw import around
from warmroute.replay.workloads.prompt import FollowUp, Priority, Prompt
from warmroute.replay.workloads.segments import Segments, named


class Conversation:
    __slots__ = (
        "_message_tokens",
        "_name",
        "_output_tokens",
        "_priority",
        "_random",
        "_said",
        "_spread",
        "_system_tokens",
        "_tenant",
        "_think_s",
        "_turn",
        "_turns",
        "_user_tokens",
    )

    def __init__(
        self,
        beginning: Segments,
        *,
        random: Random,
        name: str,
        turns: int,
        message_tokens: int,
        output_tokens: int,
        think_s: float,
        spread: float,
        priority: Priority = "normal",
        tenant: str = "",
    ) -> None:
        self._said = beginning
        self._system_tokens = beginning.tokens
        self._random = random
        self._name = name
        self._turns = turns
        self._message_tokens = message_tokens
        self._output_tokens = output_tokens
        self._think_s = think_s
        self._spread = spread
        self._priority = priority
        self._tenant = tenant
        self._turn = 0
        self._user_tokens = 0
        """Of the first message."""

    def turn(self) -> Prompt:
        """The next prompt; its answer becomes part of what was said."""
        self._turn += 1
        random, turn = self._random, self._turn
        message = around(random, self._message_tokens, self._spread)
        answer = around(random, self._output_tokens, self._spread)
        self._user_tokens = self._user_tokens or message
        asked = self._said.followed_by(named(self._name, "message", turn), message)
        self._said = asked.followed_by(named(self._name, "answer", turn), answer)
        name = self._name.encode()
        return Prompt(
            asked.tokens,
            answer,
            self._said,
            system_tokens=self._system_tokens,
            user_tokens=self._user_tokens,
            session=name,
            priority=self._priority,
            tenant=self._tenant,
            then=self._next if turn < self._turns else None,
        )

    def _next(self) -> FollowUp:
        think_ms = self._random.expovariate(1.0 / self._think_s) * 1000.0 if self._think_s else 0.0
        return FollowUp(think_ms, self.turn())
