"""65–75: calls without a first byte leave nodes that are down or gone."""

from __future__ import annotations

from typing import Final

from seam.script import (
    Script,
    arrive,
    at,
    comes_up,
    drained,
    ended,
    fleet,
    refuses,
    reject,
    rejected,
    removed,
    script,
    send,
    started,
    suspected,
    undrained,
    until,
    withdraw,
)

NODES_LEAVE: Final = (("a", "is suspected", suspected), ("b", "refuses", refuses), ("c", "is removed", removed))
MANY: Final = 74
MOVES_AT_ONCE: Final = 64
SENT: Final = at(2900, arrive("x"), send("x", 1, "a"))
"""A node is suspected only if it has been silent for two seconds."""

# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    *(
        script(
            f"65{letter}", f"a call without an answer leaves a node that {what}",
            fleet("a b"),
            SENT,
            at(3000, event("a"), withdraw("x", 1), send("x", 2, "b")),
            outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="retries_itself",
        )
        for letter, what, event in NODES_LEAVE
    ),
    *(
        script(
            f"66{letter}", f"a call that may not be repeated {'leaves' if moves else 'stays on'} a node that {what}",
            fleet("a b"),
            at(2900, arrive("x", repeatable=False), send("x", 1, "a")),
            at(3000, event("a"), *((withdraw("x", 1), send("x", 2, "b")) if moves else ())),
            outcomes={"a": "FAILED"} if moves else {}, counters={"retries": 1} if moves else {},
            needs="retries_itself",
        )
        for (letter, what, event), moves in zip(NODES_LEAVE, (False, True, False), strict=True)
    ),
    script(
        67, "a call that has begun to answer stays",
        fleet("a b"),
        SENT,
        at(2950, started("x", 1)),
        at(3000, suspected("a")),
        until(103_000),
        outcomes={}, needs="retries_itself sets_the_clock",
    ),
    script(
        68, "a call stays on a suspected node while no other is up, and moves when one comes up",
        fleet("a") | fleet("b", state="down"),
        SENT,
        at(3000, suspected("a")),
        at(4000, comes_up("b"), withdraw("x", 1), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        69, "a call stays on a removed node while no other is up, and moves when one comes up",
        fleet("a") | fleet("b", state="down"),
        SENT,
        at(3000, removed("a")),
        at(4000, comes_up("b"), withdraw("x", 1), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        70, "a call on a suspected node moves when another one is not drained any more",
        fleet("a b"),
        at(0, drained("b")),
        SENT,
        at(3000, suspected("a")),
        at(4000, undrained("b"), withdraw("x", 1), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        71, "many calls leave a node in several turns",
        fleet("a b"),
        at(0, drained("b")),
        *(at(2900, arrive(f"x{one}", tokens=100), send(f"x{one}", 1, "a")) for one in range(MANY)),
        at(2950, undrained("b")),
        at(
            3000, suspected("a"),
            *(
                command
                for one in range(MOVES_AT_ONCE)
                for command in (withdraw(f"x{one}", 1), send(f"x{one}", 2, "b"))
            ),
            sends_due=False,
        ),
        until(
            3250,
            *(
                command
                for one in range(MOVES_AT_ONCE, MANY)
                for command in (withdraw(f"x{one}", 1), send(f"x{one}", 2, "b"))
            ),
        ),
        admission={"queue_at_router": False}, outcomes={"a": "FAILED " * MANY}, counters={"retries": MANY},
        needs="retries_itself sets_the_clock",
    ),
    script(
        "72a", "max_attempts limits moves and hedges",
        fleet("a b c"),
        SENT,
        at(3000, suspected("a")),
        until(60_000),
        upstream={"max_attempts": 1}, hedging={"max_ratio": 1.0}, outcomes={},
        needs="retries_itself sets_the_clock",
    ),
    script(
        "72b", "a call on a dead node that may go nowhere else ends at once: out of tries",
        fleet("a b c"),
        SENT,
        at(3000, refuses("a"), withdraw("x", 1), reject("x", 502, "upstream_failed")),
        upstream={"max_attempts": 1}, outcomes={"a": "FAILED"}, needs="retries_itself",
        ends={"x": rejected(502, "upstream_failed", "FAILED")},
    ),
    script(
        73, "a call on a dead node that may go nowhere else ends at once: late",
        fleet("a b"),
        at(0, arrive("x", deadline_ms=1000), send("x", 1, "a")),
        at(3000, refuses("a"), withdraw("x", 1), reject("x", 502, "upstream_failed")),
        outcomes={"a": "FAILED"}, needs="retries_itself",
        ends={"x": rejected(502, "upstream_failed", "FAILED")},
    ),
    script(
        74, "a call that is still connecting leaves a dead node, and its late connection is not used",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a", is_connecting=True)),
        at(10, refuses("a"), withdraw("x", 1), send("x", 2, "b")),
        at(200, ended("x", 2)),
        outcomes={"a": "FAILED", "b": "OK"}, counters={"retries": 1, "responses": {200: 1}},
        needs="retries_itself has_sockets",
    ),
    script(
        75, "a call ends on a node that drains, and new calls go elsewhere",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(10, drained("a")),
        at(20, arrive("y"), send("y", 1, "b")),
        at(100, ended("x", 1)),
        outcomes={"a": "OK"}, counters={"responses": {200: 1}}, needs="retries_itself",
    ),
)
# fmt: on
