"""Speeds that no engine can have are replaced by those of the node's peers, and unmeasured nodes take these at once."""

from __future__ import annotations

import logging
from random import Random

import pytest

from warmroute._kernel import TicketState
from warmroute.config import Health, NodeConfig
from warmroute.core.fleet import Fleet
from warmroute.core.messages import Outcome
from warmroute.core.node import Node
from warmroute.core.prefill_work import work
from warmroute.core.speeds import DEFAULT_BASE_MS, DEFAULT_MS_PER_TOKEN

SLOW_MS = 0.29  # an 8 B model in `transformers serve` on an H200
STEP_MS = 40.0


class ServedFleet:
    """Nodes that prefill one prompt after the other."""

    def __init__(self, count: int, **node: str) -> None:
        self.fleet = Fleet(Health())
        self.nodes = [self.fleet.add(NodeConfig(url=f"http://n{at}:1", models=("m",), **node)) for at in range(count)]  # type: ignore[arg-type]
        self.random = Random(1)
        self.now_s = 100.0

    def serve(
        self, node: Node, count: int, ms_per_token: float, overhead_ms: float = 10.0, usage: int | None = None
    ) -> None:
        """Prompts of 60 to 4,000 tokens. `usage`: how many output tokens the responses report."""
        group = self.fleet.group("m")
        assert group is not None
        for _ in range(count):
            tokens = self.random.randint(60, 4000)
            ticket = TicketState()
            ticket.open(node, self.now_s, group.decode_speed, True, tokens, tokens, work(tokens, 0))
            jitter = self.random.uniform(0.5, 1.5)
            ttft_ms = overhead_ms * jitter + ms_per_token * work(tokens, 0)
            self.now_s += ttft_ms / 1000.0
            ticket.first_token(self.now_s, True)
            if usage is not None:
                hidden_ms = max(0.0, SLOW_MS * work(tokens, 0) - ttft_ms)  # the prefill, if the first token was none
                self.now_s += (hidden_ms + STEP_MS * (usage - 1)) / 1000.0
                ticket.record_answer(usage, self.now_s)
            ticket.release(Outcome.OK, self.now_s)
            self.now_s += 0.5

    def check(self) -> None:
        self.now_s += 2.0
        for node in self.nodes:
            self.fleet.check_passed(node, self.now_s)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.event} {record.fields['node']}" for record in caplog.records if hasattr(record, "event")]  # type: ignore[attr-defined]


def test_a_node_without_requests_takes_its_peers_speed_as_they_learn_it() -> None:
    served = ServedFleet(4)
    first, second, *unused = served.nodes
    served.serve(first, 20, 0.004)
    served.check()
    assert all(node.speed.ms_per_token == first.speed.ms_per_token < 0.01 for node in unused)
    served.serve(second, 20, 0.02)
    served.check()
    expected = (first.speed.ms_per_token + second.speed.ms_per_token) / 2
    assert all(node.speed.ms_per_token == expected and node.speed.source == "assumed" for node in unused)
    served.serve(unused[0], 1, 0.02)
    assert unused[0].speed.source == "learned"
    own = unused[0].speed.ms_per_token
    served.check()
    assert unused[0].speed.ms_per_token == own, "from its first response on a node has its own speed"


def test_peers_with_the_same_gpu_count_first() -> None:
    served = ServedFleet(2, gpu="h200")
    fast, unused = served.nodes
    slow = served.fleet.add(NodeConfig(url="http://slow:1", models=("m",), gpu="t4"))
    served.nodes.append(slow)
    served.serve(fast, 20, 0.02)
    served.serve(slow, 20, 0.5)
    served.check()
    assert unused.speed.ms_per_token == fast.speed.ms_per_token


