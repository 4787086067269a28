"""The first act: three simulated engines, the router in front, and conversations sent through it twice.

The engines are small on purpose: together they hold all conversations, but only if each lives on one of them. First
round robin shares the requests out, then the caches are emptied and the same conversations go by price, with the
engines' own tokens and KV events. What is shown is what the engines themselves report (`usage` of every answer, their
metrics) and what the clients measured.

A demonstration, not a benchmark: the workload was picked, out of several that were tried, to let the difference be
seen. Where conversations are short beside a system prompt that all share, or begin all at once, round robin finds much
of it too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from warmroute.config import ConfigError
from warmroute.demo.chat_client import ChatOutcome, Unanswered, chat, send_request
from warmroute.demo.child_processes import Child, Children, free_port
from warmroute.demo.router_process import HOST, RouterProcess, start_router
from warmroute.fake_engine.server.word_list import WORDS

MODEL = "sim"
ENGINES = 3
PROFILE = "l4-8b"
BLOCKS = 850
BLOCK_SIZE = 16
CONVERSATIONS = 12
TURNS = 5
SYSTEM_PROMPTS = 4
SYSTEM_WORDS = 300
DOCUMENT_WORDS = 1800
"""What a conversation is about: comes with its first question."""
QUESTION_WORDS = 60
ANSWER_TOKENS = 12
ARRIVAL_S = 6.0
"""Over which the conversations begin."""
PAUSE_S = (0.1, 0.6)
"""Between an answer and the next question."""
BEFORE, AFTER = "round_robin", "price"


class NodeShare(msgspec.Struct, frozen=True):
    """What one engine did in one pass, by its own metrics."""

    requests: int
    prompt_tokens: int
    cached_tokens: int

    def since(self, before: NodeShare) -> NodeShare:
        return NodeShare(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
        )


class Pass(msgspec.Struct, frozen=True):
    policy: str
    outcomes: list[ChatOutcome]
    failed: int
    seconds: float
    shares: list[NodeShare]

    @property
    def hit_rate(self) -> float:
        asked = sum(outcome.prompt_tokens for outcome in self.outcomes)
        return sum(outcome.cached_tokens for outcome in self.outcomes) / max(1, asked)

    def ttft_ms(self, quantile: float) -> float:
        times = sorted(outcome.ttft_s for outcome in self.outcomes)
        return times[min(len(times) - 1, int(quantile * len(times)))] * 1000 if times else 0.0


class Comparison:
    def __init__(self, children: Children, folder: Path, speed: float) -> None:
        self._children = children
        self._folder = folder
        self._speed = speed
        self._engines: list[Child] = []
        self._ports: list[int] = []
        self.router: RouterProcess
        """The one that is up; the last one in the end."""

    async def start_engines(self) -> None:
        flags = ["--port", "0", "--profile", PROFILE, "--blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
        flags += ["--model", MODEL, "--speed", str(self._speed), "--events-port", "0", "--replay-port", "0"]
        self._engines = [self._children.start("engine", *flags) for _ in range(ENGINES)]
        for engine in self._engines:
            told = msgspec.json.decode(await asyncio.to_thread(engine.first_line))
            self._ports.append(urlsplit(told["url"]).port or 0)

    async def run(self, port: int, advance: Callable[[str], None]) -> list[Pass]:
        """Both passes; the router of the last one stays up on `port`."""
        passes = []
        for policy in (BEFORE, AFTER):
            await self._empty_caches()
            at = port if policy == AFTER else free_port(port + 1)
            self.router = await start_router(self._children, self._folder, at, self._tables(policy))
            passes.append(await self._send(policy, at, partial(advance, policy)))
            if policy != AFTER:
                self._children.end(self.router.child)
        return passes

    async def why(self) -> str:
        """Of the last pass, the decision that tells most: the one with the most tokens warm, and a cold rival."""
        told = await self.router.tell(f"/admin/decisions?limit={CONVERSATIONS * TURNS}")
        decisions: list[dict[str, Any]] = told["decisions"]
        return str(max(decisions, key=_telling)["explanation"]) if decisions else ""

    def end(self) -> None:
        self._children.end(self.router.child, *self._engines)

    def _tables(self, policy: str) -> dict[str, Any]:
        nodes = [{"url": f"http://{HOST}:{port}", "name": f"node-{n}"} for n, port in enumerate(self._ports, 1)]
        return {"routing": {"policy": policy}, "prompts": {"remote_tokenize": True}, "nodes": nodes}

    async def _empty_caches(self) -> None:
        for port in self._ports:
            status, body = await send_request(HOST, port, "POST", "/reset_prefix_cache")
            if status != 200 or b"true" not in body:
                raise ConfigError("an engine did not empty its cache")

    async def _send(self, policy: str, port: int, advance: Callable[[], None]) -> Pass:
        before = [await _share(engine) for engine in self._ports]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        results = await asyncio.gather(
            *(_converse(number, port, self._speed, advance) for number in range(CONVERSATIONS))
        )
        seconds = loop.time() - began_s
        after = [await _share(engine) for engine in self._ports]
        return Pass(
            policy,
            [outcome for outcomes, _ in results for outcome in outcomes],
            sum(failed for _, failed in results),
            seconds,
            [late.since(early) for late, early in zip(after, before, strict=True)],
        )


def _telling(decision: dict[str, Any]) -> tuple[bool, int]:
    return "free but cold" in decision["explanation"], decision["cached_tokens"] or 0


async def _converse(number: int, port: int, speed: float, advance: Callable[[], None]) -> tuple[list[ChatOutcome], int]:
    """One conversation to its end: each answer goes back with the next question. What came of it, and what failed."""
    random = Random(number)
    system = _words(Random(1000 + number % SYSTEM_PROMPTS), SYSTEM_WORDS)
    messages = [{"role": "system", "content": system}]
    outcomes: list[ChatOutcome] = []
    failed = 0
    await asyncio.sleep(number * ARRIVAL_S / CONVERSATIONS / speed)
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(random.uniform(*PAUSE_S) / speed)
        words = QUESTION_WORDS if turn else DOCUMENT_WORDS + QUESTION_WORDS
        messages.append({"role": "user", "content": _words(random, words)})
        try:
            outcome = await chat(HOST, port, {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS})
        except (OSError, Unanswered):
            failed += 1
            messages.append({"role": "assistant", "content": ""})
        else:
            outcomes.append(outcome)
            messages.append({"role": "assistant", "content": outcome.text})
        advance()
    return outcomes, failed


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


async def _share(port: int) -> NodeShare:
    _, page = await send_request(HOST, port, "GET", "/metrics")
    names = ("request_success", "prefix_cache_queries", "prefix_cache_hits")
    return NodeShare(*(_metric(page.decode(), f"vllm:{name}_total") for name in names))


def _metric(page: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)))
