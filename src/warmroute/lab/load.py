"""`warmroute load`: sends a workload to a real endpoint and measures the responses as a client sees them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final
from urllib.parse import urljoin

import msgspec

from warmroute.http_client import BrokenResponse, Response, open_response
from warmroute.lab.summary import Run, percentiles, rounded
from warmroute.lab.workloads.workload_prompt import Form, WorkloadPrompt, system_end, token_ids, words

# Converts a workload's prompts to HTTP requests, as messages, text or token ids.
#
# The system message of a chat is the workload's system prompt. The next turn of a conversation contains what the
# endpoint really answered, so that it finds this turn's blocks in the engine's cache.


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class ConversationHistory(msgspec.Struct, frozen=True):
    """The messages before the next prompt of a conversation, and how many of the prompt's tokens they represent."""

    messages: tuple[Message, ...] = ()
    tokens: int = 0


def chat_messages(prompt: WorkloadPrompt, history: ConversationHistory) -> tuple[Message, ...]:
    """Return all messages of a prompt: the history, and a new user message."""
    earlier, start = history.messages, history.tokens
    if not earlier and prompt.system_tokens:
        start = system_end(prompt)
        earlier = (Message("system", words(prompt, 0, start)),)
    return (*earlier, Message("user", words(prompt, start, prompt.prompt_tokens)))


def extend_history(prompt: WorkloadPrompt, messages: tuple[Message, ...], response_text: str) -> ConversationHistory:
    """Return the history after a response to `messages`."""
    tokens = prompt.prompt_tokens + prompt.output_tokens
    return ConversationHistory((*messages, Message("assistant", response_text)), tokens)


def build_request(prompt: WorkloadPrompt, messages: tuple[Message, ...], model: str, form: Form) -> tuple[str, bytes]:
    """Return path and body of a streaming request with usage. The output has exactly the workload's length."""
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": prompt.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if prompt.session:
        fields["prompt_cache_key"] = prompt.session.decode()
    if prompt.cache_salt:
        fields["cache_salt"] = prompt.cache_salt
    if form == "chat":
        return "/v1/chat/completions", msgspec.json.encode({**fields, "messages": messages})
    text = words if form == "completion" else token_ids
    return "/v1/completions", msgspec.json.encode({**fields, "prompt": text(prompt, 0, prompt.prompt_tokens)})


# Sends one streaming request, and records the time of each piece of text in its response.

_MAX_ERROR_BYTES: Final = 4096
_ERROR_TIMEOUT_S: Final = 2.0


class RequestRefused(Exception):
    """The response has a status other than 200."""

    def __init__(self, status: int, retry_after_s: float, message: str = "") -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s
        self.message = message
        """The error message of the server."""


class RequestFailed(Exception):
    """No response, or an incomplete one. The message is a short reason to count by."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _ErrorDetails(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    error: _ErrorDetails | str = ""
    message: str = ""


_decoder = msgspec.json.Decoder(_Event)


class StreamedResponse(msgspec.Struct):
    """A complete response. Times are monotonic seconds."""

    sent_s: float
    times_s: list[float] = []
    """When each of `texts` arrived."""
    texts: list[str] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first text. There must be one."""
        return (self.times_s[0] - self.sent_s) * 1000.0


async def send_streaming(
    url: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> StreamedResponse:
    """Send a request and read the whole response. Raises RequestRefused, RequestFailed."""
    result = StreamedResponse(time.monotonic())
    try:
        async with (
            asyncio.timeout(timeout_s),
            open_response("POST", urljoin(url, path), body, headers.items()) as response,
        ):
            if response.status != 200:
                after = response.head.retry_after
                message = await _error_message(response)
                raise RequestRefused(response.status, float(after) if after.isdigit() else 1.0, message)
            await _read_events(response, result)
    except TimeoutError:
        raise RequestFailed("timeout") from None
    except BrokenResponse:
        raise RequestFailed("the response broke off") from None
    except OSError as error:
        raise RequestFailed(type(error).__name__) from None
    return result


async def _error_message(response: Response) -> str:
    """Return the message of an error's JSON, or else the beginning of its body."""
    body = b""
    try:
        async with asyncio.timeout(_ERROR_TIMEOUT_S):
            async for piece in response.pieces():
                body += piece
                if len(body) >= _MAX_ERROR_BYTES:
                    break
    except OSError:
        return ""
    try:
        decoded = msgspec.json.decode(body, type=_Error)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200]
    return decoded.error.message if isinstance(decoded.error, _ErrorDetails) else decoded.message


async def _read_events(response: Response, result: StreamedResponse) -> None:
    done = False
    rest = b""
    # Read beyond [DONE] to the end, so that the router has closed this request before the client sends the next one.
    async for piece in response.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                _add_event(line[6:], result)
    if not done:
        raise RequestFailed("the response ended without [DONE]")


def _add_event(data: bytes, result: StreamedResponse) -> None:
    try:
        event = _decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise RequestFailed("an event is not a valid chunk") from None
    if event.error is not None:
        raise RequestFailed("an error event in the response")
    for choice in event.choices:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content
        if text:
            result.times_s.append(time.monotonic())
            result.texts.append(text)
    usage = event.usage
    if usage is not None:
        result.prompt_tokens, result.output_tokens = usage.prompt_tokens, usage.completion_tokens
        details = usage.prompt_tokens_details
        result.cached_tokens = (details.cached_tokens or 0) if details else 0


# Sends a workload to an endpoint, in an open or closed loop, and measures the responses.


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
