"""Core and HTTP edge in one process: real sockets to clients and nodes, and a clock that the script sets.

Nobody tells the core what happens: a scripted node refuses, answers, stalls or closes, a client sends and leaves, and
the edge has to notice. A prompt has the length that the script says; everything else is read from the request's bytes.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from typing import Any, Final

from support.engine_scripts import SSE_HEAD, chunk, http_response
from support.polling import until
from support.raw_client import RawConnection, Response
from support.scripted_engine import ReceivedRequest, ScriptedEngine

from seam.edge_stage import PATIENCE_S, EdgeStage, request_body, request_headers, usage_json
from seam.player import Play
from seam.script import (
    EVERY_REQUEST,
    FAULTS,
    HAS_SOCKETS,
    RETRIES_ITSELF,
    SETS_THE_CLOCK,
    Arrive,
    Happens,
    Script,
    Tell,
)
from warmroute.config import Limits
from warmroute.core.messages import (
    CLOSED,
    DUE,
    ERROR_EVENT,
    LOCAL,
    MALFORMED,
    REFUSED,
    SILENT,
    TRANSIENT,
    Cancel,
    Reject,
    Role,
    Send,
)
from warmroute.core.node import Node
from warmroute.edge.client_connection import Listener
from warmroute.edge.sockets import PlainSockets, listen_tcp
from warmroute.http_client import MAX_INFORMATIONAL

ROLE: Final = chunk(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
TOKEN: Final = chunk(b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n')
DONE: Final = chunk(b"data: [DONE]\n\n")
END: Final = b"0\r\n\r\n"
ERROR: Final = chunk(b'data: {"error":{"message":"no KV cache","code":500}}\n\n')
INFORMATIONAL: Final = b"HTTP/1.1 102 P\r\n\r\n"
NOT_A_RESPONSE: Final = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 300_000,
    "switching protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "bad chunk": SSE_HEAD + b"zz\r\nhello\r\n",
    "too many 1xx": INFORMATIONAL * (MAX_INFORMATIONAL + 1) + http_response(),
}
CONNECT_ERRORS: Final = {TRANSIENT: errno.ETIMEDOUT, LOCAL: errno.EMFILE}


class _Sockets(PlainSockets):
    """Connections to nodes that wait until the script says how they end."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, list[asyncio.Future[int]]] = {}
        """Connections that are being made to a port, in their order; each gets 0, or an error number."""

    def hold(self, port: int) -> asyncio.Future[int]:
        """Let the next connection to this port wait."""
        future = asyncio.get_running_loop().create_future()
        self.held.setdefault(port, []).append(future)
        return future

    async def connect(self, host: str, port: int, create_protocol: Any) -> Any:
        held = self.held.get(port)
        if held:
            number = await held.pop(0)
            if number:
                raise OSError(number, "a failure of the test")
        return await super().connect(host, port, create_protocol)


