"""Sends a workload to an endpoint, in an open or closed loop, and measures the responses."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec

from warmroute.demo.load_generator.prompt_requests import (
    ConversationHistory,
    Message,
    build_request,
    chat_messages,
    extend_history,
)
from warmroute.demo.load_generator.streaming_client import (
    RequestFailed,
    RequestRefused,
    StreamedResponse,
    send_streaming,
)
from warmroute.replay.summary import Run, percentiles, rounded
from warmroute.replay.workloads.prompt_text import Form
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str = "sim"
    form: Form = "chat"
    concurrency: int | None = None
    """Number of clients of the closed loop. None: open loop, with the workload's arrival times."""
    limit: int | None = None
    duration_s: float | None = None
    speed: float = 1.0
    """The speed of the simulated engines. Requests are sent at this speed, and measured times are multiplied by it."""
    timeout_s: float = 600.0
    headers: dict[str, str] = {}


class _PreparedRequest(msgspec.Struct):
    """A request that is built before it is due, because building a long one takes milliseconds."""

    prompt: WorkloadPrompt
    messages: tuple[Message, ...]
    path: str
    body: bytes


class LoadRun:
    """One run of a workload. All its times are in ms at speed 1."""

    def __init__(
        self,
        options: LoadOptions,
        prompts: Iterator[WorkloadPrompt],
        progress: Callable[[int], object] = lambda _finished: None,
    ) -> None:
        """`progress` gets the number of finished requests after each one."""
        self._options = options
        self._prompts = prompts
        self._progress = progress
        self._requests_left = options.limit if options.limit is not None else -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_s = 0.0
        self._ended_ms = 0.0
        self._sent = 0
        self._finished = 0
        self._rejected = 0
        self._errors: Counter[str] = Counter()
        self.error_messages: dict[str, str] = {}
        """The server's first error message for each status."""
        self._ttft_ms = array("d")
        self._inter_token_ms = array("d")
        """Each gap between two tokens. Replay has the mean of each request instead."""
        self._latency_ms = array("d")
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    async def run(self) -> Run:
        self._start_s = time.monotonic()
        if self._options.concurrency is None:
            await self._open_loop()
        else:
            await asyncio.gather(*(self._client() for _ in range(self._options.concurrency)))
        while self._tasks:
            await asyncio.gather(*self._tasks)
        return self._summary()

    def _now_ms(self) -> float:
        return (time.monotonic() - self._start_s) * 1000.0 * self._options.speed

    def _may_send(self) -> bool:
        duration_s = self._options.duration_s
        is_over = duration_s is not None and self._now_ms() >= duration_s * 1000.0
        if is_over or self._requests_left == 0:
            return False
        self._requests_left -= 1
        return True

    async def _open_loop(self) -> None:
        for prompt in self._prompts:
            request = self._prepare(prompt, ConversationHistory())
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
            await self._converse(self._prepare(prompt, ConversationHistory()))

    async def _pause(self, ms: float) -> None:
        if ms > 0:
            await asyncio.sleep(ms / 1000.0 / self._options.speed)

    def _prepare(self, prompt: WorkloadPrompt, history: ConversationHistory) -> _PreparedRequest:
        options = self._options
        messages = chat_messages(prompt, history) if options.form == "chat" else ()
        return _PreparedRequest(prompt, messages, *build_request(prompt, messages, options.model, options.form))

    async def _converse(self, request: _PreparedRequest) -> None:
        """Send a request and the next turns of its conversation."""
        while True:
            response = await self._send(request)
            next_turn = request.prompt.next_turn
            follow_up = next_turn() if response is not None and next_turn is not None else None
            if follow_up is None or response is None:
                return
            due_ms = self._now_ms() + follow_up.think_ms
            history = ConversationHistory()
            if self._options.form == "chat":
                history = extend_history(request.prompt, request.messages, "".join(response.texts))
            request = self._prepare(follow_up.prompt, history)
            await self._pause(due_ms - self._now_ms())
            if not self._may_send():
                return

    async def _send(self, request: _PreparedRequest) -> StreamedResponse | None:
        """Send a request and measure its response. Return None if it failed."""
        options, prompt = self._options, request.prompt
        self._sent += 1
        headers = {"X-Priority": prompt.priority, **options.headers}
        if prompt.session:
            headers["X-Session-Id"] = prompt.session.decode()
        try:
            response = await send_streaming(options.url, request.path, request.body, headers, options.timeout_s)
        except RequestRefused as refused:
            self._rejected += refused.status == 429
            self.error_messages.setdefault(f"status {refused.status}", refused.message)
            if refused.status != 429:
                self._errors[f"status {refused.status}"] += 1
            if options.concurrency is not None:
                await asyncio.sleep(min(refused.retry_after_s, 5.0) / options.speed)
            return None
        except RequestFailed as failed:
            self._errors[str(failed)] += 1
            return None
        ended_s = time.monotonic()
        self._ended_ms = self._now_ms()
        times_s = response.times_s
        if not times_s:
            self._errors["a response without text"] += 1
            return None
        self._finished += 1
        self._ttft_ms.append(response.ttft_ms * options.speed)
        self._latency_ms.append((ended_s - response.sent_s) * 1000.0 * options.speed)
        self._inter_token_ms.extend((b - a) * 1000.0 * options.speed for a, b in pairwise(times_s))
        self._prompt_tokens += response.prompt_tokens
        self._cached_tokens += response.cached_tokens
        self._output_tokens += response.output_tokens or len(times_s)
        self._progress(self._finished)
        return response

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
