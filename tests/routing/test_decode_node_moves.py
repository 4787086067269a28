"""A request whose decode node is chosen again: what the first one, the peers and the learned speeds keep of it."""

from __future__ import annotations

import pytest
from attempt_harness import NotingDriver
from routing_harness import prompt
from split_harness import TRANSFER, SplitHarness, other

from warmroute._kernel import pack_load_rows
from warmroute.core.calls import Attempts, SplitRequest
from warmroute.core.messages import Outcome, RoutingRequest
from warmroute.core.node import Node, Ticket
from warmroute.core.speeds import LATENCY_MS
from warmroute.core.tickets import AttemptHistory, DecodeDispatch


class Moves(SplitHarness):
    """Requests that leave their decode node, which gets three long contexts meanwhile."""

    def split_with(self, number: int, tokens: int) -> tuple[Attempts, NotingDriver, SplitRequest]:
        """Split a request with a numbered prompt."""
        driver = NotingDriver()
        request = RoutingRequest("m", arrived_s=self.now_s, streams=True, may_split=True)
        attempts = Attempts(self.dispatcher, driver, request, b"")
        attempts.history = AttemptHistory()
        attempts.enter(prompt(tokens, number), tokens, self.now_s)
        assert attempts.split is not None
        return attempts, driver, attempts.split

    def move(self, attempts: Attempts, split: SplitRequest) -> list[Ticket]:
        """End the prefill, so that the request moves. Return the tickets of the long contexts."""
        first = attempts.ticket.node
        running = [self.send(first, prompt(90_000)) for _ in range(3)]
        for ticket in running:
            ticket.first_token(self.now_s, False)
        self.advance(2.0)
        split.prefill_ended(TRANSFER, None, self.now_s)
        assert attempts.ticket.node.name == other(first.name)
        return running

    def end(self, attempts: Attempts, running: list[Ticket]) -> None:
        for ticket in running:
            self.close(ticket)
        self.finish(attempts)
        assert self.node("p0").transfer_tokens == pytest.approx(0.0)


def test_a_moved_request_does_not_hide_older_ones_from_hedging() -> None:
    harness = Moves(prefill=2)
    moving, _driver, split = harness.split(30_000)
    harness.advance(0.1)
    older, _driver, _split = harness.split(30_000)
    running = harness.move(moving, split)
    waiting = list(harness.dispatcher.waiting)
    assert waiting == [older, moving], "in the order in which their tickets were opened"
    older.abandon(harness.now_s)
    harness.end(moving, running)


def test_the_transfer_speed_is_learned_with_the_tokens_that_the_new_node_lacks() -> None:
    harness = Moves()
    for name in ("d0", "d1"):
        harness.fleet.drain(name, name == "d1")
    warm, _driver, split = harness.split_with(5, 24_000)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.finish(warm)
    harness.advance(60.0)
    attempts, _driver, split = harness.split_with(5, 30_000)
    assert attempts.ticket.node.name == "d0" and split.pair.transfer_tokens < 10_000.0
    before_ms = split.pair.transfer_ms
    harness.fleet.drain("d1", False)
    split._decision.query.candidates = harness.fleet.group("m").up  # type: ignore[union-attr]
    running = harness.move(attempts, split)
    assert split.pair.transfer_tokens == harness.node("p0").transfer_tokens == 30_000.0
    assert split.pair.transfer_ms > before_ms
    group = harness.fleet.group("m")
    assert group is not None
    speed = group.transfer_speeds.between("local", "local")
    ms_per_token = speed.ms_per_token(harness.now_s)
    harness.advance((LATENCY_MS + 30_000 * ms_per_token) / 1000.0)
    harness.end(attempts, running)
    assert speed.ms_per_token(harness.now_s) == pytest.approx(ms_per_token, rel=0.1), "it took as long as expected"


