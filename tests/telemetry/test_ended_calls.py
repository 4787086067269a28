"""What the router writes down of requests that have ended: its log, a capture, the prompt doctor's samples."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from routing_harness import MODEL, RoutingHarness, prompt

from warmroute.app.capture import TrafficCapture
from warmroute.app.ended_calls import EndedCalls
from warmroute.app.prompt_doctor import PromptComparison
from warmroute.config import Capture, Config, from_table
from warmroute.core.brain import Brain
from warmroute.core.messages import (
    Arrive,
    Cancel,
    Ended,
    Event,
    Failed,
    FirstToken,
    Left,
    RoutingRequest,
    Started,
)
from warmroute.core.traffic import Counters
from warmroute.edge.trace_context import EndedEarly
from warmroute.prompt.prompt import exact_prompt

CHAT = b"/v1/chat/completions"
BODY = b'{"messages":[{"role":"user","content":"Hello"}]}'
LOGGED: dict[str, Any] = {"log": {"requests": True}, "prompt_doctor": {"enabled": False}}
SECRET = b"what a user typed"


class Lines:
    """Takes the lines of a capture."""

    path = Path("captured")

    def __init__(self) -> None:
        self.written = b""

    def write(self, lines: bytes) -> None:
        self.written += lines

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written.splitlines() if line]


class Setting(RoutingHarness):
    """A core whose ended calls are written down, and requests that an edge tells it of."""

    def __init__(self, nodes: int = 1, **tables: Any) -> None:
        super().__init__(nodes)
        config: Config = from_table(tables or LOGGED, experiment=True)
        counters = Counters()
        self.brain = Brain(self.fleet, self.router, self.admission, counters)
        self.capture = TrafficCapture(Capture(block_size=16), counters, lambda: 0.0)
        self.doctor = PromptComparison(lambda _key: 1, lambda _route: True, lambda: self.now_s)
        self.writer = EndedCalls(
            config, self.capture, self.doctor, None, self.router.output_lengths,
            lambda model: self.fleet.group(model) is not None,
        )  # fmt: skip
        self.number = 0

    def tell(self, *events: Event) -> None:
        for event in events:
            self.brain.handle(event, self.now_s)
            self.advance(0.1)

    def arrive(self, model: str = MODEL) -> int:
        self.number += 1
        request = RoutingRequest(model, arrived_s=self.now_s, session=SECRET, tenant="t", route="r")
        kept = self.writer.keep(request, CHAT, BODY)
        lookup = prompt(800)
        if kept is not None:
            kept.prompt = exact_prompt(lookup.tokens)
            kept.tokens = lookup.tokens
        self.tell(Arrive(self.number, b"id-%d" % self.number, request, lookup, kept=kept))
        return self.number

    def write(self, *early: EndedEarly) -> None:
        ended = list(self.brain.ended)
        self.brain.ended.clear()
        self.writer.write(ended, early, self.now_s)
        assert not any(call.kept or call.request.session for call in ended), "nothing of a request is kept longer"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's lines about requests, without what differs from run to run."""
    return [
        record.getMessage().removeprefix("request ").split(" ttft_ms")[0]
        for record in caplog.records
        if record.name == "warmroute.requests"
    ]


