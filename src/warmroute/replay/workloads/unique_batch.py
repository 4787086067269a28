"""unique_batch: a batch of prompts that share nothing. No cache helps; only balance does."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.draw import around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class UniqueBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: int = 2000
    output_tokens: int = 200
    spread: float = 0.8
    rate: float = 8.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        number = 0
        while True:
            answer = around(random, self.output_tokens, self.spread)
            text = Segments().followed_by(named("unique", number), around(random, self.prompt_tokens, self.spread))
            yield Prompt(
                text.tokens,
                answer,
                text.followed_by(named("unique answer", number), answer),
            )
            number += 1
