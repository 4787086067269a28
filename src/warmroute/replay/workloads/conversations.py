"""Conversations: the prompt of each turn is the whole history, answers included, and a new message, which follows the
answer after a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.generators import Popularity, draw_length, system_prompts
from warmroute.replay.workloads.workload_prompt import FollowUp, Segments, WorkloadPrompt, segment_id


@dataclass(slots=True, kw_only=True)
class Conversation:
    name: str
    history: Segments
    """At first the system prompt."""
    system_tokens: int
    random: Random
    turns: int
    message_tokens: int
    output_tokens: int
    think_s: float
    spread: float
    turn: int = 0
    user_tokens: int = 0
    """Length of the first user message."""

    def next_prompt(self) -> WorkloadPrompt:
        """Return the prompt of the next turn, and add it and its answer to the history."""
        self.turn += 1
        message_tokens = draw_length(self.random, self.message_tokens, self.spread)
        answer_tokens = draw_length(self.random, self.output_tokens, self.spread)
        self.user_tokens = self.user_tokens or message_tokens
        prompt = self.history.followed_by(segment_id(self.name, "message", self.turn), message_tokens)
        self.history = prompt.followed_by(segment_id(self.name, "answer", self.turn), answer_tokens)
        return WorkloadPrompt(
            prompt.tokens,
            answer_tokens,
            self.history,
            system_tokens=self.system_tokens,
            user_tokens=self.user_tokens,
            session=self.name.encode(),
            next_turn=self._follow_up if self.turn < self.turns else None,
        )

    def _follow_up(self) -> FollowUp:
        think_ms = self.random.expovariate(1.0 / self.think_s) * 1000.0 if self.think_s else 0.0
        return FollowUp(think_ms, self.next_prompt())


def _conversations(
    name: str, systems: Sequence[Segments], zipf: float, random: Random, turns: int, message_tokens: int,
    output_tokens: int, think_s: float, spread: float,
) -> Iterator[WorkloadPrompt]:  # fmt: skip
    """Return the first prompt of each conversation."""
    popularity = Popularity(len(systems), zipf)
    for number in count():
        system = systems[popularity.pick(random)]
        yield Conversation(
            name=f"{name} {number}",
            history=system,
            system_tokens=system.tokens,
            random=Random(random.getrandbits(64)),
            turns=draw_length(random, turns, spread),
            message_tokens=message_tokens,
            output_tokens=output_tokens,
            think_s=think_s,
            spread=spread,
        ).next_prompt()


class MultiTurnChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """People who chat. They send the next message after they have read the answer."""

    systems: int = 1
    """Number of system prompts; each conversation has one of them."""
    system_tokens: int = 500
    turns: int = 6
    message_tokens: int = 100
    output_tokens: int = 200
    think_s: float = 10.0
    """Mean time between an answer and the next message (exponential)."""
    spread: float = 0.5
    zipf: float = 0.0
    rate: float = 1.0
    """New conversations per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("system", self.systems, self.system_tokens)
        return _conversations(
            "chat", systems, self.zipf, random, self.turns, self.message_tokens, self.output_tokens, self.think_s,
            self.spread,
        )  # fmt: skip


class ToolAgents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agents in a loop. All agents of a kind share a long system prompt with tools. Many short steps follow each other
    as fast as the tools answer."""

    kinds: int = 3
    """Kinds of agents, each with its own tools."""
    tool_tokens: int = 6000
    """System prompt and tool descriptions."""
    steps: int = 20
    result_tokens: int = 800
    """What a tool returns; in the first step, the task."""
    output_tokens: int = 120
    tool_s: float = 2.0
    """Mean time that a tool takes (exponential)."""
    spread: float = 0.5
    rate: float = 0.3
    """New agents per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("tools", self.kinds, self.tool_tokens)
        return _conversations(
            "agent", systems, 0.0, random, self.steps, self.result_tokens, self.output_tokens, self.tool_s, self.spread
        )
