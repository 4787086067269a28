"""Real vLLM engines on this CPU (see ../shared/real-vllm): `make test-real`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from real_engine import RECIPE, VENV, RealEngine


@pytest.fixture(scope="session")
def real_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    if not RECIPE.exists():
        pytest.skip("../shared/real-vllm is missing: no recipe for a real vLLM")
    python = VENV / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{VENV} is missing: run `make test-real`, which makes it")
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "tiny-model"
    subprocess.run([python, RECIPE / "make_tiny_model.py", str(model)], check=True, capture_output=True)
    engines = [RealEngine(name, model, folder) for name in ("a", "b")]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until_ready()
        yield engines
    finally:
        for engine in engines:
            engine.kill()
