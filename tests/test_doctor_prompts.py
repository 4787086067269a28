"""warmroute doctor prompts and GET /admin/prompts, in front of a running router."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engine_scripts import http_response, script
from support.polling import until
from support.raw_client import post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.app.main import main
from warmroute.app.prompt_doctor import samples

pytestmark = pytest.mark.interpreted

TOKEN = "open sesame"
ADMIN = {"token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}
RULES = "\n".join(f"Rule {number}: look it up in the manual before you answer." for number in range(20))
REQUESTS = 12
USAGE = {"prompt_tokens": 400, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
ANSWER = json.dumps({"choices": [{"message": {"content": "ok"}}], "usage": USAGE}).encode()


@pytest.fixture(autouse=True)
def _every_request_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLE_S", 0.0)


@asynccontextmanager
async def sick_router(admin: dict[str, Any], **tables: Any) -> AsyncIterator[RunningRouter]:
    """A router whose clients put the time in front of the system prompt."""
    async with engines() as nodes, router(*nodes, admin=admin, routing={"policy": "price"}, **tables) as running:
        nodes[0].behave = script(http_response(ANSWER))
        for number in range(REQUESTS):
            messages = [
                {"role": "system", "content": f"Time: 2026-11-16T04:48:{number:02}Z\n{RULES}"},
                {"role": "user", "content": "Tell me about " + "xyz" * number},
            ]
            response = await running.request(post(json.dumps({"model": "m", "messages": messages}).encode()))
            assert response.status == 200
        yield running


async def examine(running: RunningRouter) -> None:
    doctor = running.service.prompt_doctor
    await until(lambda: len(doctor.samples._new) == REQUESTS)
    await doctor.examine()


async def run(running: RunningRouter, *arguments: str) -> int:
    admin = f"http://127.0.0.1:{running.service.admin_port}"
    return await asyncio.to_thread(main, ["doctor", "prompts", "--admin", admin, *arguments])


async def test_the_command_names_place_and_cost_without_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_ADMIN_TOKEN", TOKEN)
    async with sick_router(ADMIN) as running:
        await examine(running)
        assert await run(running) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert "a date or time at message 0 (system), character 6" in text and "1 finding" in text
        assert "xxxx: [0000-00-00x00:00:00x]" in text and "manual" not in text and "2026" not in text
        assert await run(running, "--show-text") == 1
        assert "Time: [2026-11-16T04:48:" in capsys.readouterr().out
        assert await run(running, "--json") == 1
        [finding] = json.loads(capsys.readouterr().out)["findings"]
        assert finding["kind"] == "time" and finding["lost_tokens_per_request"] > 300 and finding["share"] == 1.0


async def test_text_is_refused_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    async with sick_router({}) as running:
        await examine(running)
        assert await run(running) == 1
        assert await run(running, "--show-text") == 2
        assert "set admin.token_sha256" in capsys.readouterr().err


async def test_nothing_is_sampled_when_the_doctor_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    async with sick_router({}, prompt_doctor={"enabled": False}) as running:
        await running.service.prompt_doctor.examine()
        assert not running.service.prompt_doctor.reports
        assert await run(running) == 0
        assert "prompt_doctor.enabled is false" in capsys.readouterr().out


async def test_the_doctor_wants_a_router_not_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["doctor", "prompts", "--node", "http://127.0.0.1:1"]) == 2
    assert "use --admin URL" in capsys.readouterr().err


async def test_a_prompt_never_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with sick_router({}) as running:
        await examine(running)
        running.service.alerts.update(1e9)
        await until(lambda: bool(running.service.prompt_doctor.findings))
    assert "manual" not in caplog.text and "04:48" not in caplog.text
