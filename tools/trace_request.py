"""Counts the Python calls that one streamed request costs: calls, files, crossings between rooms, depth of the stack.

    make trace                        a table: text matching and exact tokens
    make trace ARGS="--list exact"    each call, indented by its depth

The router, with the policy `price`, runs in this process; a client and a node answer in threads that are not counted.
The request is a chat of 1 KB that the router has seen before, and its answer has five events, each sent by itself. Only
Python frames of the package `warmroute` count, those of all rooms together; compiled code has none. A crossing is a
call into a file of another room. The request is sent several times, and the one with the median number of calls is
shown, since a timer of the router may run during a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import warmroute
from warmroute.app.service import Service
from warmroute.config import from_table

PACKAGE = str(Path(warmroute.__file__).parent) + "/"
TOKENIZER = Path(__file__).parents[1] / "tests" / "prompt" / "small-model"
ROUNDS = 61
WARM_UP = 5

EVENTS = (
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    b'{"choices":[{"index":0,"delta":{"content":"It"},"finish_reason":null}]}',
    b'{"choices":[{"index":0,"delta":{"content":" works"},"finish_reason":null}]}',
    b'{"choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":3}}',
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def request_bytes() -> bytes:
    words = "Explain in plain words why a router that knows the caches of its engines answers sooner. "
    messages = [{"role": "system", "content": words * 4}, {"role": "user", "content": words * 6}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 16}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer sk-0123456789abcdef\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nUser-Agent: OpenAI/Python 2.2.0\r\n\r\n"
    )
    return head.encode() + body


# The node.


class Node:
    """Answers each chat with five events. Each event waits until the client has read the one before."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.may_send = threading.Semaphore(0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        received = b""
        while True:
            data = connection.recv(65536)
            if not data:
                return
            received += data
            head, found, body = received.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            if not found or len(body) < length:
                continue
            received = b""
            if b"/chat/completions" in head:
                self._stream(connection)
            else:
                models = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768}]}'
                page = models if b"/v1/models" in head else b""
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    def _stream(self, connection: socket.socket) -> None:
        prompt_tokens = 300
        for at, event in enumerate(EVENTS):
            self.may_send.acquire()
            if b"usage" in event:
                event = event % (prompt_tokens, prompt_tokens + 3) + b"\n\ndata: [DONE]"
            piece = b"data: %b\n\n" % event
            end = b"0\r\n\r\n" if at == len(EVENTS) - 1 else b""
            connection.sendall((b"" if at else HEAD) + b"%x\r\n%b\r\n%b" % (len(piece), piece, end))


def ask(client: socket.socket, node: Node, request: bytes) -> None:
    """Send the request, and let the node send each event once the client has read the one before."""
    client.sendall(request)
    received = b""
    for number in range(1, len(EVENTS) + 1):
        node.may_send.release()
        while received.count(b"data: {") < number or (number == len(EVENTS) and not received.endswith(b"0\r\n\r\n")):
            data = client.recv(65536)
            if not data:
                raise SystemExit(f"The router closed the connection: {received!r}")
            received += data
    if not received.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"The router answered with an error: {received!r}")


# The count.


@dataclass
class Trace:
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    """Depth, file and function of each call."""
    crossings: int = 0

    @property
    def files(self) -> set[str]:
        return {file for _, file, _ in self.calls}

    @property
    def depth(self) -> int:
        return max((depth for depth, _, _ in self.calls), default=0)


def room_of(file: str) -> str:
    return file.partition("/")[0] if "/" in file else ""


@contextmanager
def counting() -> Iterator[Trace]:
    """Count the calls of this thread."""
    trace = Trace()
    files: list[str] = []
    """Of the warmroute frames on the stack."""

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        if event == "call":
            file = name[len(PACKAGE) :]
            if files and room_of(files[-1]) != room_of(file):
                trace.crossings += 1
            files.append(file)
            trace.calls.append((len(files), file, frame.f_code.co_qualname))
        elif event == "return" and files:
            files.pop()

    sys.setprofile(profile)
    try:
        yield trace
    finally:
        sys.setprofile(None)


async def trace_requests(exact: bool) -> Trace:
    node = Node()
    table: dict[str, Any] = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "routing": {"policy": "price", "seed": 7},
        "nodes": [{"name": "node", "url": node.url}],
        "log": {"level": "error"},
    }
    if exact:
        table["models"] = [{"name": "m", "tokenizer": str(TOKENIZER)}]
    config = from_table(table, experiment=True)
    service = Service(lambda: config)
    await service.start()
    if exact:
        await service.tokenizer_registry.until_loaded()
    while service.proxy.own_endpoints.starting or not service.fleet.models:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client = socket.create_connection(("127.0.0.1", service.port))
    loop, request = asyncio.get_running_loop(), request_bytes()
    traces = []
    for number in range(WARM_UP + ROUNDS):
        await asyncio.sleep(0.005)
        with counting() as trace:
            await loop.run_in_executor(None, ask, client, node, request)
        if number >= WARM_UP:
            traces.append(trace)
    client.close()
    await service.stop()
    return sorted(traces, key=lambda one: len(one.calls))[len(traces) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=("text", "exact"), help="print each call of the request")
    parser.add_argument("--by-file", choices=("text", "exact"), help="print the number of calls of each file")
    args = parser.parse_args()
    if warmroute.is_compiled():
        raise SystemExit("The modules of the request path are compiled, so they have no frames: run the sources.")
    logging.disable(logging.WARNING)
    chosen = args.list or args.by_file
    print("prompts are read as   calls   files   crossings   depth")
    for kind in (chosen,) if chosen else ("text", "exact"):
        trace = asyncio.run(trace_requests(kind == "exact"))
        print(f"{kind:19} {len(trace.calls):7} {len(trace.files):7} {trace.crossings:11} {trace.depth:7}")
        if args.list:
            for depth, file, function in trace.calls:
                print(f"{'  ' * (depth - 1)}{function}  {file}")
        if args.by_file:
            count = {file: sum(1 for _, one, _ in trace.calls if one == file) for file in trace.files}
            for file, calls in sorted(count.items(), key=lambda item: -item[1]):
                print(f"{calls:5}  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