@pytest.mark.parametrize("usage", [None, 12])
def test_a_node_that_sends_something_before_its_first_token_gets_its_peers_speed(
    usage: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first bytes come after 5 to 15 ms, whatever the prompt. With usage, its prefill looks like decoding."""
    caplog.set_level(logging.INFO)
    served = ServedFleet(3)
    early, *others = served.nodes
    for node in others:
        served.serve(node, 40, SLOW_MS, usage=usage)
    for _ in range(3):
        served.serve(early, 30, 0.0, usage=usage)
        served.check()
    speed = early.speed
    assert speed.learned_ms_per_token < 0.02
    assert speed.implausible and speed.ms_per_token == pytest.approx(SLOW_MS, rel=0.25) and speed.source == "assumed"
    assert events(caplog) == ["prefill_speed_implausible n0:1"], "logged once"
    group = served.fleet.group("m")
    assert group is not None and group.decode_speed.token_ms(0) < 3 * STEP_MS, "its prefills are no decoding"
    for _ in range(6):  # the engine was updated
        served.serve(early, 40, SLOW_MS, usage=usage)
        served.check()
    assert not speed.implausible and speed.ms_per_token == speed.learned_ms_per_token
    assert speed.ms_per_token == pytest.approx(SLOW_MS, rel=0.1)
    assert events(caplog) == ["prefill_speed_implausible n0:1", "prefill_speed_plausible n0:1"]


def test_where_no_peer_is_plausible_the_default_is_used() -> None:
    served = ServedFleet(2)
    for node in served.nodes:
        served.serve(node, 80, 0.0)
    served.check()
    served.check()
    assert [node.speed.ms_per_token for node in served.nodes] == [DEFAULT_MS_PER_TOKEN] * 2


def test_a_speed_that_no_hardware_has_is_implausible() -> None:
    served = ServedFleet(2)
    fast, other = served.nodes
    served.serve(other, 20, 0.02)
    served.serve(fast, 120, 0.0, overhead_ms=0.05)
    served.check()
    assert fast.speed.implausible and fast.speed.ms_per_token == other.speed.ms_per_token


@pytest.mark.parametrize("ms_per_token", [0.0014, 0.0042, 0.0216, 0.0986, 0.29, 5.0])
@pytest.mark.parametrize("usage", [None, 12])
def test_the_speeds_of_real_models_are_plausible(ms_per_token: float, usage: int | None) -> None:
    """From 0.5 B on an H200 to an 8 B model on a CPU, beside much slower peers."""
    served = ServedFleet(2)
    fast, slow = served.nodes
    served.serve(slow, 40, max(1.0, 4 * ms_per_token))
    group = served.fleet.group("m")
    assert group is not None
    for _ in range(4):
        for _ in range(30):
            tokens = served.random.randint(60, 4000)
            ticket = TicketState()
            ticket.open(fast, served.now_s, group.decode_speed, True, tokens, tokens, work(tokens, 0))
            served.now_s += (served.random.uniform(4.0, 8.0) + ms_per_token * work(tokens, 0)) / 1000.0
            ticket.first_token(served.now_s, True)
            if usage is not None:  # a step takes as long as about 200 prompt tokens, and at least 2 ms
                served.now_s += (usage - 1) * max(2.0, 200 * ms_per_token) / 1000.0
                ticket.record_answer(usage, served.now_s)
            ticket.release(Outcome.OK, served.now_s)
            served.now_s += 0.3
        served.check()
        assert not fast.speed.implausible, fast.speed.implausible
    assert fast.speed.source == "learned"


def test_a_node_that_is_slow_for_every_prompt_keeps_its_speed() -> None:
    """An engine without a prefix cache, where the router expects hits: it deserves no requests at its peers' speed."""
    served = ServedFleet(2)
    slow, other = served.nodes
    served.serve(other, 40, 0.02)
    served.serve(slow, 80, 0.0, overhead_ms=2000.0)
    served.check()
    assert not slow.speed.implausible and slow.speed.ms_per_token > 10 * other.speed.ms_per_token


def test_a_node_with_waiting_prompts_is_not_judged_by_them() -> None:
    """Under load, a first token's time says more about the queue than about its own prompt."""
    served = ServedFleet(1)
    [node] = served.nodes
    group = served.fleet.group("m")
    assert group is not None
    waiting: list[TicketState] = []
    for number in range(100):
        tokens = served.random.randint(60, 4000)
        ticket = TicketState()
        ticket.open(node, served.now_s, group.decode_speed, True, tokens, tokens, work(tokens, 0))
        waiting.append(ticket)
        if number >= 4:
            served.now_s += 0.05
            done = waiting.pop(0)
            done.first_token(served.now_s, True)
            done.release(Outcome.OK, served.now_s)
    assert node.speed.answers > 90 and node.speed.lone_prefills == 0


def test_the_default_decode_step_is_not_evidence() -> None:
    """Without reported usage nothing is known about steps: 15 ms is only where learning starts."""
    served = ServedFleet(1)
    served.serve(served.nodes[0], 40, 0.001, overhead_ms=2.0)
    served.check()
    assert served.nodes[0].speed.timed_answers == 0 and DEFAULT_BASE_MS > 4.0
    assert not served.nodes[0].speed.implausible


def test_the_decode_factor_of_a_node_without_requests_returns_towards_1() -> None:
    """A node that was slow for a while gets few requests. It has to be tried again."""
    served = ServedFleet(2)
    idle, busy = served.nodes
    idle.speed.factor = 2.0
    for _ in range(60):
        served.serve(busy, 1, SLOW_MS)
        busy.speed.factor = 2.0
        for node in served.nodes:
            served.fleet.check_passed(node, served.now_s)
        assert busy.speed.factor == 2.0
    assert idle.speed.factor < 1.1


def test_the_decode_factor_of_a_node_that_still_answers_stays() -> None:
    served = ServedFleet(1)
    (node,) = served.nodes
    node.speed.factor = 2.0
    ticket = TicketState()
    group = served.fleet.group("m")
    assert group is not None
    ticket.open(node, served.now_s, group.decode_speed, True, 100, 100, work(100, 0))
    for _ in range(60):
        served.fleet.check_passed(node, served.now_s)
    assert node.speed.factor == 2.0
    ticket.release(Outcome.OK, served.now_s)
