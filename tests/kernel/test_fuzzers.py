"""A bounded run of the kernel's fuzzers, with gcc's sanitizers. `make sanitize` runs them for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"
TARGETS = {
    "body_scan", "first_token", "http_chunks", "http_head", "index", "message_tokens", "recency", "sockets", "usage",
}  # fmt: skip


@pytest.mark.timeout(600)
def test_the_fuzzers_find_nothing_in_a_bounded_run() -> None:
    command = [sys.executable, str(FUZZ / "run.py"), "--runs", "1000", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == TARGETS


def test_the_corpus_is_small_and_every_target_has_one() -> None:
    assert {path.name for path in (FUZZ / "corpus").iterdir()} == TARGETS
    assert sum(path.stat().st_size for path in FUZZ.glob("corpus/*/*")) < 300_000
