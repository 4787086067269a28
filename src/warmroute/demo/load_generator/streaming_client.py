"""A minimal streaming HTTP client: one POST, its answer as server-sent events with the time of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import msgspec

LIMIT_BYTES = 2**20
REASON_BYTES = 4096
REASON_S = 2.0
"""How much of an error is read, and for how long."""


class RequestRefused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, retry_after_s: float, said: str = "") -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s
        self.said = said
        """Why, as the server says it."""


class RequestFailed(Exception):
    """No answer, or one that did not end as it should. The message is a short reason to count by."""


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


class _Told(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    error: _Told | str = ""
    message: str = ""


_decoder = msgspec.json.Decoder(_Event)


class Answer(msgspec.Struct):
    """What came back, with the moments (s, monotonic) at which text arrived."""

    sent_s: float
    times_s: list[float] = []
    texts: list[str] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


async def send_request(url: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
    """Raises Refused or Broken."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
    answer = Answer(time.monotonic())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=True if parts.scheme == "https" else None, limit=LIMIT_BYTES
            )
            extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n{extra}\r\n".encode() + body)
            await _read(reader, answer)
    except TimeoutError:
        raise RequestFailed("timed out") from None
    except asyncio.IncompleteReadError:
        raise RequestFailed("the answer broke off") from None
    except (OSError, asyncio.LimitOverrunError) as error:
        raise RequestFailed(type(error).__name__) from None
    finally:
        if writer is not None:
            writer.close()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    words = status_line.split(" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    if status != 200:
        after = fields.get("retry-after", "")
        raise RequestRefused(status, float(after) if after.isdigit() else 1.0, await _reason(reader, fields))
    chunked = "chunked" in fields.get("transfer-encoding", "").lower()
    done = False
    # Read to its end: whoever asks again at [DONE] may be there before the router has closed the books on this one.
    async for line in _lines(reader, chunked):
        if line == b"data: [DONE]":
            done = True
        elif line.startswith(b"data: "):
            _take(line[6:], answer)
    if not done:
        raise RequestFailed("the answer ended without [DONE]")


async def _reason(reader: asyncio.StreamReader, fields: dict[str, str]) -> str:
    """The sentence of an error's JSON, else how its body begins."""
    length = fields.get("content-length", "")
    try:
        async with asyncio.timeout(REASON_S):
            body = await reader.readexactly(min(int(length), REASON_BYTES) if length.isdigit() else REASON_BYTES)
    except asyncio.IncompleteReadError as error:
        body = error.partial
    except (TimeoutError, OSError):
        return ""
    text = body.decode("utf-8", "replace")
    start, end = text.find("{"), text.rfind("}")  # chunked or not
    try:
        told = msgspec.json.decode(text[start : end + 1], type=_Error)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return " ".join(text.split())[:200]
    return told.error.message if isinstance(told.error, _Told) else told.message


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        if chunked:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = await reader.readexactly(size + 2)
            piece = data[:-2]
        else:
            piece = await reader.read(65_536)
        if not piece:
            return
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


def _take(data: bytes, answer: Answer) -> None:
    try:
        event = _decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise RequestFailed("an event that is not a chunk") from None
    if event.error is not None:
        raise RequestFailed("an error within the answer")
    for choice in event.choices:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content
        if text:
            answer.times_s.append(time.monotonic())
            answer.texts.append(text)
    usage = event.usage
    if usage is not None:
        answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
        details = usage.prompt_tokens_details
        answer.cached_tokens = (details.cached_tokens or 0) if details else 0
