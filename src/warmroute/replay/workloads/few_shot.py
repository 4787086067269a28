"""few_shot: tasks with long fixed examples before a short input, answered in a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.random_draws import Popularity, draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class FewShot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tasks: int = 20
    example_tokens: int = 400
    examples: int = 8
    input_tokens: int = 120
    output_tokens: int = 20
    zipf: float = 0.8
    spread: float = 0.3
    rate: float = 10.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        examples: list[Segments] = []
        for task in range(self.tasks):
            text = Segments()
            for example in range(self.examples):
                text = text.followed_by(segment_id("task", task, "example", example), self.example_tokens)
            examples.append(text)
        popularity = Popularity(self.tasks, self.zipf)
        for number in count():
            task = popularity.pick(random)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            input_tokens = draw_length(random, self.input_tokens, self.spread)
            prompt = examples[task].followed_by(segment_id("input", number), input_tokens)
            yield WorkloadPrompt(
                prompt.tokens, answer_tokens, prompt.followed_by(segment_id("output", number), answer_tokens)
            )
