"""The quick start, followed word for word: every command of the page runs in an empty directory, in its order.

`vllm serve` is real vLLM on this CPU with a tiny model, under the name that the page uses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_engine import BLOCK, BLOCKS, ENVIRONMENT, HERE, MAX_LEN, make_tiny_model
from support.vllm_environment import VENV, vllm_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PAGE = HERE.parents[1] / "docs" / "guides" / "quick-start.md"
SHIM = """#!/bin/sh
# vllm serve NAME FLAGS
name=$2
shift 2
exec {python} {here}/serve_forked.py --model {model} --served-model-name "$name" --dtype bfloat16 \\
  --max-model-len {length} --enforce-eager --block-size {block} --num-gpu-blocks-override {blocks} "$@"
"""
WAIT = "for turn in $(seq 200); do curl -sfo /dev/null http://127.0.0.1:{port}{path} && break; sleep 1; done\n"


def commands(page: Path) -> list[str]:
    """Return the indented blocks, without the installation and the sample of the log."""
    text = page.read_text()
    found = [block.rstrip() for block in re.findall(r"(?:^    .*\n|(?<=\n)\n(?=    ))+", text, re.M)]
    blocks = [re.sub(r"^    ", "", part, flags=re.M) for block in found for part in re.split(r"\n\n", block)]
    return [block.strip() for block in blocks if not block.strip().startswith(("python3 -m venv", "tokenizer_loaded"))]


def test_the_quick_start(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    tools, work = tmp_path / "bin", tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    (tools / "vllm").write_text(
        SHIM.format(python=vllm_python(), here=HERE, model=model, length=MAX_LEN, block=BLOCK, blocks=BLOCKS)
    )
    (tools / "vllm").chmod(0o755)
    script = ""
    for block in commands(PAGE):
        if "vllm serve" in block:
            script += f"{block} > engine.log 2>&1 &\n".replace("engine.log", f"engine-{len(script)}.log")
        elif block.startswith("warmroute serve"):
            script += f"{block} > router.log 2>&1 &\n" + WAIT.format(port=8080, path="/ready")
        else:
            script += f"echo '###'\n{block}\n"
        if "--port 8001" in block:
            script += WAIT.format(port=8000, path="/health") + WAIT.format(port=8001, path="/health")
    path = f"{tools}:{Path(sys.executable).parent}:{VENV / 'bin'}:{os.environ['PATH']}"
    # In a network of its own, the page's ports are free.
    own_network = ["unshare", "--net", "--fork", "--kill-child"] if os.geteuid() == 0 else []
    setup = "ip link set lo up\n" if own_network else ""
    done = subprocess.run(
        [*own_network, "bash", "-euc", f"{setup}trap 'kill $(jobs -p)' EXIT\n{script}"],
        cwd=work, env=os.environ | ENVIRONMENT | {"PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = (work / "router.log").read_text() if (work / "router.log").exists() else ""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log[-3000:]
    _, asked, chat, cached, shown = done.stdout.split("###\n")
    assert asked.rstrip().endswith("no problems") and chat.rstrip().endswith("data: [DONE]")
    tokens = [int(number) for number in re.findall(r'"cached_tokens":(\d+)', cached)]
    assert len(tokens) == 3 and tokens[0] < 100 < tokens[1] == tokens[2], tokens
    assert "tokens cached" in shown and re.search(r'"exact":[1-9]', shown) and '"text":0' in shown
    for event in ("tokenizer_loaded model=Qwen/Qwen3-8B", "kv_events_found node=127.0.0.1:8001", "startup_complete"):
        assert event in log
    figures = dict(re.findall(r"node_cache_(\w+)_tokens_total\{[^}]*\} ([1-9]\d*)", shown))
    assert figures["predicted"] == figures["reported"]
