"""Tokenize requests with vLLM and transformers themselves, if an environment with them exists."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENTS = [os.environ.get("WARMROUTE_VLLM_VENV", ""), HERE.parent.parent / ".venv-vllm", Path.home() / "venv-vllm"]


def vllm_python() -> Path | None:
    for environment in filter(None, ENVIRONMENTS):
        python = Path(environment) / "bin" / "python"
        if python.exists() and list(Path(environment).glob("lib/python3*/site-packages/vllm/renderers")):
            return python
    return None


def tokenize_with_vllm(requests: list[dict[str, Any]]) -> list[list[int] | str]:
    """Return for each request its token ids, or the error."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [str(vllm_python()), str(HERE / "vllm_reference_script.py")],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    results: list[list[int] | str] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(requests), done.stderr[-2000:]
    return results
