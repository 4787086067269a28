"""The commands of docs/experiments.md that are not `warmroute replay`."""

from __future__ import annotations

import sys
from pathlib import Path

import experiments
import pytest

from warmroute.replay.ladder import Step


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    experiments.main()


def test_unequal_gpus_are_told_with_their_spread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "unequal", "--seeds", "2", "--clients", "1", "4")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 3
    assert all("±" in line for line in lines[2:])


def test_the_ladder_is_climbed_by_every_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(experiments, "LLM_D_STEPS", (Step(5, 4, counts=False), Step(5, 4), Step(10, 4)))
    page = tmp_path / "page.html"
    words = ["--policy", "random", "--policy", "session", "--html", str(page), "output_tokens=20", "groups=4"]
    run(monkeypatch, "llm_d", *words)
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 2
    assert "session" in page.read_text()


def test_the_published_ladder_asks_what_was_published() -> None:
    steps = experiments.LLM_D_STEPS
    assert [step.requests for step in steps[:3]] == [750, 60, 200]
    assert steps[-1].requests == 1500
    assert len(steps) == 17