class _AtNode:
    """A try as its node sees it."""

    def __init__(self, node: ScriptedEngine, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        self.node, self.seen, self.writer = node, seen, writer
        self.is_over = asyncio.Event()
        self.has_begun = self.has_token = False
        self.streams = b'"stream":true' in seen.body

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def end(self, closes: bool = False) -> None:
        self.is_over.set()
        if closes:
            self.writer.close()


class HttpStage(EdgeStage):
    can = EVERY_REQUEST | {RETRIES_ITSELF, HAS_SOCKETS, SETS_THE_CLOCK, FAULTS}

    def __init__(self) -> None:
        super().__init__()
        self.sockets: _Sockets = _Sockets()
        self.engines: dict[str, ScriptedEngine] = {}
        self.clients: dict[str, RawConnection] = {}
        self.answers: dict[str, asyncio.Task[Response]] = {}
        self._sends: dict[tuple[int, int], Send] = {}
        self._at_node: dict[tuple[int, int], _AtNode] = {}
        self._connecting: dict[tuple[int, int], asyncio.Future[int]] = {}
        self._failing: dict[tuple[str, int], Tell] = {}
        self._stale: set[tuple[str, int]] = set()
        self._nodes: list[Node] = []
        self._awaited: set[tuple[int, int]] = set()
        """Tries on their way to a node."""
        self._play: Play | None = None

    # Processes.

    async def open(self, script: Script) -> list[Node]:
        for number in range(len(script.nodes)):
            await self._start_node(f"n{number}")
        nodes = await super().open(script)
        for line in script.lines:
            event = line.event
            if isinstance(event, Tell) and event.message == "Failed":
                self._failing[event.call, event.fields["try_"]] = event
            if isinstance(event, Tell) and event.how in ("the kept connection closes first", "closes twice"):
                self._stale.add((event.call, event.fields["try_"]))
        self.listener = Listener(self.proxy, Limits(), self.timers)
        self._server = await listen_tcp(self.listener, "127.0.0.1", 0, None, self.sockets)
        return nodes

    async def _start_node(self, name: str) -> None:
        engine = self.engines[name] = ScriptedEngine("m")
        await engine.listen()
        engine.behave = self._behave
        self.urls[name] = engine.url

    async def _behave(self, engine: ScriptedEngine, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        """A node has got a try: the script says what it does with it."""
        number = int(seen.get(b"x-request-id")[0].rpartition(b"-")[2])
        node = next(node for node in self._nodes if node.url == engine.url)
        tries = [key for key, one in self._sends.items() if key[0] == number and one.node == node.number]
        key = next((key for key in tries if key not in self._at_node), tries[-1])
        assert self._play is not None
        named = self._play.name_of(number), key[1]
        if named in self._stale:
            self._stale.discard(named)
            writer.close()
            return
        at_node = self._at_node[key] = _AtNode(engine, seen, writer)
        self._awaited.discard(key)
        await at_node.is_over.wait()

    async def close(self) -> None:
        for client in self.clients.values():
            client.disconnect()
        self._server.close()
        self.pools.close()
        await asyncio.sleep(0)
        self.sockets.close()
        for engine in self.engines.values():
            await engine.close()
        for answer in self.answers.values():
            answer.cancel()
        await asyncio.gather(*self.answers.values(), return_exceptions=True)

    # To and from the core.

    def add(self, name: str, spec: Any) -> Node:
        node = super().add(name, spec)
        self._nodes.append(node)
        return node

    def handle(self, event: Any, now_s: float) -> Sequence[Any]:
        commands = super().handle(event, now_s)
        self._awaited -= {key for key in self._awaited if key[0] == getattr(event, "id", 0) and _ends(event, key[1])}
        for command in commands:
            if isinstance(command, Send):
                self._sends[command.id, command.try_] = command
                self._awaited.add((command.id, command.try_))
                self._prepare(command)
            else:
                self._awaited -= {key for key in self._awaited if key[0] == command.id and _ends(command, key[1])}
        return commands

    async def _settle(self) -> None:
        """Wait until each node has what it was sent."""
        await until(lambda: not self._awaited, f"nodes get {self._awaited}", PATIENCE_S)

    def _prepare(self, command: Send) -> None:
        """Before the edge connects: hold a connection that will fail before the node has the request."""
        assert self._play is not None
        failing = self._failing.get((self._play.name_of(command.id), command.try_))
        holds = failing is not None and failing.fields["status"] in (REFUSED, TRANSIENT, LOCAL)
        if holds or self._play.is_connecting(command):
            node = next(node for node in self._nodes if node.number == command.node)
            pool = self.pools.by_number.get(command.node)
            if pool is not None:  # a connection that was kept would be used
                pool.close()
                self.pools.remove(node)
            self._awaited.discard((command.id, command.try_))
            self._connecting[command.id, command.try_] = self.sockets.hold(node.port)

    # Clients.

    async def arrive(self, play: Play, event: Arrive, on: Node | None) -> None:
        self._play = play
        await self._settle()
        number = next(self._new_prompts) if event.prompt is None else event.prompt
        others = [node for node in self.fleet if on is not None and node is not on and not node.draining]
        for other in others:
            self.fleet.drain(other.name)
        since = len(self.told)
        self.prompts.sizes[event.call] = (event.tokens, number)
        pending = self.prompts.pending.pop(event.call, None)
        if pending is not None:
            pending.done(self.prompts.prompt(event.call))
        else:
            await self._post(play, event.call, event.fields)
        await self.until_told(("Arrive",), play.id_of(event.call), None, since)
        for other in others:
            self.fleet.drain(other.name, False)
        if others:
            self.tell_core(DUE)

    async def _post(self, play: Play, call: str, fields: Any) -> None:
        data = request_body(call, fields)
        path = "/v1/chat/completions" if fields.get("repeatable", True) else "/v1/other"
        headers = [f"{name}: {value}" for name, value in request_headers(play.id_of(call), fields).items()]
        lines = [f"POST {path} HTTP/1.1", "Host: router", "Content-Type: application/json", *headers]
        head = "\r\n".join([*lines, f"Content-Length: {len(data)}"]).encode() + b"\r\n\r\n"
        client = self.clients[call] = RawConnection(
            *await asyncio.open_connection(*self._server.sockets[0].getsockname())
        )
        client.write(head + data)
        self.answers[call] = asyncio.create_task(client.response(patience_s=60))

    # Nodes.

    async def tell(self, play: Play, event: Tell) -> None:
        self._play = play
        await self._settle()
        call, fields, since = play.id_of(event.call), event.fields, len(self.told)
        if event.message == "Charge":
            await self._post(play, event.call, fields)
            await self.until_told(("Charge",), call, None, since)
        elif event.message == "Cancel":
            await self._cancel(event, call, since)
        else:
            try_ = fields["try_"]
            key = (call, try_)
            if key in self._connecting and event.message == "Failed":
                await self._fail_to_connect(key, fields["status"], since)
                return
            await until(lambda: key in self._at_node, f"a node gets {key}", PATIENCE_S)
            await getattr(self, f"on_{event.message.lower()}")(event, self._at_node[key], key, since)

    async def _cancel(self, event: Tell, call: int, since: int) -> None:
        if event.fields["why"] == "LEFT":
            self.clients[event.call].disconnect()
        elif event.fields["why"] == "STOPPING":
            self.proxy.exchanges[call].cut_off()  # type: ignore[attr-defined]
        else:
            self.proxy.exchanges[call].internal_error(RuntimeError("a fault of the test"))
        await self.until_told(("Cancel",), call, None, since)

    async def _fail_to_connect(self, key: tuple[int, int], status: int, since: int) -> None:
        command = self._sends[key]
        node = next(node for node in self._nodes if node.number == command.node)
        engine = next(engine for engine in self.engines.values() if engine.url == node.url)
        if status == REFUSED:
            engine.stop_listening()
            await self._pass_bytes()
        self._connecting.pop(key).set_result(CONNECT_ERRORS.get(status, 0))
        await self.until_told(("Failed",), *key, since)
        if status == REFUSED:
            await engine.listen()

    async def on_started(self, event: Tell, at_node: _AtNode, key: tuple[int, int], since: int) -> None:
        status = event.fields["status"]
        at_node.has_begun = True
        if status >= 400:
            at_node.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n" % status)
            await self._pass_bytes()
            at_node.write(b'{"error"')
            await self.until_told(("Started", "FirstToken"), *key, since)
        elif self._sends[key].role is Role.DECODE:  # the edge shows nothing before the first token
            at_node.write(SSE_HEAD + ROLE + TOKEN)
            at_node.has_token = True
            await self.until_told(("FirstToken",), *key, since)
        else:
            at_node.write(SSE_HEAD + ROLE)
            await self.until_told(("Started",), *key, since)

    async def on_firsttoken(self, _event: Tell, at_node: _AtNode, key: tuple[int, int], since: int) -> None:
        if at_node.has_token:
            return
        at_node.write(TOKEN if at_node.has_begun else SSE_HEAD + ROLE + TOKEN)
        at_node.has_begun = at_node.has_token = True
        await self.until_told(("FirstToken",), *key, since)

    async def on_ended(self, event: Tell, at_node: _AtNode, key: tuple[int, int], since: int) -> None:
        status, usage, how = event.fields["status"], event.fields["usage"], event.how
        counts = usage_json(usage)
        if how.startswith("as many 1xx"):
            at_node.write(INFORMATIONAL * MAX_INFORMATIONAL)
        if status >= 400:
            at_node.write(b':"no"}' if at_node.has_begun else http_response(b'{"error":"no"}', status))
        elif not at_node.streams:
            body = b'{"choices":[{"message":{"content":"yes"}}]%b}' % (b',"usage":' + counts if counts else b"")
            at_node.write(http_response(body))
        else:
            start = b"" if at_node.has_begun else SSE_HEAD + ROLE
            token = b"" if at_node.has_token else TOKEN
            tail = chunk(b'data: {"choices":[],"usage":%b}\n\n' % counts) if counts else b""
            at_node.write(start + token + tail + DONE)
            if how == "the client leaves after the last event":
                await self._pass_bytes()
                call = next(name for name, number in self._play.ids.items() if number == key[0])  # type: ignore[union-attr]
                self.clients[call].disconnect()
            else:
                at_node.write(END)
        await self.until_told(("Ended",), *key, since)
        at_node.end()

    async def on_prefilled(self, event: Tell, at_node: _AtNode, key: tuple[int, int], since: int) -> None:
        fields = event.fields
        answer: dict[str, Any] = {
            "choices": [{"message": {"content": "x"}, "finish_reason": "length" if fields["is_unfinished"] else "stop"}]
        }
        if fields["has_transfer"]:
            answer["kv_transfer_params"] = {"remote_engine_id": "p"}
        if counts := usage_json(fields["usage"]):
            answer["usage"] = json.loads(counts)
        at_node.write(http_response(json.dumps(answer).encode()))
        at_node.end()
        await self.until_told(("Prefilled",), *key, since)

    async def on_failed(self, event: Tell, at_node: _AtNode, key: tuple[int, int], since: int) -> None:
        status, retry_after_s, how = event.fields["status"], event.fields["retry_after_s"], event.how
        if status >= 100:
            headers = b"Retry-After: %d\r\n" % retry_after_s if retry_after_s is not None else b""
            at_node.write(http_response(b'{"error":"no"}', status, headers=headers))
            at_node.end()
        elif status == MALFORMED:
            at_node.write(NOT_A_RESPONSE[how])
        elif status == ERROR_EVENT:
            at_node.write(SSE_HEAD + ROLE + ERROR + DONE + END)
        elif status == CLOSED:
            if how == "closes after head":
                at_node.write(SSE_HEAD)
            elif how == "closes after a role":
                at_node.write(SSE_HEAD + ROLE)
            await self._pass_bytes()
            at_node.end(closes=True)
        elif status == SILENT:
            if how == "hangs after head":
                at_node.write(SSE_HEAD)
                await self._pass_bytes()
            since = 0  # the time may have come with the line
            await self._wait_in_vain(key)
        await self.until_told(("Failed",), *key, since)
        at_node.end(closes=status < 100)

    async def _wait_in_vain(self, key: tuple[int, int]) -> None:
        """Time passes until the edge gives the node up. That is a little later than its timeout, which scripts set."""
        for _ in range(100):
            if any(type(event).__name__ == "Failed" and (event.id, event.try_) == key for event in self.told):
                return
            self._now_s += 0.05
            self.timers.sweep()
            await asyncio.sleep(0.005)

    @staticmethod
    async def _pass_bytes() -> None:
        """Let what was written arrive."""
        await asyncio.sleep(0.02)

    async def happen(self, play: Play, event: Happens) -> None:
        self._play = play
        await self._settle()
        if event.what == "joins":
            await self._start_node(event.node)
        elif event.what == "stops":
            self.listener.close_idle()
            return
        await super().happen(play, event)

    # The end.

    async def check_answers(self, play: Play) -> None:
        """Each client has got what its call's end says, and each node has lost the tries that were withdrawn."""
        for name, end in play.script.ends.items():
            if name not in self.answers or end.left == "LEFT":
                continue
            answer = await asyncio.wait_for(asyncio.shield(self.answers[name]), PATIENCE_S)
            if end.left == "STOPPING" and end.status != 200:
                assert (answer.status, answer.error["code"]) == (503, "router_stopping"), f"{name} got {answer}"
            elif end.code:
                assert (answer.status, answer.error["code"]) == (end.status, end.code), f"{name} got {answer}"
            elif end.outcome == "BROKEN" or (end.left and end.status == 200):
                assert not answer.complete, f"{name} got {answer}"
            else:
                assert answer.status == end.status, f"{name} got {answer}"
                assert answer.complete or event_how(play, name), f"{name} got {answer}"
        assert not self.proxy.exchanges, "the edge has calls left"
        for at_node in self._at_node.values():
            if not at_node.is_over.is_set():
                await asyncio.wait_for(at_node.seen.left.wait(), PATIENCE_S)


def _ends(message: Any, try_: int) -> bool:
    """Whether a try is over with a message of its call."""
    return isinstance(message, (Cancel, Reject)) or (
        not isinstance(message, Send) and getattr(message, "try_", 0) == try_
    )


def event_how(play: Play, call: str) -> str:
    """Return how the call's answer ended, where that is special."""
    return next(
        (
            line.event.how
            for line in play.script.lines
            if isinstance(line.event, Tell) and line.event.call == call and line.event.message == "Ended"
        ),
        "",
    )
