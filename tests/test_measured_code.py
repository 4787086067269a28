"""Figures know the code that they were measured on: tools/measured_code.py, and what docs_figures.py says of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RULE = "src/warmroute/lab/peers/llm_d.py"
DECLARED = """\
[parts.llm_d]
code = ["src/warmroute/lab/peers/llm_d.py"]
replayed = true
policies = ["llm_d"]
[parts.kernel]
code = ["src/index*.c"]
[records]
steps = ["llm_d", "kernel", "bench/steps.py:run"]
"""
FILES = {
    "bench/measured_code.toml": DECLARED,
    "bench/steps.py": "import sys\n\ndef run():\n    return 1\n\ndef other():\n    return 2\n",
    "src/index.c": "/* Why. */\nint one(void) { return 1; }  // one\n",
    "src/warmroute/__init__.py": '__version__ = "1.2.3"\n',
    "tests/fixtures/replay_oracle.json": '{"policies": {"runs": {"0 llm_d": {"requests": 3}}}}',
    "README.md": (
        "It takes <!-- value steps.ms -->106<!-- / --> ms.\n\n"
        "<!-- table steps.all -->\n| ms |\n| --- |\n| 106 |\n<!-- / -->\n"
    ),
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A repository with one rule of a peer, one benchmark, and one fresh record of it; without git."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in (RULE, "tools/measured_code.py", "tools/docs_figures.py", "bench/record.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bench" / "results").mkdir()
    (tmp_path / "docs").mkdir()
    measure(tmp_path)
    return tmp_path


def measure(house: Path) -> None:
    run = "from record import record; record('steps', values={'ms': 106}, tables={'all': (['ms'], [[106]])})"
    subprocess.run([sys.executable, "-c", run], cwd=house / "bench", check=True)


def figures(house: Path, *words: str) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "tools/docs_figures.py", *words], cwd=house, capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


def change(house: Path, name: str, old: str, new: str) -> None:
    text = (house / name).read_text()
    assert old in text
    (house / name).write_text(text.replace(old, new, 1))


STALE = "stale: steps in README.md: measured on version 1.2.3; changed since: "


@pytest.mark.parametrize(
    ("name", "old", "new", "part"),
    [
        (RULE, "SPECULATIVE_S = 2.0", "SPECULATIVE_S = 3.0", "llm_d"),
        (RULE, "1.0 - node.kv_usage", "2.0 - node.kv_usage", "llm_d"),
        ("bench/steps.py", "return 1", "return 3", "bench/steps.py:run"),
        ("src/index.c", "return 1", "return 2", "kernel"),
    ],
)
def test_a_planted_change_is_noticed(house: Path, name: str, old: str, new: str, part: str) -> None:
    assert figures(house) == (0, "figures: docs and bench/results agree\n")
    change(house, name, old, new)
    _, said = figures(house, "--write")
    assert f"{STALE}{part}\n" in said
    # make lint warns and passes; make release fails.
    assert figures(house) == (0, f"{STALE}{part}\nfigures: docs and bench/results agree\n")
    status, said = figures(house, "--fresh")
    assert status == 1 and "1 results are stale" in said
    page = (house / "README.md").read_text()
    assert "106 (measured on version 1.2.3)<!-- / --> ms" in page
    assert "| 106 |\n\nMeasured on version 1.2.3. The code has changed since.\n<!-- / -->" in page
    # Changed back, the page has its old text again.
    change(house, name, new, old)
    figures(house, "--write")
    assert (house / "README.md").read_text() == FILES["README.md"]


def test_words_and_places_of_the_code_are_not_noticed(house: Path) -> None:
    # Comments, docstrings, also of fields, lines, imports.
    change(house, RULE, "from random import Random", "import random\nfrom random import Random  # a comment")
    change(house, RULE, '        """Nodes that got a cold request, the least recent first."""\n', "")
    change(house, RULE, '"""llm-d\'s rules, as of', '"""The rules of llm-d, as of')
    change(house, "src/index.c", "/* Why. */\nint one(void) {", "/* Other words. */ int one(void)\n{")
    change(house, "bench/steps.py", "return 2", "return 5")  # another function than the declared one
    assert figures(house) == (0, "figures: docs and bench/results agree\n")
    # A moved and renamed file, once the list has its new place; half of it in a file of its own.
    text = (house / RULE).read_text()
    head, precise = re.split(r"(?=^class LlmDPrecise)", text, flags=re.MULTILINE)
    (house / RULE).unlink()
    (house / "src" / "scorers.py").write_text(head)
    (house / "src" / "precise.py").write_text(precise)
    status, said = figures(house)
    assert status == 1 and f"{RULE} is not there; if it moved, list its new place" in said
    change(house, "bench/measured_code.toml", f'"{RULE}"', '"src/scorers.py", "src/precise.py"')
    assert figures(house) == (0, "figures: docs and bench/results agree\n")


