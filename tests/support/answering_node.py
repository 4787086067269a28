"""A node that answers each path with a fixed response, in a thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class AnsweringNode:
    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        """Path → text, JSON, or a status. A callable gets the request's body. Other paths answer 404."""
        self.requests: list[tuple[str, bytes, str | None]] = []
        """Paths, bodies and Authorization headers."""
        self.date = ""
        """The Date header; empty for the correct one."""
        self.url = ""

    def bodies(self, path: str) -> list[bytes]:
        return [body for one, body, _authorization in self.requests if one == path]


@contextmanager
def answering_node(answers: dict[str, Any]) -> Iterator[AnsweringNode]:
    node = AnsweringNode()
    node.answers = {"/health": "", **answers}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            node.requests.append((self.path, body, self.headers["Authorization"]))
            answer = node.answers.get(self.path, 404)
            if callable(answer):
                answer = answer(body)
            status = answer if isinstance(answer, int) else 200
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def date_time_string(self, timestamp: float | None = None) -> str:
            return node.date or super().date_time_string(timestamp)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    node.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield node
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
