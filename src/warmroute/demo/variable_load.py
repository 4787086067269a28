"""Requests at a rate that may change while they are sent, and what became of each. Nobody waits for another."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from random import Random

from warmroute.demo.load_generator.prompt_requests import ConversationHistory, body, messages
from warmroute.demo.load_generator.streaming_client import RequestFailed, RequestRefused, send_request
from warmroute.replay.workloads.rag import Rag
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt

ANSWER_TOKENS = 60
TIMEOUT_S = 60.0
RECENT_S = 5.0
TURN_S = 0.2
"""At least so often it is looked whether the rate has changed."""


class VariableLoad:
    """Questions over common documents, at `rate` a second."""

    def __init__(self, url: str, model: str = "sim", seed: int = 1) -> None:
        self._url = url
        self._model = model
        self._random = Random(seed)
        self._prompts = Rag(output_tokens=ANSWER_TOKENS).generate(Random(f"{seed} prompts"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._recent: deque[tuple[float, float]] = deque()
        self.rate = 0.0
        """Requests a second from now on."""
        self.ending = False
        self.sent = 0
        self.whole = 0
        """Answered to the last token that was asked for."""
        self.short = 0
        """Answered, with fewer tokens."""
        self.failed: Counter[str] = Counter()
        """Refused, never answered, or broken off; by reason."""
        self.ttft_ms: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def recent_ttft_ms(self) -> float | None:
        """Median of the last seconds; None where nothing was answered."""
        self._forget()
        times = sorted(ms for _, ms in self._recent)
        return times[len(times) // 2] if times else None

    async def run(self) -> None:
        """Until it is told to end, and all that was sent is answered."""
        try:
            await self._send_all()
            while self._tasks:
                await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._random.expovariate(1.0)  # requests that should have come until the next one is sent
        looked_s = loop.time()
        while not self.ending:
            await asyncio.sleep(min(TURN_S, left / self.rate) if self.rate else TURN_S)
            now_s = loop.time()
            left -= self.rate * (now_s - looked_s)
            looked_s = now_s
            while left <= 0:
                left += self._random.expovariate(1.0)
                task = loop.create_task(self._send(next(self._prompts)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _send(self, prompt: WorkloadPrompt) -> None:
        path, asked = body(prompt, messages(prompt, ConversationHistory()), self._model, "chat")
        self.sent += 1
        try:
            answer = await send_request(self._url, path, asked, {}, TIMEOUT_S)
        except (RequestRefused, RequestFailed) as why:
            self.failed[str(why)] += 1
            return
        if answer.output_tokens == prompt.output_tokens and answer.times_s:
            self.whole += 1
        else:
            self.short += 1
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        if answer.times_s:
            ms = (answer.times_s[0] - answer.sent_s) * 1000.0
            self.ttft_ms.append(ms)
            self._recent.append((time.monotonic(), ms))
            self._forget()

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - RECENT_S:
            self._recent.popleft()
