"""No body within the limit blocks the event loop for 20 ms: large ones are scanned in threads, without the interpreter
lock."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.polling import until
from support.raw_client import post
from support.running_router import router
from support.scripted_engine import engines
from test_event_loop_blocking import slowness

from warmroute._kernel import MAX_LOOP_BYTES, BadBody, decode_ms, digest, prefix_digests, scan_body
from warmroute.edge.client_connection import ClientConnection
from warmroute.edge.exchange import Exchange, ScanningExchange
from warmroute.edge.node_connection import NodeConnection

LOOP_MS = 20.0
BODY_BYTES = 33_554_432 - 1000
START = b'{"model":"m","messages":[{"role":"user","content":"hi"}],'


def filled(start: bytes, unit: bytes, end: bytes, size: int = BODY_BYTES) -> bytes:
    """Return a body of this size that repeats a unit, with commas between."""
    return start + b",".join([unit] * ((size - len(start) - len(end)) // (len(unit) + 1))) + end


BODIES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "millions of fields": (400, lambda: filled(START, b'"f%07d":1' % 7, b"}")),
    "one long text": (
        200,
        lambda: b'{"model":"m","messages":[{"role":"user","content":"' + b"a b c " * (BODY_BYTES // 6 - 50) + b'"}]}',
    ),
    "many numbers": (200, lambda: filled(START + b'"x":[', b"1", b"]}")),
    "deep lists": (200, lambda: filled(START + b'"x":[', b"[" * 200 + b"]" * 200, b"]}")),
    "many parts": (
        200,
        lambda: filled(b'{"model":"m","messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    ),
    "many messages": (400, lambda: filled(b'{"model":"m","messages":[', b"1", b"]}")),
}  # fmt: skip


class DrainingNode:
    """An engine in a thread of its own, so that reading a large body does not count as the event loop's time."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[int] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()
        except OSError:
            pass

    def _serve(self, connection: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        with connection:
            while True:
                head = b""
                while b"\r\n\r\n" not in head:
                    data = connection.recv(65_536)
                    if not data:
                        return
                    head += data
                head, _, rest = head.partition(b"\r\n\r\n")
                is_post = head.startswith(b"POST")
                length = int(head.lower().partition(b"content-length:")[2].split()[0]) if is_post else 0
                left = length - len(rest)
                while left:
                    left -= connection.recv_into(buffer)
                if is_post:
                    self.received.append(length)
                body = b'{"object":"list","data":[{"id":"m"}]}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def close(self) -> None:
        self._listener.close()


def send_and_read_status(port: int, request: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(request)
        return int(client.recv(65_536).split(b" ")[1])


@contextmanager
def longest_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """The longest CPU time, in ms, of what the event loop calls for a request."""
    longest: dict[str, float] = {}

    def timed(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(*given: Any) -> Any:
            began_s = time.thread_time()
            try:
                return original(*given)
            finally:
                took_ms = (time.thread_time() - began_s) * 1000
                longest[name] = max(longest.get(name, 0.0), took_ms)

        monkeypatch.setattr(kind, name, call)

    for kind, name in (
        (ClientConnection, "data_received"),
        (ScanningExchange, "scanned"),
        (Exchange, "prompt_read"),
        (NodeConnection, "send_request"),
    ):
        timed(kind, name)
    yield longest


@pytest.mark.interpreted
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_within_the_limit_blocks_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status, make = BODIES[name]
    body = make()
    assert 0.99 * BODY_BYTES < len(body) <= BODY_BYTES
    node = DrainingNode()
    try:
        with longest_call(monkeypatch) as longest:
            async with router({"url": node.url}, routing={"policy": "price", "seed": 7}) as r:
                best_ms = float("inf")
                for _ in range(4):  # the best one counts: others may use this machine, too
                    longest.clear()
                    assert await asyncio.to_thread(send_and_read_status, r.port, post(body)) == status
                    best_ms = min(best_ms, max(longest.values()) / slowness())
                    if best_ms < LOOP_MS:
                        break
                assert best_ms < LOOP_MS, longest
                assert set(node.received) <= {len(body)} and bool(node.received) == (status == 200)
    finally:
        node.close()


@pytest.mark.parametrize("size", [MAX_LOOP_BYTES - 100, MAX_LOOP_BYTES + 100, 3_000_000])
async def test_a_body_of_any_size_reaches_the_node_unchanged(size: int) -> None:
    async with engines() as [engine], router(engine) as r:
        body = b'{"model":"m","messages":[{"role":"user","content":"' + bytes(range(48, 58)) * (size // 10) + b'"}]}'
        pieces = [body[at : at + 70_000] for at in range(0, len(body), 70_000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked = head + chunks + b"0\r\n\r\n"
        for request in (post(body), chunked):
            assert (await r.request(request)).status == 200
            assert engine.seen.pop().body == body


async def test_errors_of_large_bodies_are_those_of_small_ones() -> None:
    filler = b" " * MAX_LOOP_BYTES
    async with engines() as [engine], router(engine) as r:
        for body, code in (
            (b'{"model":"m"', "malformed_json"),
            (b'{"model":"m"}', "missing_messages"),
            (b'{"model":"other","messages":[]}', "model_not_found"),
            (b'{"model":"m","messages":[],"priority":"1"}', "invalid_field"),
        ):
            peer = await r.connect()
            peer.write(post(filler + body) + post())
            response = await peer.response()
            assert response.error["code"] == code
            assert response.error == (await r.request(post(body))).error or code == "malformed_json"
            assert (await peer.response()).status == 200, "the connection serves the next request"
        assert len(engine.seen) == 4


async def test_a_client_that_leaves_during_the_scan_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines() as [engine], router(engine) as r:
        scanner = r.service.proxy.body_scanner
        gate = threading.Event()
        busy = [scanner._threads.submit(gate.wait, 10) for _ in range(2)]
        peer = await r.connect()
        peer.write(post(b'{"model":"m","messages":[' + b" " * MAX_LOOP_BYTES + b"]}"))
        await until(lambda: any(client.busy for client in r.service.listener.connections))
        peer.disconnect()
        await until(lambda: not r.service.listener.connections)
        gate.set()
        await asyncio.gather(*map(asyncio.wrap_future, busy))
        assert engine.seen == [] and r.service.counters.disconnects == 1


# Threads that scan a body let others run.


def runs_beside(call: Callable[[], object]) -> bool:
    """Return whether another thread runs Python code while this one makes the call."""
    turns = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    interval_s = sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(10)  # threads take turns only where one releases the lock
    try:
        for _ in range(20):
            before = turns[0]
            call()
            if turns[0] > before:
                return True
        return False
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        other.join()


def test_scanning_a_large_body_does_not_hold_the_interpreter_lock() -> None:
    body = filled(START + b'"x":[', b"1", b"]}", 4_000_000)
    parts = filled(b'{"prompt":[', b'{"type":"text","text":""}', b"]}", 4_000_000)
    spans = b"".join(at.to_bytes(4, "little") for at in (0, len(body)))

    def malformed() -> None:
        with pytest.raises(BadBody):
            scan_body(body[:-1])

    assert runs_beside(lambda: scan_body(body))
    assert runs_beside(lambda: scan_body(parts))
    assert runs_beside(malformed)
    assert runs_beside(lambda: decode_ms(body, 0, len(body)))
    assert runs_beside(lambda: digest(body, 0, len(body)))
    assert runs_beside(lambda: prefix_digests(body, spans))
    small = b'{"model":"m","x":[%b1]}' % (b"1," * 100_000)
    assert not runs_beside(lambda: scan_body(small)), "on the event loop, to get the lock back would take longer"
