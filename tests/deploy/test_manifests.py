"""The plain manifests, the chart's version and the Containerfile, without helm."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.kubernetes_schemas import is_builtin, schema_problems

from warmroute import __version__
from warmroute.config import Config, from_table

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
Object = dict[str, Any]


def objects(name: str) -> list[Object]:
    return [one for one in yaml.safe_load_all((KUBERNETES / name).read_text()) if one]


def find(found: list[Object], kind: str) -> Object:
    return next(one for one in found if one["kind"] == kind)


def router_config(found: list[Object]) -> Config:
    return from_table(tomllib.loads(find(found, "ConfigMap")["data"]["warmroute.toml"]))


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_manifests_match_the_schemas_of_kubernetes(path: Path) -> None:
    """Those of KEDA and of the Prometheus operator: test_chart.py."""
    found = [one for one in objects(path.name) if is_builtin(one)]
    assert found and [problem for one in found for problem in schema_problems(one)] == []


def test_a_misspelled_field_and_a_wrong_type_are_found() -> None:
    [engines] = objects("vllm.yaml")
    container = engines["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    assert any("'readinesProbe' was unexpected" in problem for problem in schema_problems(engines))
    [engines] = objects("vllm.yaml")
    engines["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "8000"
    assert any("'8000' is not of type 'integer'" in problem for problem in schema_problems(engines))
    engines["apiVersion"] = "apps/v1beta1"
    assert "there is no apps/v1beta1 Deployment" in schema_problems(engines)[0]


@pytest.mark.parametrize("name", ["warmroute.yaml", "warmroute-keda.yaml"])
def test_the_routers_pod(name: str) -> None:
    found = objects(name)
    config, pod = router_config(found), find(found, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == config.listen.port and ports["admin"] == config.admin.port
    assert ports.get("keda", 0) == config.scaling.keda_port
    for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    assert pod["terminationGracePeriodSeconds"] > config.shutdown.delay_s + config.shutdown.deadline_s
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert container["image"] == f"warmroute:{__version__}"
    account = find(found, "ServiceAccount")["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert all(one["subjects"][0]["name"] == account for one in found if one["kind"].endswith("RoleBinding"))
    selector = find(found, "Deployment")["spec"]["selector"]["matchLabels"]
    maps = [one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"]
    assert config.state.config_map in maps and config.state.config_map != find(found, "ConfigMap")["metadata"]["name"]
    rules = [one for one in find(found, "Role")["rules"] if one["resources"] == ["configmaps"]]
    assert [one["resourceNames"] for one in rules] == [[config.state.config_map]]
    assert rules[0]["verbs"] == ["get", "patch"]
    services = [one for one in found if one["kind"] == "Service"]
    assert len(services) == 2 and all(one["spec"]["selector"] == selector for one in services)
    assert find(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == selector


def test_keda_scales_the_engines_by_the_routers_number() -> None:
    found = objects("warmroute-keda.yaml")
    config, scaled = router_config(found), find(found, "ScaledObject")["spec"]
    admin = next(one for one in found if one["kind"] == "Service" and one["metadata"]["name"].endswith("-admin"))
    [trigger] = scaled["triggers"]
    assert trigger["type"] == "metrics-api" and trigger["metadata"]["authMode"] == "bearer"
    address = f"{admin['metadata']['name']}.default.svc:{config.admin.port}"
    assert trigger["metadata"]["url"] == f"http://{address}/admin/scaling"
    authentication = find(found, "TriggerAuthentication")
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    [token] = authentication["spec"]["secretTargetRef"]
    assert token["parameter"] == "token" and token["key"] in find(found, "Secret")["stringData"]
    assert scaled["scaleTargetRef"]["name"] == find(objects("vllm.yaml"), "Deployment")["metadata"]["name"]
    limits = config.scaling
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (limits.min_nodes, limits.max_nodes)
    wanted: Object = find(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= admin["metadata"]["labels"].items()


def test_the_router_finds_the_sample_engines_and_they_end_gracefully() -> None:
    template = find(objects("vllm.yaml"), "Deployment")["spec"]["template"]
    [source] = router_config(objects("warmroute.yaml")).discovery
    key, _, value = source.pod_selector.partition("=")
    assert template["metadata"]["labels"][key] == value
    [container] = template["spec"]["containers"]
    assert container["readinessProbe"] and container["lifecycle"]["preStop"] and len(container["ports"]) == 1


def test_all_versions_are_the_packages() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "warmroute" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    assert set(re.findall(r"/warmroute:([\w.]+)", guide)) == {__version__}


def test_the_containerfile_copies_files_that_exist_and_runs_the_tested_steps() -> None:
    text = (ROOT / "Containerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
    ignore = (ROOT / ".containerignore").read_text()
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists() and f"!{name.partition('/steps.sh')[0]}" in ignore, name
    assert "USER 10001" in text and "HEALTHCHECK" in text and text.count("steps.sh wheels") == 1
    assert ignore == (ROOT / ".dockerignore").read_text()
