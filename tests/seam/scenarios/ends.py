"""123–134: shutdown, faults inside the core, and messages that cross.

Scenarios that need a link between processes are listed in LATER.
"""

from __future__ import annotations

from typing import Final

from seam.script import (
    End,
    Script,
    Serve,
    answered,
    arrive,
    at,
    breaks,
    cancel,
    ended,
    failed,
    first_token,
    fleet,
    left,
    mended,
    refuses,
    reject,
    script,
    send,
    started,
    stops,
    suspected,
    then,
    until,
    withdraw,
)
from warmroute.core.messages import UNKNOWN, Role

LATER: Final = {
    "130": "Cancel crosses Send: whether the node got the request is known at the other end of a link",
    "131": "Resync: the calls of an edge survive a link that is closed and opened again",
    "132": "a lost edge: its calls end after two seconds",
}
"""Scenarios that come with the link between edges and core, and why they cannot be played before."""

BUSY: Final = 8000


def cut_off(status: int, outcome: str | None, charge: str) -> End:
    return End(outcome, status, charge, left="STOPPING")


# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    script(
        123, "during a shutdown, queued calls are served",
        fleet("a"),
        at(0, arrive("w", tokens=2 * BUSY), send("w", 1, "a")),
        then(arrive("x", tokens=2 * BUSY)),
        then(arrive("y", tokens=2 * BUSY)),
        at(10, stops()),
        at(600, ended("w", 1), send("x", 1, "a")),
        at(800, ended("x", 1), send("y", 1, "a")),
        at(900, ended("y", 1)),
        counters={"responses": {200: 3}}, needs="retries_itself has_sockets",
    ),
    script(
        124, "at the deadline of a shutdown, a queued, a waiting and an answering call are cut off",
        fleet("a b"),
        at(0, arrive("z"), send("z", 1, "a")),
        at(50, started("z", 1)),
        then(first_token("z", 1)),
        at(100, arrive("y", tokens=200_000), send("y", 1, "b")),
        then(arrive("v", on="a", tokens=200_000), send("v", 1, "a")),
        then(arrive("x", tokens=BUSY)),
        at(200, cancel("x", "STOPPING")),
        then(cancel("y", "STOPPING")),
        then(cancel("z", "STOPPING")),
        then(cancel("v", "STOPPING")),
        ends={
            "x": cut_off(0, None, "nothing"), "y": cut_off(503, "CANCELLED", "nothing"),
            "v": cut_off(503, "CANCELLED", "nothing"), "z": cut_off(200, "CANCELLED", "estimate"),
        },
        outcomes={"a": "CANCELLED CANCELLED", "b": "CANCELLED"}, counters={"interrupted": 1},
        needs="retries_itself",
    ),
    script(
        "124b", "an edge that fails before and after the first byte",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(arrive("y", on="b"), send("y", 1, "b")),
        at(50, started("y", 1)),
        at(100, cancel("x", "INTERNAL")),
        then(cancel("y", "INTERNAL")),
        ends={
            "x": End("CANCELLED", 500, "nothing", left="INTERNAL"),
            "y": End("CANCELLED", 200, "estimate", left="INTERNAL"),
        },
        outcomes={"a": "CANCELLED", "b": "CANCELLED"}, counters={"interrupted": 1},
        needs="retries_itself",
    ),
    script(
        125, "at the deadline of a shutdown, a call that Envoy has goes on without the router",
        fleet("a"),
        at(0, arrive("x", envoy=True), send("x", 1, "a")),
        at(100, cancel("x", "STOPPING")),
        ends={"x": End("CANCELLED", 0, "estimate", left="STOPPING")}, outcomes={"a": "CANCELLED"},
        counters={"cut_off": 1}, needs="is_envoy",
    ),
    script(
        126, "a fault when the turn of a queued call comes ends this call, and no other",
        fleet("a"),
        at(0, arrive("w", tokens=BUSY), send("w", 1, "a")),
        then(arrive("x", tokens=BUSY)),
        at(50, breaks("journal")),
        at(100, cancel("w"), reject("x", 500, "internal_error")),
        then(mended("journal")),
        then(arrive("y"), send("y", 1, "a")),
        at(200, ended("y", 1)),
        ends={
            "w": left(), "x": End(None, 500, "nothing", code="internal_error", left="INTERNAL"), "y": answered(),
        },
        outcomes={"a": "CANCELLED OK"}, counters={"disconnects": 1, "responses": {200: 1}},
        needs="faults retries_itself",
    ),
    script(
        "127a", "a fault before the first byte",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(50, breaks("router")),
        at(100, refuses("a"), reject("x", 500, "internal_error")),
        then(mended("router")),
        ends={"x": End("CANCELLED", 500, "nothing", code="internal_error", left="INTERNAL")},
        outcomes={"a": "CANCELLED"}, needs="faults retries_itself",
    ),
    script(
        "127b", "a fault after the first byte breaks the answer off",
        fleet("a"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(50, started("x", 1)),
        at(60, breaks("demand_meter")),
        at(100, first_token("x", 1), reject("x", 500, "internal_error")),
        then(mended("demand_meter")),
        ends={"x": End("CANCELLED", 200, "estimate", left="INTERNAL")},
        outcomes={"a": "CANCELLED"}, counters={"interrupted": 1}, needs="faults retries_itself",
    ),
    script(
        128, "an answer crosses the Withdraw: it counts, and no other node is asked",
        fleet("a b"),
        at(2900, arrive("x"), send("x", 1, "a")),
        at(3000, suspected("a"), withdraw("x", 1, answered=False)),
        at(3010, started("x", 1)),
        at(3100, ended("x", 1)),
        ends={"x": answered(tried=1)}, outcomes={"a": "OK"}, counters={"responses": {200: 1}},
        needs="late_answers retries_itself",
    ),
    script(
        "128b", "a failure crosses the Withdraw: the plan is carried out",
        fleet("a b"),
        at(2900, arrive("x"), send("x", 1, "a")),
        at(3000, suspected("a"), withdraw("x", 1, answered=False)),
        at(3010, failed("x", 1, 500), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="late_answers retries_itself",
    ),
    script(
        "128c", "a client that leaves crosses the Withdraw",
        fleet("a b"),
        at(2900, arrive("x"), send("x", 1, "a")),
        at(3000, suspected("a"), withdraw("x", 1, answered=False)),
        at(3010, cancel("x")),
        ends={"x": left(tried=1)}, outcomes={"a": "FAILED"}, counters={"disconnects": 1},
        needs="late_answers retries_itself",
    ),
    script(
        129, "an answer crosses a hedge: nothing more comes for it",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        until(1900),
        until(2300, send("x", 2, "b", Role.HEDGE)),
        then(started("x", 1)),
        then(ended("x", 1)),
        before=[Serve()], hedging={"max_ratio": 1.0}, needs="late_answers retries_itself",
        ends={"x": answered()}, outcomes={"a": "OK", "b": "CANCELLED"},
        counters={"hedges": 1, "responses": {200: 1}},
    ),
    script(
        130, "a failure for an ended call is ignored",
        fleet("a"),
        at(0, arrive("w", tokens=BUSY), send("w", 1, "a")),
        then(arrive("x", tokens=BUSY)),
        at(100, cancel("w"), send("x", 1, "a")),
        then(cancel("x")),
        then(failed("x", 1, UNKNOWN)),
        outcomes={"a": "CANCELLED CANCELLED"}, counters={"disconnects": 2}, needs="late_answers retries_itself",
    ),
    script(
        "130b", "a node that the edge does not know was not asked",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, UNKNOWN), send("x", 2, "b")),
        then(ended("x", 2)),
        ends={"x": answered()}, outcomes={"a": "CANCELLED", "b": "OK"}, states={"a": {"health": "up"}},
        counters={"responses": {200: 1}, "retries": 1}, needs="late_answers retries_itself",
    ),
    script(
        "133a", "an answer to an unknown call is withdrawn",
        fleet("a"),
        at(0, started("z", 1), withdraw("z", 1, answered=False)),
        counters={"protocol_errors": 1}, needs="late_answers",
    ),
    script(
        "133b", "a first token for an unknown call is withdrawn",
        fleet("a"),
        at(0, first_token("z", 1), withdraw("z", 1, answered=False)),
        counters={"protocol_errors": 1}, needs="late_answers",
    ),
    script(
        134, "messages for a call that has ended change nothing",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, ended("x", 1)),
        then(ended("x", 1)),
        then(failed("x", 1, 500)),
        then(cancel("x")),
        ends={"x": answered()}, outcomes={"a": "OK"}, counters={"responses": {200: 1}},
        needs="late_answers retries_itself",
    ),
)
# fmt: on
