"""One `transformers serve` process on this CPU, with a small model. `make test-real` installs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from real_engine import HERE, free_port

VENV = Path(os.environ.get("WARMROUTE_TRANSFORMERS_VENV", Path(__file__).resolve().parents[2] / ".venv-transformers"))
BLOCK, BLOCKS = 32, 512
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
START_S = 180.0


def transformers_python() -> Path:
    """Return the environment's Python. Fails if the environment is missing or incomplete."""
    python = VENV / "bin" / "python"
    installed = list(VENV.glob("lib/python3*/site-packages/transformers/cli/serving"))
    assert python.exists() and installed, f"There is no transformers in {VENV}. `make test-real` installs it."
    return python


def make_model(folder: Path) -> Path:
    """Make the model in a new directory in `folder`, and return the directory."""
    model = folder / "slower-model"
    command = [str(transformers_python()), str(HERE / "make_tiny_model.py"), str(model), "--slower"]
    subprocess.run(command, check=True, capture_output=True)
    return model


@dataclass
class TransformersEngine:
    name: str
    model: Path
    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            str(transformers_python()), "-m", "transformers.cli.transformers", "serve", str(self.model),
            "--continuous-batching", "--device", "cpu", "--dtype", "float32", "--cb-block-size", str(BLOCK),
            "--cb-num-blocks", str(BLOCKS), "--cb-max-batch-tokens", "512", "--host", "127.0.0.1",
            "--port", str(self.port), "--log-level", "warning",
        ]  # fmt: skip
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            assert self.process is not None
            assert self.process.poll() is None, f"transformers serve ended: see {self.folder}/{self.name}.log"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).read()
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError("transformers serve did not start in time")

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
