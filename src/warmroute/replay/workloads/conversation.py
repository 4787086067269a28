"""A conversation: the prompt of each turn is the whole history and a new message."""

from __future__ import annotations

from random import Random

from warmroute.replay.workloads.random_draws import draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import FollowUp, WorkloadPrompt


class Conversation:
    __slots__ = (
        "_history",
        "_message_tokens",
        "_name",
        "_output_tokens",
        "_random",
        "_spread",
        "_system_tokens",
        "_think_s",
        "_turn",
        "_turns",
        "_user_tokens",
    )

    def __init__(
        self,
        system_prompt: Segments,
        *,
        random: Random,
        name: str,
        turns: int,
        message_tokens: int,
        output_tokens: int,
        think_s: float,
        spread: float,
    ) -> None:
        self._history = system_prompt
        self._system_tokens = system_prompt.tokens
        self._random = random
        self._name = name
        self._turns = turns
        self._message_tokens = message_tokens
        self._output_tokens = output_tokens
        self._think_s = think_s
        self._spread = spread
        self._turn = 0
        self._user_tokens = 0
        """Length of the first user message."""

    def next_prompt(self) -> WorkloadPrompt:
        """Return the prompt of the next turn, and add it and its answer to the history."""
        self._turn += 1
        random, turn = self._random, self._turn
        message_tokens = draw_length(random, self._message_tokens, self._spread)
        answer_tokens = draw_length(random, self._output_tokens, self._spread)
        self._user_tokens = self._user_tokens or message_tokens
        prompt = self._history.followed_by(segment_id(self._name, "message", turn), message_tokens)
        self._history = prompt.followed_by(segment_id(self._name, "answer", turn), answer_tokens)
        return WorkloadPrompt(
            prompt.tokens,
            answer_tokens,
            self._history,
            system_tokens=self._system_tokens,
            user_tokens=self._user_tokens,
            session=self._name.encode(),
            next_turn=self._follow_up if turn < self._turns else None,
        )

    def _follow_up(self) -> FollowUp:
        think_ms = self._random.expovariate(1.0 / self._think_s) * 1000.0 if self._think_s else 0.0
        return FollowUp(think_ms, self.next_prompt())