def test_a_note_of_a_paragraph_has_one_place(house: Path) -> None:
    change(house, RULE, "SPECULATIVE_S = 2.0", "SPECULATIVE_S = 3.0")
    value = "<!-- value steps.ms -->106<!-- / -->"
    (house / "README.md").write_text(f"From {value} to {value} ms<!-- measured steps --><!-- / -->.\n\nThen {value}.\n")
    figures(house, "--write")
    note = " (measured on version 1.2.3)"
    assert (house / "README.md").read_text() == (
        f"From {value} to {value} ms<!-- measured steps -->{note}<!-- / -->.\n\n"
        f"Then {value.replace('106', '106' + note)}.\n"
    )


def test_equal_replays_carry_a_record_over(house: Path) -> None:
    oracle = house / "tools" / "replay_oracle.py"

    def carry() -> str:
        command = [sys.executable, "tools/measured_code.py", "carry"]
        return subprocess.run(command, cwd=house, capture_output=True, text=True, check=False).stdout

    change(house, RULE, "SPECULATIVE_S = 2.0", "SPECULATIVE_S = 3.0")
    oracle.write_text("raise SystemExit(1)\n")
    assert "not equal: no record is carried over" in carry()
    assert figures(house, "--fresh")[0] == 1
    oracle.write_text("")
    assert "steps: carried over" in carry()
    assert figures(house) == (0, "figures: docs and bench/results agree\n")
    assert json.loads((house / "bench/results/steps.json").read_text())["measured"]["version"] == "1.2.3"
    # Not where the replays were recorded anew, nor for code that they do not run.
    change(house, RULE, "SPECULATIVE_S = 3.0", "SPECULATIVE_S = 4.0")
    change(house, "tests/fixtures/replay_oracle.json", '"requests": 3', '"requests": 4')
    assert "the recorded replays of its policies changed since it was measured" in carry()
    change(house, "src/index.c", "return 1", "return 2")
    assert "replays do not run kernel; measure it again" in carry()


def test_a_record_needs_declared_code(house: Path) -> None:
    run = "from record import _result_name; _result_name('unknown')"
    ran = subprocess.run([sys.executable, "-c", run], cwd=house / "bench", capture_output=True, text=True, check=False)
    assert "does not say which code unknown measures" in ran.stderr


def test_a_release_needs_fresh_figures(tmp_path: Path, house: Path) -> None:
    change(house, RULE, "SPECULATIVE_S = 2.0", "SPECULATIVE_S = 3.0")
    shutil.copy(ROOT / "tools" / "build_release.sh", house / "tools")
    command = ["sh", "tools/build_release.sh", str(tmp_path / "dist"), sys.executable]
    ran = subprocess.run(command, cwd=house, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and STALE in ran.stdout
    assert not list((tmp_path / "dist").iterdir())


def test_every_record_declares_its_code() -> None:
    known = (ROOT / "bench" / "measured_code.toml").read_text().split("[records]")[1]
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert re.search(rf"^{path.stem} = \[", known, re.MULTILINE), path.stem
        measured = json.loads(path.read_text())["measured"]
        assert measured["code"] and (measured["commit"] or measured["version"])
