"""rag: questions over shared documents: a system prompt, documents of a common corpus, a question.

Documents are in the order of relevance, so two requests share blocks only up to the first document that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import msgspec

from warmroute.replay.workloads.random_draws import Popularity, draw_length
from warmroute.replay.workloads.segments import Segments, segment_id
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class Rag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    documents: int = 200
    per_request: int = 3
    document_tokens: int = 1500
    system_tokens: int = 300
    question_tokens: int = 60
    output_tokens: int = 200
    topics: int = 40
    """Each question is about a topic, which has its documents in a fixed order."""
    stray: float = 0.2
    """Probability that a document is replaced by a random one."""
    zipf: float = 1.0
    """Exponent of the topics' popularity."""
    spread: float = 0.3
    rate: float = 4.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        layout = Random("rag corpus")
        lengths = [draw_length(layout, self.document_tokens, self.spread) for _ in range(self.documents)]
        topics = [layout.sample(range(self.documents), self.per_request) for _ in range(self.topics)]
        popularity = Popularity(self.topics, self.zipf)
        system = Segments().followed_by(segment_id("rag system"), self.system_tokens)
        for number in count():
            topic = popularity.pick(random)
            text = system
            for document in topics[topic]:
                if random.random() < self.stray:
                    document = random.randrange(self.documents)
                text = text.followed_by(segment_id("document", document), lengths[document])
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt = text.followed_by(segment_id("rag question", number), question_tokens)
            answered = prompt.followed_by(segment_id("rag answer", number), answer_tokens)
            yield WorkloadPrompt(prompt.tokens, answer_tokens, answered, system_tokens=self.system_tokens)
