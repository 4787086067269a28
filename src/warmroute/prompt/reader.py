"""Reads prompts for routing: on the event loop if that takes no noticeable time, otherwise in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from warmroute._kernel import MAX_LOOP_BYTES, Outline
from warmroute.config import Prompts
from warmroute.core.traffic import Counters
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.encoding_time import LOOP_MS
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.prompt_tokenizer import PromptTokenizer, TokenizeJob, max_text_prompt_bytes
from warmroute.prompt.registry import TokenizerRegistry
from warmroute.prompt.request_body import has_prompt, text_prompt

log = EventLog("warmroute.prompts")

MAX_PENDING: Final = 64
"""Prompts that may wait for a thread or a node. The router routes further ones by load: a wait for a better choice must
not become a queue."""

OnRead = Callable[[Prompt | None], None]
FetchTokens = Callable[[str, bytes, bytes], Awaitable[bytes | None]]
"""Takes a request's model, path and body. Returns the prompt's tokens as a node of the model tokenizes it."""


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """A prompt that is being read in a thread or by a node. `cancel` it when its request has ended."""

    _on_read: OnRead | None
    _read: Callable[[], Prompt | None] | None = None
    """Reads the prompt, in a thread. The function holds the body, which a cancelled request must not keep."""

    def cancel(self) -> None:
        self._on_read = self._read = None

    def run(self) -> Prompt | None:
        """Call this in a thread."""
        read, self._read = self._read, None
        return _run_safely(read) if read is not None else None

    @property
    def cancelled(self) -> bool:
        return self._on_read is None

    def done(self, prompt: Prompt | None) -> None:
        on_read, self._on_read = self._on_read, None
        if on_read is not None:
            on_read(prompt)


class PromptReader:
    def __init__(
        self,
        tokenizer_registry: TokenizerRegistry,
        config: Prompts,
        counters: Counters,
        fetch_tokens: FetchTokens | None = None,
        is_served: Callable[[str], bool] = lambda _model: True,
    ) -> None:
        """`fetch_tokens` serves models whose tokenizer the router does not have. `is_served` returns whether a node
        serves a model: prompts for other names, which clients can invent, are not counted."""
        self._tokenizer_registry = tokenizer_registry
        self._fetch_tokens = fetch_tokens
        self._is_served = is_served
        self._fetches: set[asyncio.Task[None]] = set()
        self._counters = counters
        self._pending = 0
        self._threads = ThreadPoolExecutor(config.threads, "warmroute-prompt")
        self.reconfigure(config)

    def reconfigure(self, config: Prompts) -> None:
        """Apply a changed configuration. The number of threads stays as it was at the start."""
        self._remote_tokenize = config.remote_tokenize and self._fetch_tokens is not None
        self._max_text_prompt_bytes = (
            -1 if self._remote_tokenize else min(max_text_prompt_bytes(LOOP_MS), MAX_LOOP_BYTES)
        )
        """Up to this size, a body without a tokenizer is matched by its text, on the event loop."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._fetches:
            task.cancel()

    def read(
        self, model: str, path: bytes, body: bytes, on_read: OnRead, outline: Outline | None = None
    ) -> Prompt | PendingPrompt | None:
        """Return the prompt; or a PendingPrompt, which calls `on_read` later; or None if there is no prompt, it cannot
        be read, or too many are pending.

        `outline` is the body's outline, if the caller has it.
        """
        registry = self._tokenizer_registry
        tokenizer = registry.by_model.get(model) or registry.text_matching
        found: Prompt | PendingPrompt | None = None
        try:
            if tokenizer.tokenizer is None and len(body) <= self._max_text_prompt_bytes:
                found = text_prompt(path, body, outline)
            else:
                if len(body) <= MAX_LOOP_BYTES:
                    found = tokenizer.tokenize_plain(path, body, outline, LOOP_MS)
                if found is None:
                    found = self._read(model, tokenizer, path, body, on_read, outline)
        except Exception as error:
            _log_failure(error)
        if isinstance(found, PendingPrompt):
            return found
        counts = self._counters.prompts
        if found is not None and found.exact and not found.inexact_reason and (model, "exact") in counts:
            counts[model, "exact"] += 1  # as nearly all are
        else:
            self._count(model, tokenizer, path, found)
        return found

    def _read(
        self, model: str, tokenizer: PromptTokenizer, path: bytes, body: bytes, on_read: OnRead, outline: Outline | None
    ) -> Prompt | PendingPrompt | None:
        if len(body) > MAX_LOOP_BYTES:
            work = partial(tokenizer.tokenize, path, body, outline)
            return self._read_in_thread(work, on_read, partial(self._count, model, tokenizer, path))
        job = tokenizer.begin(path, body, outline)
        if job is None:
            return None
        if self._fetch_tokens is not None and self._remote_tokenize and tokenizer.tokenizer is None:
            return self._read_by_node(self._fetch_tokens, model, path, body, job, on_read, tokenizer)
        if job.cost_ms > LOOP_MS:
            return self._read_in_thread(job.run, on_read, partial(self._count, model, tokenizer, path))
        return job.run()

    def _count(self, model: str, tokenizer: PromptTokenizer, path: bytes, prompt: Prompt | None) -> None:
        """Count a prompt by its reading, one of telemetry's PROMPT_READINGS."""
        if prompt is None:
            if not has_prompt(path):
                return
            reading = "none"
        elif prompt.exact:
            reading = "inexact" if prompt.inexact_reason else "exact"
        else:
            own = tokenizer.tokenizer
            reading = "inexact" if own is not None and prompt.inexact_reason == own.inexact_reason else "text"
        key, counts = (model, reading), self._counters.prompts
        # Clients can invent names of models: only names that a node serves become label values.
        if key in counts or self._is_served(model):
            counts[key] += 1

    def _read_by_node(
        self,
        fetch_tokens: FetchTokens,
        model: str,
        path: bytes,
        body: bytes,
        job: TokenizeJob,
        on_read: OnRead,
        tokenizer: PromptTokenizer,
    ) -> PendingPrompt | None:
        if self._too_many_pending():
            return None
        pending = PendingPrompt(on_read)

        async def fetch() -> None:
            prompt = None
            try:
                prompt = _run_safely(job.run)
                tokens = await fetch_tokens(model, path, body)
                if prompt is not None and tokens is not None:
                    prompt.tokens, prompt.exact, prompt.inexact_reason = tokens, True, ""
                    prompt.exact_tokens = prompt.token_count
            finally:
                self._pending -= 1
                if not pending.cancelled:
                    self._count(model, tokenizer, path, prompt)
                pending.done(prompt)

        self._pending += 1
        task = asyncio.get_running_loop().create_task(fetch())
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)
        return pending

    def _read_in_thread(
        self, read: Callable[[], Prompt | None], on_read: OnRead, count: OnRead
    ) -> PendingPrompt | None:
        if self._too_many_pending():
            return None
        self._pending += 1
        self._counters.prompts_in_threads += 1
        loop = asyncio.get_running_loop()
        pending = PendingPrompt(on_read, read)

        def settle(read: Future[Prompt | None]) -> None:
            self._pending -= 1
            prompt = None if read.cancelled() else read.result()
            if not pending.cancelled:
                count(prompt)
            pending.done(prompt)

        def hand_to_loop(read: Future[Prompt | None]) -> None:
            # A thread may end after the router's loop: at the end of the process, and in tests.
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, read)

        work = self._threads.submit(pending.run)
        work.add_done_callback(hand_to_loop)
        return pending

    def _too_many_pending(self) -> bool:
        if self._pending < MAX_PENDING:
            return False
        self._counters.prompts_not_tokenized += 1
        return True


def _run_safely(read: Callable[[], Prompt | None]) -> Prompt | None:
    """Return None for a prompt that cannot be read: its request is served all the same."""
    try:
        return read()
    except Exception as error:
        _log_failure(error)
        return None


def _log_failure(error: Exception) -> None:
    log.error("prompt_read_failed", "The router routes the request by load.", reason=where_it_failed(error))
