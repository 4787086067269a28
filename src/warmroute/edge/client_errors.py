"""Requests that the router rejects because of what the client sent (4xx): how many, with which code, and from where.

Counting happens only when a request is rejected, in memory that does not grow with the number of clients. Every code
with rejections is a line in the log, at most one a minute. Many of them are a storm, of which app/alerts.py makes an
alert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappush, heapreplace
from typing import Any, Final, NamedTuple

from warmroute.event_log import EventLog

log = EventLog("warmroute.requests")

WINDOW_S: Final = 60.0
"""Time between two lines of a code in the log. What is known of sources is of the last one or two windows."""
MANY: Final = 100
"""Rejections of one code in the last one or two windows that are an alert."""
TRACKED: Final = 64
"""Sources that are tracked for each code, and keys."""
MAX_SOURCES: Final = 4
"""Sources and keys that are named."""
MAX_FRESH: Final = 256
"""Kinds of rejections that an edge keeps for its next report. It reports further ones without their sources."""
NAME: Final = "client_errors"
"""Of the alert and of the line in the log."""
NO_KEY: Final = "none"
COMMON: Final = (
    (400, "bad_request"), (400, "http_on_tls_port"), (400, "malformed_json"), (400, "tls_on_plain_port"),
    (401, "invalid_api_key"), (401, "invalid_token"), (404, "model_not_found"), (404, "not_found"),
    (413, "request_too_large"),
    (415, "unsupported_content_encoding"), (415, "unsupported_media_type"),
)  # fmt: skip
"""Status and code of errors that are on the metrics page from the start: Prometheus sees no rate of a counter whose
first sample is that of a storm."""
_WARN: Final = frozenset({"invalid_api_key", "invalid_token", "http_on_tls_port", "tls_on_plain_port"})
"""Codes that are warnings in the log however few they are: somebody's configuration is wrong."""
_ADVICE: Final = {
    "invalid_api_key": "Compare the beginning of the key's hash with sha256 in [[keys]] and in its earlier versions; "
    "`warmroute hash-key` prints the hash of a key. If nobody of yours sends from this address, block it before it "
    "reaches the router.",
    "invalid_token": "Somebody calls the admin API without its token, or with a wrong one. Compare the beginning of "
    "the hash with admin.token_sha256. If nobody of yours does, do not let this address reach the admin port.",
    "not_found": "Clients use a path that does not exist. The base URL of an OpenAI client ends with /v1.",
    "model_not_found": "Clients name a model that no node serves. GET /v1/models lists those that exist.",
    "request_too_large": "Clients send bodies above limits.body_bytes. Raise it if they may.",
    "unsupported_media_type": "Clients send bodies that are no JSON in UTF-8, or say so. They need "
    "`Content-Type: application/json`.",
    "unsupported_content_encoding": "Clients send compressed bodies, which the router does not read.",
    "http_on_tls_port": "Clients speak plain HTTP on the port where the router speaks TLS. Give them a URL that "
    "begins with https://.",
    "tls_on_plain_port": "Clients speak TLS on the port where the router speaks plain HTTP. Give them a URL that "
    "begins with http://, or set listen.tls_cert and listen.tls_key.",
    "request_timeout": "Clients begin a request and do not finish it in time: the head within 10 s, the "
    "body within 60 s.",
}
_DEFAULT_ADVICE: Final = "The clients have to change their requests: docs/reference/errors.md explains each code."


def is_client_error(status: int) -> bool:
    """Return whether the client has to change its request. A 429 is admission's: the request may come again."""
    return 400 <= status < 500 and status != 429


