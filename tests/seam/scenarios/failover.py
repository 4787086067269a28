"""34–64: what follows from a failure before and after the first byte, and what an answer counts for."""

from __future__ import annotations

from typing import Any, Final

from seam.script import (
    End,
    Script,
    answered,
    arrive,
    at,
    cancel,
    drained,
    ended,
    failed,
    first_token,
    fleet,
    joins,
    left,
    refuses,
    reject,
    rejected,
    script,
    send,
    started,
    suspected,
    then,
    until,
    withdraw,
)
from warmroute.core.messages import CLOSED, LOCAL, MALFORMED, REFUSED, SILENT, TRANSIENT

DEADLINES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("a", "first token", {"deadline_ms": 1000}), ("b", "whole response", {"total_ms": 1000}),
)  # fmt: skip
FAILED_ALL: Final = rejected(502, "upstream_failed", "FAILED")
PATIENCE: Final = {"first_byte_timeout_s": 0.1, "between_chunks_timeout_s": 0.1}
MANY: Final = [f"n{number}" for number in range(1, 21)]
MALFORMED_ANSWERS: Final = (
    "not HTTP", "two lengths", "endless head", "switching protocols", "bad chunk",
)  # fmt: skip
REPEATABLE: Final = (("a", SILENT), ("b", CLOSED), ("c", 500))
NEVER_BEGUN: Final = (("d", REFUSED), ("e", 503))


def moves_on(number: str, title: str, status: int, how: str) -> Script:
    """A try on a fails, and b answers."""
    return script(
        number, title, fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, failed("x", 1, status, how=how), send("x", 2, "b")),
        at(200, ended("x", 2, usage=(1000, 0, 10))),
        ends={"x": answered(tried=2, reported=(1000, 0, 10))}, outcomes={"a": "FAILED", "b": "OK"},
        counters={"retries": 1, "responses": {200: 1}}, needs="retries_itself has_sockets", upstream=PATIENCE,
    )  # fmt: skip


# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    script(
        34, "every node is tried once",
        fleet("a b c d e f"),
        at(0, arrive("x"), send("x", 1, "a")),
        *(
            at(10 * number, failed("x", number, 500), send("x", number + 1, name))
            for number, name in enumerate("bcdef", 1)
        ),
        at(60, failed("x", 6, 500), reject("x", 502, "upstream_failed", "tried 6 nodes")),
        ends={"x": rejected(502, "upstream_failed", "FAILED", tried=6)}, counters={"retries": 5},
        outcomes=dict.fromkeys("abcdef", "FAILED"), needs="retries_itself",
    ),
    script(
        35, "max_attempts limits the nodes that are tried",
        fleet("a b c d e f"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 500), send("x", 2, "b")),
        then(failed("x", 2, 500), reject("x", 502, "upstream_failed", "tried 2 nodes")),
        upstream={"max_attempts": 2}, ends={"x": rejected(502, "upstream_failed", "FAILED", tried=2)},
        counters={"retries": 1}, outcomes={"a": "FAILED", "b": "FAILED"}, needs="retries_itself",
    ),
    script(
        36, "a node that came up meanwhile is tried, and a draining one is not",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(10, drained("b")),
        at(20, joins("late")),
        at(30, failed("x", 1, 500), send("x", 2, "c")),
        then(failed("x", 2, 500), send("x", 3, "late")),
        then(failed("x", 3, 500), reject("x", 502, "upstream_failed", "tried 3 nodes")),
        ends={"x": FAILED_ALL}, counters={"retries": 2}, needs="retries_itself",
        outcomes={"a": "FAILED", "c": "FAILED", "late": "FAILED"},
    ),
    script(
        37, "suspected nodes come last, and dead ones never",
        fleet("a b c d"),
        at(2900, arrive("x"), send("x", 1, "a")),
        at(3000, suspected("b")),
        at(3010, refuses("c")),
        at(3020, failed("x", 1, 500), send("x", 2, "d")),
        then(failed("x", 2, 500), send("x", 3, "b")),
        then(failed("x", 3, 500), reject("x", 502, "upstream_failed", "tried 3 nodes")),
        ends={"x": FAILED_ALL}, counters={"retries": 2}, needs="retries_itself",
        outcomes={"a": "FAILED", "d": "FAILED", "b": "FAILED"},
    ),
    *(
        script(
            f"38{letter}", f"no further node is tried after the deadline of the {what}",
            fleet("a b c d"),
            at(0, arrive("x", **deadline), send("x", 1, "a")),
            at(100, failed("x", 1, 500), send("x", 2, "b")),
            at(1000, failed("x", 2, 500), reject("x", 502, "upstream_failed", "tried 2 nodes")),
            ends={"x": FAILED_ALL}, counters={"retries": 1}, needs="retries_itself sets_the_clock",
            outcomes={"a": "FAILED", "b": "FAILED"},
        )
        for letter, what, deadline in DEADLINES
    ),
    script(
        39, "busy nodes are busy, with the smallest Retry-After",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 503, retry_after_s=9), send("x", 2, "b")),
        then(failed("x", 2, 503, retry_after_s=4), send("x", 3, "c")),
        then(failed("x", 3, 503, retry_after_s=6), reject("x", 429, "overloaded", retry_after_s=4)),
        ends={"x": rejected(429, "overloaded", "BUSY", tried=3)}, outcomes=dict.fromkeys("abc", "BUSY"),
        counters={"retries": 2, "rejected": {"nodes_busy": 1}}, states={"a": {"health": "up"}}, needs="retries_itself",
    ),
    script(
        40, "one 503 without Retry-After makes the fleet unavailable",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 503), send("x", 2, "b")),
        then(failed("x", 2, 429, retry_after_s=4), reject("x", 503, "no_node_available", retry_after_s=4)),
        ends={"x": rejected(503, "no_node_available", "BUSY")}, outcomes={"a": "BUSY", "b": "BUSY"},
        counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        41, "an overloaded fleet does not get each call once for each node",
        fleet(" ".join(MANY)),
        at(0, arrive("x"), send("x", 1, "n1")),
        *(
            then(failed("x", number, 429, retry_after_s=1), send("x", number + 1, name))
            for number, name in enumerate(MANY[1:], 1)
        ),
        then(failed("x", 20, 429, retry_after_s=1), reject("x", 429, "overloaded")),
        then(arrive("y"), send("y", 1, "?")),
        then(failed("y", 1, 429, retry_after_s=1), send("y", 2, "?")),
        then(failed("y", 2, 429, retry_after_s=1), send("y", 3, "?")),
        then(failed("y", 3, 429, retry_after_s=1), reject("y", 429, "overloaded")),
        at(1100, arrive("z"), send("z", 1, "?")),
        then(failed("z", 1, 429, retry_after_s=1), send("z", 2, "?")),
        then(started("z", 2)),
        counters={"retries": 19 + 2 + 1, "rejected": {"nodes_busy": 2}}, needs="retries_itself sets_the_clock",
    ),
    script(
        42, "a node that said it is busy comes after the others",
        fleet("a b c d"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(arrive("y", on="b"), send("y", 1, "b")),
        then(failed("y", 1, 429, retry_after_s=5), send("y", 2, "?")),
        then(cancel("y")),
        then(failed("x", 1, 500), send("x", 2, "c")),
        then(failed("x", 2, 500), send("x", 3, "d")),
        then(failed("x", 3, 500), send("x", 4, "b")),
        then(failed("x", 4, 500), reject("x", 502, "upstream_failed", "tried 4 nodes")),
        ends={"x": FAILED_ALL, "y": left()}, counters={"retries": 4, "disconnects": 1}, needs="retries_itself",
    ),
    script(
        "42b", "a node that answers 503 without Retry-After comes after the others for a second",
        fleet("a b c"),
        at(0, arrive("y"), send("y", 1, "a")),
        then(failed("y", 1, 503), send("y", 2, "?")),
        then(cancel("y")),
        then(arrive("x", on="b"), send("x", 1, "b")),
        then(failed("x", 1, 500), send("x", 2, "c")),
        then(failed("x", 2, 500), send("x", 3, "a")),
        states={"a": {"health": "up"}}, counters={"retries": 3, "disconnects": 1}, needs="retries_itself",
    ),
    script(
        43, "a failed and a busy node: the error names the time of the busy one",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 500), send("x", 2, "b")),
        then(failed("x", 2, 429, retry_after_s=5), reject("x", 502, "upstream_failed", "tried 2", retry_after_s=5)),
        ends={"x": rejected(502, "upstream_failed", "BUSY")}, outcomes={"a": "FAILED", "b": "BUSY"},
        counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        "44a", "two nodes at fault are each excused once: the call may be at fault",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 500), send("x", 2, "b")),
        then(failed("x", 2, 500), send("x", 3, "c")),
        then(failed("x", 3, 429), reject("x", 502, "upstream_failed")),
        states={"a": {"excused_failures": 1}, "b": {"excused_failures": 1}, "c": {"excused_failures": 0}},
        counters={"retries": 2}, needs="retries_itself",
    ),
    script(
        "44b", "one node at fault is not excused",
        fleet("a b c"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, 500), send("x", 2, "b")),
        then(failed("x", 2, 429), send("x", 3, "c")),
        then(failed("x", 3, 429), reject("x", 502, "upstream_failed")),
        states={name: {"excused_failures": 0} for name in "abc"}, counters={"retries": 2}, needs="retries_itself",
    ),
    script(
        45, "nodes of the conversation's island come first",
        fleet("a c", island="A") | fleet("b d", island="B"),
        at(0, arrive("v", on="a", prompt=1), send("v", 1, "a")),
        at(100, ended("v", 1)),
        at(200, arrive("x", prompt=1), send("x", 1, "a|c")),
        then(failed("x", 1, 500), send("x", 2, "a|c")),
        then(failed("x", 2, 500), send("x", 3, "b|d")),
        then(failed("x", 3, 500), send("x", 4, "b|d")),
        then(failed("x", 4, 500), reject("x", 502, "upstream_failed", "tried 4 nodes")),
        counters={"retries": 3, "responses": {200: 1}}, needs="retries_itself",
        ends={"v": answered(), "x": FAILED_ALL},
    ),
    script(
        46, "another 4xx goes to the client: no retry, and no tokens are charged",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(50, started("x", 1, 404)),
        then(ended("x", 1, 404)),
        ends={"x": answered(404, tried=1)}, outcomes={"a": "REJECTED"}, counters={"responses": {404: 1}},
        needs="retries_itself",
    ),
    script(
        47, "a refused connection takes every call off the node",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(0, arrive("y", on="a"), send("y", 1, "a")),
        at(5, failed("x", 1, REFUSED), withdraw("y", 1), send("x", 2, "b"), send("y", 2, "b")),
        outcomes={"a": "FAILED FAILED"}, counters={"retries": 2}, states={"a": {"health": "down"}},
        needs="retries_itself",
    ),
    script(
        48, "a connection that fails for the moment moves the call, and the node stays up",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(5, failed("x", 1, TRANSIENT), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, states={"a": {"health": "up"}}, needs="retries_itself",
    ),
    script(
        49, "a node that is silent for too long is left",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, failed("x", 1, SILENT), send("x", 2, "b")),
        outcomes={"a": "FAILED"}, counters={"retries": 1}, needs="retries_itself", upstream=PATIENCE,
    ),
    moves_on("50a", "a head without a byte of its body is no first byte: the node closes", CLOSED, "closes after head"),
    moves_on("50b", "a head without a byte of its body is no first byte: the node hangs", SILENT, "hangs after head"),
    *(
        moves_on(f"51{letter}", f"an answer that is not HTTP: {how}", MALFORMED, how)
        for letter, how in zip("abcde", MALFORMED_ANSWERS, strict=True)
    ),
    script(
        52, "a kept connection that was closed meanwhile costs the call no try",
        fleet("a"),
        at(0, arrive("w"), send("w", 1, "a")),
        at(100, ended("w", 1)),
        at(200, arrive("x"), send("x", 1, "a")),
        at(300, ended("x", 1, how="the kept connection closes first")),
        upstream={"max_attempts": 1}, ends={"w": answered(), "x": answered(tried=1)}, outcomes={"a": "OK OK"},
        counters={"responses": {200: 2}}, needs="retries_itself has_sockets",
    ),
    script(
        53, "a connection that was kept and closes twice is a failure",
        fleet("a"),
        at(0, arrive("w"), send("w", 1, "a")),
        at(100, ended("w", 1)),
        at(200, arrive("x"), send("x", 1, "a")),
        at(210, failed("x", 1, CLOSED, how="closes twice"), reject("x", 502, "upstream_failed", "tried 1 node")),
        ends={"w": answered(), "x": FAILED_ALL}, counters={"responses": {200: 1}}, outcomes={"a": "OK FAILED"},
        needs="retries_itself has_sockets",
    ),
    script(
        "54a", "a lack of the router's own files or ports is no failure of the node",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, LOCAL), send("x", 2, "b")),
        outcomes={"a": "BUSY"}, counters={"retries": 1}, states={"a": {"health": "up"}}, needs="retries_itself",
    ),
    script(
        "54b", "a lack of the router's own files or ports at every node is its own error",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        then(failed("x", 1, LOCAL), send("x", 2, "b")),
        then(failed("x", 2, LOCAL), reject("x", 503, "router_out_of_resources")),
        ends={"x": rejected(503, "router_out_of_resources", "BUSY")}, outcomes={"a": "BUSY", "b": "BUSY"},
        counters={"retries": 1}, needs="retries_itself",
    ),
    script(
        55, "a call for some of the nodes goes to no other one",
        fleet("a b"),
        at(0, arrive("x", subset=("a",)), send("x", 1, "a")),
        then(failed("x", 1, 500), reject("x", 502, "upstream_failed", "tried 1 node")),
        ends={"x": FAILED_ALL}, outcomes={"a": "FAILED"}, needs="retries_itself",
    ),
    *(
        script(
            f"56{letter}", f"a call that may not be repeated ends with the node that may have begun it ({status})",
            fleet("a b"),
            at(0, arrive("x", repeatable=False), send("x", 1, "a")),
            at(100, failed("x", 1, status), reject("x", 502, "upstream_failed", "tried 1 node")),
            ends={"x": FAILED_ALL}, outcomes={"a": "FAILED"}, needs="retries_itself", upstream=PATIENCE,
        )
        for letter, status in REPEATABLE
    ),
    *(
        script(
            f"56{letter}", f"a call that may not be repeated goes on where the node has not begun it ({status})",
            fleet("a b"),
            at(0, arrive("x", repeatable=False), send("x", 1, "a")),
            at(100, failed("x", 1, status), send("x", 2, "b")),
            counters={"retries": 1}, needs="retries_itself",
        )
        for letter, status in NEVER_BEGUN
    ),
    script(
        "57a", "informational answers are skipped",
        fleet("a"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, ended("x", 1, how="as many 1xx as are allowed")),
        ends={"x": answered()}, counters={"responses": {200: 1}}, needs="retries_itself has_sockets",
    ),
    moves_on("57b", "too many informational answers are no HTTP", MALFORMED, "too many 1xx"),
    script(
        58, "a whole answer in one piece",
        fleet("a"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(200, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(reported=(1000, 0, 10), first_token_ms=200)}, outcomes={"a": "OK"},
        counters={"responses": {200: 1}}, needs="retries_itself",
    ),
    script(
        59, "the first token counts, not the role that comes before it",
        fleet("a"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, started("x", 1)),
        at(300, first_token("x", 1)),
        at(1000, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(reported=(1000, 0, 10), first_token_ms=300)}, counters={"responses": {200: 1}},
    ),
    script(
        60, "an answer that is not streamed has its first token at its end",
        fleet("a"),
        at(0, arrive("x", streams=False), send("x", 1, "a")),
        until(2000),
        at(2000, ended("x", 1, usage=(1000, 0, 10))),
        ends={"x": answered(reported=(1000, 0, 10), first_token_ms=2000)}, counters={"responses": {200: 1}},
        outcomes={"a": "OK"}, needs="retries_itself",
    ),
    script(
        61, "an answer that breaks off is not sent again",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, started("x", 1)),
        then(first_token("x", 1)),
        at(200, failed("x", 1, CLOSED, broke=True)),
        ends={"x": End("BROKEN", 200, "estimate", tried=1)}, outcomes={"a": "BROKEN"}, counters={"interrupted": 1},
        needs="retries_itself",
    ),
    script(
        62, "an answer that is silent for too long in its middle has broken off",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(50, started("x", 1)),
        at(150, failed("x", 1, SILENT, broke=True)),
        ends={"x": End("BROKEN", 200, "estimate")}, outcomes={"a": "BROKEN"}, counters={"interrupted": 1},
        needs="retries_itself", upstream=PATIENCE,
    ),
    script(
        63, "a client that leaves frees the node, and no other one is asked",
        fleet("a b"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, cancel("x")),
        ends={"x": left(tried=1)}, outcomes={"a": "CANCELLED"}, counters={"disconnects": 1},
        states={"a": {"health": "up"}},
    ),
    script(
        64, "a client that leaves after the last event has its answer",
        fleet("a"),
        at(0, arrive("x"), send("x", 1, "a")),
        at(100, started("x", 1)),
        then(first_token("x", 1)),
        at(200, ended("x", 1, usage=(1000, 0, 10), how="the client leaves after the last event")),
        ends={"x": answered(reported=(1000, 0, 10))}, outcomes={"a": "OK"}, counters={"responses": {200: 1}},
    ),
)
# fmt: on
