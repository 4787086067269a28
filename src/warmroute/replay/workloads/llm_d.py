"""llm_d: the workload of llm-d's published figures. Groups of prompts share a long system prompt, and every prompt is
sent many times (150 groups × 5 prompts, 6,000 + 1,200 tokens, answers of 1,000 tokens; Poisson at 3 to 60 requests/s).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class LlmDBenchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: int = 150
    prompts: int = 5
    """In each group."""
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    rate: float = 10.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        prompts = [
            Segments()
            .followed_by(segment_id("group", group), self.system_tokens)
            .followed_by(segment_id("group", group, "question", prompt), self.question_tokens)
            for group in range(self.groups)
            for prompt in range(self.prompts)
        ]
        number = 0
        while True:
            order = list(range(len(prompts)))
            random.shuffle(order)
            for which in order:
                prompt = prompts[which]
                yield WorkloadPrompt(
                    prompt.tokens,
                    self.output_tokens,
                    prompt.followed_by(segment_id("llm-d answer", number), self.output_tokens),
                    system_tokens=self.system_tokens,
                    session=b"group %d" % (which // self.prompts),
                )
                number += 1
