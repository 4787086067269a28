"""kind = "file": Prometheus' file_sd format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.polling import until

from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery.target import SourceError, Targets, split_host_port
from warmroute.engines.discovery.targets_file import MAX_FILE_BYTES, TargetsFile, read_groups

CONFIG = DiscoveryConfig(kind="file", file="targets.json")


def source(path: Path, **more: object) -> TargetsFile:
    return TargetsFile(DiscoveryConfig(kind="file", file=str(path), **more))  # type: ignore[arg-type]


async def first(one: TargetsFile) -> Targets:
    reports: list[Targets] = []
    running = asyncio.ensure_future(one.run(reports.append))
    try:
        await until(lambda: reports or running.done())
        if running.done():
            await running
        return reports[0]
    finally:
        running.cancel()


async def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    groups = [
        {
            "targets": ["10.0.0.7:8000", "[fd00::7]:8001"],
            "labels": {
                "model": "llama, qwen/2", "island": "aws/us-east-1", "gpu": "L4", "role": "decode", "engine": "vllm",
                "usd_per_hour": "0.8", "max_inflight": "12", "job": "vllm", "__scheme__": "https",
            },
        },
        {"targets": ["gpu-a.lan"]},
    ]  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(groups))
    (tmp_path / "t.yml").write_text(
        "- targets: [10.0.0.7:8000, '[fd00::7]:8001']\n"
        "  labels: {model: 'llama, qwen/2', island: aws/us-east-1, gpu: L4, role: decode, engine: vllm,\n"
        "           usd_per_hour: 0.8, max_inflight: 12, job: vllm, __scheme__: https}\n"
        "- targets: [gpu-a.lan]\n"
    )
    found = await first(source(tmp_path / "t.json"))
    assert found == await first(source(tmp_path / "t.yml")) and not found.invalid
    one, two, three = (target.node for target in found.found)
    assert one.url == "https://10.0.0.7:8000" and two.url == "https://[fd00::7]:8001"
    assert one.models == ("llama", "qwen/2") and one.island == "aws/us-east-1" and one.gpu == "L4"
    assert (one.role, one.engine, one.usd_per_hour, one.max_inflight) == ("decode", "vllm", 0.8, 12)
    assert (three.url, three.island, three.models) == ("http://gpu-a.lan:8000", "local", ())


async def test_the_configuration_sets_what_labels_leave_out_and_its_island_wins(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '[{"targets": ["a:1"], "labels": {"island": "x", "api_key_env": "SECRET", "kv_events": "tcp://b:1"}}]'
    )
    found = await first(source(path, island="home", models=("m",), api_key_env="KEY", scheme="https"))
    node = found.found[0].node
    assert (node.url, node.island, node.models) == ("https://a:1", "home", ("m",))
    assert (node.api_key_env, node.kv_events) == ("KEY", "auto"), "a label never sets a key or an endpoint"


async def test_changes_are_noticed_also_through_a_link(tmp_path: Path) -> None:
    """A ConfigMap is mounted as a link to a directory that Kubernetes replaces."""
    for number in (1, 2):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        (folder / "t.json").write_text(json.dumps([{"targets": [f"10.0.0.{number}:8000"]}]))
    (tmp_path / "data").symlink_to("v1")
    reports: list[Targets] = []
    running = asyncio.ensure_future(source(tmp_path / "data" / "t.json").run(reports.append))
    await until(lambda: len(reports) == 1)
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").rename(tmp_path / "data")
    await until(lambda: len(reports) == 2)
    running.cancel()
    assert [report.found[0].address for report in reports] == [("10.0.0.1", 8000), ("10.0.0.2", 8000)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.json", "[", "invalid JSON"),
        ("t.json", '{"targets": []}', "expected a list of groups"),
        ("t.yaml", "a: [", "invalid YAML"),
        ("t.yaml", "!!python/object/apply:os.system [false]", "invalid YAML"),
        ("t.json", "[" * 50_000, "invalid JSON"),
        ("t.json", " " * (MAX_FILE_BYTES + 1), "larger than"),
        ("missing.json", None, "No such file"),
    ],
)
async def test_an_unusable_file_is_an_error(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=reason):
        await first(source(tmp_path / name))


def test_single_invalid_targets_and_labels_are_ignored() -> None:
    groups = [
        {"targets": ["good:8000", 7, "a:0", "a:99999", "a b:1", "user@a:1", "x" * 400, "::1", "[::1", "a/b:1"]},
        {"targets": "good:8000"}, 5, {"targets": ["b:1"], "labels": 5},
        {"targets": ["c:1"], "labels": {"role": "king", "engine": "x", "usd_per_hour": "nan", "gpu": "G" * 201,
                                       "max_inflight": "-1", "model": "a\x00b", "island": {"a": 1}}},
    ]  # fmt: skip
    found = read_groups(CONFIG, groups)
    assert [target.node.url for target in found.found] == ["http://good:8000", "http://[::1]:8000", "http://c:1"]
    odd = found.found[-1].node
    assert (odd.role, odd.engine, odd.usd_per_hour, odd.gpu, odd.models, odd.island) == (
        "mixed", "auto", 0.0, "", (), "local",
    )  # fmt: skip
    assert len(found.invalid) == 18 and any("possible values: mixed, prefill, decode" in one for one in found.invalid)


@settings(max_examples=40)
@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["targets", "labels", "model", "role"]), inner),
))  # fmt: skip
def test_garbage_is_refused_or_ignored(groups: object) -> None:
    try:
        found = read_groups(CONFIG, groups)
    except SourceError:
        return
    assert all(target.node.url.startswith("http") for target in found.found)


def test_hosts_and_ports() -> None:
    assert split_host_port("a:1") == ("a", 1) and split_host_port("a") == ("a", 0)
    assert split_host_port("[fd00::1]:2") == ("fd00::1", 2) and split_host_port("fd00::1") == ("fd00::1", 0)
    for bad in ("", ":1", "a:b", "a:-1", "a:١", "[::1]x", "a:b:c"):
        assert split_host_port(bad) is None, bad
