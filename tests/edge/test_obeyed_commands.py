"""The edge alone: what it tells a core that the test plays, and how it obeys. Real sockets to clients and nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engine_scripts import CLOSE, DONE, SSE_HEAD, chunk, failing, hanging, http_response, normal, script
from support.polling import until
from support.raw_client import RawConnection, chat, post
from support.scripted_engine import ScriptedEngine, engines

from warmroute.config import Limits, from_table
from warmroute.core.messages import (
    CLOSED,
    UNKNOWN,
    Arrive,
    Cancel,
    Charge,
    Cut,
    Ended,
    Failed,
    FirstToken,
    Left,
    NodeRow,
    Reject,
    Role,
    Send,
    Tables,
    Withdraw,
    Withdrawn,
)
from warmroute.core.traffic import Counters
from warmroute.edge.arrival import hash_key
from warmroute.edge.client_connection import Listener
from warmroute.edge.connection_pool import ConnectionPools
from warmroute.edge.exchange import Exchange
from warmroute.edge.proxy import Proxy
from warmroute.edge.sockets import PlainSockets, listen_tcp
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.prompt.reader import PromptReader
from warmroute.prompt.registry import TokenizerRegistry

ROLE = chunk(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
TOKEN = chunk(b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n')
LAST = chunk(b"data: [DONE]\n\n")
ERROR = Reject(1, 503, "no_node_available", "No node.", "server_error", retry_after_s=1)


class Edge:
    """An edge, and the core that the test plays: `answer` returns the commands that follow from an event."""

    def __init__(self, nodes: Sequence[ScriptedEngine], **tables: Any) -> None:
        self.told: list[Any] = []
        self.answer: Callable[[Any], Sequence[Any]] = self.send_first
        rows = [NodeRow(at, f"n{at}", "http", "127.0.0.1", node.port, "", "vllm", "mixed", 0)
                for at, node in enumerate(nodes, 1)]  # fmt: skip
        self.tables = Tables(nodes={row.number: row for row in rows}, only_model="m")
        self.timers, self.sockets, self.counters = TimerWheel(time.monotonic), PlainSockets(), Counters()
        self.sockets.start()
        config = from_table({"upstream": {"between_chunks_timeout_s": 20.0}, **tables}, experiment=True)
        self.pools = ConnectionPools(config.upstream, self.timers, self.sockets)
        self.proxy = Proxy(
            config, self.handle, lambda: False, lambda: self.tables,
            PromptReader(TokenizerRegistry(config.prompts, ()), config.prompts, self.counters), self.pools,
            self.counters,
        )  # fmt: skip
        self.listener = Listener(self.proxy, Limits(), self.timers)
        self.port = 0
        self.peers: list[RawConnection] = []

    @staticmethod
    def send_first(event: Any) -> Sequence[Any]:
        return (Send(event.id, 1, 1, Role.FIRST, wants_usage=True),) if isinstance(event, Arrive) else ()

    def handle(self, event: Any, _now_s: float) -> Sequence[Any]:
        self.told.append(event)
        return self.answer(event)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.told]

    async def peer(self) -> RawConnection:
        peer = RawConnection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.peers.append(peer)
        return peer

    async def ask(self, body: bytes | None = None, **fields: Any) -> RawConnection:
        peer = await self.peer()
        peer.write(post(body if body is not None else chat(**fields)))
        return peer

    async def until_told(self, kind: type) -> Any:
        await until(lambda: any(isinstance(event, kind) for event in self.told), kind.__name__)
        return next(event for event in self.told if isinstance(event, kind))


@asynccontextmanager
async def edge(count: int = 1, **tables: Any) -> AsyncIterator[tuple[Edge, list[ScriptedEngine]]]:
    async with engines(count) as nodes:
        found = Edge(nodes, **tables)
        server = await listen_tcp(found.listener, "127.0.0.1", 0, None, found.sockets)
        found.port = server.sockets[0].getsockname()[1]
        try:
            yield found, nodes
            for peer in found.peers:
                peer.disconnect()
            await until(lambda: not found.proxy.exchanges and not found.listener.connections, "nothing is left")
        finally:
            server.close()
            found.pools.close()
            found.sockets.close()
            found.proxy.body_scanner.close()


# What a node's answer becomes.


async def test_a_response_in_one_piece_is_one_message() -> None:
    async with edge() as (e, [node]):
        usage = b'{"usage":{"prompt_tokens":9,"completion_tokens":2}}'
        node.behave = script(http_response(usage))
        assert (await (await e.ask()).response()).body == usage
        assert e.kinds == ["Arrive", "Ended"]
        ended = e.told[1]
        assert (ended.id, ended.try_, ended.status, ended.usage) == (1, 1, 200, (9, None, 2))
        assert 0.0 < ended.first_s <= time.monotonic()


async def test_a_stream_is_told_by_its_start_its_first_token_and_its_end() -> None:
    async with edge() as (e, [node]):
        node.behave = script(SSE_HEAD + ROLE, 0.05, TOKEN, 0.05, DONE)
        assert (await (await e.ask(stream=True)).response()).complete
        assert e.kinds == ["Arrive", "Started", "FirstToken", "Ended"]


async def test_a_first_byte_with_the_first_token_tells_that_alone() -> None:
    async with edge() as (e, [node]):
        node.behave = script(SSE_HEAD + TOKEN, 0.05, DONE)
        assert (await (await e.ask(stream=True)).response()).complete
        assert e.kinds == ["Arrive", "FirstToken", "Ended"]


async def test_an_error_of_the_client_passes_and_an_error_of_the_node_does_not() -> None:
    async with edge() as (e, [node]):
        node.behave = script(http_response(b'{"error":{"message":"x","type":"t"}}', status=400))
        assert (await (await e.ask()).response()).status == 400
        assert e.kinds == ["Arrive", "Ended"] and e.told[1].error.type == "t"
        e.told.clear()
        e.answer = lambda event: (
            e.send_first(event)
            or ([Reject(event.id, 502, "upstream_failed", "x")] if isinstance(event, Failed) else ())
        )
        node.behave = failing(429, b"Retry-After: 7\r\n")
        assert (await (await e.ask()).response()).status == 502
        assert e.kinds == ["Arrive", "Failed"]
        assert (e.told[1].status, e.told[1].retry_after_s, e.told[1].broke) == (429, 7, False)


async def test_a_response_that_breaks_off_has_failed_after_its_beginning() -> None:
    async with edge() as (e, [node]):
        node.behave = script(SSE_HEAD + TOKEN, 0.05, b"zz")
        response = await (await e.ask(stream=True)).response()
        assert b"event: error" in response.body and not response.complete
        assert e.kinds == ["Arrive", "FirstToken", "Failed"] and e.told[2].broke


# Several tries.


async def test_the_first_answer_wins_and_the_other_try_is_closed_before_the_core_knows() -> None:
    async with edge(2) as (e, [slow, _quick]):
        slow.behave = hanging
        e.answer = lambda event: (
            [Send(1, 1, 1, Role.FIRST), Send(1, 2, 2, Role.HEDGE)] if isinstance(event, Arrive) else ()
        )
        assert (await (await e.ask()).response()).status == 200
        await until(lambda: slow.seen[0].left.is_set())
        assert e.kinds == ["Arrive", "Ended"] and e.told[1].try_ == 2


async def test_a_withdrawn_try_is_closed_and_said_to_be() -> None:
    async with edge(2) as (e, [hung, other]):
        hung.behave = hanging
        peer = await e.ask()
        await until(lambda: hung.seen)
        e.answer = lambda event: [Send(1, 2, 2, Role.MOVE)] if isinstance(event, Withdrawn) else ()
        e.proxy.obey([Withdraw(1, 1)])
        assert (await peer.response()).status == 200
        assert e.kinds == ["Arrive", "Withdrawn", "Ended"] and len(other.seen) == 1
        await until(lambda: hung.seen[0].left.is_set())


async def test_a_response_that_has_begun_is_not_withdrawn() -> None:
    async with edge() as (e, [node]):
        end = asyncio.Event()
        node.behave = script(SSE_HEAD + TOKEN, end, DONE)
        peer = await e.ask(stream=True)
        await e.until_told(FirstToken)
        e.proxy.obey([Withdraw(1, 1), Withdraw(1, 9), Send(1, 2, 1, Role.HEDGE)])
        end.set()
        assert (await peer.response()).complete
        assert e.kinds == ["Arrive", "FirstToken", "Ended"] and len(node.seen) == 1


async def test_what_the_edge_does_not_know_it_says() -> None:
    async with edge() as (e, [node]):
        node.behave = hanging
        await e.ask()
        await until(lambda: node.seen)
        e.answer = lambda _event: ()
        e.proxy.obey([Send(1, 2, 77, Role.HEDGE), Send(1, 3, 1, Role.DECODE, kv_from=9), Send(5, 1, 1, Role.FIRST)])
        failed = [(event.id, event.try_, event.status) for event in e.told if isinstance(event, Failed)]
        assert failed == [(1, 2, UNKNOWN), (1, 3, UNKNOWN), (5, 1, UNKNOWN)]
        e.proxy.obey([Withdraw(5, 1), Withdraw(1, 8), Send(1, 1, 1, Role.FIRST)])
        assert isinstance(e.told[-1], Withdrawn) and (e.told[-1].id, e.told[-1].try_) == (1, 8)
        await asyncio.sleep(0.05)
        assert len(node.seen) == 1, "a command that came twice is carried out once"


async def test_what_is_told_while_the_edge_obeys_comes_before_the_next_command() -> None:
    async with edge() as (e, [node]):
        node.behave = hanging
        for _ in range(2):
            await e.ask()
        await until(lambda: len(node.seen) == 2)
        order: list[str] = []

        def answer(event: Any) -> Sequence[Any]:
            order.append(f"{type(event).__name__} {event.id}")
            return [Reject(event.id, 502, "upstream_failed", "x")] if isinstance(event, Withdrawn) else ()

        e.answer = answer
        e.proxy.obey([Withdraw(1, 1), Withdraw(2, 1)])
        assert order == ["Withdrawn 1", "Withdrawn 2"] and not e.proxy.exchanges


# Requests that must not be executed twice.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/unknown"])
async def test_only_a_repeatable_request_gets_a_kept_connection(path: str) -> None:
    async with edge() as (e, [node]):
        node.behave = normal()
        peer = await e.peer()
        for _ in range(2):
            peer.write(post(b'{"model":"m","prompt":"x"}', path))
            assert (await peer.response()).status == 200
        assert [event.repeatable for event in e.told if isinstance(event, Arrive)] == [path == "/v1/completions"] * 2
        assert node.accepted == (1 if path == "/v1/completions" else 2)


async def test_a_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    async with edge() as (e, [node]):
        assert (await (await e.ask()).response()).status == 200
        node.behave = script(CLOSE)
        e.answer = lambda event: (
            e.send_first(event)
            or ([Reject(event.id, 502, "upstream_failed", "x")] if isinstance(event, Failed) else ())
        )
        assert (await (await e.ask()).response()).status == 502
        assert [event.status for event in e.told if isinstance(event, Failed)] == [CLOSED]
        assert e.counters.stale_connections == 1 and len(node.seen) == 3, "once more on a new connection"


# How a call ends.


async def test_a_call_that_is_rejected_at_once_gets_its_error_and_the_connection_serves_on() -> None:
    async with edge() as (e, _nodes):
        e.answer = lambda event: [ERROR] if isinstance(event, Arrive) and event.id == 1 else e.send_first(event)
        peer = await e.ask()
        response = await peer.response()
        assert (response.status, response.error["code"], response.get("retry-after")) == (503, "no_node_available", "1")
        peer.write(post())
        assert (await peer.response()).status == 200
        assert e.counters.errors == {(503, "no_node_available"): 1}


async def test_a_rejected_charge_ends_the_request_before_its_prompt_is_read() -> None:
    keys = [{"tenant": "a", "sha256": hash_key("k"), "requests_per_min": 1}]
    async with edge(keys=keys) as (e, _nodes):
        e.answer = lambda event: (
            [Reject(event.id, 429, "rate_limit_exceeded", "x")] if isinstance(event, Charge) else ()
        )
        peer = await e.peer()
        peer.write(post(headers=["Authorization: Bearer k"]))
        assert (await peer.response()).status == 429
        assert e.kinds == ["Charge"] and e.told[0].has_output and e.told[0].request.tenant == "a"


async def test_a_response_that_has_begun_is_broken_off_by_a_rejection() -> None:
    async with edge() as (e, [node]):
        node.behave = script(SSE_HEAD + TOKEN, 10.0)
        peer = await e.ask(stream=True)
        await e.until_told(FirstToken)
        e.proxy.obey([ERROR])
        response = await peer.response()
        assert b"event: error" in response.body and b"No node." in response.body
        await until(lambda: node.seen[0].left.is_set())
        assert e.kinds == ["Arrive", "FirstToken"], "the core knows"


async def test_a_cut_ends_a_response_unless_its_last_event_is_there() -> None:
    for last in (b"", LAST):
        async with edge() as (e, [node]):
            end = asyncio.Event()
            node.behave = script(SSE_HEAD + TOKEN + last, end, DONE)
            peer = await e.ask(stream=True)
            await e.until_told(FirstToken)
            e.proxy.obey([Cut(1, ERROR)])
            end.set()
            response = await peer.response()
            assert response.complete == bool(last) and (b"event: error" in response.body) != bool(last)
            assert e.kinds[2:] == (["Ended"] if last else ["Cancel"])
            assert last or e.told[2].why is Left.CUT


async def test_a_client_that_leaves_ends_its_call() -> None:
    async with edge() as (e, [node]):
        node.behave = hanging
        peer = await e.ask()
        await until(lambda: node.seen)
        peer.disconnect()
        assert (await e.until_told(Cancel)).why is Left.LEFT
        await until(lambda: node.seen[0].left.is_set())
        assert e.counters.disconnects == 0, "the core counts it"
        e.proxy.hold_requests()
        peer = await e.ask()
        await until(lambda: len(e.proxy.exchanges) == 1)
        peer.disconnect()
        await until(lambda: not e.proxy.exchanges)
        assert e.counters.disconnects == 1 and e.kinds == ["Arrive", "Cancel"], "the core never heard of it"


async def test_a_client_that_leaves_with_the_last_event_has_its_response() -> None:
    async with edge() as (e, [node]):
        node.behave = script(SSE_HEAD + TOKEN + LAST, 10.0)
        peer = await e.ask(stream=True)
        await e.until_told(FirstToken)
        peer.disconnect()
        await e.until_told(Ended)
        assert e.kinds == ["Arrive", "FirstToken", "Ended"]


async def test_when_the_router_stops_those_that_wait_go_first() -> None:
    async with edge() as (e, [node]):
        node.behave = hanging
        e.answer = lambda event: e.send_first(event) if event.id == 2 else ()
        peers = [await e.ask() for _ in range(3)]
        await until(lambda: len(e.proxy.exchanges) == 3 and node.seen)
        e.listener.cut_off_all()
        cancelled = [event for event in e.told if isinstance(event, Cancel)]
        assert [event.why for event in cancelled] == [Left.STOPPING] * 3 and cancelled[-1].id == 2
        assert [(await peer.response()).error["code"] for peer in peers] == ["router_stopping"] * 3


@pytest.mark.interpreted
async def test_a_fault_at_one_call_ends_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, seen = Exchange.send, 0

    def breaks_once(exchange: Exchange, command: Send) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            raise RuntimeError("what the user typed")
        send(exchange, command)

    async with edge() as (e, _nodes):
        e.answer = lambda _event: ()
        peers = [await e.ask() for _ in range(2)]
        await until(lambda: len(e.proxy.exchanges) == 2)
        monkeypatch.setattr(Exchange, "send", breaks_once)
        e.proxy.obey([Send(1, 1, 1, Role.FIRST), Send(2, 1, 1, Role.FIRST)])
        assert [(await peer.response()).status for peer in peers] == [500, 200]
        cancel = await e.until_told(Cancel)
        assert (cancel.id, cancel.why) == (1, Left.INTERNAL) and "RuntimeError at" in cancel.reason
        assert "what the user typed" not in caplog.text


# While the router starts.


async def test_requests_are_held_until_the_router_has_started() -> None:
    async with edge() as (e, _nodes):
        e.proxy.hold_requests()
        peer = await e.ask()
        await until(lambda: e.proxy.exchanges)
        assert not e.told
        e.proxy.release_requests()
        assert (await peer.response()).status == 200 and e.kinds == ["Arrive", "Ended"]


async def test_a_404_that_the_router_replaces_is_the_nodes_answer_to_the_core() -> None:
    async with edge() as (e, [node]):
        body = b'{"detail":"Not Found"}'
        node.behave = script(b"HTTP/1.1 404 N\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5], 0.05, body[5:])
        assert (await (await e.ask()).response()).error["code"] == "path_not_served"
        assert e.kinds == ["Arrive", "Started", "Ended"] and e.told[2].status == 404
