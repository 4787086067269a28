"""The format of log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from warmroute.app import log as logs
from warmroute.config import Log
from warmroute.event_log import EventLog

log = EventLog("warmroute.test")


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    logger = logging.getLogger("warmroute")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def log_request() -> None:
    log.info(
        "request",
        "The node answered.",
        request_id="wr-1",
        node="gpu-a",
        tenant="search team",
        model="m",
        status=200,
        duration_ms=12.5,
    )


def test_text_has_the_date_the_level_the_event_its_fields_and_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log())
    log_request()
    time, line = capsys.readouterr().err.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert line == (
        'INFO    request request_id=wr-1 node=gpu-a tenant="search team" model=m status=200 duration_ms=12.5: '
        "The node answered.\n"
    )


def test_lines_of_one_of_several_processes_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log(), process="edge-1")
    log_request()
    assert " INFO    [edge-1] request request_id=wr-1 " in capsys.readouterr().err
    logs.set_up(Log(format="json"), process="brain")
    log_request()
    assert json.loads(capsys.readouterr().err)["process"] == "brain"


def test_json_has_a_key_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log(format="json"))
    log_request()
    line = json.loads(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "warmroute.test",
        "event": "request",
        "message": "The node answered.",
        "request_id": "wr-1",
        "node": "gpu-a",
        "tenant": "search team",
        "model": "m",
        "status": 200,
        "duration_ms": 12.5,
    }


@pytest.mark.parametrize("format_", ["text", "json"])
def test_a_line_break_in_a_value_does_not_start_a_new_line(capsys: pytest.CaptureFixture[str], format_: str) -> None:
    logs.set_up(Log(format=format_))  # type: ignore[arg-type]
    value = 'gpu-a\n2026-01-01T00:00:00.000Z ERROR   forged "line"'
    log.info("node_added", node=value)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.endswith("\n")
    if format_ == "json":
        assert json.loads(printed)["node"] == value
    else:
        assert printed.rstrip().endswith(f"node_added node={json.dumps(value)}")


def test_text_has_the_traceback_of_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log())
    log_exception()
    first, *traceback = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR   clean_up_failed node=gpu-a: The router tries again.")
    assert (
        traceback[0] == "Traceback (most recent call last):" and traceback[-1] == "ZeroDivisionError: division by zero"
    )


def test_json_has_the_traceback_of_an_exception_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log(format="json"))
    log_exception()
    (printed,) = capsys.readouterr().err.splitlines()
    line = json.loads(printed)
    assert (line["level"], line["event"], line["node"]) == ("error", "clean_up_failed", "gpu-a")
    assert line["exception"].endswith("ZeroDivisionError: division by zero") and "Traceback" in line["exception"]


def log_exception() -> None:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        log.exception("clean_up_failed", "The router tries again.", node="gpu-a")


def test_lines_below_the_level_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log(level="warning"))
    log.info("node_added", node="gpu-a")
    log.warning("node_down", node="gpu-a")
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["node_down"]


def test_a_field_cannot_replace_a_key_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Log(format="json"))
    log.info("node_added", "Added.", level="debug", event="forged", reason=ValueError("x"))
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"], line["message"], line["reason"]) == ("info", "node_added", "Added.", "x")
