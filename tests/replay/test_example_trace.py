"""The trace in examples/ is what its README says, and the documented commands run with it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import make_trace
import pytest

from warmroute.app.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACE = EXAMPLES / "trace.jsonl.gz"


def test_the_committed_trace_is_what_the_command_in_the_readme_makes(tmp_path: Path) -> None:
    command = re.search(r"python bench/make_trace\.py (\S+) (.+)", (EXAMPLES / "README.md").read_text())
    assert command is not None and command[1] == "examples/trace.jsonl.gz"
    made = tmp_path / "trace.jsonl"
    make_trace.main([str(made), *command[2].split()])
    # zlib's versions compress differently, so the content is compared.
    assert made.read_bytes() == gzip.decompress(TRACE.read_bytes())
    assert TRACE.stat().st_size < 100_000


def test_replay_and_plan_run_with_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(TRACE), "--nodes", "4", "--limit", "100"]) == 0
    assert "round_robin" in capsys.readouterr().out
    assert main(["plan", str(TRACE), "--ttft-p90", "500ms", "--limit", "100", "--quiet"]) == 0
    assert "GPUs with price" in capsys.readouterr().out
