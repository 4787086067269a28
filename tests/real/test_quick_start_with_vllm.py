"""The quick start, followed word for word. `vllm serve` is real vLLM on this CPU with a tiny model, under the name that
the page uses.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from real_engine import BLOCK, BLOCKS, ENVIRONMENT, HERE, MAX_LEN, make_tiny_model
from support.quick_start import cached_tokens, follow
from support.vllm_environment import VENV, vllm_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SHIM = """#!/bin/sh
# vllm serve NAME FLAGS
name=$2
shift 2
exec {python} {here}/serve_forked.py --model {model} --served-model-name "$name" --dtype bfloat16 \\
  --max-model-len {length} --enforce-eager --block-size {block} --num-gpu-blocks-override {blocks} "$@"
"""


def test_the_quick_start(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    tools, work = tmp_path / "bin", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    (tools / "vllm").write_text(
        SHIM.format(python=vllm_python(), here=HERE, model=model, length=MAX_LEN, block=BLOCK, blocks=BLOCKS)
    )
    (tools / "vllm").chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{VENV / 'bin'}:{os.environ['PATH']}"
    outputs, log = follow(
        "quick-start.md", work, ENVIRONMENT | {"PATH": path}, lambda block: "vllm serve" in block,
        ("python3 -m venv", "tokenizer_loaded"),
    )  # fmt: skip
    asked, chat, cached, shown = outputs
    assert asked.rstrip().endswith("no problems") and chat.rstrip().endswith("data: [DONE]")
    first, second, third = cached_tokens(cached)
    assert first < 100 < second == third
    assert "tokens cached" in shown and re.search(r'"exact":[1-9]', shown) and '"text":0' in shown
    for event in ("tokenizer_loaded model=Qwen/Qwen3-8B", "kv_events_found node=127.0.0.1:8001", "startup_complete"):
        assert event in log
    figures = dict(re.findall(r"node_cache_(\w+)_tokens_total\{[^}]*\} ([1-9]\d*)", shown))
    assert figures["predicted"] == figures["reported"]
