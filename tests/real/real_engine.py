"""One real vLLM engine on this CPU, with a tiny model. `make test-real` installs vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.vllm_environment import VENV, vllm_python

HERE = Path(__file__).parent
BLOCK, BLOCKS, MAX_LEN = 32, 64, 1024
"""A CPU needs a multiple of 32 as block size. One block is the null block."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
START_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_tiny_model(folder: Path, *flags: str) -> Path:
    """Make the model in a new directory in `folder`, and return the directory."""
    model = folder / "tiny-model"
    subprocess.run([vllm_python(), HERE / "make_tiny_model.py", model, *flags], check=True, capture_output=True)
    return model


@dataclass
class RealEngine:
    """One vLLM process; `start` and `kill` may be called again and again."""

    name: str
    model: Path
    folder: Path
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    flags: list[str] = field(default_factory=list)
    """Flags of vLLM beside those that every engine here has."""
    python: Path | None = None
    """None: that of the environment with vLLM."""
    script: str = "serve_forked.py"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start vLLM. A process that still runs, of a test that failed before it killed it, ends first."""
        self.kill()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": f"kv@127.0.0.1:{self.port}@tiny",
        }
        command = [
            str(self.python or vllm_python()), str(HERE / self.script),
            "--model", str(self.model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN), "--enforce-eager", "--enable-prefix-caching",
            "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "16",
            "--enable-prompt-tokens-details", "--enable-request-id-headers", "--kv-events-config", json.dumps(events),
            *self.flags,
        ]  # fmt: skip
        environment = os.environ | ENVIRONMENT | self.environment | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"vLLM ended: see {self.folder}/{self.name}.log"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).read()
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError("vLLM did not start in time")

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def running(engines: Sequence[RealEngine]) -> Iterator[None]:
    """Start engines together, wait until all are ready, and kill them at the end."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until_ready()
        yield
    finally:
        for engine in engines:
            engine.kill()
