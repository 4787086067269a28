"""`warmroute doctor` in front of real vLLM engines: one set up as the guides say, and one with the wrong flags."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_engine import BLOCK, MAX_LEN, RealEngine

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, dict[str, Any]]]]:
    """Return the exit code, and the checks by subject and name."""
    command = [str(Path(sys.executable).with_name("warmroute")), "doctor", "--json", "--timeout", "30", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    report = json.loads(ended.stdout)
    subjects = {one["name"]: {check["name"]: check for check in one["checks"]} for one in report["subjects"]}
    return ended.returncode, subjects


@pytest.fixture
def misconfigured(real_engines: list[RealEngine], tmp_path: Path) -> Iterator[RealEngine]:
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}")
    flags = ["--no-enable-prefix-caching", "--no-enable-prompt-tokens-details", "--chat-template", str(template)]
    engine = RealEngine("misconfigured", real_engines[0].model, tmp_path, flags=flags)
    engine.start()
    try:
        engine.wait_until_ready()
        yield engine
    finally:
        engine.kill()


def test_engines_that_are_set_up_as_the_guides_say_have_no_problems(real_engines: list[RealEngine]) -> None:
    arguments = [word for engine in real_engines for word in ("--node", engine.url)]
    code, subjects = doctor(*arguments)
    problems = [check for checks in subjects.values() for check in checks.values() if check["state"] == "problem"]
    assert (code, problems) == (0, [])
    for engine in real_engines:
        checks = subjects[engine.url.removeprefix("http://")]
        assert {check["state"] for check in checks.values()} == {"ok"}, checks
        assert checks["engine"]["found"].startswith("vLLM 0.")
        assert checks["tokenizer"]["found"] == f"{engine.model}, at the path that the node reports"
        assert "same tokens" in checks["chat template"]["found"]
        assert "an event arrived" in checks["KV events"]["found"]
        assert checks["block size"]["found"] == f"{BLOCK} tokens"
        assert checks["context window"]["found"] == f"{MAX_LEN:,} tokens"


def test_without_requests_nothing_is_generated(real_engines: list[RealEngine]) -> None:
    code, subjects = doctor("--node", real_engines[0].url, "--no-requests")
    checks = subjects[real_engines[0].url.removeprefix("http://")]
    assert code == 0 and checks["cached tokens"]["state"] == "note"
    assert "was not checked" in checks["KV events"]["found"]


def test_wrong_flags_are_named(misconfigured: RealEngine) -> None:
    code, subjects = doctor("--node", misconfigured.url)
    checks = subjects[misconfigured.url.removeprefix("http://")]
    assert code == 1
    assert checks["prefix caching"]["change"] == "Start vLLM without --no-enable-prefix-caching"
    assert checks["cached tokens"]["change"] == "Start vLLM with --enable-prompt-tokens-details"
    assert checks["chat template"]["state"] == "problem" and "chat_template = " in checks["chat template"]["change"]
    assert checks["tokenizer"]["state"] == "ok"
