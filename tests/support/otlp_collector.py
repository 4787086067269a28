"""An OpenTelemetry collector in memory: receives OTLP over HTTP and decodes its protobuf."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass
class ReceivedSpan:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    failed: bool
    message: str
    trace_state: str
    resource: dict[str, Any]
    children: list[ReceivedSpan] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [child for child in self.children if child.name == name]

    def only(self, name: str) -> ReceivedSpan:
        [child] = self.named(name)
        return child

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children]


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[ReceivedSpan] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Paths and headers."""
        self.status = 200
        self.body = b""
        self.delay_s = 0.0
        self.closing = Event()

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.requests.append((path, headers))
        if self.status != 200:
            return
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_span(one, resource) for one in of_scope.spans]

    def requests_spans(self) -> list[ReceivedSpan]:
        """Return the routers' spans of requests (SERVER), each with the tree of its children, by start."""
        by_id = {span.span_id: span for span in self.spans}
        for span in self.spans:
            span.children = []
        for span in sorted(self.spans, key=lambda span: (span.start_s, span.end_s)):
            if span.parent_id in by_id:
                by_id[span.parent_id].children.append(span)
        return sorted((span for span in self.spans if span.kind == "server"), key=lambda span: span.start_s)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _span(one: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        one.name, KINDS[one.kind], one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(),
        one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9, _attributes(one.attributes),
        one.status.code == 2, one.status.message, one.trace_state, resource,
    )  # fmt: skip


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.closing.wait(collector.delay_s)
            collector.receive(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(collector.status)
            self.send_header("Content-Length", str(len(collector.body)))
            self.end_headers()
            self.wfile.write(collector.body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        collector.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
