"""tool_agents: agents in a loop. A long system prompt with tools is shared by all agents of a kind. Many short steps
follow each other as fast as the tools answer, and the prompt of each is the whole history.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.conversation import Conversation
from warmroute.replay.workloads.random_draws import Popularity, draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class ToolAgents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
        popularity = Popularity(self.kinds, 0.0)
        for number in count():
            kind = popularity.pick(random)
            agent = Conversation(
                Segments().followed_by(segment_id("tools", kind), self.tool_tokens),
                random=Random(random.getrandbits(64)),
                name=f"agent {number}",
                turns=draw_length(random, self.steps, self.spread),
                message_tokens=self.result_tokens,
                output_tokens=self.output_tokens,
                think_s=self.tool_s,
                spread=self.spread,
            )
            yield agent.next_prompt()
