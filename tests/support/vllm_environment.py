"""The Python environment with a real vLLM, for the tests marked `real`. `make test-real` makes it."""

from __future__ import annotations

import os
from pathlib import Path

VENV = Path(os.environ.get("WARMROUTE_VLLM_VENV", Path(__file__).resolve().parents[2] / ".venv-vllm"))


def vllm_python() -> Path:
    """Return the environment's Python. Fails if the environment is missing or incomplete."""
    python = VENV / "bin" / "python"
    installed = list(VENV.glob("lib/python3*/site-packages/vllm/renderers"))
    assert python.exists() and installed, f"There is no vLLM in {VENV}. `make test-real` installs it."
    return python
