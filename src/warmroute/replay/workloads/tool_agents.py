"""tool_agents: agents in a loop. A long system prompt with tools that all agents of a kind share, then many short steps
that follow each other as fast as the tools answer, each on top of everything before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.conversation import Conversation
from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class ToolAgents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kinds: int = 3
    """Agents with tools of their own."""
    tool_tokens: int = 6000
    """System prompt and tool descriptions."""
    steps: int = 20
    result_tokens: int = 800
    """What a tool returns, or the task at first."""
    output_tokens: int = 120
    tool_s: float = 2.0
    """How long a tool takes, on average (exponential)."""
    spread: float = 0.5
    rate: float = 0.3
    """Agents that begin, a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        popularity = Popularity(self.kinds, 0.0)
        number = 0
        while True:
            kind = popularity.pick(random)
            agent = Conversation(
                Segments().followed_by(named("tools", kind), self.tool_tokens),
                random=Random(random.getrandbits(64)),
                name=f"agent {number}",
                turns=around(random, self.steps, self.spread),
                message_tokens=self.result_tokens,
                output_tokens=self.output_tokens,
                think_s=self.tool_s,
                spread=self.spread,
            )
            yield agent.turn()
            number += 1
