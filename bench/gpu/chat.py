"""Closed-loop conversations over one document each, through a router. TTFT is the time to the first piece of content.

    python bench/gpu/chat.py --port 8080 --model NAME --salt a

Each client takes a conversation, asks all its questions one after the other with up to a second between them, and takes
the next one. Another salt makes every prompt new, so that engines need no restart between two runs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

WORDS = (
    "alpha", "beta", "gamma", "delta", "omega", "river", "stone", "cloud", "field", "light", "north", "paper", "quiet",
    "round", "sugar", "table",
)  # fmt: skip
TIMEOUT_S = 300.0
QUESTION_WORDS = 60


@dataclass(frozen=True)
class Load:
    clients: int = 12
    conversations: int = 24
    turns: int = 5
    document_words: int = 3000
    output_tokens: int = 12


@dataclass(frozen=True)
class Answer:
    turn: int
    status: int
    ttft_s: float | None
    total_s: float
    node: str | None


@dataclass
class Run:
    """One run of the load. `answers` has one entry for each request."""

    port: int
    model: str
    salt: str
    load: Load
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._todo = list(range(self.load.conversations))
        random.Random(7).shuffle(self._todo)

    def start(self) -> None:
        """Run all conversations, and return when the last one has ended."""
        started_s = time.monotonic()
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self.load.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wall_s = time.monotonic() - started_s

    def _client(self, number: int) -> None:
        pauses = random.Random(number)
        while True:
            with self._lock:
                if not self._todo:
                    return
                conversation = self._todo.pop()
            self._converse(conversation, pauses)

    def _converse(self, number: int, pauses: random.Random) -> None:
        words = random.Random(number)
        document = f"{self.salt} document {number}: " + " ".join(words.choices(WORDS, k=self.load.document_words))
        messages = [{"role": "system", "content": document}]
        for turn in range(self.load.turns):
            question = f"question {turn} " + " ".join(words.choices(WORDS, k=QUESTION_WORDS))
            messages.append({"role": "user", "content": question})
            answer = self._ask(messages, turn)
            with self._lock:
                self.answers.append(answer)
            if answer.status != 200:
                return
            messages.append({"role": "assistant", "content": f"noted, {turn}"})
            time.sleep(pauses.random())

    def _ask(self, messages: list[dict[str, str]], turn: int) -> Answer:
        body = json.dumps(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.load.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        headers = {"Content-Type": "application/json", "X-Warmroute-Explain": "1"}
        started_s, ttft_s = time.monotonic(), None
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            node = response.getheader("X-Warmroute-Node")
            if response.status != 200:
                self.errors.append(f"{response.status} {response.read()[:300]!r}")
            for line in response:
                if ttft_s is None and line.startswith(b"data: {") and _has_content(json.loads(line[6:])):
                    ttft_s = time.monotonic() - started_s
            return Answer(turn, response.status, ttft_s, time.monotonic() - started_s, node)
        except OSError as error:
            self.errors.append(repr(error))
            return Answer(turn, 0, None, time.monotonic() - started_s, None)
        finally:
            connection.close()

    def figures(self) -> dict[str, Any]:
        served = [answer for answer in self.answers if answer.status == 200 and answer.ttft_s is not None]
        ttft = sorted(answer.ttft_s for answer in served if answer.ttft_s is not None)
        later = sorted(answer.ttft_s for answer in served if answer.ttft_s is not None and answer.turn)
        return {
            "requests": len(self.answers),
            "served": len(served),
            "wall_s": round(self.wall_s, 1),
            "requests_per_s": round(len(served) / self.wall_s, 2) if self.wall_s else 0.0,
            "ttft_ms": {f"p{percent}": percentile_ms(ttft, percent) for percent in (50, 90, 99)},
            "ttft_later_turns_p50_ms": percentile_ms(later, 50),
            "latency_p50_ms": percentile_ms(sorted(answer.total_s for answer in served), 50),
            "requests_by_node": dict(sorted(Counter(str(answer.node) for answer in served).items())),
            "errors": self.errors[:3],
        }


def _has_content(event: dict[str, Any]) -> bool:
    return any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ())


def percentile_ms(ordered_s: list[float], percent: int) -> int | None:
    if not ordered_s:
        return None
    return round(1000 * ordered_s[min(len(ordered_s) - 1, percent * len(ordered_s) // 100)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--salt", default="a")
    for name in ("clients", "conversations", "turns", "document_words", "output_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Load, name))
    options = vars(parser.parse_args())
    run = Run(options.pop("port"), options.pop("model"), options.pop("salt"), Load(**options))
    run.start()
    print(json.dumps(run.figures()))


if __name__ == "__main__":
    main()
