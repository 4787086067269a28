"""From a request's body to its tokens, and on to the nodes that hold its blocks. Run it alone on the machine:

python bench/decision.py [tokenizer directory] [chats directory]

Conversations are made of real chats' words, no text twice. Each is read turn by turn: a turn adds the assistant's
answer and the user's next question (chat), or a call of a tool and its answer (agent, with ten tools). The first turn
is cold, the others are warm. A match is the read, the hashes of its blocks of 16 tokens, and a match over 64 nodes of
which eight hold the conversation so far and all hold the first block. A decision is the whole way of the router, from
the body to the node by the default policy: ask, read, hashes, match, tiers and confidence, ranking. Its books are what
follows: dispatch, first token, the answer's numbers, end. A choice by price is what the router does with 8,000 tokens
that are read: hashes, match, and the prices of 64 or 1,000 nodes with full caches, of which an eighth hold the prompt;
chosen again, as for one who waits, it takes what they hold as known. Times are of one thread: wall time, and CPU time
beside it, which other work on the machine does not change.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from warmroute.config import Config, Health, Index, ModelConfig, NodeConfig, Routing
from warmroute.edge.reading import PromptReader
from warmroute.fleet.fleet import Fleet
from warmroute.fleet.node import Outcome
from warmroute.index import Tier
from warmroute.index.cache_view import CacheView
from warmroute.index.lookup import Lookup
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.reading import PromptTokenizer
from warmroute.prompt.routing_request import RoutingRequest, read_json
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.routing.decision import Decision
from warmroute.routing.dispatch import Dispatch
from warmroute.routing.lookups import lookup_of
from warmroute.routing.router import Router
from warmroute.telemetry.counters import Counters

CHAT = b"/v1/chat/completions"
BLOCK_TOKENS = 16
NODES, HOLDERS = 64, 8
TURNS = 12
CHARACTERS_PER_TOKEN = 4.3


class Words:
    """Text that was not there before."""

    def __init__(self, chats: Path) -> None:
        with gzip.open(chats / "mt_bench_101.jsonl.gz", "rt") as lines:
            texts = [m["content"] for line in lines for m in json.loads(line)["messages"]]
        self._text = "\n".join(texts)
        self._at = 0
        self._round = 0

    def take(self, characters: int) -> str:
        if self._at + characters > len(self._text):
            self._at, self._round = 0, self._round + 1
        text = self._text[self._at : self._at + characters]
        self._at += characters
        return f"{text} ({self._round}.{self._at})"


def tools(words: Words) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": words.take(600),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "description": words.take(200)}},
                },
            },
        }
        for number in range(10)
    ]


def turns(words: Words, tokens: int, agent: bool, offered: list[dict[str, Any]]) -> Iterator[bytes]:
    """Bodies of one conversation; the last has about so many tokens."""
    size, new = int(tokens * CHARACTERS_PER_TOKEN), 900
    messages: list[dict[str, Any]] = [{"role": "system", "content": words.take(2_000)}]
    messages.append({"role": "user", "content": words.take(1_000)})
    number = 0

    def add(characters: int) -> None:
        nonlocal number
        number += 1
        if not agent:
            messages.append({"role": "assistant", "content": words.take(characters * 2 // 3)})
            messages.append({"role": "user", "content": words.take(characters // 3)})
            return
        call = {"name": f"tool_{number % 10}", "arguments": json.dumps({"path": words.take(60)})}
        call_id = f"call_{number}"
        thought = {"content": words.take(characters // 5), "reasoning_content": words.take(characters // 5)}
        calls = [{"id": call_id, "type": "function", "function": call}]
        messages.append({"role": "assistant", **thought, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": words.take(characters * 3 // 5)})

    written = 3_000 + (10_000 if agent else 0)
    while written < size - TURNS * new:
        add(2_400)
        written += 2_400
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 500, "messages": messages}
    if agent:
        body["tools"] = offered
    for _turn in range(TURNS):
        add(new)
        yield json.dumps(body).encode()


def percentiles(samples: list[float]) -> str:
    ordered = sorted(samples)
    middle, late = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"p50 {middle * 1e3:6.3f}  p99 {late * 1e3:6.3f}"


class Stopwatch:
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def time(self, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        made = work()
        self.cpu.append(time.thread_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return made

    def report(self, what: str) -> None:
        print(f"{what:<44} wall ms {percentiles(self.wall)}   CPU ms {percentiles(self.cpu)}")


class Routed:
    """A router with its fleet, as the service puts them together; every node tells what it holds."""

    def __init__(self, library: TokenizerRegistry, config: Config) -> None:
        self.fleet = Fleet(config.health)
        self.cache_view = CacheView(config.index)
        self.router = Router(self.fleet, self.cache_view, config.routing)
        self.readings = PromptReader(library, config.prompts, Counters())
        self._now_s = 1.0
        for number in range(NODES):
            node = self.fleet.add(NodeConfig(url=f"http://10.0.0.{number}:8000", name=f"node-{number}", models=("m",)))
            self.fleet.check_passed(node, 0.0)
            cache = self.cache_view.join(node.name, ["m"])
            cache.describe(BLOCK_TOKENS, 1_000_000)
            cache.follow(0)
            cache.tells_all(0, True)

    def hear(self, hashes: bytes) -> None:
        """Some nodes tell of the conversation, all of its first block; and time passes."""
        self._now_s += 5.0
        for number, cache in enumerate(self.cache_view):
            cache.heard(self._now_s)
            told = hashes if number < HOLDERS else hashes[:8]
            self.cache_view.index.store_chain(cache.ranks[0], told, Tier.GPU)
        self.cache_view.tidy(self._now_s)

    def decide(self, body: bytes) -> Decision:
        request = read_json(body)
        prompt = self.readings.read(request.model, CHAT, body, lambda _: None, request.outline)
        assert isinstance(prompt, Prompt), "it should be read on the loop"
        return self.router.decide(request, self._now_s, lookup_of(prompt, ""))

    def books(self, decision: Decision) -> None:
        ticket = self.router.dispatch(decision, decision.node, self._now_s)
        assert isinstance(ticket, Dispatch) and ticket.prediction is not None and ticket.prediction.tokens
        ticket.first_byte(self._now_s)
        ticket.answered(ticket.prediction.prompt_tokens, ticket.prediction.tokens, 300, self._now_s)
        ticket.close(Outcome.OK, self._now_s)


def measure(library: TokenizerRegistry, words: Words, tokens: int, agent: bool, conversations: int) -> None:
    routed = Routed(library, Config())
    reader = library.reader("m")
    offered = tools(words)
    cold, begun, warm, matched, decided, booked = (Stopwatch() for _ in range(6))
    count, size = 0, 0

    def hashes_of(prompt: Prompt | None) -> bytes:
        assert prompt is not None and prompt.sure_tokens == prompt.token_count
        return lookup_of(prompt, "").blocks("m", "", BLOCK_TOKENS)

    def match(body: bytes) -> bytes:
        hashes = hashes_of(reader.read(CHAT, body))
        routed.cache_view.index.match(hashes)
        return hashes

    for _conversation in range(conversations):
        for turn, body in enumerate(turns(words, tokens, agent, offered)):
            if turn == 0:
                hashes = hashes_of(cold.time(lambda body=body: reader.read(CHAT, body)))
            elif turn % 3 == 1:
                begun.time(lambda body=body: reader.begin(CHAT, body))
                prompt = warm.time(lambda body=body: reader.read(CHAT, body))
                assert prompt.warm_tokens
                hashes = hashes_of(prompt)
            elif turn % 3 == 2:
                hashes = matched.time(lambda body=body: match(body))
            else:
                decision = decided.time(lambda body=body: routed.decide(body))
                booked.time(lambda decision=decision: routed.books(decision))
                count = decision.query.lookup.token_count
                hashes = decision.query.lookup.blocks("m", "", BLOCK_TOKENS)
            size = len(body)
            routed.hear(hashes)
    routed.readings.close()
    kind = "agent" if agent else "chat"
    print(f"\n{kind} of {count} tokens, {size // 1000} KB")
    begun.report("  looking over (begin), warm")
    warm.report("  body to tokens, warm")
    matched.report("  body to match, warm")
    decided.report(f"  body to decision by {routed.router.policy.name}, warm")
    booked.report("  its books, dispatch to end")
    cold.report("  body to tokens, cold")


def longest_pause(reader: PromptTokenizer, words: Words, tokens: int) -> None:
    """How long other threads wait while one reads cold prompts."""
    pauses, size = [0.0], 0
    for _round in range(5):
        body = next(turns(words, tokens, agent=False, offered=[]))
        size = len(body)
        thread = threading.Thread(target=reader.read, args=(CHAT, body))
        last = time.perf_counter()
        thread.start()
        while True:
            alive, now = thread.is_alive(), time.perf_counter()
            pauses.append(now - last)
            last = now
            if not alive:
                break
    print(f"\ncold {size // 1000} KB in a thread: the loop waits at most {max(pauses) * 1e3:.1f} ms at a time")


def choices(count: int) -> None:
    """What a choice by price costs over so many nodes."""
    fleet, cache_view = Fleet(Health(slow_start_s=0.0)), CacheView(Index())
    tokens = Random(1).randbytes(4 * 8_000)
    for number in range(count):
        node = fleet.add(NodeConfig(url=f"http://10.0.0.0:{number + 1}", name=f"node-{number}", models=("m",)))
        fleet.check_passed(node, 0.0)
        cache = cache_view.join(node.name, ["m"])
        cache.describe(BLOCK_TOKENS, 300_000)
        cache.keep_answer(300_000, 0.0)
        cache.accuracy.compare(8_000, 7_000, 0.0)
        node.speed.factor = 1.0 + number / count
        if number % 8 == 0:
            cache_view.sent("m", Lookup(tokens, 8_000, 8_000), node.name, None, 1.0)
    router = Router(fleet, cache_view, Routing(policy="price"))
    chosen, again = Stopwatch(), Stopwatch()
    for number in range(500):
        now_s = 2.0 + number / 100.0
        lookup = Lookup(tokens, 8_000, 8_000)
        decision = chosen.time(lambda lookup=lookup, now_s=now_s: router.decide(RoutingRequest("m"), now_s, lookup))
        again.time(lambda query=decision.query, now_s=now_s: router.decide_again(query, now_s))
    chosen.report(f"  choice by price of {count} nodes")
    again.report("  the same, chosen again")


async def main() -> None:
    shared = Path("/work/shared/data")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else shared / "tokenizers" / "qwen3-rebuilt"
    words = Words(Path(sys.argv[2]) if len(sys.argv) > 2 else shared / "chats")
    started = time.perf_counter()
    library = TokenizerRegistry(Config().prompts, [ModelConfig(name="m", tokenizer=str(folder))])
    await library.load_configured()
    reader = library.reader("m")
    print(f"{folder.name}: loaded in {time.perf_counter() - started:.1f} s")
    for agent in (False, True):
        measure(library, words, 8_000, agent, conversations=40)
        measure(library, words, 47_000, agent, conversations=20)
    print()
    choices(64)
    choices(1_000)
    longest_pause(reader, words, 47_000)
    assert reader.chats is not None
    print(f"remembered: {len(reader.chats.stems)} beginnings in {reader.chats.used_bytes / 1e6:.1f} MB")
    print(f"audit: {reader.audit()}, contradictions: {reader.chats.contradictions}")
    library.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
