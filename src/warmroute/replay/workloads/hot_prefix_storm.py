"""hot_prefix_storm: ordinary traffic over many prefixes, and now and then a storm in which most requests begin alike (a
launch, a shared document, a looping job). Affinity without regard for load puts the storm on one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class HotPrefixStorm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefixes: int = 60
    prefix_tokens: int = 3000
    question_tokens: int = 100
    output_tokens: int = 150
    hot_share: float = 0.9
    """Of requests within a storm, those with the hot prefix."""
    calm: int = 300
    """Requests between storms."""
    storm: int = 300
    """Requests of a storm."""
    zipf: float = 0.5
    spread: float = 0.3
    rate: float = 12.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        popularity = Popularity(self.prefixes, self.zipf)
        number = 0
        while True:
            round_number, place = divmod(number, self.calm + self.storm)
            if place >= self.calm and random.random() < self.hot_share:
                prefix, key = named("hot", round_number), b"hot %d" % round_number
            else:
                which = popularity.pick(random)
                prefix, key = named("prefix", which), b"prefix %d" % which
            answer = around(random, self.output_tokens, self.spread)
            asked = (
                Segments()
                .followed_by(prefix, self.prefix_tokens)
                .followed_by(named("storm question", number), around(random, self.question_tokens, self.spread))
            )
            yield Prompt(
                asked.tokens,
                answer,
                asked.followed_by(named("storm answer", number), answer),
                session=key,
            )
            number += 1
