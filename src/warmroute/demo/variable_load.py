"""Sends requests at a rate that may change, and counts their outcomes. Requests do not wait for each other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from random import Random

from warmroute.demo.load_generator.prompt_requests import ConversationHistory, build_request, chat_messages
from warmroute.demo.load_generator.streaming_client import RequestFailed, RequestRefused, send_streaming
from warmroute.replay.workloads.generators import Rag
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

OUTPUT_TOKENS = 60
TIMEOUT_S = 60.0
RECENT_S = 5.0
RATE_CHECK_S = 0.2
"""Maximum time until a changed rate takes effect."""


class VariableLoad:
    """Questions about common documents, at `rate` requests per second."""

    def __init__(self, url: str, model: str = "sim", seed: int = 1) -> None:
        self._url = url
        self._model = model
        self._random = Random(seed)
        self._prompts = Rag(output_tokens=OUTPUT_TOKENS).generate(Random(f"{seed} prompts"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent: deque[tuple[float, float]] = deque()
        """When a response ended (s), and its time to first token (ms)."""
        self.rate = 0.0
        self.stopped = False
        """Set it to send no more requests."""
        self.sent = 0
        self.completed = 0
        """Responses with all tokens of the request."""
        self.truncated = 0
        """Responses with fewer tokens."""
        self.failed: Counter[str] = Counter()
        """Requests without a complete response, by reason."""
        self.ttft_ms: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def recent_ttft_ms(self) -> float | None:
        """Return the median of the last seconds, or None without responses."""
        self._drop_old()
        times = sorted(ms for _, ms in self._recent)
        return times[len(times) // 2] if times else None

    async def run(self) -> None:
        """Send requests until `stopped` is set, then wait for all responses."""
        try:
            await self._send_all()
            while self._tasks:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        until_next = self._random.expovariate(1.0)  # in mean intervals, so that it does not depend on the rate
        last_s = loop.time()
        while not self.stopped:
            await asyncio.sleep(min(RATE_CHECK_S, until_next / self.rate) if self.rate else RATE_CHECK_S)
            now_s = loop.time()
            until_next -= self.rate * (now_s - last_s)
            last_s = now_s
            while until_next <= 0:
                until_next += self._random.expovariate(1.0)
                task = loop.create_task(self._send(next(self._prompts)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, prompt: WorkloadPrompt) -> None:
        path, body = build_request(prompt, chat_messages(prompt, ConversationHistory()), self._model, "chat")
        self.sent += 1
        try:
            response = await send_streaming(self._url, path, body, {}, TIMEOUT_S)
        except (RequestRefused, RequestFailed) as reason:
            self.failed[str(reason)] += 1
            return
        if response.output_tokens == prompt.output_tokens and response.times_s:
            self.completed += 1
        else:
            self.truncated += 1
        self.prompt_tokens += response.prompt_tokens
        self.cached_tokens += response.cached_tokens
        if response.times_s:
            self.ttft_ms.append(response.ttft_ms)
            self._recent.append((time.monotonic(), response.ttft_ms))
            self._drop_old()

    def _drop_old(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - RECENT_S:
            self._recent.popleft()
