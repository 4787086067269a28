"""From a request's body to its tokens, and on to the nodes that hold its blocks. Run it alone on the machine:

python bench/decision.py [tokenizer directory] [chats directory]

Conversations are made of real chats' words, no text twice. Each is read turn by turn: a turn adds the assistant's
answer and the user's next question (chat), or a call of a tool and its answer (agent, with ten tools). The first turn
is cold, the others are warm. A decision is the read, the hashes of its blocks of 16 tokens, and a match over 64 nodes
of which eight hold the conversation so far. Times are of one thread: wall time, and CPU time beside it, which other
work on the machine does not change.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warmroute.index import BlockIndex, Tier, chain, namespace_seed
from warmroute.prompt.reading import PromptReader, load_reader

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


def measure(reader: PromptReader, words: Words, tokens: int, agent: bool, conversations: int) -> None:
    index = BlockIndex(256 << 20)
    places = [index.open_place() for _node in range(NODES)]
    assert reader.tokenizer is not None
    seed = namespace_seed("m", block_size=BLOCK_TOKENS, tokenizer=reader.tokenizer.fingerprint)
    offered = tools(words)
    cold, begun, warm, decided = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
    count, size = 0, 0

    def decide(body: bytes) -> tuple[bytes, int]:
        prompt = reader.read(CHAT, body)
        assert prompt is not None and prompt.sure_tokens == prompt.token_count
        hashes = chain(seed, None, prompt.tokens, BLOCK_TOKENS)
        index.match(hashes)
        return hashes, prompt.token_count

    for _conversation in range(conversations):
        for turn, body in enumerate(turns(words, tokens, agent, offered)):
            if turn == 0:
                prompt = cold.time(lambda body=body: reader.read(CHAT, body))
                hashes = chain(seed, None, prompt.tokens, BLOCK_TOKENS)
            elif turn % 2:
                begun.time(lambda body=body: reader.begin(CHAT, body))
                prompt = warm.time(lambda body=body: reader.read(CHAT, body))
                assert prompt.warm_tokens
                hashes = chain(seed, None, prompt.tokens, BLOCK_TOKENS)
            else:
                hashes, count = decided.time(lambda body=body: decide(body))
            size = len(body)
            for place in places[:HOLDERS]:
                index.store_chain(place, hashes, Tier.GPU)
    kind = "agent" if agent else "chat"
    print(f"\n{kind} of {count} tokens, {size // 1000} KB")
    begun.report("  looking over (begin), warm")
    warm.report("  body to tokens, warm")
    decided.report("  body to decision, warm")
    cold.report("  body to tokens, cold")


def longest_pause(reader: PromptReader, words: Words, tokens: int) -> None:
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


def main() -> None:
    shared = Path("/work/shared/data")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else shared / "tokenizers" / "qwen3-rebuilt"
    words = Words(Path(sys.argv[2]) if len(sys.argv) > 2 else shared / "chats")
    started = time.perf_counter()
    reader = load_reader(folder)
    print(f"{folder.name}: loaded in {time.perf_counter() - started:.1f} s")
    for agent in (False, True):
        measure(reader, words, 8_000, agent, conversations=40)
        measure(reader, words, 47_000, agent, conversations=20)
    longest_pause(reader, words, 47_000)
    assert reader.chats is not None
    print(f"remembered: {len(reader.chats.stems)} beginnings in {reader.chats.used_bytes / 1e6:.1f} MB")
    print(f"audit: {reader.audit()}, contradictions: {reader.chats.contradictions}")


if __name__ == "__main__":
    main()
