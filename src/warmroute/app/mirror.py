"""Takes mirrored traffic (nginx's mirror, Envoy's request mirroring) and captures it. Nothing is forwarded.

A request is answered as soon as its body has arrived, before it is read: a proxy may hold its client's connection until
the mirror has answered. What cannot be read is counted and left out. The prompts are read as `warmroute serve` reads
them, with the same configuration.

A mirror has no responses. The length of an answer is estimated: as long as the answers that later turns of the
conversations contain (four bytes to a token), and at most as long as the request allows.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from hashlib import sha256
from typing import Final

import msgspec

from warmroute._kernel import MAX_LOOP_BYTES, Outline, RequestHead
from warmroute.app.capture import CapturedCall, Sink, TrafficCapture
from warmroute.config import Capture, Config
from warmroute.core.messages import Tables
from warmroute.core.output_length import OutputLengthEstimate
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import NO_RIGHTS, BodyScanner, RequestBuilder, Rights
from warmroute.edge.client_connection import ClientConnection, Listener
from warmroute.edge.errors import HttpError, internal_error
from warmroute.edge.sockets import Server, listen_tcp
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.hub import find_tokenizer_files
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.reader import PendingPrompt, PromptReader
from warmroute.prompt.registry import TokenizerRegistry
from warmroute.prompt.request_body import has_prompt

log = EventLog("warmroute.capture")

MAX_UNREAD_REQUESTS: Final = 1024
"""Answered requests that wait until their prompt is read. Further ones are dropped."""
BYTES_PER_TOKEN: Final = 4
_NO_NODES: Final = Tables()
"""A mirror sends no request anywhere, so it knows no fleet."""


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


class Mirror:
    """Implements listener.Handler."""

    def __init__(self, config: Config, output_tokens: int | None = None) -> None:
        """`output_tokens`: the length of an answer; None to learn it."""
        self._config = config
        self._now = time.monotonic
        self.counters = Counters()
        self._output_tokens = output_tokens
        self._output_lengths = OutputLengthEstimate()
        self._requests = RequestBuilder(config, self._now)
        self._registry = TokenizerRegistry(config.prompts, config.models, locate=find_tokenizer_files)
        self._prompt_reader = PromptReader(self._registry, config.prompts, self.counters)
        self._body_scanner = BodyScanner()
        self._timers = TimerWheel(self._now)
        self._listener = Listener(self, config.limits, self._timers)
        self._reading: set[asyncio.Task[None]] = set()
        self._server: Server | None = None
        self.capture = TrafficCapture(Capture(block_size=config.capture.block_size), self.counters, self._now)
        self._tasks: list[asyncio.Task[None]] = []
        self.received = 0
        """Requests with a body."""
        self.unreadable: Counter[str] = Counter()
        """Requests that are not in the capture, by the code of the error that `serve` would answer with."""
        self.port = 0

    async def start(self, host: str, port: int, sink: Sink) -> None:
        """Raises ConfigError if the address or a configured tokenizer cannot be used."""
        await self._registry.load_configured()
        self.capture.start(sink)
        self._server = await listen_tcp(self._listener, host, port)
        self.port = self._server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._timers.run()), loop.create_task(self.capture.run())]
        log.info("mirror_started", "Mirrored requests are answered, captured and not forwarded.", port=self.port)

    async def close(self) -> None:
        """Read what has arrived, write it, and close everything."""
        if self._server is not None:
            self._server.close()
        self._listener.abort_all()
        if self._reading:
            await asyncio.wait(self._reading, timeout=5.0)
        for task in (*self._tasks, *self._reading):
            task.cancel()
        await self.capture.close()
        self._prompt_reader.close()
        self._body_scanner.close()
        self._registry.close()

    # listener.Handler

    def check_head(self, head: RequestHead) -> Rights:
        return NO_RIGHTS  # the key is checked when the request is read

    def serve(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        client.reply(200, b"", content_type="text/plain")
        if not body:
            return
        self.received += 1
        if len(self._reading) >= MAX_UNREAD_REQUESTS:
            self.counters.capture_dropped += 1
            return
        task = asyncio.get_running_loop().create_task(self._read(head, body))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    def new_request_id(self) -> bytes:
        return b""

    def error_sent(self, error: HttpError, request_id: bytes, peer: bytes, forwarded_for: bytes) -> None:
        self.unreadable[error.code] += 1

    def internal_error(self, error: Exception, request_id: bytes = b"") -> HttpError:
        log.error("mirror_failed", "The request is not captured.", reason=where_it_failed(error))
        return internal_error()

    # Reading.

    async def _read(self, head: RequestHead, body: bytes) -> None:
        try:
            await self._capture_request(head, body)
        except HttpError as error:
            self.unreadable[error.code] += 1
        except Exception as error:
            self.internal_error(error)

    async def _capture_request(self, head: RequestHead, body: bytes) -> None:
        path = head.target.partition(b"?")[0]
        path = path[max(0, path.rfind(b"/v1/")) :]  # the API may be mounted below another path
        if head.method != b"POST" or not has_prompt(path):
            self.unreadable["no_prompt"] += 1
            return
        rights = self._requests.keys.rights(head)
        tenant = rights.tenant or _key_owner(head)
        now_s = self._now()
        scanned = await self._body_scanner.scan(path, head.content_type, body)
        scanned.engine_field = None  # no engine gets this request
        request = self._requests.build(head, path, scanned, rights, _NO_NODES)
        request.tenant, request.arrived_s = tenant, now_s
        future: asyncio.Future[Prompt | None] = asyncio.get_running_loop().create_future()
        not_read = self.counters.prompts_not_tokenized
        prompt = self._prompt_reader.read(request.model, path, body, future.set_result, scanned.outline)
        if isinstance(prompt, PendingPrompt):
            prompt = await future
        elif self.counters.prompts_not_tokenized > not_read:  # too many wait for a thread
            self.counters.capture_dropped += 1
            return
        answer = _last_answer_tokens(body, scanned.outline, prompt)
        if answer:
            self._output_lengths.record(request.model, tenant, answer)
        limit = request.max_output_tokens
        if self._output_tokens is None:
            output = self._output_lengths.expected(request.model, tenant, limit)
        else:
            output = min(self._output_tokens, limit or self._output_tokens)
        self.capture.add(
            CapturedCall(
                request, request.session_key(), prompt, len(body), "mirrored", now_s, output, True,
                answer_tokens=answer,
            )
        )  # fmt: skip


def _last_answer_tokens(body: bytes, outline: Outline | None, prompt: Prompt | None) -> int:
    """Return the estimated tokens of the last answer in a chat; 0 if there is none."""
    span = outline.fields.get("messages") if outline is not None else None
    if span is None or span[1] - span[0] > MAX_LOOP_BYTES:
        return 0
    try:
        messages = msgspec.json.decode(body[span[0] : span[1]], type=list[_Message])
    except msgspec.MsgspecError:
        return 0
    answer = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if answer is None:
        return 0
    bytes_per_token = float(BYTES_PER_TOKEN)
    if prompt is not None and prompt.exact and prompt.token_count:
        bytes_per_token = max(1.0, (span[1] - span[0]) / prompt.token_count)
    return max(1, round(len(memoryview(answer.content)) / bytes_per_token))


def _key_owner(head: RequestHead) -> str:
    """Return a name for the owner of the API key of another server; empty without a key."""
    key = head.authorization or head.api_key
    return sha256(key).hexdigest() if key else ""
