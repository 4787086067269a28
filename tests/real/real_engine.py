"""One real vLLM engine on this CPU, by the recipe in ../shared/real-vllm."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT.parent / "shared" / "real-vllm"
VENV = Path(os.environ.get("WARMROUTE_VLLM_VENV", ROOT / ".venv-vllm"))
START_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Those beyond the recipe's."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = os.environ | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "MODEL": str(self.model)}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [RECIPE / "start", self.name, str(self.port), str(self.events_port), str(self.replay_port),
                 *self.flags],
                stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip

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
