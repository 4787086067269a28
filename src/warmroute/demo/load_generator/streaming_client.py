"""Sends one streaming request, and records the time of each piece of text in its response."""

from __future__ import annotations

import asyncio
import time
from typing import Final
from urllib.parse import urljoin

import msgspec

from warmroute.http_client import BrokenResponse, Response, open_response

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
