"""`warmroute demo`: three simulated engines, the router in front, and conversations sent through it twice.

The engines are small on purpose: together they hold all conversations, but only if each lives on one of them. First
round robin shares the requests out, then the caches are emptied and the same conversations go by prefix hash. What is
shown is what the engines themselves report (`usage` of every answer, their metrics) and what the clients measured.

A demonstration, not a benchmark: the workload was picked, out of several that were tried, to let the difference be
seen. Where conversations are short beside a system prompt that all share, or begin all at once, round robin finds much
of it too, and prefix hash had the worse p90 (two first turns that wait for each other on one engine).
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from warmroute.config import ConfigError
from warmroute.sim.chat_client import ChatOutcome, Unanswered, ask, chat
from warmroute.sim.children import Child, Children, free_port
from warmroute.sim.server.words import WORDS

HOST = "127.0.0.1"
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
BEFORE, AFTER = "round_robin", "prefix_hash"


class DemoOptions(msgspec.Struct, frozen=True):
    port: int | None = None
    """None for 8080, or the next one that is free."""
    speed: float = 1.0
    leave: bool = False
    """End after the comparison instead of leaving the router up."""


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


def run(options: DemoOptions, console: Console) -> int:
    """The demo from start to end; all children are gone when it returns or raises. Raises ConfigError."""
    # The children end before the loop closes: it waits for threads that wait for them.
    with asyncio.Runner() as runner, Children() as children:
        return runner.run(_until_told(_Demo(options, console, children).run()))


async def _until_told(demo: Coroutine[Any, Any, int]) -> int:
    """Runs it; SIGINT, SIGTERM and SIGHUP end it in order."""
    loop = asyncio.get_running_loop()
    task: asyncio.Task[int] = loop.create_task(demo)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


class _Demo:
    def __init__(self, options: DemoOptions, console: Console, children: Children) -> None:
        self._options = options
        self._console = console
        self._children = children
        self._engine_ports: list[int] = []

    async def run(self) -> int:
        console, options = self._console, self._options
        port = free_port(8080) if options.port is None else _only(options.port)
        console.print(
            f"[bold]Warmroute[/] in front of {ENGINES} simulated engines ({PROFILE}, {BLOCKS * BLOCK_SIZE:,} KV tokens "
            f"each):\n{CONVERSATIONS} conversations of {TURNS} turns, each about a document of its own, sent twice.\n"
            f"No GPU is needed: the engines take the time that real ones would.\n"
        )
        await self._start_engines()
        passes: list[Pass] = []
        with _progress(console) as progress:
            bars = {policy: progress.add_task(policy, total=CONVERSATIONS * TURNS) for policy in (BEFORE, AFTER)}
            for policy in (BEFORE, AFTER):
                await self._empty_caches()
                at = port if policy == AFTER else free_port(port + 1)
                router = await self._start_router(policy, at)
                passes.append(await self._send(policy, at, partial(progress.advance, bars[policy])))
                if policy != AFTER:
                    self._children.end(router)
        console.print(_where_it_went(passes), _compared(passes))
        if options.leave:
            return 0
        try:
            await self._stay(router, port)
        except asyncio.CancelledError:
            return 0  # Ctrl-C is how it ends
        return 1

    # Processes.

    async def _start_engines(self) -> None:
        flags = ["--port", "0", "--profile", PROFILE, "--blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
        flags += ["--model", MODEL, "--speed", str(self._options.speed)]
        engines = [self._children.start("engine", *flags) for _ in range(ENGINES)]
        for engine in engines:
            told = msgspec.json.decode(await asyncio.to_thread(engine.first_line))
            self._engine_ports.append(urlsplit(told["url"]).port or 0)

    async def _start_router(self, policy: str, port: int) -> Child:
        nodes = [flag for engine in self._engine_ports for flag in ("--node", f"http://{HOST}:{engine}")]
        router = self._children.start(
            "serve", "--host", HOST, "--port", str(port), "--admin-port", "0", "--policy", policy, *nodes
        )
        async with asyncio.timeout(20):
            while True:
                await asyncio.sleep(0.05)
                if router.has_ended():
                    raise ConfigError(router.why_it_ended())
                try:
                    status, _ = await ask(HOST, port, "GET", "/ready")
                except (OSError, Unanswered):
                    continue
                if status == 200:
                    return router

    async def _empty_caches(self) -> None:
        for port in self._engine_ports:
            status, body = await ask(HOST, port, "POST", "/reset_prefix_cache")
            if status != 200 or b"true" not in body:
                raise ConfigError("an engine did not empty its cache")

    async def _stay(self, router: Child, port: int) -> None:
        url = f"http://{HOST}:{port}/v1/chat/completions"
        body = f'{{"model": "{MODEL}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        self._console.print("\nThe router is still there, by prefix hash. Try it:\n")
        self._console.print(
            f"  curl -N {url} -H 'Content-Type: application/json' \\\n    -d '{body}'\n", style="cyan", soft_wrap=True
        )
        self._console.print("Ctrl-C ends it.", style="dim")
        await asyncio.to_thread(router.process.wait)
        raise ConfigError(f"the router has ended (exit {router.process.returncode})")

    # Traffic.

    async def _send(self, policy: str, port: int, advance: Callable[[], None]) -> Pass:
        before = [await _share(engine) for engine in self._engine_ports]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        results = await asyncio.gather(
            *(_converse(number, port, self._options.speed, advance) for number in range(CONVERSATIONS))
        )
        seconds = loop.time() - began_s
        after = [await _share(engine) for engine in self._engine_ports]
        return Pass(
            policy,
            [outcome for outcomes, _ in results for outcome in outcomes],
            sum(failed for _, failed in results),
            seconds,
            [late.since(early) for late, early in zip(after, before, strict=True)],
        )


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
    _, page = await ask(HOST, port, "GET", "/metrics")
    names = ("request_success", "prefix_cache_queries", "prefix_cache_hits")
    return NodeShare(*(_metric(page.decode(), f"vllm:{name}_total") for name in names))


def _metric(page: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)))


def _only(port: int) -> int:
    if free_port(port, tries=2) != port:
        raise ConfigError(f"port {port} is taken; leave --port out for the next free one from 8080")
    return port


# What is shown.


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
    )


def _where_it_went(passes: list[Pass]) -> Table:
    table = Table(title="What went where", title_justify="left")
    table.add_column("engine")
    for one in passes:
        table.add_column(f"{one.policy}\nrequests", justify="right", no_wrap=True)
        table.add_column("\nfrom cache", justify="right")
    for index in range(ENGINES):
        row = [f"engine {index + 1}"]
        for one in passes:
            share = one.shares[index]
            row += [
                str(share.requests),
                f"{share.cached_tokens / max(1, share.prompt_tokens):.0%}",
            ]
        table.add_row(*row)
    return table


def _compared(passes: list[Pass]) -> Table:
    before, after = passes
    table = Table(title="Side by side", title_justify="left")
    table.add_column("")
    for one in passes:
        table.add_column(one.policy, justify="right")
    table.add_row("prompt tokens from cache", *(f"{one.hit_rate:.1%}" for one in passes))
    for name, quantile in (("p50", 0.5), ("p90", 0.9)):
        table.add_row(f"time to first token, {name}", *(f"{one.ttft_ms(quantile):,.0f} ms" for one in passes))
    table.add_row("all done after", *(f"{one.seconds:.1f} s" for one in passes))
    if before.failed or after.failed:
        table.add_row("[red]failed", *(str(one.failed) for one in passes))
    return table
