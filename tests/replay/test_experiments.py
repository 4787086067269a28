"""The commands of bench/experiments.py."""

from __future__ import annotations

import sys
from pathlib import Path

import experiments
import pytest
from load_steps import LoadStep


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    experiments.main()


def table_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_unequal_gpus_are_reported_with_standard_deviations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "unequal", "--seeds", "2", "--clients", "1", "4")
    lines = table_lines(capsys)
    assert len(lines) == 2 + 2 * 3
    assert all("±" in line for line in lines[2:])


def test_every_policy_runs_all_load_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(experiments, "LLM_D_STEPS", (LoadStep(5, 4, measured=False), LoadStep(5, 4), LoadStep(10, 4)))
    page = tmp_path / "page.html"
    words = ["--policy", "random", "--policy", "session", "--html", str(page), "output_tokens=20", "groups=4"]
    run(monkeypatch, "llm_d", *words)
    assert len(table_lines(capsys)) == 2 + 2 * 2
    assert "session" in page.read_text()


def test_the_load_steps_are_the_published_ones() -> None:
    steps = experiments.LLM_D_STEPS
    assert [step.requests for step in steps[:3]] == [750, 60, 200]
    assert steps[-1].requests == 1500
    assert len(steps) == 17
