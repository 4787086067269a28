"""93–113: one node prefills a call, and another one decodes its answer.

With vLLM the decode node gets its request when the prefill node has answered; until then its ticket is reserved. With
SGLang both get their requests at once, and the decode node cannot prefill: it needs a partner.
"""

from __future__ import annotations

from typing import Final

from seam.script import (
    Expected,
    Line,
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
    left,
    prefilled,
    refuses,
    reject,
    reserve,
    script,
    send,
    started,
    then,
    undrained,
    until,
    withdraw,
)
from warmroute.core.messages import CLOSED, ERROR_EVENT, REFUSED, Role

VLLM: Final = fleet(prefill="p", decode="d e", engine="vllm")
SGLANG: Final = fleet(prefill="p", decode="d", engine="sglang")
TWO_PREFILL: Final = fleet(prefill="p q", decode="d", engine="sglang")
HEDGING: Final = {"min_delay_s": 1.0}
DECODE: Final = Role.DECODE
PREFILL_USAGE: Final = (2000, 512, 1)


def prefill(call: str, try_: int, node: str, decode_node: str) -> Expected:
    return send(call, try_, node, Role.PREFILL, kv_from=decode_node)


def decode(call: str, try_: int, node: str, kv_from: int, prefill_node: str = "p") -> Expected:
    return send(call, try_, node, DECODE, kv_from=kv_from, prefill_node=prefill_node)


def both(call: str, try_: int, node: str, decode_node: str) -> tuple[Expected, Expected]:
    """With SGLang."""
    return (
        prefill(call, try_, node, decode_node),
        send(call, try_ + 1, decode_node, DECODE, kv_from=try_, prefill_node=node, needs_partner=True),
    )


def arrives(call: str = "x", tokens: int = 2000, decode_node: str = "d", **fields: object) -> Line:
    return at(0, arrive(call, tokens=tokens, **fields), prefill(call, 1, "p", decode_node))  # type: ignore[arg-type]


PREFILLING: Final = arrives()
TRANSFERRING: Final = (PREFILLING, at(200, prefilled("x", 1, usage=PREFILL_USAGE), decode("x", 2, "d", kv_from=1)))
SERVED: Final = answered(tried=1, reported=(2000, 512, 40))


def serves(call: str, try_: int) -> Line:
    return then(ended(call, try_, usage=(2000, 0, 40)))


