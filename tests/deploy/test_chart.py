"""The chart with helm itself, the Containerfile with hadolint, the image's steps, and the unit with systemd-analyze."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from warmroute.config import from_table

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "warmroute"
TOOLS = ROOT / ".venv-deploy" / "bin"
pytestmark = pytest.mark.deploy


def run(*command: str | Path, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def render(*arguments: str, **values: Any) -> list[dict[str, Any]]:
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]
    text = run(TOOLS / "helm", "template", "r", CHART, "--namespace", "llm", *sets, *arguments).stdout
    return [one for one in yaml.safe_load_all(text) if one]


def config_of(found: list[dict[str, Any]]) -> Any:
    [text] = [one["data"]["warmroute.toml"] for one in found if "warmroute.toml" in (one.get("data") or {})]
    return from_table(tomllib.loads(text))


def test_the_chart_is_clean_and_the_manifests_are_what_it_renders(tmp_path: Path) -> None:
    run(TOOLS / "helm", "lint", "--strict", CHART)
    run("sh", ROOT / "deploy" / "kubernetes" / "render.sh", TOOLS / "helm", tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "deploy" / "kubernetes" / path.name).read_text(), "run `make manifests`"


def test_values_become_a_configuration_that_the_router_accepts(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        'engines: {podSelector: "app in (vllm, sglang),tier=gpu", port: 9000, apiKey: "s3cret\\"x"}\n'
        'admin: {token: "0123456789"}\nconfig: |\n  [routing]\n  policy = "price"\n\n  [[islands]]\n  name = "a"\n'
    )
    found = render("-f", str(values))
    config = config_of(found)
    assert config.discovery[0].pod_selector == "app in (vllm, sglang),tier=gpu" and config.discovery[0].port == 9000
    assert config.discovery[0].api_key_env == "ENGINE_API_KEY" and config.islands[0].name == "a"
    assert config.admin.token_sha256 == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"
    [secret] = [one for one in found if one["kind"] == "Secret"]
    assert secret["stringData"] == {"engine-api-key": 's3cret"x', "admin-token": "0123456789"}
    assert not [one for one in found if "s3cret" in str(one) and one["kind"] != "Secret"]
    assert config_of(render(engines__podSelector="")).discovery == ()
    assert "ClusterRole" not in {one["kind"] for one in render(readNodes="false")}
    config_of(render("-f", str(CHART / "values-replicas.yaml")))


def test_the_alert_rules_and_the_dashboard_are_those_of_the_repository() -> None:
    found = render(prometheusRule__enabled="true", grafanaDashboard__enabled="true")
    [rules] = [one for one in found if one["kind"] == "PrometheusRule"]
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert any("warmroute.json" in (one.get("data") or {}) for one in found)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keda__enabled": "true"}, "keda.enabled needs engines.deployment"),
        ({"serviceMonitor__enabled": "true"}, "serviceMonitor.enabled needs admin.token"),
        ({"admin__existingSecret": "s"}, "admin.existingSecret needs admin.tokenSha256"),
    ],
)
def test_contradicting_values_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        render(**values)


def test_hadolint_finds_nothing() -> None:
    run(TOOLS / "hadolint", ROOT / "Containerfile")


@pytest.mark.timeout(900)
def test_the_images_steps_in_a_clean_directory(tmp_path: Path) -> None:
    """The same steps as in the Containerfile, for the Python of this test; then the demo, with nothing else on PATH."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    wanted = re.compile(r"(pyproject.toml|setup.py|README.md|LICENSE|requirements-image.lock)\Z|src/|deploy/image/")
    for name in filter(wanted.match, listed):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    steps, target = tmp_path / "source" / "deploy" / "image" / "steps.sh", tmp_path / "opt"
    run("sh", steps, "wheels", sys.executable, tmp_path / "source", tmp_path / "wheels")
    run("sh", steps, "install", sys.executable, tmp_path / "wheels", target)
    shutil.rmtree(tmp_path / "source")
    clean = ("env", "-i", f"HOME={tmp_path}", f"PATH={target}/bin")
    assert "warmroute " in run(*clean, target / "bin" / "warmroute", "--version").stdout
    sample = ROOT / "deploy" / "systemd" / "warmroute.toml"
    run(*clean, target / "bin" / "warmroute", "check-config", sample)
    run(*clean, target / "bin" / "python", "-c", "import lightkube, dns, grpc, warmroute.discovery.kubernetes")
    assert not (target / "bin" / "pip").exists()
    run(*clean, target / "bin" / "warmroute", "demo", "--only", "compare", "--exit")


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With another path of the program, because verify wants to find it."""
    for name in ("warmroute.service", "warmroute.socket"):
        text = (ROOT / "deploy" / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/warmroute/bin/warmroute", "/bin/true"))
    done = run("systemd-analyze", "verify", "--man=no", tmp_path / "warmroute.service", tmp_path / "warmroute.socket")
    assert not done.stderr
    security = run(
        "systemd-analyze", "security", "--offline=yes", "--threshold=15", tmp_path / "warmroute.service"
    ).stdout  # fmt: skip
    assert "Overall exposure level" in security
