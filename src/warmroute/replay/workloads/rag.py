"""rag: questions over common documents. A system prompt, some documents of a popular corpus, a question. Documents
come in the order of relevance, so two requests share blocks only as far as their documents agree from the first one on.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.draw import Popularity, around
from warmroute.replay.workloads.prompt import Prompt
from warmroute.replay.workloads.segments import Segments, named


class Rag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    documents: int = 200
    per_request: int = 3
    document_tokens: int = 1500
    system_tokens: int = 300
    question_tokens: int = 60
    output_tokens: int = 200
    topics: int = 40
    """A question is about a topic; its documents are mostly the topic's own, in the topic's order."""
    stray: float = 0.2
    """Chance that a document is any other instead."""
    zipf: float = 1.0
    """Exponent of the topics' popularity."""
    spread: float = 0.3
    rate: float = 4.0
    """Requests a second."""

    def generate(self, random: Random) -> Iterator[Prompt]:
        layout = Random("rag corpus")
        lengths = [around(layout, self.document_tokens, self.spread) for _ in range(self.documents)]
        topics = [layout.sample(range(self.documents), self.per_request) for _ in range(self.topics)]
        popularity = Popularity(self.topics, self.zipf)
        system = Segments().followed_by(named("rag system"), self.system_tokens)
        number = 0
        while True:
            topic = popularity.pick(random)
            text = system
            for document in topics[topic]:
                if random.random() < self.stray:
                    document = random.randrange(self.documents)
                text = text.followed_by(named("document", document), lengths[document])
            question = around(random, self.question_tokens, self.spread)
            answer = around(random, self.output_tokens, self.spread)
            asked = text.followed_by(named("rag question", number), question)
            yield Prompt(
                asked.tokens,
                answer,
                asked.followed_by(named("rag answer", number), answer),
                system_tokens=self.system_tokens,
            )
            number += 1