# fmt: off
SCRIPTS: Final[tuple[Script, ...]] = (
    script(
        93, "the decode request follows the prefill",
        VLLM,
        PREFILLING,
        at(200, prefilled("x", 1, usage=PREFILL_USAGE), decode("x", 2, "d", kv_from=1)),
        at(250, started("x", 2)),
        then(first_token("x", 2)),
        at(1250, ended("x", 2, usage=(2000, 0, 40))),
        hedging=HEDGING, ends={"x": answered(tried=1, reported=(2000, 512, 40))}, outcomes={"p": "OK", "d": "OK"},
        counters={"responses": {200: 1}, "split_requests": {"transferred": 1}}, needs="retries_itself",
    ),
    script(
        94, "the decode node is chosen again when the prompt is prefilled",
        VLLM,
        arrives(tokens=30_000),
        *(
            line
            for call in ("v1", "v2")
            for line in (
                then(arrive(call, on="d", tokens=90_000), send(call, 1, "d")),
                then(first_token(call, 1)),
            )
        ),
        at(2000, prefilled("x", 1, usage=(30_000, 512, 1)), decode("x", 3, "e", kv_from=1)),
        then(ended("x", 3, usage=(30_000, 0, 40))),
        hedging={"min_delay_s": 10.0}, ends={"x": answered(tried=1, reported=(30_000, 512, 40))},
        outcomes={"p": "OK", "d": "CANCELLED", "e": "OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"transferred": 1}},
    ),
    *(
        script(
            f"95{letter}", f"the decode node prefills if the prefill node answers {status}",
            VLLM,
            PREFILLING,
            at(100, failed("x", 1, status), send("x", 3, "d")),
            serves("x", 3),
            hedging=HEDGING, ends={"x": answered(tried=1, reported=(2000, 0, 40))},
            outcomes={"p": outcome, "d": "CANCELLED OK"}, needs="retries_itself",
            counters={"responses": {200: 1}, "split_requests": {"prefill_failed": 1}},
        )
        for letter, status, outcome in (("a", 500, "FAILED"), ("b", 503, "BUSY"), ("c", 400, "REJECTED"))
    ),
    script(
        "95d", "an answer of the prefill node that comes too late is ignored",
        VLLM,
        PREFILLING,
        at(100, failed("x", 1, 500), send("x", 3, "d")),
        then(prefilled("x", 1)),
        serves("x", 3),
        hedging=HEDGING, ends={"x": answered(tried=1, reported=(2000, 0, 40))}, needs="retries_itself late_answers",
        counters={"responses": {200: 1}, "split_requests": {"prefill_failed": 1}},
    ),
    script(
        96, "the decode nodes prefill if the prefill node refuses connections",
        fleet(prefill="p", decode="d", engine="vllm"),
        PREFILLING,
        arrives("y"),
        at(100, failed("x", 1, REFUSED), send("x", 3, "d"), withdraw("y", 1), send("y", 3, "d")),
        hedging=HEDGING, outcomes={"p": "FAILED FAILED", "d": "CANCELLED CANCELLED"}, states={"p": {"health": "down"}},
        counters={"split_requests": {"prefill_failed": 2}}, needs="retries_itself",
    ),
    script(
        "97a", "an answer without KV transfer parameters: the node prefills for no other one for a minute",
        fleet(prefill="p", decode="d", engine="vllm"),
        PREFILLING,
        at(100, prefilled("x", 1, has_transfer=False), send("x", 3, "d")),
        then(ended("x", 3, usage=(2000, 0, 40))),
        at(1000, arrive("y", tokens=2000), send("y", 1, "d")),
        then(ended("y", 1, usage=(2000, 0, 40))),
        at(61_100, arrive("z", tokens=2000), prefill("z", 1, "p", "d")),
        hedging=HEDGING, ends={"x": answered(tried=1, reported=(2000, 0, 40))}, needs="retries_itself sets_the_clock",
        counters={"responses": {200: 2}, "split_requests": {"not_supported": 1}},
    ),
    script(
        "97b", "an answer without KV transfer parameters that has ended: the node is asked again",
        fleet(prefill="p", decode="d", engine="vllm"),
        PREFILLING,
        at(100, prefilled("x", 1, has_transfer=False, is_unfinished=False), send("x", 3, "d")),
        then(ended("x", 3, usage=(2000, 0, 40))),
        at(1000, arrive("y", tokens=2000), prefill("y", 1, "p", "d")),
        hedging=HEDGING, ends={"x": answered(tried=1, reported=(2000, 0, 40))}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"not_supported": 1}},
    ),
    script(
        98, "a failed transfer is not the decode node's failure; the next one is",
        VLLM,
        *TRANSFERRING,
        at(300, failed("x", 2, 500), send("x", 3, "d")),
        at(400, failed("x", 3, 500), send("x", 4, "e")),
        serves("x", 4),
        hedging=HEDGING, ends={"x": answered(tried=2, reported=(2000, 0, 40))}, needs="retries_itself",
        outcomes={"p": "OK", "d": "CANCELLED FAILED", "e": "OK"},
        counters={"responses": {200: 1}, "split_requests": {"transfer_failed": 1}, "retries": 1},
    ),
    script(
        99, "another decode node gets the same KV cache if nothing was sent to the first one",
        VLLM,
        *TRANSFERRING,
        at(210, failed("x", 2, REFUSED), decode("x", 3, "e", kv_from=1)),
        serves("x", 3),
        hedging=HEDGING, outcomes={"p": "OK", "d": "FAILED", "e": "OK"}, states={"d": {"health": "down"}},
        counters={"responses": {200: 1}, "split_requests": {"transferred": 1}, "retries": 1},
        ends={"x": answered(reported=(2000, 512, 40))}, needs="retries_itself",
    ),
    script(
        100, "another decode node starts over if the KV cache may be released",
        VLLM,
        *TRANSFERRING,
        at(300, failed("x", 2, CLOSED), prefill("x", 3, "p", "e")),
        at(400, prefilled("x", 3, usage=PREFILL_USAGE), decode("x", 4, "e", kv_from=3)),
        serves("x", 4),
        hedging=HEDGING, outcomes={"p": "OK OK", "d": "FAILED", "e": "OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"transferred": 1, "decode_failed": 1}, "retries": 1},
        ends={"x": answered(tried=2, reported=(2000, 512, 40))},
    ),
    script(
        101, "a prefill node that drains gets no call a second time",
        VLLM,
        *TRANSFERRING,
        at(250, drained("p")),
        at(300, failed("x", 2, CLOSED), send("x", 3, "e")),
        serves("x", 3),
        hedging=HEDGING, outcomes={"p": "OK", "d": "FAILED", "e": "OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"decode_failed": 1}, "retries": 1},
        ends={"x": answered(tried=2, reported=(2000, 0, 40))},
    ),
    script(
        102, "a decode node that goes down during the prefill is replaced",
        VLLM,
        PREFILLING,
        at(100, refuses("d"), reserve("x", 3, "e")),
        at(200, prefilled("x", 1, usage=PREFILL_USAGE), decode("x", 3, "e", kv_from=1)),
        serves("x", 3),
        hedging=HEDGING, outcomes={"p": "OK", "d": "CANCELLED", "e": "OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"transferred": 1}, "retries": 1},
        ends={"x": answered(tried=1, reported=(2000, 512, 40))},
    ),
    script(
        "103a", "a client that leaves during the prefill frees both nodes",
        VLLM,
        PREFILLING,
        at(100, cancel("x")),
        then(prefilled("x", 1)),
        hedging=HEDGING, ends={"x": left(tried=1)}, outcomes={"p": "CANCELLED", "d": "CANCELLED"},
        counters={"disconnects": 1}, needs="retries_itself late_answers",
    ),
    script(
        "103b", "a client that leaves during the transfer frees the decode node",
        VLLM,
        *TRANSFERRING,
        at(300, cancel("x")),
        hedging=HEDGING, ends={"x": left(tried=1)}, outcomes={"p": "OK", "d": "CANCELLED"},
        counters={"disconnects": 1}, needs="retries_itself",
    ),
    script(
        104, "a prefill node that hangs is left",
        fleet(prefill="p", decode="d", engine="vllm"),
        *(
            line
            for number, call in enumerate(("u", "v", "w"))
            for line in (
                at(200 * number, arrive(call, tokens=2000), prefill(call, 1, "p", "d")),
                at(200 * number + 100, prefilled(call, 1), decode(call, 2, "d", kv_from=1)),
                then(ended(call, 2, usage=(2000, 0, 40))),
            )
        ),
        at(1000, arrive("x", tokens=2000), prefill("x", 1, "p", "d")),
        until(1500),
        until(31_000, withdraw("x", 1), send("x", 3, "d")),
        hedging=HEDGING, outcomes={"p": "OK OK OK FAILED", "d": "OK OK OK CANCELLED"},
        counters={"responses": {200: 3}, "split_requests": {"transferred": 3, "prefill_slow": 1}},
        needs="retries_itself sets_the_clock",
    ),
    script(
        105, "a transfer that hangs is given up",
        fleet(prefill="p", decode="d", engine="vllm"),
        *TRANSFERRING,
        until(60_000, withdraw("x", 2), send("x", 3, "d")),
        hedging={**HEDGING, "max_ratio": 0.0}, outcomes={"p": "OK", "d": "CANCELLED"},
        counters={"split_requests": {"transfer_failed": 1}}, needs="retries_itself sets_the_clock",
    ),
    script(
        106, "a decode node that needs a partner gets the next one after a failure",
        TWO_PREFILL,
        at(0, arrive("x", tokens=2000), *both("x", 1, "p", "d")),
        at(100, failed("x", 1, 500), withdraw("x", 2), *both("x", 3, "q", "d")),
        at(200, prefilled("x", 3, usage=PREFILL_USAGE)),
        then(started("x", 4)),
        serves("x", 4),
        hedging=HEDGING, outcomes={"p": "FAILED", "q": "OK", "d": "CANCELLED OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"prefill_failed": 1, "transferred": 1}},
        ends={"x": answered(tried=2, reported=(2000, 512, 40))},
    ),
    script(
        "107a", "a decode node that needs a partner gets nothing without one",
        SGLANG,
        at(0, arrive("x", tokens=2000), *both("x", 1, "p", "d")),
        at(100, failed("x", 1, 500), withdraw("x", 2), reject("x", 503, "no_node_available")),
        hedging=HEDGING, outcomes={"p": "FAILED", "d": "CANCELLED"}, needs="retries_itself",
        counters={"split_requests": {"prefill_failed": 1}},
    ),
    script(
        "107b", "a call whose decode node finds no partner goes to a node that needs none",
        SGLANG | fleet("m", engine="sglang"),
        at(0, drained("m")),
        then(arrive("x", tokens=2000), *both("x", 1, "p", "d")),
        at(50, undrained("m")),
        at(100, failed("x", 1, 500), withdraw("x", 2), send("x", 3, "m")),
        hedging=HEDGING, outcomes={"p": "FAILED", "d": "CANCELLED"}, needs="retries_itself",
        counters={"split_requests": {"prefill_failed": 1}, "retries": 1},
    ),
    script(
        108, "max_attempts counts partners, too",
        fleet(prefill="p q r", decode="d", engine="sglang"),
        at(0, arrive("x", tokens=2000), *both("x", 1, "p", "d")),
        at(100, failed("x", 1, 500), withdraw("x", 2), reject("x", 502, "upstream_failed")),
        hedging=HEDGING, upstream={"max_attempts": 1}, outcomes={"p": "FAILED", "d": "CANCELLED"},
        needs="retries_itself", counters={"split_requests": {"prefill_failed": 1}},
    ),
    script(
        109, "a late call is not sent to its decode node alone",
        fleet(prefill="p", decode="d", engine="vllm"),
        arrives(deadline_ms=1000),
        at(1500, failed("x", 1, 500), reject("x", 502, "upstream_failed")),
        hedging=HEDGING, outcomes={"p": "FAILED", "d": "CANCELLED"}, needs="retries_itself",
        counters={"split_requests": {"prefill_failed": 1}},
    ),
    script(
        110, "a 4xx of a decode node that needs a partner passes, and says nothing about speeds",
        SGLANG,
        at(0, arrive("x", tokens=2000), *both("x", 1, "p", "d")),
        at(100, started("x", 2, 400)),
        then(ended("x", 2, 400)),
        hedging=HEDGING, ends={"x": answered(400)}, outcomes={"p": "CANCELLED", "d": "REJECTED"},
        counters={"responses": {400: 1}}, needs="retries_itself",
    ),
    script(
        111, "a mixed node that prefilled serves the whole call after a failure of the decode node",
        fleet("m", engine="vllm", kv_connector=True, cache_tokens=400_000) | fleet(decode="d", engine="vllm"),
        at(0, arrive("x", tokens=2000), prefill("x", 1, "m", "d")),
        at(200, prefilled("x", 1), decode("x", 2, "d", kv_from=1, prefill_node="m")),
        at(300, failed("x", 2, 503), send("x", 3, "m")),
        serves("x", 3),
        hedging=HEDGING, outcomes={"m": "OK OK", "d": "BUSY"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"decode_failed": 1}, "retries": 1},
        ends={"x": answered(tried=2, reported=(2000, 0, 40))},
    ),
    script(
        112, "a 4xx during the transfer: the decode node gets the call alone, and its own 4xx passes",
        VLLM,
        *TRANSFERRING,
        at(300, failed("x", 2, 400), send("x", 3, "d")),
        at(400, started("x", 3, 400)),
        then(ended("x", 3, 400)),
        hedging=HEDGING, ends={"x": answered(400, tried=1)}, outcomes={"p": "OK", "d": "CANCELLED REJECTED"},
        counters={"responses": {400: 1}, "split_requests": {"transfer_failed": 1}}, needs="retries_itself",
    ),
    script(
        "113a", "a stream that begins with an error event: the decode node gets the call alone",
        VLLM,
        *TRANSFERRING,
        at(300, failed("x", 2, ERROR_EVENT, how="a role, then an error event"), send("x", 3, "d")),
        serves("x", 3),
        hedging=HEDGING, outcomes={"p": "OK", "d": "CANCELLED OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "split_requests": {"transfer_failed": 1}},
        ends={"x": answered(tried=1, reported=(2000, 0, 40))},
    ),
    script(
        "113b", "a stream that closes after the role: another decode node starts over",
        VLLM,
        *TRANSFERRING,
        at(300, failed("x", 2, CLOSED, how="closes after a role"), prefill("x", 3, "p", "e")),
        at(400, prefilled("x", 3, usage=PREFILL_USAGE), decode("x", 4, "e", kv_from=3)),
        serves("x", 4),
        hedging=HEDGING, outcomes={"p": "OK OK", "d": "FAILED", "e": "OK"}, needs="retries_itself",
        counters={"responses": {200: 1}, "retries": 1, "split_requests": {"decode_failed": 1, "transferred": 1}},
        ends={"x": answered(reported=(2000, 512, 40))},
    ),
)
# fmt: on