class HeavyHitters:
    """The most frequent keys of a stream, in the memory of `capacity` keys (the algorithm Space-Saving).

    A new key takes the place of the least frequent one and inherits its count as a possible error. So every key that
    makes up more than 1 / capacity of the stream is known, and its count is too high by its error at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """Every key with an earlier count, the least first. A count is brought up to date when it comes to the top."""

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, key: str, times: int = 1) -> None:
        counts = self._counts
        known = counts.get(key)
        if known is not None:
            counts[key] = known + times
            return
        heap = self._heap
        if len(counts) < self._capacity:
            counts[key] = times
            heappush(heap, (times, key))
            return
        while heap[0][0] != counts[heap[0][1]]:
            heapreplace(heap, (counts[heap[0][1]], heap[0][1]))
        least, replaced = heap[0]
        del counts[replaced]
        self._errors.pop(replaced, None)
        counts[key], self._errors[key] = least + times, least
        heapreplace(heap, (least + times, key))

    def at_least(self) -> Counter[str]:
        """Return how often each key came at least. A thread may call it."""
        errors = self._errors.copy()
        found = {key: count - errors.get(key, 0) for key, count in self._counts.copy().items()}
        return Counter(found)


class _Window:
    def __init__(self) -> None:
        self.count = 0
        self.sources = HeavyHitters(TRACKED)
        self.keys = HeavyHitters(TRACKED)


class _Code:
    """Rejections with one code."""

    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code
        self.total = 0
        self.current = _Window()
        self.previous = _Window()
        self.next_s = 0.0
        """When the current window ends."""
        self.storm_from: int | None = None
        """`total` when the storm began; None without one."""
        self.storm_sources: Counter[str] = Counter()
        """Sources of the storm before the last two windows."""

    @property
    def recent(self) -> int:
        return self.previous.count + self.current.count

    def recent_sources(self) -> Counter[str]:
        return self.previous.sources.at_least() + self.current.sources.at_least()

    def recent_keys(self) -> Counter[str]:
        return self.previous.keys.at_least() + self.current.keys.at_least()

    def next_window(self) -> None:
        if self.storm_from is not None:
            known = self.storm_sources + self.previous.sources.at_least()
            self.storm_sources = Counter(dict(known.most_common(TRACKED)))
        self.previous, self.current = self.current, _Window()


class Storm(NamedTuple):
    """A code with many rejections."""

    status: int
    code: str
    requests: int
    """Rejections since the storm began."""
    sources: list[tuple[str, int]]
    """The clients that got the most of them."""
    cause: str
    advice: str


class ClientErrors:
    def __init__(self) -> None:
        self.fresh: dict[tuple[int, str, str, str], int] | None = None
        """What another process has not been told, by status, code, source and key; None: there is none to tell."""
        self._codes: dict[str, _Code] = {}

    def count(self, status: int, code: str, source: str, key_sha256: str, times: int = 1) -> None:
        """`source`: the client's address. `key_sha256`: the first characters of the hash of its key, for 401."""
        found = self._codes.get(code)
        if found is None:
            found = self._codes[code] = _Code(status, code)
        if self.fresh is not None:
            kind = (status, code, source, key_sha256)
            if kind not in self.fresh and len(self.fresh) >= MAX_FRESH:
                kind = (status, code, "", "")
            self.fresh[kind] = self.fresh.get(kind, 0) + times
        found.total += times
        window = found.current
        window.count += times
        window.sources.add(source, times)
        if status == 401:
            window.keys.add(key_sha256 or NO_KEY, times)

    def storms(self, now_s: float) -> Iterator[Storm]:
        """Write the log, and yield the codes that many requests were rejected with. Call this every few seconds."""
        for one in list(self._codes.values()):
            if now_s >= one.next_s and one.recent:
                if one.current.count:
                    _log(one)
                one.next_window()
                one.next_s = now_s + WINDOW_S
            if one.recent < MANY:
                one.storm_from = None
                continue
            if one.storm_from is None:
                one.storm_from = one.total - one.recent
                one.storm_sources = Counter()
            sources = one.storm_sources + one.recent_sources()
            yield Storm(
                one.status, one.code, one.total - one.storm_from, sources.most_common(MAX_SOURCES), _cause(one),
                _ADVICE.get(one.code, _DEFAULT_ADVICE),
            )  # fmt: skip

    def log_rest(self) -> None:
        """Write the log of what was rejected since the last lines: the router stops."""
        for one in self._codes.values():
            if one.current.count:
                _log(one)
                one.next_window()

    def describe(self) -> list[dict[str, Any]]:
        """Return the codes for the live page, the most frequent of the last minutes first. A thread may call it."""
        rows: list[dict[str, Any]] = [
            {
                "status": one.status,
                "code": one.code,
                "total": one.total,
                "recent": one.recent,
                "sources": [
                    {"source": source, "count": count}
                    for source, count in one.recent_sources().most_common(MAX_SOURCES)
                ],
                "keys": [
                    {"key_sha256": key, "count": count} for key, count in one.recent_keys().most_common(MAX_SOURCES)
                ],
            }
            for one in list(self._codes.values())
        ]
        rows.sort(key=lambda row: (-row["recent"], -row["total"], row["code"]))
        return rows


def _cause(one: _Code) -> str:
    [(source, count)] = one.recent_sources().most_common(1) or [("", 0)]
    share = count / one.recent
    if share >= 0.1:
        text = f"{share:.0%} of those of the last minutes came from {source}."
    else:
        text = "They come from many addresses: none sent a tenth of those of the last minutes."
    if one.status == 401 and one.recent:
        [(key, count)] = one.recent_keys().most_common(1) or [("", 0)]
        if 2 * count < one.recent:
            text += " Their keys differ."
        elif key == NO_KEY:
            text += " They sent no key."
        else:
            text += f" The SHA-256 hash of their key begins with {key}."
    return text


def _log(one: _Code) -> None:
    window = one.current
    [(source, count)] = window.sources.at_least().most_common(1) or [("", 0)]
    fields: dict[str, object] = {
        "status": one.status, "reason": one.code, "count": window.count, "source": source, "source_count": count,
    }  # fmt: skip
    if one.status == 401:
        fields["key_sha256"], fields["key_count"] = (window.keys.at_least().most_common(1) or [("", 0)])[0]
    write = log.warning if window.count >= MANY or one.code in _WARN else log.info
    write(NAME, _ADVICE.get(one.code, _DEFAULT_ADVICE), **fields)
