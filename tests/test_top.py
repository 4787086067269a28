"""warmroute top: the frame, the feed, and errors."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from typing import Any

import pytest
from rich.console import Console
from support.engine_scripts import normal
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app.commands.top import read_events
from warmroute.app.commands.top_view import LiveState, sparkline, view
from warmroute.app.main import main
from warmroute.core.health import HealthState

TOKEN = {"token_sha256": hashlib.sha256(b"open sesame").hexdigest()}
FIELDS = ["at_s", "requests_per_s", "hit_ratio", "ttft_p90_ms", "saved_gpus", "in_flight", "duration_p90_ms"]


def node(name: str, state: str = "up", **more: Any) -> dict[str, Any]:
    return {
        "name": name, "island": "eu", "state": state, "in_flight": 3, "other": 1, "waiting": 0, "kv_usage": 0.4,
        "prefill_us": 81.0, "backlog_ms": 12.0, "failed": 0, "cache": "events", **more,
    }  # fmt: skip


def snapshot(**more: Any) -> dict[str, Any]:
    sums = {
        "seconds": 300, "requests": 40, "hit_ratio": 0.85, "round_robin_hit_ratio": 0.26, "ttft_p50_ms": 35.0,
        "ttft_p90_ms": 12_000.0, "saved_s": 450.0, "round_robin_saved_s": 120.0, "short_reports": 0,
        "duration_p50_ms": 1500.0, "duration_p90_ms": 3200.0, "token_p50_ms": 21.0, "token_at_most_ms": 40.0,
    }  # fmt: skip
    return {
        "router": {"version": "1.0", "build": "interpreted", "policy": "price", "started": 0},
        "window": sums,
        "nodes": [node(f"gpu-{number}") for number in range(64)],
        "routes": [{"model": "qwen3-32b-instruct-with-a-long-name", "route": "interactive", **sums}],
        "queue": {
            "waiting": 2,
            "rows": [
                {"priority": "low", "tenant": "batch", "waiting": 2, "rejected": 9, "reasons": {"queue_full": 9}}
            ],
        },
        "scaling": {
            "enabled": True, "desired_nodes": 3,
            "last_decision": {"nodes": 2, "reasons": ["the queue is long and keeps growing " * 5]},
        },
        "alerts": [],
        "history": {"fields": FIELDS, "fine": [[float(at), 4.0, 0.8, 140.0, 1.5, 7.0, 3200.0] for at in range(120)]},
        "decisions": [{"time": "2026-11-16T02:03:32.000Z", "explanation": "gpu-1: the only candidate " * 9}],
        **more,
    }  # fmt: skip


def frame(state: LiveState, width: int = 80, height: int | None = 24) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(view(state, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("state", [*(state.value for state in HealthState), "draining"])
def test_every_state_of_a_node_can_be_shown(state: str) -> None:
    live = LiveState()
    live.apply("snapshot", snapshot(nodes=[node("gpu-0", state), node("gpu-1")]))
    assert any("gpu-0" in line for line in frame(live))


def test_a_frame_fits_80_columns_and_the_height_of_the_terminal() -> None:
    state = LiveState()
    state.apply("snapshot", snapshot())
    lines = frame(state)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "85% of prompt tokens; round robin est. 26%" in text
    assert "1.5 GPUs of prefill; round robin est. 0.4" in text
    assert "p50 35 ms, p90 12.0 s" in text and "more nodes" in text
    assert "p50 1,500 ms, p90 3,200 ms; 21 ms/token" in text and "1.0 (interpreted)" in lines[0]


def test_clients_that_do_not_stream_have_times_too_and_a_limited_estimate_says_so() -> None:
    data = snapshot()
    unstreamed = {"ttft_p50_ms": None, "ttft_p90_ms": None, "token_p50_ms": None, "short_reports": 3}
    [route] = data["routes"]
    state = LiveState()
    state.apply("snapshot", {**data, "window": {**data["window"], **unstreamed}, "routes": [{**route, **unstreamed}]})
    text = "\n".join(frame(state, height=None))
    assert "p90 3,200 ms; ≤40 ms/token" in text and "total p90 3,200 ms" in text
    assert "nodes reported 3 prompts shorter than expected" in text


def test_errors_of_clients_are_shown_with_their_sources() -> None:
    state = LiveState()
    row = {
        "status": 401, "code": "invalid_api_key", "total": 70_000, "recent": 66_879, "keys": [],
        "sources": [{"source": "10.0.0.5", "count": 66_000}, {"source": "10.0.0.6", "count": 879}],
    }  # fmt: skip
    state.apply("snapshot", snapshot(client_errors=[row, {**row, "code": "not_found", "recent": 0}]))
    lines = frame(state, height=None)
    [shown] = [line for line in lines if "invalid_api_key" in line]
    assert "401" in shown and "66,879" in shown and "10.0.0.5 (66,000)" in shown and len(shown) <= 80
    assert not any("not_found" in line for line in lines)


def test_an_alert_about_clients_names_the_source() -> None:
    state = LiveState()
    alert = {
        "severity": "warning", "title": "5 requests were rejected", "what_to_do": "Stop them.", "nodes": [],
        "source": "10.0.0.5",
    }  # fmt: skip
    state.apply("snapshot", snapshot(alerts=[alert]))
    assert any("5 requests were rejected, most from 10.0.0.5" in line for line in frame(state, height=None))


def test_nodes_in_trouble_come_first_and_alerts_say_what_to_do() -> None:
    alert = {
        "severity": "critical", "title": "gpu-9 is down", "what_to_do": "Restart the engine.", "nodes": ["gpu-9"],
    }  # fmt: skip
    state = LiveState()
    state.apply("snapshot", snapshot(nodes=[node("gpu-1"), node("gpu-9", "down"), node("gpu-3")], alerts=[alert]))
    lines = frame(state)
    assert "gpu-9 is down" in lines[1] and "Restart the engine." in lines[2]
    names = [line.split()[0] for line in lines if line.startswith("gpu-")]
    assert names[0] == "gpu-9"


def test_updates_replace_sections_and_add_points() -> None:
    state = LiveState()
    state.apply("snapshot", snapshot())
    state.apply("update", {"nodes": [node("new")], "fine": [[121.0, 9.0, None, None, 0.0, 3.0, None]], "coarse": []})
    lines = frame(state)
    assert any(line.startswith("new ") for line in lines) and "9.0/s, 3 running" in "\n".join(lines)


def test_an_empty_fleet_and_missing_measurements_are_shown() -> None:
    sums = {
        "seconds": 0, "requests": 0, "hit_ratio": None, "round_robin_hit_ratio": None, "ttft_p50_ms": None,
        "ttft_p90_ms": None, "saved_s": 0.0, "round_robin_saved_s": 0.0, "short_reports": 0,
        "duration_p50_ms": None, "duration_p90_ms": None, "token_p50_ms": None, "token_at_most_ms": None,
    }  # fmt: skip
    history = {"fields": FIELDS, "fine": []}
    state = LiveState()
    state.apply("snapshot", snapshot(nodes=[], routes=[], window=sums, history=history, decisions=[]))
    assert "- of prompt tokens" in "\n".join(frame(state))


def test_a_sparkline_leaves_gaps_where_nothing_was_measured() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 1.0, 4) == "▁▅ █"


def test_a_response_that_is_no_event_stream_is_refused() -> None:
    with pytest.raises(ValueError):
        list(read_events(io.BytesIO(b"<html>\n")))
    [(name, data)] = read_events(io.BytesIO(b'event: update\ndata: {"a": 1}\n\n'))
    assert (name, data) == ("update", {"a": 1})


# Against a router.


async def top(r: RunningRouter, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = await asyncio.to_thread(main, ["top", "--admin", f"http://127.0.0.1:{r.service.admin_port}"])
    output = capsys.readouterr()
    return status, output.out, output.err


async def test_top_prints_one_frame_without_a_terminal_and_takes_the_token_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}}
    async with engines(2) as both, router(*both, admin=TOKEN, routing={"policy": "price"}) as r:
        for engine in both:
            engine.behave = normal(json.dumps({"choices": [], "usage": usage}).encode())
        await r.request(post(chat("the router sends each request " * 300)))
        monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN", "open sesame")
        status, output, _ = await top(r, capsys)
        assert status == 0 and "policy price" in output and "node0" in output and "94% of prompt tokens" in output
        assert max(map(len, output.splitlines())) <= 80
        monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN", "wrong")
        status, _, error = await top(r, capsys)
        assert status == 2 and "the token in WARMROUTE_ADMIN_TOKEN is wrong" in error
