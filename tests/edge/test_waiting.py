"""Requests that wait at the router until a node has room: the engine does not see them before.

Speeds are guesses here (0.05 ms a token), and prompts are read as text, four bytes a token: LONG is 8,000 tokens, which
are believed to take 460 ms; more than the 250 ms that may be queued on a node (admission.ahead_ms). Once the engine has
answered, it is believed to be quicker: where it is to take one at a time for long, ONE_BY_ONE says so. They are
streamed: of others nobody sees when their prefill is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from harness import Answer, Engine, Peer, Router, answer, chat, engines, get, post, quick_table, router, script, until

from warmroute.config import Config, from_table
from warmroute.edge.keys import hash_key
from warmroute.service import Service

LONG = "abcdefgh" * 4000
PRICE = {"policy": "price", "seed": 7}
ONE_BY_ONE = {"ahead_ms": 0.01}


def long(number: int) -> bytes:
    """A prompt that begins like no other."""
    return post(chat(f"{number:08d}{LONG}", stream=True))


class Gate:
    """The engine begins its answers when it is told to, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self.answers = asyncio.Semaphore(0)
        self.engine = engine
        engine.behave = self._play

    async def _play(self, engine: Engine, seen: Any, writer: asyncio.StreamWriter) -> None:
        await self.answers.acquire()
        await script(answer())(engine, seen, writer)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self.answers.release()


@asynccontextmanager
async def one_busy(**tables: Any) -> AsyncIterator[tuple[Router, Gate]]:
    """A router over one engine that prefills a long prompt, until it is let."""
    async with engines() as [engine], router(engine, routing=PRICE, **tables) as r:
        gate = Gate(engine)
        await ask(r, 0)
        await until(lambda: engine.seen)
        yield r, gate
        gate.let(1000)
        for peer in r.peers:
            peer.leave()
        await until(lambda: r.service.admission.waiting == 0)


async def ask(r: Router, number: int) -> Peer:
    peer = await r.connect()
    peer.write(long(number))
    return peer


async def waiting(r: Router, count: int) -> None:
    await until(lambda: r.service.admission.waiting == count, f"{count} wait")


async def test_what_the_engine_has_no_room_for_waits_at_the_router() -> None:
    async with one_busy(admission=ONE_BY_ONE) as (r, gate):
        peers = [await ask(r, number) for number in range(1, 4)]
        await waiting(r, 3)
        await asyncio.sleep(0.15)  # some ticks
        assert len(gate.engine.seen) == 1 and r.inflight() == 1
        for seen in range(2, 5):
            gate.let()
            await until(lambda seen=seen: len(gate.engine.seen) == seen)
        gate.let()
        answers = [await peer.answer() for peer in peers]
        assert [found.status for found in answers] == [200] * 3
        assert r.service.admission.held == 3 and r.service.admission.waiting == 0


async def test_a_long_prompt_is_more_than_may_be_queued_and_an_answer_shows_how_much_it_was() -> None:
    async with one_busy() as (r, gate):
        assert r.service.config.admission.ahead_ms == 250.0
        assert 400 < r.node(0).pending_work * r.node(0).speed.ms_per_token < 600
        peer = await ask(r, 1)
        await waiting(r, 1)
        assert len(gate.engine.seen) == 1
        gate.let(2)
        assert (await peer.answer()).status == 200
        assert r.node(0).speed.answers == 2 and abs(r.node(0).pending_work) < 1e-3


async def test_what_waits_reaches_the_engine_byte_for_byte() -> None:
    async with one_busy() as (r, gate):
        peer = await ask(r, 1)
        await waiting(r, 1)
        gate.let(2)
        assert (await peer.answer()).status == 200
        assert gate.engine.seen[1].body == chat(f"{1:08d}{LONG}", stream=True)


async def test_a_short_answer_within_a_connection_does_not_disturb_what_follows() -> None:
    async with one_busy() as (r, gate):
        peer = await r.connect()
        peer.write(long(1) + long(2))
        await waiting(r, 1)
        gate.let(3)
        assert [(await peer.answer()).status for _ in range(2)] == [200, 200]
        assert [seen.body[:80] for seen in gate.engine.seen[1:]] == [
            chat(f"{number:08d}{LONG}", stream=True)[:80] for number in (1, 2)
        ]


