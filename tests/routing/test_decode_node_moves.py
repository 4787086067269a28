"""A request whose decode node is chosen again: what the first one, the peers and the learned speeds keep of it."""

from __future__ import annotations

import pytest
from routing_harness import FakeRequest, prompt
from split_harness import SplitHarness, other

from warmroute._kernel import pack_load_rows
from warmroute.core.messages import CLOSED
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import LATENCY_MS
from warmroute.core.tickets import DecodeTicket


class Moves(SplitHarness):
    """Requests that leave their decode node, which gets three long contexts meanwhile."""

    def move(self, request: FakeRequest) -> list[Ticket]:
        """End the prefill, so that the request moves. Return the tickets of the long contexts."""
        first = request.main.node
        running = [self.send(first, prompt(90_000)) for _ in range(3)]
        for ticket in running:
            ticket.first_token(self.now_s, False)
        self.advance(2.0)
        request.prefilled()
        assert request.node.name == other(first.name)
        return running

    def end(self, request: FakeRequest, running: list[Ticket]) -> None:
        for ticket in running:
            self.close(ticket)
        self.finish(request)
        assert self.node("p0").transfer_tokens == pytest.approx(0.0)


def test_a_moved_request_does_not_hide_older_ones_from_hedging() -> None:
    harness = Moves(prefill=2)
    moving = harness.submit_split(30_000)
    harness.advance(0.1)
    older = harness.submit_split(30_000)
    running = harness.move(moving)
    assert list(harness.brain.waiting) == [older.call, moving.call], "in the order in which their tickets were opened"
    older.cancel()
    harness.end(moving, running)


def test_the_transfer_speed_is_learned_with_the_tokens_that_the_new_node_lacks() -> None:
    harness = Moves()
    for name in ("d0", "d1"):
        harness.fleet.drain(name, name == "d1")
    warm = harness.submit_split(prompt(24_000, 5))
    warm.prefilled()
    harness.finish(warm)
    harness.advance(60.0)
    request = harness.submit_split(prompt(30_000, 5))
    assert request.main.node.name == "d0" and request.split.pair.transfer_tokens < 10_000.0
    before_ms = request.split.pair.transfer_ms
    harness.fleet.drain("d1", False)
    request.split.decision.query.candidates = harness.fleet.group("m").up  # type: ignore[union-attr]
    running = harness.move(request)
    assert request.split.pair.transfer_tokens == harness.node("p0").transfer_tokens == 30_000.0
    assert request.split.pair.transfer_ms > before_ms
    group = harness.fleet.group("m")
    assert group is not None
    speed = group.transfer_speeds.between("local", "local")
    ms_per_token = speed.ms_per_token(harness.now_s)
    harness.advance((LATENCY_MS + 30_000 * ms_per_token) / 1000.0)
    harness.end(request, running)
    assert speed.ms_per_token(harness.now_s) == pytest.approx(ms_per_token, rel=0.1), "it took as long as expected"


def test_a_decode_node_that_replaces_a_failed_one_has_its_own_transfer() -> None:
    harness = Moves()
    harness.fleet.drain("d1")
    warm = harness.submit_split(prompt(24_000, 5))
    warm.prefilled()
    harness.finish(warm)
    harness.fleet.drain("d1", False)
    request = harness.submit_split(prompt(30_000, 5))
    assert request.main.node.name == "d0"
    split = request.split
    harness.fleet.check_failed(harness.node("d0"), harness.now_s, "connection refused")
    harness.settle()
    assert request.main.node.name == "d1" and request.split is split
    assert request.split.pair.transfer_tokens == harness.node("p0").transfer_tokens == 30_000.0
    request.prefilled()
    harness.end(request, [])


def test_peers_learn_only_of_the_node_that_decodes() -> None:
    harness = Moves()
    log = harness.cache_view.routed_log = []
    request = harness.submit_split(30_000)
    assert [one[0] for one in log] == ["p0"]
    running = harness.move(request)
    told = [one[0] for one in log if one[1] == log[0][1]]
    assert told == ["p0", request.main.node.name]
    harness.end(request, running)


def test_a_decode_node_that_fails_before_it_decodes_is_not_told_to_peers() -> None:
    harness = Moves(decode=1)
    log = harness.cache_view.routed_log = []
    request = harness.submit_split(30_000)
    request.prefill_fails()
    assert [one[0] for one in log] == ["p0", "d0"], "d0 prefills the prompt itself"
    harness.finish(request)


@pytest.mark.interpreted
def test_a_moved_request_is_counted_once_and_is_no_try_of_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Moves()
    request = harness.submit_split(prompt(30_000, 5), kept="history")
    first, ticket = request.main.node, request.ticket
    assert isinstance(ticket, DecodeTicket) and ticket.prediction is not None
    sampled = ticket.prediction.sampled_blocks
    chains: list[bytes] = []
    record = harness.cache_view.reuse.record

    def noting(chain: bytes, now_s: float) -> tuple[int, int]:
        chains.append(chain)
        return record(chain, now_s)

    monkeypatch.setattr(harness.cache_view.reuse, "record", noting)
    running = harness.move(request)
    assert len(chains) == len(running), "only the other requests"
    moved = request.ticket
    assert isinstance(moved, DecodeTicket) and moved.prediction is not None and sampled
    assert moved.prediction.sampled_blocks == sampled
    harness.end(request, running)
    assert request.call.history is not None
    assert first.name not in [one.node for one in request.call.history.tries]


def published(harness: SplitHarness) -> list[str]:
    names, _rows = pack_load_rows(harness.fleet.by_name, harness.cache_view.by_name, False, 100)
    return list(names)


def test_peers_learn_of_the_context_when_decoding_begins() -> None:
    harness = SplitHarness(decode=1)
    request = harness.submit_split(30_000)
    assert set(published(harness)) == {"p0", "d0"} and not published(harness)
    request.prefilled()
    assert "d0" in published(harness)
    harness.finish(request)


def context(node: Node) -> int:
    return node.context_tokens


def test_a_context_counts_from_the_beginning_where_the_node_is_not_chosen_again() -> None:
    sglang = SplitHarness(decode=1, engine="sglang")
    request = sglang.submit_split(30_000)
    assert context(sglang.node("d0")) > 30_000, "long prompts do not stack on one node"
    request.prefilled()
    assert context(sglang.node("d0")) > 30_000
    sglang.finish(request)
    vllm = SplitHarness()
    request = vllm.submit_split(30_000)
    assert context(request.main.node) < 1000, "chosen again by price"
    request.prefilled()
    request.fail(CLOSED)
    assert request.events[-1].startswith("prefill p0") and context(request.main.node) > 30_000, "the second one is not"
    request.prefilled()
    vllm.finish(request)
