"""114–122: Envoy has the call. It sends it, and sends it to a fallback if a node fails; the core can only watch."""

from __future__ import annotations

from typing import Final

from seam.script import (
    End,
    Line,
    Script,
    answer_now,
    answered,
    arrive,
    at,
    cancel,
    ended,
    failed,
    first_token,
    fleet,
    left,
    reject,
    rejected,
    removed,
    script,
    send,
    started,
    suspected,
    then,
    until,
)
from warmroute.core.messages import NO_ENDPOINT

BUSY: Final = 8000
NEEDS: Final = "is_envoy"
SENT: Final = at(0, arrive("x", envoy=True), send("x", 1, "a", fallbacks=("b", "c")))


def envoy(number: str | int, title: str, *lines: Line, **more: object) -> Script:
    return script(number, title, fleet("a b c"), SENT, *lines, **{"needs": NEEDS, **more})  # type: ignore[arg-type]


def fails(number: str, title: str, status: int, outcome: str, *, by_envoy: bool = False) -> Script:
    """Envoy shows an answer after which there is nothing to do."""
    return envoy(
        number, title,
        at(100, started("x", 1, status, by_envoy=by_envoy)),
        ends={"x": End(outcome, status, "nothing")}, outcomes={"a": outcome},
    )  # fmt: skip


# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    envoy(
        114, "a call gets its node and fallbacks, and its answer is observed",
        at(100, started("x", 1)),
        at(200, first_token("x", 1)),
        at(1000, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(tried=1, reported=(1000, 0, 10), first_token_ms=200)}, outcomes={"a": "OK"},
        counters={"responses": {200: 1}},
    ),
    envoy(
        115, "Envoy used a fallback: the ticket moves to the node that answers",
        at(100, started("x", 1, served="b")),
        then(first_token("x", 1)),
        at(1000, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(tried=2, reported=(1000, 0, 10))}, outcomes={"a": "FAILED", "b": "OK"},
        counters={"responses": {200: 1}, "retries": 1},
    ),
    fails("116a", "an error of a node counts for it: 500", 500, "FAILED"),
    fails("116b", "an error of a node counts for it: 503", 503, "BUSY"),
    fails("116c", "an error of a node counts for it: 429", 429, "BUSY"),
    envoy(
        "116d", "an error of a node counts for it: 400",
        at(100, started("x", 1, 400)),
        then(ended("x", 1, 400)),
        ends={"x": answered(400)}, outcomes={"a": "REJECTED"}, counters={"responses": {400: 1}},
    ),
    fails("117a", "Envoy's own 503: no node has answered", 503, "FAILED", by_envoy=True),
    fails("117b", "Envoy's own 504: no node has answered", 504, "FAILED", by_envoy=True),
    fails("117c", "Envoy's own 429: another filter rejects the request", 429, "CANCELLED", by_envoy=True),
    envoy(
        118, "an answer that Envoy does not show is complete when the stream ends",
        at(1000, started("x", 1, 0)),
        then(ended("x", 1, 0)),
        ends={"x": answered(0)}, outcomes={"a": "OK"}, counters={"responses": {0: 1}},
    ),
    envoy(
        119, "where Envoy shows heads and showed none, the client has left",
        at(1000, cancel("x")),
        ends={"x": left(tried=1)}, outcomes={"a": "CANCELLED"}, counters={"disconnects": 1},
    ),
    script(
        "120a", "Envoy does not wait longer: a call of low priority is rejected",
        fleet("a"),
        at(0, arrive("w", tokens=BUSY, envoy=True), send("w", 1, "a")),
        then(arrive("x", tokens=BUSY, envoy=True, priority="low")),
        at(200, answer_now("x"), reject("x", 429, "overloaded")),
        ends={"x": rejected(429, "overloaded")}, counters={"rejected": {"envoy_timeout": 1}}, needs=NEEDS,
    ),
    *(
        script(
            f"120{letter}", f"Envoy does not wait longer: a call of {priority} priority goes to its node",
            fleet("a"),
            at(0, arrive("w", tokens=BUSY, envoy=True), send("w", 1, "a")),
            then(arrive("x", tokens=BUSY, envoy=True, priority=priority)),
            at(200, answer_now("x"), send("x", 1, "a")),
            needs=NEEDS,
        )
        for letter, priority in (("b", "normal"), ("c", "high"))
    ),
    script(
        "120d", "Envoy does not wait longer, and there is no node",
        fleet(),
        at(0, arrive("x", envoy=True)),
        at(200, answer_now("x"), reject("x", 503, "no_node_available")),
        ends={"x": rejected(503, "no_node_available")}, needs=NEEDS, first_node_wait_s=60,
    ),
    script(
        "121p", "a node whose name has no address is passed over",
        fleet("a", has_address=False) | fleet("b"),
        at(0, arrive("w", on="b", tokens=200_000, envoy=True), send("w", 1, "b")),
        then(arrive("x", envoy=True), send("x", 1, "a"), send("x", 2, "b")),
        then(ended("x", 2)),
        ends={"x": answered()}, states={"a": {"health": "up"}}, needs="names_nodes",
        outcomes={"a": "CANCELLED", "b": "OK"}, counters={"responses": {200: 1}, "retries": 1},
    ),
    envoy(
        121, "a node whose name has no address was not asked",
        then(failed("x", 1, NO_ENDPOINT), send("x", 2, "b|c")),
        then(ended("x", 2)),
        ends={"x": answered()}, states={"a": {"health": "up", "excused_failures": 0}},
        outcomes={"a": "CANCELLED", "b": "OK"}, counters={"responses": {200: 1}, "retries": 1},
        needs="is_envoy late_answers",
    ),
    envoy(
        122, "a call that Envoy has stays, whatever happens to its node",
        at(3000, suspected("a")),
        until(60_000),
        at(60_000, removed("a")),
        until(61_000),
        hedging={"max_ratio": 1.0}, outcomes={},
    ),
    script(
        "55p", "the fallbacks are of the call's subset",
        fleet("a b c"),
        at(0, arrive("x", envoy=True, subset=("a", "b")), send("x", 1, "a|b")),
        at(100, started("x", 1, 500)),
        ends={"x": End("FAILED", 500, "nothing")}, needs=NEEDS,
    ),
)
# fmt: on
