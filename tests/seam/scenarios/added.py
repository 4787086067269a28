"""Rules that are younger than the numbered scenarios: deadlines that end a call, poison requests, full nodes."""

from __future__ import annotations

from typing import Final

from seam.script import (
    End,
    Script,
    Serve,
    answered,
    arrive,
    at,
    cut,
    ended,
    failed,
    first_token,
    fleet,
    reject,
    rejected,
    script,
    send,
    started,
    then,
    until,
    withdraw,
)
from warmroute.core.messages import SILENT

AT_ONCE: Final = {"queue_at_router": False}

# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    script(
        "D1", "a call without a first byte ends when its deadline has passed",
        fleet("a b"),
        at(0, arrive("x", deadline_ms=700, ends_late=True), send("x", 1, "a")),
        until(650),
        until(800, reject("x", 504, "deadline_exceeded")),
        ends={"x": End("CANCELLED", 504, "estimate", code="deadline_exceeded", tried=1)}, outcomes={"a": "CANCELLED"},
        needs="retries_itself sets_the_clock",
    ),
    script(
        "D2", "an answer is cut off when the deadline of the whole has passed",
        fleet("a"),
        at(0, arrive("x", total_ms=1000, ends_late=True), send("x", 1, "a")),
        at(100, started("x", 1)),
        then(first_token("x", 1)),
        until(950),
        until(1100, cut("x")),
        ends={"x": End("CANCELLED", 200, "estimate", left="CUT")}, outcomes={"a": "CANCELLED"},
        counters={"interrupted": 1}, needs="retries_itself sets_the_clock",
    ),
    script(
        "D3", "an answer whose last event the client has is not cut off",
        fleet("a"),
        at(0, arrive("x", total_ms=1000, ends_late=True), send("x", 1, "a")),
        at(100, started("x", 1)),
        then(first_token("x", 1)),
        until(1090, cut("x", answered=False)),
        then(ended("x", 1)),
        ends={"x": answered()}, outcomes={"a": "OK"}, counters={"responses": {200: 1}},
        needs="retries_itself late_answers",
    ),
    script(
        "D4", "an overdue call moves to a node that meets its deadline",
        fleet("a b"),
        at(0, arrive("x", tokens=4000, deadline_ms=5000, ends_late=True), send("x", 1, "a")),
        until(150),
        until(3000, withdraw("x", 1), send("x", 2, "b")),
        then(ended("x", 2)),
        before=[Serve("*", 4000, took_ms=220)], ends={"x": answered(tried=2)}, outcomes={"a": "CANCELLED", "b": "OK"},
        counters={"retries": 1, "responses": {200: 1}}, needs="retries_itself sets_the_clock",
    ),
    script(
        "P1", "a call at which two nodes fail that serve others is sent to no third one",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 500), send("x", 2, "b")),
        then(failed("x", 2, 500), reject("x", 502, "failed_on_every_node", "tried 2 nodes")),
        before=[Serve()], ends={"x": rejected(502, "failed_on_every_node", "FAILED", tried=2)},
        counters={"retries": 1}, states={name: {"health": "up"} for name in "ab"}, needs="retries_itself",
    ),
    script(
        "P2", "failures that are no 5xx make no poison",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(50, failed("x", 1, 500), send("x", 2, "b")),
        at(150, failed("x", 2, SILENT), send("x", 3, "c")),
        then(ended("x", 3)),
        before=[Serve()], ends={"x": answered(tried=3)}, counters={"retries": 2, "responses": {200: 1}},
        upstream={"first_byte_timeout_s": 0.1}, needs="retries_itself",
    ),
    script(
        "M1", "a call that may not wait gets 429 when every node is full",
        fleet("a b", max_inflight=1),
        at(0, arrive("x"), send("x", 1, "a")),
        then(arrive("y"), send("y", 1, "b")),
        then(arrive("z"), reject("z", 429, "overloaded")),
        admission=AT_ONCE, ends={"z": rejected(429, "overloaded")}, counters={"rejected": {"max_inflight": 1}},
    ),
    script(
        "M2", "a failed call goes to no full node",
        fleet("a b", max_inflight=1),
        at(0, arrive("x"), send("x", 1, "a")),
        then(arrive("y"), send("y", 1, "b")),
        then(failed("x", 1, 500), reject("x", 429, "overloaded")),
        ends={"x": rejected(429, "overloaded", "FAILED")}, outcomes={"a": "FAILED"},
        counters={"rejected": {"nodes_busy": 1}}, needs="retries_itself",
    ),
    script(
        "M3", "a call waits at the router while its node is full",
        fleet("a", max_inflight=1),
        at(0, arrive("x", tokens=100), send("x", 1, "a")),
        then(arrive("y", tokens=100)),
        at(100, ended("x", 1), send("y", 1, "a")),
        outcomes={"a": "OK"}, counters={"responses": {200: 1}},
    ),
)
# fmt: on
