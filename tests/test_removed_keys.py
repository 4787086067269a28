"""The number of keys, and an upgrade from 0.2: a file with removed keys starts, with one warning for each."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.serve_process import serve

from warmroute.app.main import main
from warmroute.config import Config, ConfigError, describe_keys, from_table, tables
from warmroute.config.file import EXPERIMENT
from warmroute.config.section import REMOVED_IN, Section, keys_of, removed_keys_of, section_of


@pytest.fixture(autouse=True)
def _no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks that other tests import set the variable."""
    monkeypatch.delenv(EXPERIMENT, raising=False)


MAX_KEYS = 185
RELEASE_0_2 = Path(__file__).parent / "fixtures" / "config_0_2"
"""The example files, the chart's values and the examples of the pages of 0.2, and a file with every key of 0.2."""


def test_the_file_has_few_keys() -> None:
    """The 7 keys of [cluster] leave later: then 178."""
    names = [f"{name}.{key.name}" for name, section, _ in tables() for key in describe_keys(section)]
    assert len(names) == len(set(names)) and len(names) <= MAX_KEYS


def all_removed(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all removed keys."""
    for name in removed_keys_of(section):
        yield f"{prefix}{name}"
    for name, kind in keys_of(section).items():
        if inner := section_of(kind):
            yield from all_removed(inner, f"{prefix}{name}.")


def paths_of(warnings: tuple[str, ...]) -> list[str]:
    """Return the keys that the warnings name: `[[nodes]] kv_replay was removed …` is nodes.kv_replay."""
    words = [warning.split(" ", 2) for warning in warnings]
    assert all(rest.startswith(f"was removed in {REMOVED_IN}; Warmroute uses ") for _table, _key, rest in words)
    return [f"{table.strip('[]')}.{key}" for table, key, _rest in words]


def files() -> Iterator[tuple[str, str]]:
    """Yield the configurations of 0.2: a name and the TOML text of each."""
    for path in sorted(RELEASE_0_2.iterdir()):
        if path.suffix == ".toml":
            yield path.name, path.read_text()
            continue
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and "warmroute.toml" in (document.get("data") or {}):
                yield path.name, document["data"]["warmroute.toml"]
            elif path.name.startswith("values"):
                yield path.name, document.get("config") or ""


def test_every_key_of_0_2_is_a_key_or_gives_one_warning() -> None:
    config = from_table(tomllib.loads((RELEASE_0_2 / "every-key.toml").read_text()))
    named = paths_of(config.warnings)
    assert sorted(named) == sorted(all_removed())


@pytest.mark.parametrize(("name", "text"), [pytest.param(*one, id=one[0]) for one in files()])
def test_a_file_of_0_2_starts_with_warnings_only(name: str, text: str) -> None:
    table = tomllib.loads(text)
    config = from_table(table)
    assert set(paths_of(config.warnings)) <= set(all_removed()), name


def test_the_values_that_the_chart_of_0_2_shows_start_with_warnings_only() -> None:
    lines = (RELEASE_0_2 / "values.yaml").read_text().splitlines()
    at = lines.index("tables: {}")
    shown: dict[str, Any] = yaml.safe_load("\n".join(line.replace("# ", "", 1) for line in lines[at + 1 : at + 3]))
    assert shown.keys() == {"scaling", "log"}
    assert from_table(shown).log.level == "debug"


def test_a_removed_key_does_not_count() -> None:
    config = from_table({"health": {"interval_s": 99, "path": 5}, "limits": {"body_bytes": 7}})
    assert config.health == Config().health and config.limits.body_bytes == 7
    assert config.warnings == (
        "[health] interval_s was removed in 0.3; Warmroute uses 1 s",
        '[health] path was removed in 0.3; Warmroute uses "/health"',
    )


def test_an_unknown_key_beside_a_removed_one_stays_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        from_table({"health": {"interval_s": 99, "intervall_s": 1}, "hedgin": {}})
    assert error.value.problems == (
        "unknown key health.intervall_s; this table has no keys",
        "unknown key hedgin; did you mean hedging?",
    )


def test_a_removed_key_of_a_repeated_table_gives_one_warning() -> None:
    nodes = [{"url": f"http://10.0.0.{at}:8000", "bootstrap_port": at} for at in (1, 2)]
    config = from_table({"nodes": [{**node, "kv_replay": "tcp://*:6557"} for node in nodes]})
    assert [node.bootstrap_port for node in config.nodes] == [1, 2]
    assert len(config.warnings) == 1


OLD_FILE = """
[listen]
port = 0
[admin]
port = 0
[hedging]
factor = 3.0
[[nodes]]
url = "http://127.0.0.1:9"
kv_replay = "tcp://*:6557"
"""
WARNINGS = (
    "[hedging] factor was removed in 0.3; Warmroute uses 5",
    "[[nodes]] kv_replay was removed in 0.3; Warmroute uses what the engine reports",
)


def test_check_config_and_doctor_show_the_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.toml"
    file.write_text(OLD_FILE)
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr().err.splitlines() == [f"warning: {file}: {warning}" for warning in WARNINGS]
    main(["doctor", "--config", str(file), "--no-requests", "--json"])
    found = json.loads(capsys.readouterr().out)
    notes = [check["found"] for one in found["subjects"] for check in one["checks"] if check["state"] == "note"]
    assert [note for note in notes if "was removed" in note] == list(WARNINGS)


async def test_serve_starts_and_logs_each_warning_once(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(OLD_FILE)
    async with serve("--config", file) as router:
        assert router.port, router.lines
        logged = [line.partition("config_warning: ")[2] for line in router.lines if "config_warning" in line]
        assert logged == list(WARNINGS)
