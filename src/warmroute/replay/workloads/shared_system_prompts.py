"""shared_system_prompts: a few applications, each with its own system prompt in front of questions that differ."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class SharedSystemPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompts: int = 5
    """System prompts."""
    system_tokens: int = 200
    question_tokens: int = 50
    output_tokens: int = 100
    spread: float = 0.2
    """Of questions and answers around their mean."""
    zipf: float = 0.0
    """Exponent of the system prompts' popularity; 0 is evenly."""
    rate: float = 4.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        systems = [Segments().followed_by(named("system", n), self.system_tokens) for n in range(self.prompts)]
        popularity = Popularity(self.prompts, self.zipf)
        number = 0
        while True:
            which = popularity.pick(random)
            question = around(random, self.question_tokens, self.spread)
            answer = around(random, self.output_tokens, self.spread)
            asked = systems[which].followed_by(named("question", number), question)
            yield Prompt(
                asked.tokens,
                answer,
                asked.followed_by(named("answer", number), answer),
                system_tokens=self.system_tokens,
                session=b"app %d" % which,  # its prompt_cache_key
            )
            number += 1
