"""Synthetic workloads."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random
from typing import Any

import msgspec

from warmroute.lab.workloads.workload_prompt import FollowUp, Segments, WorkloadPrompt, segment_id

# The synthetic workloads, except for conversations. Each class is one generator; its fields are its parameters.
# `rate` is in requests per second.


def draw_length(random: Random, mean: int, spread: float) -> int:
    """Return a length drawn uniformly from `mean` × (1 ± `spread`), at least one token."""
    return max(1, round(mean * (1.0 - spread + 2.0 * spread * random.random()))) if spread else max(1, mean)


class Popularity:
    """Picks one of `count` items by Zipf's law: the k-th has the weight 1/k^exponent. Exponent 0 is uniform."""

    def __init__(self, count: int, exponent: float) -> None:
        self._sums = list(accumulate(rank**-exponent for rank in range(1, count + 1)))

    def pick(self, random: Random) -> int:
        return bisect(self._sums, random.random() * self._sums[-1], hi=len(self._sums) - 1)


def system_prompts(name: str, count: int, tokens: int) -> list[Segments]:
    return [Segments().followed_by(segment_id(name, number), tokens) for number in range(count)]


def _request(prompt: Segments, answer_id: int, answer_tokens: int, **fields: Any) -> WorkloadPrompt:
    answered = prompt.followed_by(answer_id, answer_tokens)
    return WorkloadPrompt(prompt.tokens, answer_tokens, answered, **fields)


class SharedSystemPrompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A few applications, each with its own system prompt before questions that differ."""

    prompts: int = 5
    """Number of system prompts."""
    system_tokens: int = 200
    question_tokens: int = 50
    output_tokens: int = 100
    spread: float = 0.2
    """Spread of the lengths of questions and answers around their mean."""
    zipf: float = 0.0
    """Exponent of the system prompts' popularity; 0 is uniform."""
    rate: float = 4.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("system", self.prompts, self.system_tokens)
        popularity = Popularity(self.prompts, self.zipf)
        for number in count():
            which = popularity.pick(random)
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt = systems[which].followed_by(segment_id("question", number), question_tokens)
            session = b"app %d" % which  # sent as prompt_cache_key
            answer_id = segment_id("answer", number)
            yield _request(prompt, answer_id, answer_tokens, system_tokens=self.system_tokens, session=session)


class MixedLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Short prompts and, now and then, a very long one. No two share a prefix."""

    short_tokens: int = 1000
    long_tokens: int = 30_000
    longest_tokens: int = 100_000
    """Long prompts have a length between these two, evenly distributed."""
    long_share: float = 0.1
    """Fraction of the requests with a long prompt."""
    output_tokens: int = 250
    spread: float = 0.5
    """Spread of the lengths of short prompts and answers around their mean."""
    rate: float = 4.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        for number in count():
            tokens = draw_length(random, self.short_tokens, self.spread)
            if random.random() < self.long_share:
                tokens = random.randint(self.long_tokens, max(self.long_tokens, self.longest_tokens))
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt = Segments().followed_by(segment_id("prompt", number), tokens)
            yield _request(prompt, segment_id("answer", number), answer_tokens)


class PriorityMix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shared system prompts with three priorities, by default 20 % high, 60 % normal, 20 % low."""

    high: float = 0.2
    low: float = 0.2
    prompts: int = 5
    system_tokens: int = 200
    question_tokens: int = 50
    output_tokens: int = 100
    spread: float = 0.2
    tenants: int = 4
    rate: float = 10.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        requests = SharedSystemPrompts(
            self.prompts, self.system_tokens, self.question_tokens, self.output_tokens, self.spread
        ).generate(Random(random.getrandbits(64)))
        for prompt in requests:
            chance = random.random()
            prompt.priority = "high" if chance < self.high else "low" if chance >= 1.0 - self.low else "normal"
            prompt.tenant = f"tenant-{random.randrange(self.tenants)}"
            yield prompt


