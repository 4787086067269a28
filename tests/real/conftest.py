"""Two real vLLM engines on this CPU: `make test-real`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_engine import RealEngine, make_tiny_model, running


@pytest.fixture(scope="session")
def real_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_tiny_model(folder)
    engines = [RealEngine(name, model, folder) for name in ("a", "b")]
    with running(engines):
        yield engines
