"""Asks vLLM and transformers themselves, where an environment with them is found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = [os.environ.get("WARMROUTE_VLLM_VENV", ""), HERE.parent.parent / ".venv-vllm", Path.home() / "venv-vllm"]


def oracle_python() -> Path | None:
    for environment in filter(None, ENVIRONMENTS):
        python = Path(environment) / "bin" / "python"
        if python.exists() and list(Path(environment).glob("lib/python3*/site-packages/vllm/renderers")):
            return python
    return None


def ask_oracle(asks: list[dict[str, Any]]) -> list[list[int] | str]:
    """Token ids for each, or why there are none."""
    lines = "".join(json.dumps(ask) + "\n" for ask in asks)
    done = subprocess.run(
        [str(oracle_python()), str(HERE / "engine_oracle.py")], input=lines, capture_output=True, text=True, check=True
    )
    answers: list[list[int] | str] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asks), done.stderr[-2000:]
    return answers
