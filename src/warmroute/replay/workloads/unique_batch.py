"""unique_batch: a batch of prompts that share nothing. No cache helps; only load balancing does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.random_draws import draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class UniqueBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int = 2000
    output_tokens: int = 200
    spread: float = 0.8
    rate: float = 8.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        for number in count():
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt_tokens = draw_length(random, self.prompt_tokens, self.spread)
            prompt = Segments().followed_by(segment_id("unique", number), prompt_tokens)
            answered = prompt.followed_by(segment_id("unique answer", number), answer_tokens)
            yield WorkloadPrompt(prompt.tokens, answer_tokens, answered)
