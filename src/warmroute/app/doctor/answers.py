"""What a node answers, read by the router's own parsers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

from warmroute.config import NodeConfig, node_name
from warmroute.core.node import LoadReport
from warmroute.core.reported_values import ReportedValues, decode_json
from warmroute.engines import ENGINES, detect_engine, engine_of, engine_of_cards, read_cards
from warmroute.engines.kv_events import BadPayload, ByteBudget, decode_batch
from warmroute.engines.kv_subscription import (
    SUBSCRIBE_TO_ALL,
    KvEndpoint,
    configured_endpoints,
    parse_event_sources,
    parse_server_info,
)
from warmroute.engines.prometheus_page import labels
from warmroute.engines.zmtp import SUB, ZmtpConnection
from warmroute.http_client import open_response

# Requests of the doctor to one node, each on its own connection.

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


# What a node answers: its engine, models, metrics and KV event endpoints, read by the router's own parsers.

_OWNERS = {engine.owner: name for name, engine in ENGINES.items() if engine.owner}


@dataclass(slots=True)
class NodeFacts:
    config: NodeConfig
    health: Answer
    health_path: str = "/health"
    has_key: bool = False
    """Whether the environment has an API key for it."""
    metrics: Answer = field(default_factory=Answer)
    models: Answer = field(default_factory=Answer)
    cards: list[dict[str, Any]] = field(default_factory=list)
    engine: str = ""
    """`vllm`, `sglang`, `trtllm`; empty if it is unknown."""
    is_detected: bool = False
    """Whether the router would detect the engine, too."""
    version: str = ""
    is_simulated: bool = False
    """Whether the node is `warmroute engine`."""
    load: LoadReport | None = None
    server_info: dict[str, Any] = field(default_factory=dict)
    endpoints: list[KvEndpoint] | None = None
    """Where the node publishes KV events; None if it does not say."""
    block_size: int = 0
    prefix_caching: bool | None = None

    @property
    def name(self) -> str:
        return node_name(self.config)

    @property
    def refused(self) -> tuple[str, int]:
        """The first path that the node refuses, without a key or with a wrong one, and its status; 0 if none."""
        answers = {self.health_path: self.health, "/v1/models": self.models, "/metrics": self.metrics}
        return next(((path, one.status) for path, one in answers.items() if one.status in (401, 403)), ("", 0))

    @property
    def bases(self) -> list[dict[str, Any]]:
        """The cards of models that are not adapters."""
        return [card for card in self.cards if not card.get("parent")]

    @property
    def adapters(self) -> list[str]:
        return [card["id"] for card in self.cards if card.get("parent")]


async def ask_node(config: NodeConfig, http: NodeHttp, health_path: str) -> NodeFacts:
    facts = NodeFacts(config, await http.get(health_path), health_path, http.has_key)
    if facts.health.error:
        return facts
    reported = ReportedValues(facts.name)
    facts.models = await http.get("/v1/models")
    if facts.models.ok:
        try:
            facts.cards = read_cards(facts.models.body, reported)
        except ValueError:
            pass
    await _ask_metrics(facts, http)
    facts.version = await _version(facts, http)
    await _ask_kv_events(facts, http, reported)
    facts.prefix_caching = _prefix_caching(facts)
    return facts


async def _ask_metrics(facts: NodeFacts, http: NodeHttp) -> None:
    configured = facts.config.engine
    refused: Answer | None = None
    for path in engine_of(configured).metrics_paths:
        facts.metrics = await http.get(path)
        refused = refused or (facts.metrics if facts.metrics.status in (401, 403) else None)
        if facts.metrics.ok and (configured != "auto" or detect_engine(facts.metrics.body)):
            break
    if refused is not None and not facts.metrics.ok:
        facts.metrics = refused
    page = facts.metrics.body if facts.metrics.ok else b""
    detected = configured if configured != "auto" else detect_engine(page) or engine_of_cards(facts.cards)
    facts.is_detected = bool(detected)
    owners = [_OWNERS.get(str(card.get("owned_by"))) for card in facts.bases]
    facts.engine = detected or next(filter(None, owners), "")
    try:
        if facts.metrics.ok and (configured != "auto" or detect_engine(page)):
            facts.load = engine_of(facts.engine).parse_load(page)
    except ValueError:
        pass
    facts.block_size = facts.load.block_size if facts.load is not None else 0


async def _version(facts: NodeFacts, http: NodeHttp) -> str:
    if facts.engine == "sglang":
        answer = await http.get("/server_info")
        facts.server_info = _object(answer)
        return printable(facts.server_info.get("version"))
    found = _object(await http.get("/version"))
    facts.is_simulated = found.get("simulated_by") == "warmroute"
    return printable(found.get("version"))


async def _ask_kv_events(facts: NodeFacts, http: NodeHttp, reported: ReportedValues) -> None:
    """Ask a node where it publishes KV events, as engines/kv_subscription.py does."""
    config, host = facts.config, urlsplit(facts.config.url).hostname or ""
    if config.kv_events not in ("auto", "off"):
        facts.endpoints = configured_endpoints(config.kv_events, config.kv_replay, host)
        return
    if engine_of(facts.engine).why_no_subscription:
        return
    try:
        answer = await http.get("/kv_event_sources")
        if answer.ok:
            facts.endpoints = parse_event_sources(answer.body, host, reported)
        if not facts.endpoints and facts.engine != "vllm":
            answer = await http.get("/server_info")
            if answer.ok:
                found = parse_server_info(answer.body, host, reported)
                facts.endpoints = found.endpoints
                facts.block_size = facts.block_size or found.block_size
    except ValueError:
        pass


def _prefix_caching(facts: NodeFacts) -> bool | None:
    """Return None if the engine does not say."""
    if facts.engine == "vllm":
        for config in labels(facts.metrics.body, b"vllm:cache_config_info"):
            value = config.get(b"enable_prefix_caching")
            return None if value is None else value == b"True"
    if "disable_radix_cache" in facts.server_info:
        return not facts.server_info["disable_radix_cache"]
    return None


def printable(value: object, length: int = 60) -> str:
    """Return a text of a node without characters that control a terminal."""
    return "".join(one if one.isprintable() else " " for one in str(value or "")[:length])


def _object(answer: Answer) -> dict[str, Any]:
    try:
        value = decode_json(answer.body) if answer.ok else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# A small request to a node: does the engine report cached tokens, and does it publish KV events?
#
# It has one output token, and a prompt that no request had before and that fills a few KV blocks, so that the engine
# has something to publish. vLLM before 0.10 reports cached tokens only if there are any; so without a report the same
# request is sent once more.

CONNECT_S: Final = 2.0
"""A firewall that drops packets answers nothing at all."""
SUBSCRIBE_S: Final = 0.5
"""Time for a subscription to reach the engine. Events before that are lost."""
EVENT_S: Final = 3.0
"""How long the doctor waits for a KV event after the response."""
REQUEST_S: Final = 120.0
"""A cold engine compiles kernels for its first request."""
_DEFAULT_BLOCK: Final = 64
"""Block size that is assumed where the node does not report its own. The prompt fills two such blocks."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    error: str = ""
    """Why the request failed; empty if it succeeded."""
    reports_cached_tokens: bool = False
    has_event: bool = False
    """Whether the router can read a KV event that the engine published for the request."""
    unreadable: str = ""
    """Why the router cannot read what the engine published; empty if it can, or if nothing arrived."""


