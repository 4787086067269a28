"""multi_turn_chat: people who talk. Each turn's prompt is the whole conversation so far, answers included, and a new
message; it is sent when the answer has been read and thought about.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.conversation import Conversation
from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class MultiTurnChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    systems: int = 1
    """System prompts; conversations pick one."""
    system_tokens: int = 500
    turns: int = 6
    message_tokens: int = 100
    output_tokens: int = 200
    think_s: float = 10.0
    """Between an answer and the next message, on average (exponential)."""
    spread: float = 0.5
    zipf: float = 0.0
    rate: float = 1.0
    """Conversations that begin, a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        popularity = Popularity(self.systems, self.zipf)
        number = 0
        while True:
            which = popularity.pick(random)
            talk = Conversation(
                Segments().followed_by(named("system", which), self.system_tokens),
                random=Random(random.getrandbits(64)),
                name=f"chat {number}",
                turns=around(random, self.turns, self.spread),
                message_tokens=self.message_tokens,
                output_tokens=self.output_tokens,
                think_s=self.think_s,
                spread=self.spread,
            )
            yield talk.turn()
            number += 1
