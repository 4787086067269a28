"""Arguments of all commands: bad numbers and files are reported in one sentence before a command works, output fits the
terminal, and a closed pipe is no error."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from warmroute.app.commands import TableColumn, fit_tables, output_file
from warmroute.app.main import create_parser, main

NUMBERS = {
    "replay": (
        "nodes", "blocks", "block-size", "cpu-blocks", "rate", "scale-rate", "day", "burst", "concurrency", "limit",
        "duration", "warm-up", "warm-rate", "seed", "queue-threshold", "poll-interval", "poll-lag", "poll-loss",
        "kv-lag", "kv-loss", "min-nodes", "max-nodes", "start", "usd", "quota", "ceiling", "replicas", "sync-lag",
        "sync-loss", "kv-bandwidth", "kv-store", "kv-store-bandwidth", "tenants",
    ),
    "plan": (
        "usd", "max-nodes", "rate", "scale-rate", "limit", "warm-up", "seed", "ttft-p50", "ttft-p90", "ttft-p99",
        "inter-token-p90", "margin",
    ),
    "load": (
        "rate", "scale-rate", "burst", "concurrency", "limit", "duration", "speed", "timeout", "seed",
    ),
    "engine": (
        "port", "blocks", "block-size", "cpu-blocks", "max-num-seqs", "max-num-batched-tokens", "max-model-len",
        "events-port", "replay-port", "max-loras", "data-parallel-size", "speed", "answer-tokens", "seed",
        "kv-bandwidth",
    ),
    "demo": ("port", "speed"),
    "serve": ("port", "admin-port", "edges", "workers"),
    "picker": ("port", "admin-port"),
    "doctor": ("timeout",),
    "init": ("port", "admin-port", "timeout"),
    "capture": ("listen", "minutes", "max-mb", "output-tokens"),
    "explain": ("status", "limit"),
    "monitoring": ("ttft-seconds", "queue-wait-seconds", "ttft-share", "availability"),
}  # fmt: skip
WITH_WORKLOAD = ("replay", "plan", "load")
MAY_BE_ZERO = (
    "cpu-blocks", "warm-up", "seed", "poll-lag", "poll-loss", "kv-lag", "kv-loss", "min-nodes", "start", "usd", "quota",
    "port", "events-port", "replay-port", "admin-port", "sync-lag", "sync-loss", "listen", "margin", "tenants",
)  # fmt: skip


def bad_numbers() -> Iterator[tuple[str, str, str]]:
    for command, flags in NUMBERS.items():
        for flag in flags:
            for value in ("abc", "nan", "inf", "", "1e999", "-1", "0", "1.5x"):
                if (value == "0" and flag in MAY_BE_ZERO) or (value == "-1" and flag == "seed"):
                    continue
                yield command, flag, value


def test_bad_numbers_are_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    parser = create_parser()
    for command, flag, value in bad_numbers():
        words = [command, *(["unique_batch"] if command in WITH_WORKLOAD else []), f"--{flag}={value}"]
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        out, err = capsys.readouterr()
        assert ended.value.code == 2, words
        assert not out and err.count("\n") == 1, (words, err)
        assert err.startswith(f"warmroute {command}: --{flag}: ") and repr(value) in err, (words, err)
        assert "expected a" in err or "is not a duration such as" in err, (words, err)


def test_every_number_of_every_command_is_tested() -> None:
    (commands,) = (action for action in create_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        numbers = {
            option.removeprefix("--")
            for action in parser._actions
            if action.type not in (None, Path, output_file)
            for option in action.option_strings
        }
        assert numbers == set(NUMBERS.get(name, ())), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "rag", "--island", "eu=nan"], "--island 'eu=nan': expected NAME=MS"),
        (["replay", "rag", "--fault", "nan fail node-1"], "is not like '60 fail node-3'"),
        (["replay", "rag", "--fault", "-5 fail node-1"], "is not like '60 fail node-3'"),
        (["replay", "rag", "--policy", "sglang:cache_threshold=nan"], "cache_threshold is a float, not 'nan'"),
        (["replay", "rag", "--policy", "price:cache_weight=nan"], "price: cache_weight is a float, not 'nan'"),
        (["replay", "rag", "--autoscale", "--scaler", "hpa:target=0"], "'target=0' is not like target=1"),
        (["replay", "rag", "documents=0"], "rag: documents is '0'; expected a whole number above 0"),
        (["replay", "rag", "rate=nan"], "rag: rate is 'nan'; expected a number above 0"),
        (["replay", "rag", "spread=2"], "rag: spread is '2'; expected a number from 0 to 1"),
        (["replay", "rag", "per_request=500"], "there are only 200 documents"),
        (["replay", "rag", "--policy"], "expected one argument"),
        (["replay", "rag", "--nodse", "3"], "--nodse"),
        (["rplay"], "invalid choice: 'rplay'"),
    ],
)
def test_other_mistakes_are_reported_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--quiet"] if words[0] == "replay" and words[-1] != "--policy" else words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err


@pytest.mark.parametrize("command", WITH_WORKLOAD)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nowhere/at/all.json", "the directory /nowhere/at does not exist"),
        ("{tmp}", "it is a directory"),
        ("{tmp}/locked/x.json", "this user has no permission to write it"),
        ("", "its name is empty"),
    ],
)
def test_output_files_are_checked_before_the_run(
    command: str, path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "locked").mkdir()
    # root may write everywhere
    monkeypatch.setattr("os.access", lambda path, _mode: "locked" not in str(path))
    flags = ("--json", "--html") if command == "replay" else ("--json",)
    for flag in flags:
        assert main([command, "no_such_workload", f"{flag}={path.format(tmp=tmp_path)}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"warmroute {command}: {flag}: cannot write the file") and reason in err


def test_existing_files_and_devices_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    words = ["replay", "unique_batch", "--limit", "2", "--nodes", "1", "--policy", "round_robin", "--quiet"]
    assert main([*words, "--json", str(tmp_path / "old.json"), "--html", "/dev/null"]) == 0
    assert (tmp_path / "old.json").read_text().startswith("{")


# Tables.


def table_text(names: list[str], columns: int, width: int) -> list[str]:
    keys = [TableColumn("policy", [Text(name) for name in names], "left")]
    others = [TableColumn(f"TTFT p{at} of all", [Text(f"{at * 1000:,} ms") for _ in names]) for at in range(columns)]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in fit_tables(keys, others, width, "a title"):
        console.print(table)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 81, 120, 300])
@pytest.mark.parametrize("columns", [1, 5, 18])
def test_tables_fit_the_terminal_and_lose_nothing(width: int, columns: int) -> None:
    names = ["price", "prefix_hash:load_factor=2.5", "a policy with " + "a very long name " * 6]
    lines = table_text(names, columns, width)
    assert max(cell_len(line) for line in lines) <= width
    text = " ".join(lines)
    for at in range(columns):
        assert text.count(f" {at * 1000:,} ms ") == len(names) and f"p{at}" in text
    assert "…" not in text


def test_a_wide_terminal_shows_one_table() -> None:
    assert sum("┏" in line for line in table_text(["price"], 8, 300)) == 1
    assert sum("┏" in line for line in table_text(["price"], 18, 80)) > 1


def test_the_results_of_a_replay_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["replay", "unique_batch", "--limit", "4", "--nodes", "1", "--rate", "2,4"]
    assert main([*words, "--policy", "prefix_hash:load_factor=2.5", "--policy", "round_robin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(cell_len(line) for line in lines) <= 80
    text = " ".join(lines)
    assert all(head in text for head in ("hit rate", "tokens/s", "preemptions", "failed"))


def test_the_results_of_plan_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["plan", "unique_batch", "--limit", "4", "--max-nodes", "1", "--usd", "3", "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert max(cell_len(line) for line in lines if "│" in line or "┃" in line) <= 80


# Closed pipes.


@pytest.mark.parametrize(
    "words",
    [
        ["config-reference"],
        ["replay", "--help"],
        ["replay", "unique_batch", "--limit", "3", "--nodes", "1", "--policy", "round_robin"],
    ],
)
def test_a_reader_that_has_read_enough_is_no_error(words: list[str]) -> None:
    """As in `warmroute … | head -1`: the pipe is closed before everything is written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "warmroute", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) in (0, 141) and "Traceback" not in err and "BrokenPipe" not in err, err
