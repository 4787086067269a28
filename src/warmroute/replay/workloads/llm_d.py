"""llm_d: the workload that llm-d publishes its figures on: groups of prompts that share a long system prompt, asked
over and over (150 groups × 5 prompts, 6,000 + 1,200 tokens, 1,000 tokens of answer; Poisson at 3 to 60 requests/s).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class LlmD(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: int = 150
    prompts: int = 5
    """In each group."""
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    rate: float = 10.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        asked = [
            Segments()
            .followed_by(named("group", group), self.system_tokens)
            .followed_by(named("group", group, "question", prompt), self.question_tokens)
            for group in range(self.groups)
            for prompt in range(self.prompts)
        ]
        number = 0
        while True:
            order = list(range(len(asked)))
            random.shuffle(order)
            for which in order:
                text = asked[which]
                group = which // self.prompts
                yield Prompt(
                    text.tokens,
                    self.output_tokens,
                    text.followed_by(named("llm-d answer", number), self.output_tokens),
                    system_tokens=self.system_tokens,
                    session=b"group %d" % group,
                )
                number += 1