async def unreachable_endpoints(endpoints: list[KvEndpoint]) -> list[str]:
    """Return the endpoints of events and replays that accept no connection."""
    names = [name for one in endpoints for name in (one.endpoint, one.replay) if name]
    return [name for name in names if not await _accepts(name)]


async def _accepts(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(CONNECT_S):
            _reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


async def send_sample(facts: NodeFacts, http: NodeHttp, endpoints: list[KvEndpoint]) -> SampleResult:
    """Send the request, and wait for a KV event if there are endpoints."""
    first = _FirstEvent()
    # The router's own subscriber: it refuses what libzmq would accept, such as a message larger than the router keeps.
    connections = [first.subscribe(one.endpoint) for one in endpoints]
    try:
        if endpoints:
            await asyncio.sleep(SUBSCRIBE_S)
        answer = await _complete(facts, http)
        if not answer.ok:
            return SampleResult(error=answer.error or f"it answers {answer.status}: {_message(answer)}")
        if endpoints:
            with suppress(TimeoutError):
                await asyncio.wait_for(first.has_arrived.wait(), EVENT_S)
        return SampleResult("", _reports(answer), first.has_arrived.is_set(), first.unreadable)
    finally:
        for connection in connections:
            connection.close()


class _FirstEvent:
    """Waits for one message that the router can read, from any of a node's endpoints."""

    def __init__(self) -> None:
        self.has_arrived = asyncio.Event()
        self.unreadable = ""
        self._budget = ByteBudget()

    def subscribe(self, endpoint: str) -> ZmtpConnection:
        parts = urlsplit(endpoint)

        def read() -> None:
            while (frames := connection.receive()) is not None:
                self._read(frames)

        connection = ZmtpConnection(
            parts.hostname or "", parts.port or 0, SUB, SUBSCRIBE_TO_ALL, self._budget, read, on_error=self._fail
        )
        return connection

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self._fail(f"a message of {len(frames)} frames instead of topic, number and events")
            return
        try:
            decode_batch(frames[2])
        except BadPayload as error:
            self._fail(str(error))
        else:
            self.has_arrived.set()

    def _fail(self, reason: str) -> None:
        self.unreadable = printable(reason, 200)


async def _complete(facts: NodeFacts, http: NodeHttp) -> Answer:
    words = 2 * (facts.block_size or _DEFAULT_BLOCK) + 16
    window = facts.bases[0].get("max_model_len")
    if isinstance(window, int):
        words = min(words, window // 8)
    text = f"{os.urandom(8).hex()} " + "one two three four five six seven eight " * (words // 8 + 1)
    common = {"model": facts.bases[0]["id"], "max_tokens": 1, "temperature": 0}
    forms = [
        ("/v1/completions", {**common, "prompt": text}),
        ("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}),
    ]
    answer = Answer()
    for path, body in forms:
        answer = await http.post(path, json.dumps(body).encode(), REQUEST_S)
        if answer.ok and not _reports(answer):
            answer = await http.post(path, json.dumps(body).encode(), REQUEST_S)
        if answer.ok or answer.error or answer.status in (401, 403, 429) or answer.status >= 500:
            break
    return answer


def _reports(answer: Answer) -> bool:
    try:
        usage = decode_json(answer.body)["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return isinstance(details.get("cached_tokens"), int)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _message(answer: Answer) -> str:
    try:
        body = decode_json(answer.body)
        found = body.get("error", body)
        return printable(found.get("message", found) if isinstance(found, dict) else found, 200)
    except (ValueError, AttributeError):
        return "no JSON"