def test_a_decode_node_that_replaces_a_failed_one_has_its_own_transfer() -> None:
    harness = Moves()
    harness.fleet.drain("d1")
    warm, _driver, split = harness.split_with(5, 24_000)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.finish(warm)
    harness.fleet.drain("d1", False)
    attempts, _driver, split = harness.split_with(5, 30_000)
    assert attempts.ticket.node.name == "d0"
    harness.fleet.check_failed(harness.node("d0"), harness.now_s, "connection refused")
    assert attempts.ticket.node.name == "d1" and attempts.split is split
    assert split.pair.transfer_tokens == harness.node("p0").transfer_tokens == 30_000.0
    split.prefill_ended(TRANSFER, None, harness.now_s)
    harness.end(attempts, [])


def test_peers_learn_only_of_the_node_that_decodes() -> None:
    harness = Moves()
    log = harness.cache_view.routed_log = []
    attempts, _driver, split = harness.split(30_000)
    assert [one[0] for one in log] == ["p0"]
    running = harness.move(attempts, split)
    told = [one[0] for one in log if one[1] == log[0][1]]
    assert told == ["p0", attempts.ticket.node.name]
    harness.end(attempts, running)


def test_a_decode_node_that_fails_before_it_decodes_is_not_told_to_peers() -> None:
    harness = Moves(decode=1)
    log = harness.cache_view.routed_log = []
    attempts, _driver, split = harness.split(30_000)
    split.prefill_failed(Outcome.FAILED, "HTTP status 500", harness.now_s)
    assert [one[0] for one in log] == ["p0", "d0"], "d0 prefills the prompt itself"
    harness.finish(attempts)


@pytest.mark.interpreted
def test_a_moved_request_is_counted_once_and_is_no_attempt_at_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Moves()
    attempts, _driver, split = harness.split_with(5, 30_000)
    first, ticket = attempts.ticket.node, attempts.ticket
    assert isinstance(ticket, DecodeDispatch) and ticket.prediction is not None
    sampled = ticket.prediction.sampled_blocks
    chains: list[bytes] = []
    record = harness.cache_view.reuse.record

    def noting(chain: bytes, now_s: float) -> tuple[int, int]:
        chains.append(chain)
        return record(chain, now_s)

    monkeypatch.setattr(harness.cache_view.reuse, "record", noting)
    running = harness.move(attempts, split)
    assert len(chains) == len(running), "only the other requests"
    moved = attempts.ticket
    assert isinstance(moved, DecodeDispatch) and moved.prediction is not None and sampled
    assert moved.prediction.sampled_blocks == sampled
    harness.end(attempts, running)
    assert attempts.history is not None
    assert first not in [one.ticket.node for one in attempts.history.closed]


def published(harness: SplitHarness) -> list[str]:
    names, _rows = pack_load_rows(harness.fleet.by_name, harness.cache_view.by_name, False, 100)
    return list(names)


def test_peers_learn_of_the_context_when_decoding_begins() -> None:
    harness = SplitHarness(decode=1)
    attempts, _driver, split = harness.split(30_000)
    assert set(published(harness)) == {"p0", "d0"} and not published(harness)
    split.prefill_ended(TRANSFER, None, harness.now_s)
    assert "d0" in published(harness)
    harness.finish(attempts)


def context(node: Node) -> int:
    return node.context_tokens


def test_a_context_counts_from_the_beginning_where_the_node_is_not_chosen_again() -> None:
    sglang = SplitHarness(decode=1, engine="sglang")
    attempts, _driver, split = sglang.split(30_000)
    assert context(sglang.node("d0")) > 30_000, "long prompts do not stack on one node"
    split.prefill_ended(b"{}", None, sglang.now_s)
    assert context(sglang.node("d0")) > 30_000
    sglang.finish(attempts)
    vllm = SplitHarness()
    attempts, _driver, split = vllm.split(30_000)
    first = attempts.ticket.node
    assert context(first) < 1000, "chosen again by price"
    vllm.fleet.check_failed(first, vllm.now_s, "connection refused")
    assert context(attempts.ticket.node) > 30_000, "the second one is not"
    split.prefill_ended(TRANSFER, None, vllm.now_s)
    vllm.finish(attempts)
