"""multi_turn_chat: people who chat. Each turn's prompt is the whole conversation so far, answers included, and a new
message, sent after the user has read the answer.
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


class MultiTurnChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
        popularity = Popularity(self.systems, self.zipf)
        for number in count():
            which = popularity.pick(random)
            conversation = Conversation(
                Segments().followed_by(segment_id("system", which), self.system_tokens),
                random=Random(random.getrandbits(64)),
                name=f"chat {number}",
                turns=draw_length(random, self.turns, self.spread),
                message_tokens=self.message_tokens,
                output_tokens=self.output_tokens,
                think_s=self.think_s,
                spread=self.spread,
            )
            yield conversation.next_prompt()