class LlmDBenchmark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workload of llm-d's published figures. Groups of prompts share a long system prompt, and every prompt is sent
    many times (150 groups × 5 prompts, 6,000 + 1,200 tokens, answers of 1,000 tokens; Poisson at 3 to 60 requests/s).
    """

    groups: int = 150
    prompts: int = 5
    """Prompts in each group."""
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    rate: float = 10.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        prompts = [
            system.followed_by(segment_id("group", group, "question", prompt), self.question_tokens)
            for group, system in enumerate(system_prompts("group", self.groups, self.system_tokens))
            for prompt in range(self.prompts)
        ]
        numbers = count()
        while True:
            order = list(range(len(prompts)))
            random.shuffle(order)
            for which in order:
                session = b"group %d" % (which // self.prompts)
                known = {"system_tokens": self.system_tokens, "session": session}
                yield _request(prompts[which], segment_id("llm-d answer", next(numbers)), self.output_tokens, **known)


class FewShot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks with long fixed examples before a short input, answered in a few tokens."""

    tasks: int = 20
    example_tokens: int = 400
    examples: int = 8
    input_tokens: int = 120
    output_tokens: int = 20
    zipf: float = 0.8
    spread: float = 0.3
    rate: float = 10.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        tasks = [Segments()] * self.tasks
        for task in range(self.tasks):
            for example in range(self.examples):
                example_id = segment_id("task", task, "example", example)
                tasks[task] = tasks[task].followed_by(example_id, self.example_tokens)
        popularity = Popularity(self.tasks, self.zipf)
        for number in count():
            task = popularity.pick(random)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            input_tokens = draw_length(random, self.input_tokens, self.spread)
            prompt = tasks[task].followed_by(segment_id("input", number), input_tokens)
            yield _request(prompt, segment_id("output", number), answer_tokens)


class Rag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Questions over shared documents: a system prompt, documents of a common corpus, a question. Documents are in the
    order of relevance, so two requests share blocks only up to the first document that differs."""

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

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        layout = Random("rag corpus")
        lengths = [draw_length(layout, self.document_tokens, self.spread) for _ in range(self.documents)]
        topics = [layout.sample(range(self.documents), self.per_request) for _ in range(self.topics)]
        popularity = Popularity(self.topics, self.zipf)
        system = Segments().followed_by(segment_id("rag system"), self.system_tokens)
        for number in count():
            prompt = system
            for document in topics[popularity.pick(random)]:
                if random.random() < self.stray:
                    document = random.randrange(self.documents)
                prompt = prompt.followed_by(segment_id("document", document), lengths[document])
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt = prompt.followed_by(segment_id("rag question", number), question_tokens)
            answer_id = segment_id("rag answer", number)
            yield _request(prompt, answer_id, answer_tokens, system_tokens=self.system_tokens)


class HotPrefixStorm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ordinary traffic over many prefixes, interrupted by storms in which most requests share a prefix (a launch, a
    shared document, a looping job). A policy that follows the prefix and ignores load puts a storm on one node."""

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

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        popularity = Popularity(self.prefixes, self.zipf)
        for number in count():
            storm, position = divmod(number, self.calm + self.storm)
            if position >= self.calm and random.random() < self.hot_share:
                kind, which = "hot", storm
            else:
                kind, which = "prefix", popularity.pick(random)
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            question_tokens = draw_length(random, self.question_tokens, self.spread)
            prompt = Segments().followed_by(segment_id(kind, which), self.prefix_tokens)
            prompt = prompt.followed_by(segment_id("storm question", number), question_tokens)
            answer_id = segment_id("storm answer", number)
            yield _request(prompt, answer_id, answer_tokens, session=f"{kind} {which}".encode())


class UniqueBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch of prompts that share nothing. No cache helps; only load balancing does."""

    prompt_tokens: int = 2000
    output_tokens: int = 200
    spread: float = 0.8
    rate: float = 8.0

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        for number in count():
            answer_tokens = draw_length(random, self.output_tokens, self.spread)
            prompt_tokens = draw_length(random, self.prompt_tokens, self.spread)
            prompt = Segments().followed_by(segment_id("unique", number), prompt_tokens)
            yield _request(prompt, segment_id("unique answer", number), answer_tokens)


# Conversations: the prompt of each turn is the whole history, answers included, and a new message, which follows the
# answer after a while.


@dataclass(slots=True, kw_only=True)
class Conversation:
    name: str
    history: Segments
    """At first the system prompt."""
    system_tokens: int
    random: Random
    turns: int
    message_tokens: int
    output_tokens: int
    think_s: float
    spread: float
    turn: int = 0
    user_tokens: int = 0
    """Length of the first user message."""

    def next_prompt(self) -> WorkloadPrompt:
        """Return the prompt of the next turn, and add it and its answer to the history."""
        self.turn += 1
        message_tokens = draw_length(self.random, self.message_tokens, self.spread)
        answer_tokens = draw_length(self.random, self.output_tokens, self.spread)
        self.user_tokens = self.user_tokens or message_tokens
        prompt = self.history.followed_by(segment_id(self.name, "message", self.turn), message_tokens)
        self.history = prompt.followed_by(segment_id(self.name, "answer", self.turn), answer_tokens)
        return WorkloadPrompt(
            prompt.tokens,
            answer_tokens,
            self.history,
            system_tokens=self.system_tokens,
            user_tokens=self.user_tokens,
            session=self.name.encode(),
            next_turn=self._follow_up if self.turn < self.turns else None,
        )

    def _follow_up(self) -> FollowUp:
        think_ms = self.random.expovariate(1.0 / self.think_s) * 1000.0 if self.think_s else 0.0
        return FollowUp(think_ms, self.next_prompt())


def _conversations(
    name: str, systems: Sequence[Segments], zipf: float, random: Random, turns: int, message_tokens: int,
    output_tokens: int, think_s: float, spread: float,
) -> Iterator[WorkloadPrompt]:  # fmt: skip
    """Return the first prompt of each conversation."""
    popularity = Popularity(len(systems), zipf)
    for number in count():
        system = systems[popularity.pick(random)]
        yield Conversation(
            name=f"{name} {number}",
            history=system,
            system_tokens=system.tokens,
            random=Random(random.getrandbits(64)),
            turns=draw_length(random, turns, spread),
            message_tokens=message_tokens,
            output_tokens=output_tokens,
            think_s=think_s,
            spread=spread,
        ).next_prompt()


class MultiTurnChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """People who chat. They send the next message after they have read the answer."""

    systems: int = 1
    """Number of system prompts; each conversation has one of them."""
    system_tokens: int = 500
    turns: int = 6
    message_tokens: int = 100
    output_tokens: int = 200
    think_s: float = 10.0
    """Mean time between an answer and the next message (exponential)."""
    spread: float = 0.5
    zipf: float = 0.0
    rate: float = 1.0
    """New conversations per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("system", self.systems, self.system_tokens)
        return _conversations(
            "chat", systems, self.zipf, random, self.turns, self.message_tokens, self.output_tokens, self.think_s,
            self.spread,
        )  # fmt: skip


class ToolAgents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agents in a loop. All agents of a kind share a long system prompt with tools. Many short steps follow each other
    as fast as the tools answer."""

    kinds: int = 3
    """Kinds of agents, each with its own tools."""
    tool_tokens: int = 6000
    """System prompt and tool descriptions."""
    steps: int = 20
    result_tokens: int = 800
    """What a tool returns; in the first step, the task."""
    output_tokens: int = 120
    tool_s: float = 2.0
    """Mean time that a tool takes (exponential)."""
    spread: float = 0.5
    rate: float = 0.3
    """New agents per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        systems = system_prompts("tools", self.kinds, self.tool_tokens)
        return _conversations(
            "agent", systems, 0.0, random, self.steps, self.result_tokens, self.output_tokens, self.tool_s, self.spread
        )
