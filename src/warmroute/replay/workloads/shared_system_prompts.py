"""shared_system_prompts: a few applications, each with its own system prompt before questions that differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.random_draws import Popularity, draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class SharedSystemPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompts: int = 5
    """Number of system prompts."""
    system_tokens: int = 200
    question_tokens: int = 50
    output_tokens: int = 100
    spread: float = 0.2
    """Of the lengths of questions and answers around their mean."""
    zipf: float = 0.0
    """Exponent of the system prompts' popularity; 0 is uniform."""
    rate: float = 4.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = [Segments().followed_by(segment_id("system", n), self.system_tokens) for n in range(self.prompts)]
        popularity = Popularity(self.prompts, self.zipf)
        for number in count():
            which = popularity.pick(random)
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt = systems[which].followed_by(segment_id("question", number), question_tokens)
            yield WorkloadPrompt(
                prompt.tokens,
                answer_tokens,
                prompt.followed_by(segment_id("answer", number), answer_tokens),
                system_tokens=self.system_tokens,
                session=b"app %d" % which,  # sent as prompt_cache_key
            )
