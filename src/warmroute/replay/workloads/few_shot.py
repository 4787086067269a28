"""few_shot: tasks with long fixed examples in front of a short input, answered in a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class FewShot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tasks: int = 20
    example_tokens: int = 400
    examples: int = 8
    input_tokens: int = 120
    output_tokens: int = 20
    zipf: float = 0.8
    spread: float = 0.3
    rate: float = 10.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        shots: list[Segments] = []
        for task in range(self.tasks):
            text = Segments()
            for example in range(self.examples):
                text = text.followed_by(named("task", task, "example", example), self.example_tokens)
            shots.append(text)
        popularity = Popularity(self.tasks, self.zipf)
        number = 0
        while True:
            task = popularity.pick(random)
            answer = around(random, self.output_tokens, self.spread)
            asked = shots[task].followed_by(named("input", number), around(random, self.input_tokens, self.spread))
            yield Prompt(
                asked.tokens,
                answer,
                asked.followed_by(named("output", number), answer),
            )
            number += 1
