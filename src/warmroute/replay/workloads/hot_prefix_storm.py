"""hot_prefix_storm: ordinary traffic over many prefixes, interrupted by storms in which most requests share a prefix (a
launch, a shared document, a looping job). A policy that follows the prefix and ignores load puts a storm on one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.random_draws import Popularity, draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class HotPrefixStorm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefixes: int = 60
    prefix_tokens: int = 3000
    question_tokens: int = 100
    output_tokens: int = 150
    hot_share: float = 0.9
    """Fraction of a storm's requests that have the hot prefix."""
    calm: int = 300
    """Requests between two storms."""
    storm: int = 300
    """Requests of a storm."""
    zipf: float = 0.5
    spread: float = 0.3
    rate: float = 12.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        popularity = Popularity(self.prefixes, self.zipf)
        for number in count():
            storm, position = divmod(number, self.calm + self.storm)
            if position >= self.calm and random.random() < self.hot_share:
                prefix, session = segment_id("hot", storm), b"hot %d" % storm
            else:
                which = popularity.pick(random)
                prefix, session = segment_id("prefix", which), b"prefix %d" % which
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            prompt = Segments().followed_by(prefix, self.prefix_tokens)
            prompt = prompt.followed_by(segment_id("storm question", number), question_tokens)
            answered = prompt.followed_by(segment_id("storm answer", number), answer_tokens)
            yield WorkloadPrompt(prompt.tokens, answer_tokens, answered, session=session)