# The request log.


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([FirstToken(1, 1, 200), Ended(1, 1, 200, 0.0, (800, 0, 5))], "status=200 outcome=complete"),
        ([Started(1, 1, 404), Ended(1, 1, 404, 0.0, None)], "status=404 outcome=complete"),
        ([FirstToken(1, 1, 200), Failed(1, 1, -5, "closed", broke=True)], "status=200 outcome=broken"),
        ([FirstToken(1, 1, 200), Cancel(1, Left.LEFT)], "status=200 outcome=client_left"),
        ([Cancel(1, Left.LEFT)], "status=0 outcome=client_left"),
        ([FirstToken(1, 1, 200), Cancel(1, Left.CUT)], "status=200 outcome=late"),
        ([Failed(1, 1, 500, "HTTP status 500")], ""),  # the edge has logged the error that the client got
        ([FirstToken(1, 1, 200), Cancel(1, Left.STOPPING)], ""),
        ([Cancel(1, Left.INTERNAL)], ""),
    ],
)
def test_a_line_says_how_a_request_ended(events: list[Event], line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting()
    setting.arrive()
    setting.tell(*events)
    setting.write()
    expected = [f"request_id=id-1 node=n0 tenant=t model=m {line}"] if line else []
    assert logged(caplog) == expected


def test_a_line_has_the_times_on_the_node_and_the_number_of_nodes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting(2)
    setting.arrive()
    setting.tell(Failed(1, 1, 500, "HTTP status 500"), FirstToken(1, 2, 200), Ended(1, 2, 200, 0.0, None))
    setting.write()
    [line] = [record.getMessage() for record in caplog.records if record.name == "warmroute.requests"]
    assert line.endswith("outcome=complete ttft_ms=100 duration_ms=200 attempts=2"), line


def test_a_request_without_a_node_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting()
    for node in setting.nodes:
        setting.fleet.remove(node.name)
    setting.arrive()
    setting.write()
    assert not logged(caplog) and not setting.brain.open


def test_nothing_is_kept_of_a_request_that_nobody_wants() -> None:
    setting = Setting(1, prompt_doctor={"enabled": False})
    setting.arrive()
    setting.tell(Ended(1, 1, 200, 0.0, None))
    assert not setting.brain.ended


@pytest.mark.interpreted
def test_a_bug_costs_one_request_and_no_other(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    caplog.set_level(logging.INFO)
    setting = Setting()
    for _ in range(2):
        number = setting.arrive()
        setting.tell(Ended(number, 1, 200, 0.0, None))
    monkeypatch.setattr(setting.brain.ended[0], "usage", 3)
    setting.brain.ended[0].kept.body_bytes = 9
    setting.write()
    lines = logged(caplog)
    assert sum("outcome=complete" in line for line in lines) == 2
    assert [line.split()[0] for line in lines].count("request_not_recorded") == 1


# The capture.


async def captured(setting: Setting, lines: Lines, *early: EndedEarly) -> list[dict[str, Any]]:
    setting.write(*early)
    await setting.capture.flush()
    return lines.rows


async def test_rows_of_a_capture() -> None:
    setting, lines = Setting(2), Lines()
    setting.capture.start(lines)
    answers: list[list[Event]] = [
        [FirstToken(1, 1, 200), Ended(1, 1, 200, 0.0, (800, 640, 5))],
        [Cancel(2, Left.LEFT)],
        [FirstToken(3, 1, 200), Failed(3, 1, -5, "closed", broke=True)],
        [Failed(4, 1, 500, "HTTP status 500"), Failed(4, 2, 500, "HTTP status 500")],
        [Started(5, 1, 404), Ended(5, 1, 404, 0.0, None)],
        [Cancel(6, Left.STOPPING)],
        [FirstToken(7, 1, 200), Cancel(7, Left.STOPPING)],
    ]
    for events in answers:
        setting.arrive()
        setting.tell(*events)
    rows = await captured(setting, lines)
    outcomes = [(row.get("outcome", "ok"), "node" in row, row.get("attempts", 1)) for row in rows]
    assert outcomes == [
        ("ok", True, 1), ("cancelled", True, 1), ("broken", True, 1), ("failed", True, 2),
        ("not_admitted", False, 1),  # the router stopped before a node had answered
        ("cancelled", True, 1),
    ]  # fmt: skip
    assert (rows[0]["cached_tokens"], rows[0]["predicted_tokens"], rows[0]["output_length"]) == (640, 0, 5)
    assert rows[0]["ttft_ms"] == 100.0 and rows[0]["duration_ms"] == 200.0
    assert rows[1]["output_estimated"] and all(row["session_id"] and row["hash_ids"] for row in rows)
    assert SECRET not in lines.written


async def test_what_no_node_could_serve_is_demand_but_a_clients_mistake_is_not() -> None:
    setting, lines = Setting(), Lines()
    setting.capture.start(lines)
    setting.arrive(model="what a user typed")  # 404
    setting.fleet.remove("n0")
    setting.arrive()  # 503
    [row] = await captured(setting, lines)
    assert (row["outcome"], row["model"]) == ("not_admitted", MODEL) and "node" not in row


async def test_a_client_that_leaves_while_its_prompt_is_read_is_demand() -> None:
    setting, lines = Setting(), Lines()
    setting.capture.start(lines)
    early = []
    for left in (True, False):
        request = RoutingRequest(MODEL, arrived_s=setting.now_s)
        kept = setting.writer.keep(request, CHAT, BODY)
        early.append(EndedEarly(None, kept, setting.now_s + 0.5, 0 if left else 400, "", left, request, b"x"))
    [row] = await captured(setting, lines, *early)
    assert row["outcome"] == "cancelled" and row["input_length"] == len(BODY) // 4 and row["duration_ms"] == 500.0


# The prompt doctor.


def test_a_sampled_prompt_is_complete_with_what_it_took() -> None:
    setting = Setting(1, prompt_doctor={"enabled": True})
    setting.arrive()
    node = setting.nodes[0]
    setting.tell(FirstToken(1, 1, 200), Ended(1, 1, 200, 0.0, (800, 640, 5)))
    setting.write()
    setting.advance(2.0)
    [(key, sample)] = setting.doctor.samples.take(setting.now_s)
    assert key == (MODEL, "r") and (sample.prompt_tokens, sample.cached_tokens) == (800, 640)
    assert sample.ms_per_token == node.speed.long_ms_per_token and sample.step_ms == node.speed.step_ms
    assert len(sample.tokens) == 3200 and sample.body == BODY


def test_the_router_knows_how_much_was_cached_if_the_node_does_not_say() -> None:
    setting = Setting(1, prompt_doctor={"enabled": True})
    setting.arrive()
    setting.tell(Ended(1, 1, 200, 0.0, None))
    setting.write()
    setting.advance(2.0)
    [(_key, sample)] = setting.doctor.samples.take(setting.now_s)
    assert (sample.prompt_tokens, sample.cached_tokens) == (800, 0)


def test_a_sampled_request_that_fails_is_dropped() -> None:
    setting = Setting(1, prompt_doctor={"enabled": True})
    for end in (Started(1, 1, 404), Ended(1, 1, 404, 0.0, None)), (Cancel(2, Left.LEFT),):
        setting.arrive()
        setting.tell(*end)
        setting.write()
        setting.advance(2.0)
    assert not setting.doctor.samples.take(setting.now_s) and not setting.doctor.samples._pending


def test_turning_the_doctor_off_forgets_the_samples() -> None:
    setting = Setting(1, prompt_doctor={"enabled": True})
    setting.arrive()
    setting.writer.reconfigure(from_table({"prompt_doctor": {"enabled": False}}, experiment=True))
    setting.tell(Ended(1, 1, 200, 0.0, None))
    setting.write()
    setting.advance(2.0)
    assert not setting.doctor.samples.take(setting.now_s)