async def test_a_client_that_leaves_while_it_waits_never_reaches_an_engine() -> None:
    async with one_busy() as (r, gate):
        leaving, staying = await ask(r, 1), await ask(r, 2)
        await waiting(r, 2)
        left_s = time.monotonic()
        leaving.leave()
        await waiting(r, 1)
        assert time.monotonic() - left_s < 0.5
        assert r.service.counters.left == 1
        gate.let(2)
        assert (await staying.answer()).status == 200
        assert len(gate.engine.seen) == 2


async def test_it_goes_to_the_node_that_is_free_first() -> None:
    async with engines(2) as [first, second], router(first, second, routing=PRICE) as r:
        gates = [Gate(first), Gate(second)]
        await ask(r, 0)
        await ask(r, 1)
        await until(lambda: first.seen and second.seen)
        peer = await ask(r, 2)
        await waiting(r, 1)
        gates[1].let(2)
        assert (await peer.answer()).status == 200
        assert len(first.seen) == 1 and len(second.seen) == 2
        gates[0].let()
        await until(lambda: r.inflight() == 0)


async def test_too_many_are_told_to_come_back() -> None:
    async with one_busy(admission={"max_waiting": 2}) as (r, gate):
        for number in range(1, 3):
            await ask(r, number)
        await waiting(r, 2)
        refused = await r.ask(long(3))
        assert refused.status == 429 and refused.error["code"] == "overloaded"
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.get("retry-after") or 0) <= 60
        assert len(gate.engine.seen) == 1 and r.service.counters.refused[429, "overloaded"] == 1


async def test_who_waits_too_long_is_told_so() -> None:
    async with one_busy(admission={"max_wait_s": 0.2}) as (r, gate):
        began_s = time.monotonic()
        refused = await r.ask(long(1))
        assert refused.status == 503 and refused.error["code"] == "waited_too_long"
        assert refused.get("retry-after") and time.monotonic() - began_s >= 0.2
        assert len(gate.engine.seen) == 1


async def test_who_was_refused_may_go_on_asking_on_the_same_connection() -> None:
    async with one_busy(admission={"max_wait_s": 0.1}) as (r, _gate):
        peer = await r.connect()
        peer.write(long(1) + get("/v1/models"))
        assert (await peer.answer()).status == 503
        assert (await peer.answer()).status == 200


async def test_when_the_node_dies_those_who_wait_are_told() -> None:
    async with one_busy() as (r, gate):
        peers = [await ask(r, number) for number in range(1, 4)]
        await waiting(r, 3)
        await gate.engine.refuse()
        answers: list[Answer] = [await peer.answer() for peer in peers]
        assert {found.status for found in answers} <= {502, 503} and all(found.error["code"] for found in answers)
        await gate.engine.listen()
        await until(lambda: r.service.fleet.can_serve)


async def test_without_holding_the_engine_gets_everything_at_once() -> None:
    async with one_busy(admission={"hold": False}) as (r, gate):
        for number in range(1, 4):
            await ask(r, number)
        await until(lambda: len(gate.engine.seen) == 4)
        assert r.service.admission.held == 0


async def test_metrics_tell_who_waits() -> None:
    async with one_busy() as (r, gate):
        peer = await ask(r, 1)
        await waiting(r, 1)
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert "\nwarmroute_waiting 1\n" in page and "\nwarmroute_held_total 1\n" in page
        assert '\nwarmroute_node_prefill_ms_per_token{node="node0"} 0.05\n' in page
        assert '\nwarmroute_node_token_ms{node="node0"} ' in page
        gate.let(2)
        await peer.answer()
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert "\nwarmroute_waiting 0\n" in page and "\nwarmroute_held_total 1\n" in page


async def test_a_fault_of_the_routers_own_costs_one_request_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OverflowError("what the user typed")

    async with one_busy() as (r, gate):
        held = await ask(r, 1)
        await waiting(r, 1)
        with monkeypatch.context() as broken:
            broken.setattr("warmroute.edge.exchange.Entry", fails)
            gate.let(1)  # the one before: the other is let through, and breaks
            failed = await held.answer()
            assert failed.status == 500 and failed.error["code"] == "internal_error"
            assert (await r.ask(post(chat(LONG)))).status == 500, "at once"
        assert r.service.admission.waiting == 0 and r.node(0).inflight == 0
        gate.let(1)
        peer = await ask(r, 2)
        assert (await peer.answer()).status == 200
    assert "OverflowError at" in caplog.text and "typed" not in caplog.text


# Reload and shutdown.


