"""The servers of bench/mutated_requests.py, each in a process of its own: uvicorn as an engine, and the router.

    python bench/mutation_servers.py engine httptools RECORD
    python bench/mutation_servers.py router RECORD URL URL

Each prints its port, and writes a line to the file RECORD for every request: what the engine read, or what the router
judged before it forwarded it. The engine reads a request as vLLM does (Starlette's headers and JSON, pydantic's
conversions, python-multipart's forms), and also where vLLM would refuse the content type.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from typing import Any, Protocol

import msgspec
import pydantic
import uvicorn
import uvloop
from python_multipart import create_form_parser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from request_mutations import KEYS, MODELS

from warmroute.app.service import Service
from warmroute.config import from_table
from warmroute.edge.arrival import hash_key
from warmroute.edge.proxy import Proxy

UNREADABLE = "unreadable"
"""In place of the fields of a body that the engine refuses."""
Fields = list[Any] | str
"""Model, whether the response streams, max_tokens, priority."""


class Record(Protocol):
    def write(self, *values: Any) -> None:
        """Add a record."""


class FileRecord:
    """A file that gets one line at a time."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *values: Any) -> None:
        os.write(self._file, msgspec.json.encode(values) + b"\n")


# The engine.


class EngineRequest(pydantic.BaseModel):
    """The fields that decide where a request goes and what it costs, declared as vLLM declares them."""

    model: str | None = None
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    priority: int = 0


def read_form(content_type: str, body: bytes) -> Fields:
    models: list[str] = []
    try:
        parser = create_form_parser(
            {"Content-Type": content_type.encode("latin-1")},
            lambda field: models.append((field.value or b"").decode()) if field.field_name == b"model" else None,
            lambda file: models.append("a file") if file.field_name == b"model" else None,
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError):
        return UNREADABLE
    return [models[-1] if models else "", None, None, 0]


def read_json(path: str, body: bytes) -> Fields:
    try:
        read = EngineRequest.model_validate(json.loads(body))
    except (ValueError, RecursionError):
        return UNREADABLE
    limit = read.max_tokens
    if path == "/v1/chat/completions" and read.max_completion_tokens is not None:
        limit = read.max_completion_tokens
    return [read.model or "", bool(read.stream), limit, read.priority]


class RecordingEngine:
    """An ASGI application."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._cards = json.dumps({"object": "list", "data": [{"id": model} for model in MODELS]}).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        reply = b'{"ok":true}'
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        by_name = dict(reversed(headers))  # the first of several, as in Starlette
        if is_poll(scope, by_name):
            reply = self._cards if scope["path"] == "/v1/models" else b""
        else:
            self._write(scope, headers, by_name, body)
        sized = [(b"content-length", b"%d" % len(reply)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": sized})
        await send({"type": "http.response.body", "body": reply})

    def _write(self, scope: Any, headers: list[tuple[bytes, bytes]], by_name: dict[bytes, bytes], body: bytes) -> None:
        names = [name for name, _ in headers]
        path, content_type = scope["path"], by_name.get(b"content-type", b"").decode("latin-1")
        is_form = parse_options_header(content_type)[0] == b"multipart/form-data"
        fields = read_form(content_type, body) if is_form else read_json(path, body)
        if isinstance(fields, list) and b"x-vllm-priority" in by_name:
            try:
                fields[3] = int(by_name[b"x-vllm-priority"])
            except ValueError:
                pass
        single = (b"content-type", b"content-length", b"host", b"x-request-id", b"authorization", b"x-vllm-priority")
        repeated = [name.decode() for name in single if names.count(name) > 1]
        never = (b"x-data-parallel-rank", b"content-encoding", b"transfer-encoding", b"authorization", b"x-api-key")
        unwanted = repeated + [name.decode() for name in never if name in by_name]
        request_id = by_name.get(b"x-request-id", b"").decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        self._record.write(request_id, scope["method"], path, query, fingerprint(body), fields, unwanted)


def is_poll(scope: Any, by_name: dict[bytes, bytes]) -> bool:
    """Whether a request is the router's own: only that has no other headers, and the engine's address."""
    if scope["method"] != "GET" or not by_name.keys() <= {b"host", b"accept"}:
        return False
    return by_name.get(b"host") == b"127.0.0.1:%d" % scope["server"][1]


def fingerprint(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def engine_server(http: Any, record: Record) -> uvicorn.Server:
    config = uvicorn.Config(
        RecordingEngine(record), port=0, http=http, lifespan="off", log_level="critical", access_log=False,
        timeout_keep_alive=3600, proxy_headers=False,
    )  # fmt: skip
    return uvicorn.Server(config)


async def run_engine(http: Any, record: Record) -> None:
    server = engine_server(http, record)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


# The router.


def record_judgements(record: Record) -> None:
    """Write a line for each request that the router is about to forward."""
    begin = Proxy.begin

    def begin_and_record(
        self: Proxy, client: Any, head: Any, path: bytes, body: bytes, scanned: Any, trace: Any, kind: Any
    ) -> None:
        begin(self, client, head, path, body, scanned, trace, kind)
        exchange = client.exchange
        if exchange is None:  # it has its answer: it was rejected
            return
        request_id, tenant = exchange.request_id.decode("latin-1"), exchange.request.tenant
        query = head.target.partition(b"?")[2].decode("latin-1")
        fields = [scanned.model, scanned.streams, scanned.max_output_tokens, scanned.priority]
        if value := head.get(b"x-vllm-priority"):
            fields[3] = int(value)
        record.write(
            request_id, head.method.decode(), path.decode(), query, fingerprint(body), fields,
            scanned.outline is None, tenant,
        )  # fmt: skip

    Proxy.begin = begin_and_record  # type: ignore[method-assign]


def router_table(urls: list[str]) -> dict[str, Any]:
    """Return the router's configuration."""
    keys = [
        {"sha256": hash_key(key), "tenant": key.removeprefix("key-"), "max_priority": key.removeprefix("key-")}
        for key in KEYS
    ]
    return {
        "listen": {"port": 0},
        "admin": {"enabled": False},
        "limits": {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "idle_timeout_s": 2.0},
        "routing": {"policy": "round_robin"},
        "log": {"level": "error"},
        "keys": keys,
        "nodes": [{"url": url, "name": f"node{number}"} for number, url in enumerate(urls)],
    }


async def run_router(record: Record, urls: list[str]) -> None:
    record_judgements(record)
    config = from_table(router_table(urls), experiment=True)
    service = Service(lambda: config)
    await service.start()
    while sum(len(group.sort_if_changed().up) for group in service.fleet.groups) < len(urls) * len(MODELS):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(service.port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "engine":
        uvloop.run(run_engine(arguments[0], FileRecord(arguments[1])))
    else:
        uvloop.run(run_router(FileRecord(arguments[0]), arguments[1:]))


if __name__ == "__main__":
    main()
