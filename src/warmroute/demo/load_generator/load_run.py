"""Drives an endpoint with a workload, open or closed loop, and measures what its clients would see."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec

from warmroute.demo.load_generator.prompt_requests import Message, ConversationHistory, body, extend_history, messages
from warmroute.demo.load_generator.streaming_client import RequestFailed, RequestRefused, send_request
from warmroute.replay.summary import Run, rounded, percentiles
from warmroute.replay.workloads.prompt_text import Form
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str = "sim"
    form: Form = "chat"
    concurrency: int | None = None
    """Clients of the closed loop; None for the workload's own times."""
    limit: int | None = None
    duration_s: float | None = None
    speed: float = 1.0
    """How many times faster than life the engines run: times are sent faster and told slower by it."""
    timeout_s: float = 600.0
    headers: dict[str, str] = {}


class _Request(msgspec.Struct):
    """A request, ready to be sent: made before its time has come, since making a long one takes milliseconds."""

    prompt: WorkloadPrompt
    asked: tuple[Message, ...]
    path: str
    body: bytes


class LoadRun:
    """One run. All times that it tells are those of life."""

    def __init__(self, load: LoadOptions, prompts: Iterator[WorkloadPrompt], progress: Callable[[int], object] | None = None) -> None:
        self._load = load
        self._prompts = prompts
        self._progress = progress
        self._left = load.limit if load.limit is not None else -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_s = 0.0
        self._ended_ms = 0.0
        self._sent = 0
        self._finished = 0
        self._rejected = 0
        self._errors: Counter[str] = Counter()
        self.said: dict[str, str] = {}
        """What the server said of a status, the first time."""
        self._ttft_ms = array("d")
        self._inter_token_ms = array("d")
        """Every gap between two tokens, unlike the replay's mean of each request."""
        self._latency_ms = array("d")
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    async def run(self) -> Run:
        self._start_s = time.monotonic()
        if self._load.concurrency is None:
            await self._open_loop()
        else:
            await asyncio.gather(*(self._client() for _ in range(self._load.concurrency)))
        while self._tasks:
            await asyncio.gather(*self._tasks)
        return self._summary()

    def _now_ms(self) -> float:
        return (time.monotonic() - self._start_s) * 1000.0 * self._load.speed

    def _may_send(self) -> bool:
        over = self._load.duration_s is not None and self._now_ms() >= self._load.duration_s * 1000.0
        if over or self._left == 0:
            return False
        self._left -= 1
        return True

    async def _open_loop(self) -> None:
        for prompt in self._prompts:
            request = self._ready(prompt, ConversationHistory())
            await self._pause(prompt.at_ms - self._now_ms())
            if not self._may_send():
                return
            task = asyncio.get_running_loop().create_task(self._converse(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _client(self) -> None:
        for prompt in self._prompts:
            if not self._may_send():
                return
            await self._converse(self._ready(prompt, ConversationHistory()))

    async def _pause(self, ms: float) -> None:
        if ms > 0:
            await asyncio.sleep(ms / 1000.0 / self._load.speed)

    def _ready(self, prompt: WorkloadPrompt, talk: ConversationHistory) -> _Request:
        asked = messages(prompt, talk) if self._load.form == "chat" else ()
        return _Request(prompt, asked, *body(prompt, asked, self._load.model, self._load.form))

    async def _converse(self, request: _Request) -> None:
        """A request and those that follow from its answer."""
        while True:
            talk = await self._send(request)
            then = request.prompt.next_turn
            follow_up = then() if talk is not None and then is not None else None
            if follow_up is None or talk is None:
                return
            due_ms = self._now_ms() + follow_up.think_ms
            request = self._ready(follow_up.prompt, talk)
            await self._pause(due_ms - self._now_ms())
            if not self._may_send():
                return

    async def _send(self, request: _Request) -> ConversationHistory | None:
        """What was said with its answer; None where there is none."""
        load, prompt = self._load, request.prompt
        self._sent += 1
        headers = {"X-Priority": prompt.priority, **load.headers}
        if prompt.session:
            headers["X-Session-Id"] = prompt.session.decode()
        try:
            answer = await send_request(load.url, request.path, request.body, headers, load.timeout_s)
        except RequestRefused as refused:
            self._rejected += refused.status == 429
            self.said.setdefault(f"status {refused.status}", refused.said)
            if refused.status != 429:
                self._errors[f"status {refused.status}"] += 1
            if load.concurrency is not None:
                await asyncio.sleep(min(refused.retry_after_s, 5.0) / load.speed)
            return None
        except RequestFailed as broken:
            self._errors[str(broken)] += 1
            return None
        ended_s = time.monotonic()
        self._ended_ms = self._now_ms()
        times_s = answer.times_s
        if not times_s:
            self._errors["an answer without text"] += 1
            return None
        to_ms = 1000.0 * load.speed
        self._finished += 1
        self._ttft_ms.append((times_s[0] - answer.sent_s) * to_ms)
        self._latency_ms.append((ended_s - answer.sent_s) * to_ms)
        self._inter_token_ms.extend((b - a) * to_ms for a, b in pairwise(times_s))
        self._prompt_tokens += answer.prompt_tokens
        self._cached_tokens += answer.cached_tokens
        self._output_tokens += answer.output_tokens or len(times_s)
        if self._progress is not None:
            self._progress(self._finished)
        return extend_history(prompt, request.asked, "".join(answer.texts)) if load.form == "chat" else ConversationHistory()

    def _summary(self) -> Run:
        duration_s = max(1e-9, self._ended_ms / 1000.0)
        return {
            "requests": self._sent,
            "finished": self._finished,
            "rejected": self._rejected,
            "failed": sum(self._errors.values()),
            "errors": dict(sorted(self._errors.items())),
            "hit_rate": rounded(self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0),
            "ttft_ms": percentiles(self._ttft_ms, 50, 90, 99),
            "inter_token_ms": percentiles(self._inter_token_ms, 50, 90, 99),
            "latency_ms": percentiles(self._latency_ms, 50, 90, 99),
            "duration_s": rounded(duration_s),
            "requests_per_s": rounded(self._finished / duration_s),
            "output_tokens_per_s": rounded(self._output_tokens / duration_s),
            "prompt_tokens": self._prompt_tokens,
        }
