"""76–92: a call whose first token is overdue is sent to a second node as well.

`WARM` lets each node answer once, so that a first token is expected after 0.1 s: then it is overdue after two seconds.
The router looks for overdue calls every 200 ms.
"""

from __future__ import annotations

from typing import Any, Final

from seam.script import (
    Expected,
    Line,
    Script,
    Serve,
    answered,
    arrive,
    at,
    cancel,
    check_times_out,
    drained,
    ended,
    failed,
    first_token,
    fleet,
    left,
    reject,
    rejected,
    reports,
    script,
    send,
    started,
    suspected,
    then,
    undrained,
    until,
    withdraw,
)
from warmroute.core.messages import REFUSED, Role

ALWAYS: Final = {"max_ratio": 1.0}
AT_ONCE: Final = {"queue_at_router": False}
WARM: Final = [Serve()]
SENT: Final = at(0, arrive("x"), send("x", 1, "a"))
HEDGED: Final = (SENT, until(1900), until(2300, send("x", 2, "b", Role.HEDGE)))


def on_a(count: int, name: str = "x", tokens: int = 300) -> list[Line]:
    """Calls that all go to a, and have no answer yet."""
    return [
        at(0, drained("b")),
        *(then(arrive(f"{name}{one}", tokens=tokens), send(f"{name}{one}", 1, "a")) for one in range(count)),
        then(undrained("b")),
    ]


def hedges(count: int, name: str = "x", start: int = 0) -> list[Expected]:
    return [send(f"{name}{one}", 2, "b", Role.HEDGE) for one in range(start, start + count)]


def hedged(number: str | int, title: str, *lines: Line, nodes: str = "a b c", **more: Any) -> Script:
    """x has waited for two seconds on a, and b has it, too."""
    counters = {"hedges": 1, **more.pop("counters", {})}
    return script(
        number, title, fleet(nodes), *HEDGED, *lines,
        before=WARM, hedging=ALWAYS, counters=counters, needs="retries_itself", **more,
    )  # fmt: skip


def no_hedge(letter: str, why: str, *before_it: Line, tokens: int = 1000, **more: Any) -> Script:
    fields = more.pop("fields", {})
    return script(
        f"88{letter}", f"no hedge: {why}", fleet("a b"),
        at(0, arrive("x", tokens=tokens, **fields), send("x", 1, "a")), *before_it, until(100_000),
        before=WARM, needs="retries_itself sets_the_clock", **{"hedging": ALWAYS, **more},
    )  # fmt: skip


# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    hedged(
        76, "an overdue call is sent to a second node, once",
        until(12_000),
        ends={},
    ),
    hedged(
        77, "the first node answers: the hedge is over",
        at(2400, started("x", 1)),
        then(first_token("x", 1)),
        at(2500, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(tried=2, reported=(1000, 0, 10))}, outcomes={"a": "OK", "b": "CANCELLED"},
        counters={"responses": {200: 1}},
    ),
    hedged(
        78, "the hedge answers: the first node has failed",
        at(2400, started("x", 2)),
        then(first_token("x", 2)),
        at(2500, ended("x", 2, usage=(1000, 0, 10))),
        ends={"x": answered(tried=2, reported=(1000, 0, 10))}, outcomes={"a": "FAILED", "b": "OK"},
        counters={"responses": {200: 1}, "hedges_won": 1},
    ),
    *(
        hedged(
            f"79{letter}", f"a hedge that fails with {status} leaves the call where it was",
            at(2400, failed("x", 2, status)),
            then(started("x", 1)),
            at(2500, ended("x", 1, usage=(1000, 0, 10))),
            ends={"x": answered(reported=(1000, 0, 10))}, outcomes={"a": "OK", "b": outcome},
            counters={"responses": {200: 1}},
        )
        for letter, status, outcome in (("a", 429, "BUSY"), ("b", 500, "FAILED"), ("c", 503, "BUSY"))
    ),
    hedged(
        "79d", "a hedge that is refused takes its node down",
        at(2400, failed("x", 2, REFUSED)),
        then(ended("x", 1)),
        ends={"x": answered()}, outcomes={"a": "OK", "b": "FAILED"}, counters={"responses": {200: 1}},
        states={"b": {"health": "down"}},
    ),
    hedged(
        80, "a busy hedge and a busy node are busy",
        at(2400, failed("x", 2, 429, retry_after_s=7)),
        then(failed("x", 1, 429, retry_after_s=9), reject("x", 429, "overloaded", retry_after_s=7)),
        nodes="a b", ends={"x": rejected(429, "overloaded", "BUSY")}, outcomes={"a": "BUSY", "b": "BUSY"},
        counters={"rejected": {"nodes_busy": 1}},
    ),
    hedged(
        81, "a hedge takes over when the first node fails",
        at(2400, failed("x", 1, 500)),
        then(started("x", 2)),
        at(2500, ended("x", 2, usage=(1000, 0, 10))),
        ends={"x": answered(reported=(1000, 0, 10))}, outcomes={"a": "FAILED", "b": "OK"},
        counters={"responses": {200: 1}},
    ),
    hedged(
        "82a", "the first node goes down: the hedge takes over",
        at(3000, suspected("a"), withdraw("x", 1)),
        then(started("x", 2)),
        at(3100, ended("x", 2)),
        ends={"x": answered()}, outcomes={"a": "FAILED", "b": "OK"}, counters={"responses": {200: 1}},
    ),
    hedged(
        "82b", "the hedge's node goes down: the first one goes on",
        at(3000, suspected("b"), withdraw("x", 2)),
        then(started("x", 1)),
        at(3100, ended("x", 1)),
        ends={"x": answered()}, outcomes={"a": "OK", "b": "FAILED"}, counters={"responses": {200: 1}},
    ),
    hedged(
        83, "a client that leaves closes both",
        at(2400, cancel("x")),
        ends={"x": left(tried=2)}, outcomes={"a": "CANCELLED", "b": "CANCELLED"}, counters={"disconnects": 1},
    ),
    script(
        84, "a long prompt is overdue later",
        fleet("a b"),
        at(0, arrive("x", tokens=60_000), send("x", 1, "a")),
        until(20_000),
        until(60_000, send("x", 2, "b", Role.HEDGE)),
        before=WARM, hedging=ALWAYS, counters={"hedges": 1}, needs="retries_itself sets_the_clock",
    ),
    script(
        85, "an answer that is not streamed is hedged only if its node answers nobody",
        fleet("a b"),
        at(0, arrive("x", streams=False, max_output_tokens=10), send("x", 1, "a")),
        at(1500, reports("a", 1, 0, 0.1)),
        until(1900),
        at(2000, reports("a", 1, 0, 0.2)),
        until(2100),
        until(20_000, send("x", 2, "b", Role.HEDGE)),
        before=WARM, hedging=ALWAYS, counters={"hedges": 1}, needs="retries_itself sets_the_clock",
    ),
    *(
        script(
            f"86{letter}", f"a node with a long {what} is slow, and does not hang before it is silent for 30 s",
            fleet("a b"),
            SENT,
            *(
                line
                for number in range(3)
                for line in (
                    at(29_000 * number, reports("a", 5, waiting, usage + 0.01 * number)),
                    until(29_000 * (number + 1)),
                )
            ),
            until(87_900),
            until(88_400, send("x", 2, "b", Role.HEDGE)),
            before=WARM, hedging=ALWAYS, counters={"hedges": 1}, needs="retries_itself sets_the_clock",
        )
        for letter, what, waiting, usage in (("a", "queue", 2, 0.07), ("b", "KV cache", 0, 0.7))
    ),
    script(
        87, "without an estimate, a health check that times out shows that a node hangs",
        fleet("a b"),
        SENT,
        until(5000),
        at(5000, check_times_out("a"), send("x", 2, "b", Role.HEDGE), within_ms=250),
        hedging=ALWAYS, counters={"hedges": 1}, needs="retries_itself sets_the_clock",
    ),
    no_hedge("a", "the call may not be repeated", fields={"repeatable": False}),
    no_hedge("b", "switched off", hedging={"max_ratio": 0.0}),
    no_hedge("c", "the other node has no room", at(0, arrive("w", on="b", tokens=400_000), send("w", 1, "b"))),
    no_hedge("d", "the deadline has passed", fields={"deadline_ms": 1000}),
    script(
        89, "the budget bounds hedges",
        fleet("a b"),
        *on_a(40),
        until(59_900),
        until(61_000, *hedges(10)),
        until(65_000),
        at(65_000, drained("a")),
        *(
            line
            for one in range(40)
            for line in (
                then(arrive(f"y{one}", tokens=300), send(f"y{one}", 1, "b")),
                then(ended(f"y{one}", 1)),
            )
        ),
        then(undrained("a")),
        until(66_000, *hedges(4, start=10)),
        before=WARM, hedging={"max_ratio": 0.1, "min_delay_s": 60.0}, admission=AT_ONCE,
        counters={"hedges": 14, "responses": {200: 40}}, needs="retries_itself sets_the_clock",
    ),
    script(
        90, "a node that loses every race is down",
        fleet("a b"),
        *on_a(8),
        until(1900),
        until(4000, *hedges(8)),
        *(then(started(f"x{one}", 2)) for one in range(4)),
        then(started("x4", 2), *(withdraw(f"x{one}", 1) for one in range(5, 8))),
        *(then(started(f"x{one}", 2)) for one in range(5, 8)),
        before=WARM, hedging=ALWAYS, admission=AT_ONCE, counters={"hedges": 8, "hedges_won": 5},
        outcomes={"a": "FAILED " * 8}, states={"a": {"health": "down"}}, needs="retries_itself",
    ),
    hedged(
        91, "a hedge that answers 4xx passes, and wins no race",
        at(2400, started("x", 2, 400)),
        then(ended("x", 2, 400)),
        ends={"x": answered(400)}, outcomes={"a": "CANCELLED", "b": "REJECTED"}, counters={"responses": {400: 1}},
    ),
    script(
        92, "overdue calls without a second node do not keep others from a hedge",
        fleet("a b") | fleet("o", model="other"),
        *(at(0, arrive(f"y{one}", tokens=100, model="other"), send(f"y{one}", 1, "o")) for one in range(32)),
        then(arrive("x"), send("x", 1, "a")),
        at(1900, check_times_out("o")),
        until(3000, send("x", 2, "b", Role.HEDGE)),
        before=[Serve("a"), Serve("b")], hedging=ALWAYS, admission=AT_ONCE, counters={"hedges": 1},
        needs="retries_itself sets_the_clock",
    ),
)
# fmt: on
