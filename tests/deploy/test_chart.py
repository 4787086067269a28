"""The chart with helm itself, the Containerfile with hadolint, the image's steps, and the unit with systemd-analyze."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.kubernetes_schemas import custom_problems, is_builtin, schema_problems

from warmroute.config import from_table

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "warmroute"
TOOLS = ROOT / ".venv-deploy" / "bin"
OWN_SECRET: dict[str, Any] = {"admin__existingSecret": "own", "admin__tokenSha256": "0" * 64}
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


@cache
def operator_schemas() -> Any:
    return json.loads(run(TOOLS / "python", ROOT / "tools" / "operator_schemas.py").stdout)


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
    assert config.state.config_map == "r-warmroute-state"
    assert "r-warmroute-state" not in str(render(state__enabled="false"))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"engines__podSelector": "", "readNodes": "false", "podDisruptionBudget__enabled": "false"},
        {
            "keda__enabled": "true", "engines__deployment": "vllm", "engines__apiKey": "k", "replicas": 3,
            "cluster__url": "rediss://redis:6379/1", "cluster__password": "p", "admin__token": "t",
            "networkPolicy__enabled": "true", "networkPolicy__clients[0]__ipBlock__cidr": "10.0.0.0/8",
            "networkPolicy__monitoring[0]__namespaceSelector__matchLabels__name": "monitoring",
            "serviceMonitor__enabled": "true", "serviceMonitor__labels__release": "prometheus",
            "prometheusRule__enabled": "true", "grafanaDashboard__enabled": "true", "podAnnotations__a": "b",
            "env[0]__name": "HF_TOKEN", "env[0]__value": "x", "image__pullSecrets[0]__name": "registry",
            "nodeSelector__pool": "cpu", "tolerations[0]__key": "t", "service__type": "LoadBalancer",
        },
        {**OWN_SECRET, "serviceMonitor__enabled": "true"},
        {"keda__enabled": "true", "keda__trigger": "external-push", "engines__deployment": "vllm"},
    ],
    ids=["defaults", "least", "everything", "existing secret", "KEDA by gRPC"],
)  # fmt: skip
def test_what_the_chart_renders_matches_the_schemas(values: dict[str, Any]) -> None:
    found = render(**values)
    assert [problem for one in found if is_builtin(one) for problem in schema_problems(one)] == []
    custom = [one for one in found if not is_builtin(one)]
    assert [problem for one in custom for problem in custom_problems(one, operator_schemas())] == []


def test_mistakes_in_objects_of_the_operators_are_found() -> None:
    values = {"engines__deployment": "vllm", "keda__enabled": "true", "admin__token": "t"}
    found = render(**values, serviceMonitor__enabled="true", prometheusRule__enabled="true")
    kinds = {one["kind"]: one for one in found}
    scaled, monitor, rules = kinds["ScaledObject"], kinds["ServiceMonitor"], kinds["PrometheusRule"]
    scaled["spec"]["maxReplicaCount"] = "ten"
    monitor["spec"]["endpoints"][0]["authorization"]["credentials"]["nmae"] = "secret"
    rules["spec"]["groups"][0]["rules"][0]["expresion"] = "1"
    for one, part in ((scaled, "'ten' is not of type"), (monitor, "'nmae' was unexpected"), (rules, "'expresion'")):
        assert part in str(custom_problems(one, operator_schemas()))


def test_keda_reads_the_token_from_the_secret_and_the_number_from_the_admin_api() -> None:
    found = render(keda__enabled="true", engines__deployment="vllm", **OWN_SECRET)
    kinds = {one["kind"]: one for one in found}
    assert kinds["TriggerAuthentication"]["spec"]["secretTargetRef"] == [
        {"parameter": "token", "name": "own", "key": "admin-token"}
    ]
    [trigger] = kinds["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["url"] == "http://r-warmroute-admin.llm.svc:8081/admin/scaling"
    config = config_of(found)
    assert config.scaling.enabled and not config.scaling.keda_port and config.admin.port == 8081
    pushed = render(keda__enabled="true", keda__trigger="external-push", engines__deployment="vllm")
    assert config_of(pushed).scaling.keda_port == 8083 and "TriggerAuthentication" not in str(pushed)


def test_replicas_share_their_state_through_redis(tmp_path: Path) -> None:
    def environment(found: list[dict[str, Any]]) -> dict[str, Any]:
        [pod] = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"]
        return {one["name"]: one.get("valueFrom") for one in pod["containers"][0]["env"]}

    found = render("-f", str(CHART / "values-replicas.yaml"))
    service = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "redis.yaml").read_text())
    [port] = [one["spec"]["ports"][0]["port"] for one in service if one["kind"] == "Service"]
    assert config_of(found).cluster.url == f"redis://redis:{port}/0" and "REDIS_PASSWORD" not in environment(found)
    values = tmp_path / "values.yaml"
    values.write_text('cluster: {url: "redis://r:6379/0", password: "s3cret"}\n')
    found = render("-f", str(values))
    [secret] = [one for one in found if one["kind"] == "Secret"]
    assert secret["stringData"] == {"redis-password": "s3cret"} and config_of(found).cluster.password_env
    assert environment(found)[config_of(found).cluster.password_env] == {
        "secretKeyRef": {"name": "r-warmroute", "key": "redis-password"}
    }
    assert not [one for one in found if "s3cret" in str(one) and one["kind"] != "Secret"]
    found = render("-f", str(values), cluster__existingSecret="own")
    assert environment(found)["REDIS_PASSWORD"]["secretKeyRef"]["name"] == "own"
    assert not [one for one in found if one["kind"] == "Secret"]


def test_tables_that_the_chart_writes_take_further_keys(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "keda: {enabled: true, trigger: external-push}\nengines: {deployment: vllm}\n"
        "tables:\n  scaling: {load_timeout_s: 4, scale_to_zero_after_s: 2}\n"
        '  log: {level: debug}\n  admin: {}\n  discovery: {gpu: "b\\"c", role: decode}\n'
    )
    config = config_of(render("-f", str(values)))
    assert (config.scaling.load_timeout_s, config.scaling.scale_to_zero_after_s, config.log.level) == (
        4.0,
        2.0,
        "debug",
    )
    assert config.discovery[0].gpu == 'b"c' and config.discovery[0].role == "decode"


def test_a_changed_secret_restarts_the_pods_and_a_changed_configuration_does_not() -> None:
    def template(**values: Any) -> Any:
        return next(one["spec"]["template"] for one in render(**values) if one["kind"] == "Deployment")

    assert template(engines__apiKey="a") != template(engines__apiKey="b")
    assert template(shutdown__delaySeconds=5) == template(config="[log]")


def test_the_alert_rules_and_the_dashboard_are_those_of_the_repository() -> None:
    found = render(prometheusRule__enabled="true", grafanaDashboard__enabled="true")
    [rules] = [one for one in found if one["kind"] == "PrometheusRule"]
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert any("warmroute.json" in (one.get("data") or {}) for one in found)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keda__enabled": "true", "admin__token": "t"}, "keda.enabled needs engines.deployment"),
        ({"keda__enabled": "true", "engines__deployment": "vllm"}, "keda.enabled needs admin.token"),
        ({"keda__enabled": "true", "keda__trigger": "grpc", "engines__deployment": "x"}, "keda.trigger is neither"),
        (
            {"keda__enabled": "true", "engines__deployment": "vllm", "replicas": 2, "admin__token": "t"},
            "keda.enabled with several replicas needs cluster.url",
        ),
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
    wanted = re.compile(
        r"(pyproject.toml|setup.py|README.md|LICENSE|requirements.*lock|tools/build_(backend.py|wheel.sh))\Z|src/|deploy/image/"
    )
    for name in filter(wanted.match, listed):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    steps, target = tmp_path / "source" / "deploy" / "image" / "steps.sh", tmp_path / "opt"
    run("sh", steps, "wheels", sys.executable, tmp_path / "source", tmp_path / "wheels")
    run("sh", steps, "install", sys.executable, tmp_path / "wheels", target)
    shutil.rmtree(tmp_path / "source")
    clean = ("env", "-i", f"HOME={tmp_path}", f"PATH={target}/bin")
    assert "(compiled)" in run(*clean, target / "bin" / "warmroute", "--version").stdout
    sample = ROOT / "deploy" / "systemd" / "warmroute.toml"
    run(*clean, target / "bin" / "warmroute", "check-config", sample)
    run(*clean, target / "bin" / "python", "-c", "import lightkube, dns, grpc, warmroute.engines.discovery.kubernetes")
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
