"""Part 1 of the demo: the same conversations with round_robin and with price."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from warmroute.config import ConfigError
from warmroute.lab.demo.processes import Child, Children, RouterProcess, free_port, send_request, start_router
from warmroute.lab.engine.tokenizers import WORDS
from warmroute.lab.load import RequestFailed, RequestRefused, StreamedResponse, send_streaming
from warmroute.lab.summary import percentile

# Part 1 of the demo: conversations through three simulated engines, first with round_robin, then with price.
#
# The engines' caches are small on purpose: together they hold all conversations, if each one stays on one engine. The
# engines clear their caches before the second run. The results are what the engines report (`usage` in the responses,
# metrics) and what the clients measure.
#
# This is a demonstration, not a benchmark: the workload was chosen to show the difference. With short conversations and
# a common system prompt, or if all conversations begin at once, round_robin finds much of the cache too.

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
"""The document of a conversation is in its first message."""
QUESTION_WORDS = 60
OUTPUT_TOKENS = 12
ARRIVALS_S = 6.0
"""The conversations begin within this time."""
PAUSE_S = (0.1, 0.6)
"""Range of the time between a response and the next question."""
TIMEOUT_S = 120.0
POLICIES = ("round_robin", "price")


class EngineTotals(msgspec.Struct, frozen=True):
    """Counters of one engine, from its metrics."""

    requests: int
    prompt_tokens: int
    cached_tokens: int

    def since(self, before: EngineTotals) -> EngineTotals:
        return EngineTotals(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.cached_tokens - before.cached_tokens,
        )


class PolicyRun(msgspec.Struct, frozen=True):
    """The results of all conversations with one policy."""

    policy: str
    responses: list[StreamedResponse]
    failed: int
    seconds: float
    engines: list[EngineTotals]

    @property
    def hit_rate(self) -> float:
        prompt_tokens = sum(response.prompt_tokens for response in self.responses)
        return sum(response.cached_tokens for response in self.responses) / max(1, prompt_tokens)

    def ttft_ms(self, fraction: float) -> float:
        return percentile(sorted(one.ttft_ms for one in self.responses if one.times_s), fraction) or 0.0


class RoutingComparison:
    def __init__(self, children: Children, folder: Path, speed: float) -> None:
        self._children = children
        self._folder = folder
        self._speed = speed
        self._engines: list[Child] = []
        self._engine_urls: list[str] = []
        self.router: RouterProcess
        """The running router. The one of the last run keeps running."""

    async def start_engines(self) -> None:
        flags = ["--port", "0", "--profile", PROFILE, "--blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE)]
        flags += ["--model", MODEL, "--speed", str(self._speed), "--events-port", "0", "--replay-port", "0"]
        self._engines = [self._children.start("engine", *flags) for _ in range(ENGINES)]
        for engine in self._engines:
            started = msgspec.json.decode(await asyncio.to_thread(engine.first_line))
            self._engine_urls.append(started["url"])

    async def run(self, port: int, advance: Callable[[str], None]) -> list[PolicyRun]:
        """Run both policies. The last router listens on `port`. `advance` is called with the policy of each request."""
        runs = []
        for policy in POLICIES:
            is_last = policy == POLICIES[-1]
            await self._clear_caches()
            router_port = port if is_last else free_port(port + 1)
            tables = self._router_config(policy)
            self.router = await start_router(self._children, self._folder, router_port, tables)
            runs.append(await self._send(policy, partial(advance, policy)))
            if not is_last:
                self._children.end(self.router.child)
        return runs

    async def example_decision(self) -> str:
        """Return the explanation of the decision of the last run that used the most cached tokens."""
        listed = await self.router.admin_get(f"/admin/decisions?limit={CONVERSATIONS * TURNS}")
        decisions: list[dict[str, Any]] = listed["decisions"]
        return str(max(decisions, key=_cached_and_idle_rival)["explanation"]) if decisions else ""

    def stop(self) -> None:
        self._children.end(self.router.child, *self._engines)

    def _router_config(self, policy: str) -> dict[str, Any]:
        nodes = [{"url": url, "name": f"node-{number}"} for number, url in enumerate(self._engine_urls, 1)]
        return {"routing": {"policy": policy}, "prompts": {"remote_tokenize": True}, "nodes": nodes}

    async def _clear_caches(self) -> None:
        """Clear the engines' caches. Like vLLM, an engine publishes KV events only with its next step: a tiny request
        makes it, so that the router does not start with an outdated view of the caches."""
        fields = {"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": True}
        for url in self._engine_urls:
            status, body = await send_request("POST", f"{url}/reset_prefix_cache")
            if status != 200 or b"true" not in body:
                raise ConfigError("an engine did not clear its cache")
            await send_streaming(url, "/v1/completions", msgspec.json.encode(fields), {}, TIMEOUT_S)

    async def _send(self, policy: str, advance: Callable[[], None]) -> PolicyRun:
        before = [await _engine_totals(url) for url in self._engine_urls]
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        results = await asyncio.gather(
            *(_converse(number, self.router.url, self._speed, advance) for number in range(CONVERSATIONS))
        )
        seconds = loop.time() - started_s
        after = [await _engine_totals(url) for url in self._engine_urls]
        responses = [response for conversation in results for response in conversation]
        return PolicyRun(
            policy,
            responses,
            CONVERSATIONS * TURNS - len(responses),
            seconds,
            [late.since(early) for late, early in zip(after, before, strict=True)],
        )


def _cached_and_idle_rival(decision: dict[str, Any]) -> tuple[bool, int]:
    """Sort decisions by how well they show the point: an idle rival lost, and many tokens are cached."""
    return "is idle but" in decision["explanation"], decision["cached_tokens"] or 0


async def _converse(number: int, url: str, speed: float, advance: Callable[[], None]) -> list[StreamedResponse]:
    """Send one conversation, each question after the previous response. Return the complete responses."""
    random = Random(number)
    system = _words(Random(1000 + number % SYSTEM_PROMPTS), SYSTEM_WORDS)
    messages = [{"role": "system", "content": system}]
    responses: list[StreamedResponse] = []
    await asyncio.sleep(number * ARRIVALS_S / CONVERSATIONS / speed)
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(random.uniform(*PAUSE_S) / speed)
        words = QUESTION_WORDS if turn else DOCUMENT_WORDS + QUESTION_WORDS
        messages.append({"role": "user", "content": _words(random, words)})
        fields = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
        body = msgspec.json.encode({**fields, "stream_options": {"include_usage": True}})
        text = ""
        try:
            response = await send_streaming(url, "/v1/chat/completions", body, {}, TIMEOUT_S)
        except (RequestRefused, RequestFailed):
            pass
        else:
            responses.append(response)
            text = "".join(response.texts)
        messages.append({"role": "assistant", "content": text})
        advance()
    return responses


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


async def _engine_totals(url: str) -> EngineTotals:
    _, page = await send_request("GET", f"{url}/metrics")
    names = ("request_success", "prefix_cache_queries", "prefix_cache_hits")
    return EngineTotals(*(_metric(page.decode(), f"vllm:{name}_total") for name in names))


def _metric(page: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)))


# Part 1 of the demo on a terminal.


def introduce(console: Console) -> None:
    console.print(
        f"[bold]1. Cache-aware routing[/]\n"
        f"Warmroute routes to {ENGINES} simulated engines ({PROFILE}, {BLOCKS * BLOCK_SIZE:,} KV tokens each).\n"
        f"They take as long as real engines and need no GPU. {CONVERSATIONS} conversations\n"
        f"of {TURNS} turns, each about its own document, run twice: with the policy\n"
        f"{POLICIES[0]}, then with price.\n",
        highlight=False,
    )


class ProgressBars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks = {policy: bars.add_task(policy, start=False, total=CONVERSATIONS * TURNS) for policy in POLICIES}

    def advance(self, policy: str) -> None:
        self._bars.start_task(self._tasks[policy])  # has no effect after the first call
        self._bars.advance(self._tasks[policy])


@contextmanager
def progress(console: Console) -> Iterator[ProgressBars]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        yield ProgressBars(bars)


def conclude(console: Console, runs: list[PolicyRun], example_decision: str) -> None:
    console.print(_engines_table(runs), _results_table(runs))
    if example_decision:
        console.print("One decision, as the router explains it:")
        console.print(Padding(Text(example_decision, "cyan"), (0, 0, 1, 2), expand=False))


def _engines_table(runs: list[PolicyRun]) -> Table:
    table = Table(title="Requests and cached prompt tokens of each engine", title_justify="left")
    table.add_column("engine")
    for run in runs:
        table.add_column(f"{run.policy}\nrequests", justify="right", no_wrap=True)
        table.add_column("\ncached", justify="right")
    for index in range(ENGINES):
        row = [f"node-{index + 1}"]
        for run in runs:
            engine = run.engines[index]
            row += [str(engine.requests), f"{engine.cached_tokens / max(1, engine.prompt_tokens):.0%}"]
        table.add_row(*row)
    return table


def _results_table(runs: list[PolicyRun]) -> Table:
    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    table.add_row("cached prompt tokens", *(f"{run.hit_rate:.1%}" for run in runs))
    for name, fraction in (("p50", 0.5), ("p90", 0.9)):
        table.add_row(f"time to first token, {name}", *(f"{run.ttft_ms(fraction):,.0f} ms" for run in runs))
    table.add_row("total time", *(f"{run.seconds:.1f} s" for run in runs))
    if any(run.failed for run in runs):
        table.add_row("[red]failed requests", *(str(run.failed) for run in runs))
    return table