async def test_a_reload_of_admission_takes_effect_for_those_who_wait_too() -> None:
    async with engines() as [engine]:
        tables: dict[str, Any] = {}

        def config() -> Config:
            return from_table(quick_table([engine], routing=PRICE, **tables))

        service = Service(config)
        await service.start()
        r = Router(service)
        try:
            await until(lambda: service.fleet.can_serve)
            gate = Gate(engine)
            peers = [await ask(r, 0)]
            await until(lambda: engine.seen)
            peers += [await ask(r, 1), await ask(r, 2)]
            await waiting(r, 2)
            tables["admission"] = {"max_waiting": 2}
            assert service.reload() is None
            assert (await r.ask(long(3))).status == 429
            tables["admission"] = {"ahead_ms": 60_000.0}
            assert service.reload() is None
            await until(lambda: len(engine.seen) == 3)
            gate.let(3)
            assert [(await peer.answer()).status for peer in peers] == [200] * 3
        finally:
            for peer in r.peers:
                peer.leave()
            await service.stop()


async def test_on_shutdown_those_who_wait_are_served() -> None:
    async with one_busy() as (r, gate):
        peers = [await ask(r, number) for number in range(1, 3)]
        await waiting(r, 2)
        stopping = asyncio.ensure_future(r.service.stop())
        await asyncio.sleep(0.05)
        gate.let(3)
        assert [(await peer.answer()).status for peer in peers] == [200, 200]
        await asyncio.wait_for(stopping, 10)


async def test_who_still_waits_when_the_shutdown_ends_is_cut_and_not_hung() -> None:
    async with one_busy(shutdown={"deadline_s": 0.2}) as (r, gate):
        peer = await ask(r, 1)
        await waiting(r, 1)
        await asyncio.wait_for(r.service.stop(), 10)
        assert await peer.is_closed()
        assert r.service.admission.waiting == 0 and len(gate.engine.seen) == 1


async def test_priority_by_header_and_by_field_decides_who_goes_first() -> None:
    async with one_busy(admission=ONE_BY_ONE) as (r, gate):
        asked = [
            post(chat("1" * 8 + LONG, stream=True), headers=["X-Priority: low"]),
            post(chat("2" * 8 + LONG, stream=True)),
            post(chat("3" * 8 + LONG, stream=True, priority=5)),
            post(chat("4" * 8 + LONG, stream=True, priority=-1)),
            post(chat("5" * 8 + LONG, stream=True), headers=["X-Priority: HIGH"]),
            post(chat("6" * 8 + LONG, stream=True), headers=["X-Priority: normal"]),
        ]
        for body in asked:
            (await r.connect()).write(body)
        await waiting(r, len(asked))
        for seen in range(len(asked)):
            gate.let()
            await until(lambda seen=seen: len(gate.engine.seen) == seen + 2)
        order = [
            next(number for number in "123456" if number * 8 in seen.body.decode()) for seen in gate.engine.seen[1:]
        ]
        assert [{"1": 2, "2": 1, "3": 2, "4": 0, "5": 0, "6": 1}[number] for number in order] == [0, 0, 1, 1, 2, 2]


async def test_a_key_caps_the_priority_that_it_may_ask_for() -> None:
    keys = [
        {"sha256": hash_key("big"), "tenant": "a"},
        {"sha256": hash_key("small"), "tenant": "b", "priority": "normal"},
    ]
    async with engines() as [engine], router(engine, routing=PRICE, admission=ONE_BY_ONE, keys=keys) as r:
        gate = Gate(engine)
        for number, key in enumerate(["big", "small", "small", "big"]):
            headers = [f"Authorization: Bearer {key}", "X-Priority: high"]
            (await r.connect()).write(post(chat(f"{number:08d}{LONG}", stream=True), headers=headers))
            await until(lambda number=number: r.service.admission.waiting + len(engine.seen) == number + 1)
        asked = sorted(key for key, tenant in r.service.admission.room.tenants.items() if tenant.waiting)
        assert asked == [(0, "a"), (1, "b")]
        gate.let(4)
        await until(lambda: len(engine.seen) == 4)
        await until(lambda: r.inflight() == 0)


async def test_answers_that_are_not_streamed_do_not_wait_for_each_others_ends() -> None:
    async with engines() as [engine], router(engine, routing=PRICE) as r:
        gate = Gate(engine)
        peers = []
        for number in range(4):  # 460 ms of believed prefill each, and nobody has ended
            peers.append(await r.connect())
            peers[-1].write(post(chat(f"{number:08d}{LONG}")))
        await until(lambda: len(engine.seen) == 4, "all of them are at the engine")
        gate.let(4)
        for peer in peers:
            assert (await peer.answer()).status == 200
