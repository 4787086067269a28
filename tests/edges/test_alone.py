"""An edge without a brain (edge/alone.py): which node it chooses, and what it rejects."""

from __future__ import annotations

from collections import Counter

from warmroute.core.messages import (
    REFUSED,
    Arrive,
    Cancel,
    Charge,
    Ended,
    Failed,
    FirstToken,
    Left,
    NodeRow,
    OpenTry,
    Reject,
    Resume,
    Role,
    RoutingRequest,
    Send,
    Tables,
    Withdraw,
)
from warmroute.edge.alone import ALONE_MAX_S, FIRST_TRY, Alone


def tables(nodes: int = 4, edges: int = 1, max_inflight: int = 0) -> Tables:
    rows = {
        number: NodeRow(number, f"n{number}", "http", "127.0.0.1", 8000 + number, "", "vllm", "mixed", 0, max_inflight)
        for number in range(1, nodes + 1)
    }
    return Tables(nodes=rows, serving={"m": tuple(rows)}, only_model="m", edges=edges)


def arrive(number: int, text: str = "a", **more: object) -> Arrive:
    fields: dict[str, object] = {"model": "m", "system": text.encode(), "user": b"hi", "tenant": "t"}
    return Arrive(number, b"id", RoutingRequest(**(fields | more)))  # type: ignore[arg-type]


def sent(edge: Alone, event: Arrive, now_s: float = 0.0) -> Send:
    [command] = edge.handle(event, now_s)
    assert isinstance(command, Send) and command.id == event.id and command.try_ > FIRST_TRY
    return command


def rejected(edge: Alone, event: Arrive | Charge | Failed, now_s: float = 0.0) -> Reject:
    [command] = edge.handle(event, now_s)
    assert isinstance(command, Reject) and command.id == event.id
    return command


def test_prompts_that_begin_alike_go_to_one_node_until_it_has_more_than_its_share() -> None:
    edge = Alone(tables(), {}, 0.0)
    nodes = []
    for number, text in enumerate("abcdefgh" * 3, 1):
        command = sent(edge, arrive(number, text))
        nodes.append(command.node)
        edge.handle(Ended(number, command.try_, 200, 1.0, None), 0.0)
    assert nodes[:8] == nodes[8:16] == nodes[16:], "nothing runs: each prompt has its node"
    counts = Counter(sent(edge, arrive(100 + number, "a")).node for number in range(40))
    assert len(counts) == 4 and max(counts.values()) <= 13, "one prompt alone does not overload its node"


def test_two_edges_choose_the_same_node() -> None:
    for text in "abcdefgh":
        assert (
            sent(Alone(tables(), {}, 0.0), arrive(1, text)).node == sent(Alone(tables(), {}, 0.0), arrive(9, text)).node
        )


def test_a_node_that_fails_is_not_asked_again_and_after_three_the_client_gets_an_error() -> None:
    edge = Alone(tables(), {}, 0.0)
    command, seen = sent(edge, arrive(1)), set[int]()
    for _ in range(2):
        seen.add(command.node)
        [again] = edge.handle(Failed(1, command.try_, REFUSED, "refused"), 0.0)
        assert isinstance(again, Send) and again.node not in seen and again.role is Role.MOVE
        command = again
    assert rejected(edge, Failed(1, command.try_, 500, "")).status == 503
    assert edge.handle(Failed(1, command.try_, 500, ""), 0.0) == ()


def test_a_request_that_a_node_may_have_begun_is_not_repeated_where_it_must_not_be() -> None:
    edge = Alone(tables(), {}, 0.0)
    event = arrive(1)
    event.repeatable = False
    command = sent(edge, event)
    assert rejected(edge, Failed(1, command.try_, 500, "")).code == "upstream_failed"


def test_models_subsets_and_full_nodes() -> None:
    edge = Alone(tables(max_inflight=1), {}, 0.0)
    assert rejected(edge, arrive(1, model="unknown")).code == "model_not_found"
    assert sent(edge, arrive(2, subset=frozenset({"n3"}))).node == 3
    assert rejected(edge, arrive(3, subset=frozenset({"n3"}))).code == "no_node_available", "it has its request"
    for number in range(4, 7):
        sent(edge, arrive(number))
    assert rejected(edge, arrive(8)).status == 503
    edge.handle(Cancel(5, Left.LEFT), 0.0)
    sent(edge, arrive(9))


def test_an_edge_spends_its_part_of_a_limit() -> None:
    edge = Alone(tables(edges=4), {"t": (40, 0)}, 0.0)
    request = RoutingRequest("m", tenant="t")
    assert all(edge.handle(Charge(number, 10, True, request), 0.0) == () for number in range(10))
    found = rejected(edge, Charge(10, 10, True, request))
    assert (found.status, found.code) == (429, "rate_limit_exceeded") and (found.retry_after_s or 0) >= 6
    assert edge.handle(Charge(11, 10, True, request), 6.1) == (), "one of its ten came back"
    assert edge.handle(Charge(12, 10, True, RoutingRequest("m", tenant="free")), 6.1) == ()


def test_after_a_minute_every_new_request_is_rejected() -> None:
    edge = Alone(tables(), {}, 0.0)
    sent(edge, arrive(1), ALONE_MAX_S - 1.0)
    assert rejected(edge, arrive(2), ALONE_MAX_S + 1.0).code == "no_brain"


def test_calls_that_have_a_node_stay_there_and_those_that_wait_get_one() -> None:
    edge = Alone(tables(max_inflight=1), {}, 0.0)
    running = Resume(arrive(1), (OpenTry(3, Role.FIRST, "n2", 0.0, 200),))
    assert edge.take_over(running, 0.0) == ()
    [command] = edge.take_over(Resume(arrive(2)), 0.0)
    assert isinstance(command, Send) and command.node != 2, "n2 has a request"
    withdrawn, again = edge.take_over(Resume(arrive(3), (OpenTry(1, Role.PREFILL, "n1", 0.0),)), 0.0)
    assert isinstance(withdrawn, Withdraw) and isinstance(again, Send)
    edge.handle(FirstToken(1, 3, 200), 0.0)
    edge.handle(Ended(1, 3, 200, 0.0, None), 0.0)
    assert edge.handle(Ended(1, 3, 200, 0.0, None), 0.0) == ()
    assert sent(edge, arrive(4, subset=frozenset({"n2"}))).node == 2
