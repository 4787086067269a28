"""A Hugging Face hub on loopback: it lists a repository's files and serves them, large ones by a redirect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.listings: dict[str, bytes] = {}
        """Answers for the file list of a repository, instead of a correct one."""
        self.token = ""
        """Required if it is not empty."""
        self.truncate = False
        """Close the connection in the middle of each file."""
        self.requests: list[tuple[str, str | None]] = []
        """Paths and Authorization headers."""
        self.url = ""
        self.storage_url = ""
        """Another origin, where files named in `stored_elsewhere` are."""
        self.stored_elsewhere: set[str] = set()

    def add(self, hub_id: str, folder: Path, **more: bytes) -> None:
        self.repositories[hub_id] = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} | more

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes, dict[str, str]]:
        self.requests.append((path, authorization))
        if path.startswith("/storage/"):
            _, _, repository, name = path.split("/", 3)
            return 200, self.repositories[repository.replace("--", "/")][name], {}
        if self.token and authorization != f"Bearer {self.token}":
            return 401, b'{"error": "gated"}', {}
        for hub_id, files in self.repositories.items():
            path = path.replace("/resolve/main/", f"/resolve/{COMMIT}/")
            if path == f"/api/models/{hub_id}/revision/main":
                listing = {"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                return 200, self.listings.get(hub_id, json.dumps(listing).encode()), {}
            name = path.removeprefix(f"/{hub_id}/resolve/{COMMIT}/")
            if name in files:
                if name in self.stored_elsewhere:
                    return 302, b"", {"Location": f"{self.storage_url}/storage/{hub_id.replace('/', '--')}/{name}"}
                return 200, files[name], {}
        return 404, b'{"error": "no such repository"}', {}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = hub.answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if hub.truncate and "/resolve/" in self.path else body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    try:
        for thread in threads:
            thread.start()
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
