"""Reads prompts for routing: on the loop where that takes no time to speak of, else in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from warmroute._kernel._scan import Outline
from warmroute.config import Prompts
from warmroute.event_log import where_it_failed
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.reading import Reading, stand_in_bytes
from warmroute.prompt.request import stand_in_of
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.telemetry.counters import Counters

log = logging.getLogger("warmroute.prompts")

LOOKED_OVER_BYTES: Final = 1 << 19
"""Larger bodies are not even looked over on the loop: that takes milliseconds of some, and all are for a thread."""


Then = Callable[[Prompt | None], None]
Remote = Callable[[str, bytes, bytes], Awaitable[bytes | None]]
"""Model, path and body of a request: the tokens of its prompt, as a node of the model makes them."""


class PendingPrompt:
    """A prompt that is being read in a thread. `cancel` where nobody waits for it any more."""

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[Prompt | None], None]) -> None:
        self._then: Callable[[Prompt | None], None] | None = then

    def cancel(self) -> None:
        self._then = None

    @property
    def cancelled(self) -> bool:
        return self._then is None

    def done(self, prompt: Prompt | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(prompt)


class PromptReader:
    def __init__(
        self, library: TokenizerRegistry, config: Prompts, counters: Counters, remote: Remote | None = None
    ) -> None:
        """`remote` asks a node for the tokens of prompts that no tokenizer here can read."""
        self._library = library
        self._remote = remote
        self._asking: set[asyncio.Task[None]] = set()
        self._counters = counters
        self._waiting = 0
        self._threads = ThreadPoolExecutor(config.threads, "warmroute-prompt")
        self.reconfigure(config)

    def reconfigure(self, config: Prompts) -> None:
        """The number of threads is that of the start."""
        self._loop_ms = config.loop_ms
        self._max_waiting = config.max_waiting
        self._asks_nodes = config.remote and self._remote is not None
        self._stand_in_bytes = -1 if self._asks_nodes else min(stand_in_bytes(config.loop_ms), LOOKED_OVER_BYTES)
        """Up to this a body's text stands in at once where no tokenizer is known."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._asking:
            task.cancel()

    def read(
        self,
        model: str,
        path: bytes,
        body: bytes,
        then: Callable[[Prompt | None], None],
        outline: Outline | None = None,
    ) -> Prompt | PendingPrompt | None:
        """The prompt at once; or PendingPrompt, which calls `then`; or None where there is none, or no time to read it.

        `outline`: the body's, where it is made already.
        """
        reader = self._library.reader(model)
        try:
            if reader.tokenizer is None and len(body) <= self._stand_in_bytes:
                return stand_in_of(path, body, outline)
            if len(body) > LOOKED_OVER_BYTES:
                return self._in_thread(lambda: reader.read(path, body, outline), then)
            reading = reader.begin(path, body, outline)
            if reading is None:
                return None
            if self._remote is not None and self._asks_nodes and reader.tokenizer is None:
                return self._ask_node(self._remote, model, path, body, reading, then)
            if reading.cost_ms > self._loop_ms:
                return self._in_thread(reading.prompt, then)
            return reading.prompt()
        except Exception as error:
            _say_unread(error)
            return None

    def _ask_node(
        self, remote: Remote, model: str, path: bytes, body: bytes, reading: Reading, then: Then
    ) -> PendingPrompt | None:
        if self._waiting >= self._max_waiting:
            self._counters.unread_prompts += 1
            return None
        later = PendingPrompt(then)

        async def request() -> None:
            prompt = None
            try:
                prompt = _safely(reading.prompt)
                tokens = await remote(model, path, body)
                if prompt is not None and tokens is not None:
                    prompt.tokens, prompt.exact, prompt.doubt = tokens, True, ""
                    prompt.sure_tokens = prompt.token_count
            finally:
                self._waiting -= 1
                later.done(prompt)

        self._waiting += 1
        task = asyncio.get_running_loop().create_task(request())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return later

    def _in_thread(
        self, read: Callable[[], Prompt | None], then: Callable[[Prompt | None], None]
    ) -> PendingPrompt | None:
        if self._waiting >= self._max_waiting:
            self._counters.unread_prompts += 1
            return None
        self._waiting += 1
        self._counters.threaded_prompts += 1
        loop = asyncio.get_running_loop()
        later = PendingPrompt(then)
        work = self._threads.submit(_unless_cancelled, later, read)

        def settle(made: Future[Prompt | None]) -> None:
            self._waiting -= 1
            later.done(None if made.cancelled() else made.result())

        def tell(made: Future[Prompt | None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, made)

        work.add_done_callback(tell)
        return later


def _unless_cancelled(later: PendingPrompt, read: Callable[[], Prompt | None]) -> Prompt | None:
    return None if later.cancelled else _safely(read)


def _safely(read: Callable[[], Prompt | None]) -> Prompt | None:
    """Whatever a prompt does to its reader, its request is served."""
    try:
        return read()
    except Exception as error:
        _say_unread(error)
        return None


def _say_unread(error: Exception) -> None:
    log.error("a prompt could not be read (%s); its request is routed by load", where_it_failed(error))
