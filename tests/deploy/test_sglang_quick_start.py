"""The quick start for SGLang, followed word for word, with a simulated engine in place of SGLang's."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.quick_start import ROOT, cached_tokens, follow

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

COMMIT = "ab" * 20


def test_the_quick_start_for_sglang(tmp_path: Path) -> None:
    package, work = tmp_path / "python" / "sglang", tmp_path / "work"
    package.mkdir(parents=True)
    work.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("from support.sglang_engine import main\n\nmain()\n")
    tokenizer = ROOT / "tests" / "prompt" / "small-model"
    hub = tmp_path / "hub" / "models--Qwen--Qwen3-8B"  # as an engine that downloads the model leaves it
    shutil.copytree(tokenizer, hub / "snapshots" / COMMIT)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(COMMIT)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_CACHE": str(tmp_path / "hub"),
        "PYTHONPATH": f"{package.parent}:{ROOT / 'tests'}:{ROOT / 'src'}", "SIMULATED_TOKENIZER": str(tokenizer),
    }  # fmt: skip
    outputs, log = follow(
        "sglang.md", work, environment, lambda block: "sglang.launch_server" in block, ("python3 -m venv",)
    )
    asked, sent = outputs
    assert asked.rstrip().endswith("no problems") and "SGLang 0.5.23" in asked and "an event arrived" in asked
    first, second, third = cached_tokens(sent)
    assert first < 100 < second == third and "tokens cached" in sent
    assert "tokenizer_loaded model=Qwen/Qwen3-8B" in log and "kv_events_found node=127.0.0.1:8001" in log
