"""Requests of the doctor to one node, each on its own connection."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from warmroute.config import NodeConfig
from warmroute.http_client import open_response

MAX_BYTES: Final = 8 << 20
_DATE: Final = re.compile(rb"(?im)^date:[ \t]*([^\r\n]+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, or why there is none."""

    status: int = 0
    body: bytes = b""
    clock_skew_s: float | None = None
    """By how much the node's clock is ahead of this one, to about a second; None if the response has no date."""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


class NodeHttp:
    def __init__(self, node: NodeConfig, tls: ssl.SSLContext, timeout_s: float) -> None:
        self._url = node.url.rstrip("/")
        self._tls = tls if self._url.startswith("https://") else None
        self._timeout_s = timeout_s
        key = os.environ.get(node.api_key_env, "") if node.api_key_env else ""
        self.has_key = bool(key)
        """Whether the environment has an API key for the node."""
        self._headers = [("Authorization", f"Bearer {key}")] if key else []

    async def get(self, path: str) -> Answer:
        return await self._request("GET", path, b"", self._timeout_s)

    async def post(self, path: str, body: bytes, timeout_s: float | None = None) -> Answer:
        return await self._request("POST", path, body, timeout_s or self._timeout_s)

    async def _request(self, method: str, path: str, body: bytes, timeout_s: float) -> Answer:
        started_s = time.time()
        try:
            async with (
                asyncio.timeout(timeout_s),
                open_response(method, self._url + path, body, self._headers, self._tls) as response,
            ):
                skew_s = _clock_skew_s(response.head.forwarded_fields, started_s, time.time())
                return Answer(response.status, await response.read(MAX_BYTES), skew_s)
        except TimeoutError:
            return Answer(error=f"no answer within {timeout_s:g} s")
        except ssl.SSLError as error:
            return Answer(error=f"TLS failed: {error.reason or error}")
        except (OSError, ValueError) as error:
            return Answer(error=_reason(error))


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror) or not isinstance(number, int) or number <= 0:
        return str(getattr(error, "strerror", None) or error or type(error).__name__)
    return os.strerror(number)  # asyncio's own text has the address, but not the reason


def _clock_skew_s(fields: bytes, started_s: float, ended_s: float) -> float | None:
    found = _DATE.search(fields)
    if found is None:
        return None
    try:
        date_s = parsedate_to_datetime(found[1].decode("ascii")).timestamp()
    except (ValueError, OverflowError):
        return None
    # the date has no fraction of a second: the node's clock was between date_s and date_s + 1
    return date_s - ended_s if date_s > ended_s else min(0.0, date_s + 1.0 - started_s)
