"""The manifests for gateways: deploy/envoy. test_real_envoy.py runs the plain one with a real Envoy."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.kubernetes_schemas import custom_problems, is_builtin, schema_problems

from warmroute import __version__
from warmroute.config import from_table

ENVOY = Path(__file__).resolve().parents[2] / "deploy" / "envoy"
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "gateway_schemas.json").read_text())
"""Of Gateway API, the Inference Extension, Istio and Envoy Gateway: tools/gateway_schemas.py."""


def objects(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((ENVOY / name).read_text()) if one]


def test_the_pickers_manifest_matches_the_schemas_of_kubernetes() -> None:
    found = objects("picker.yaml")
    assert all(map(is_builtin, found))
    assert [problem for one in found for problem in schema_problems(one)] == []


@pytest.mark.parametrize("name", ["istio.yaml", "envoy-gateway.yaml"])
def test_the_manifests_of_gateways_match_the_schemas_that_the_gateways_publish(name: str) -> None:
    assert [problem for one in objects(name) for problem in custom_problems(one, SCHEMAS)] == []


def test_a_misspelled_field_of_a_gateways_object_is_found() -> None:
    policy = next(one for one in objects("envoy-gateway.yaml") if one["kind"] == "EnvoyExtensionPolicy")
    ext_proc = policy["spec"]["extProc"][0]
    ext_proc["metadataOptions"] = ext_proc.pop("metadata")
    ext_proc["processingMode"]["request"]["body"] = "BUFFERED"
    wrong, unknown = sorted(custom_problems(policy, SCHEMAS), key=len, reverse=True)
    assert "'metadataOptions' was unexpected" in unknown and "'BUFFERED' is not one of" in wrong


@pytest.mark.parametrize("name", ["istio.yaml", "envoy-gateway.yaml"])
def test_the_manifests_of_gateways_refer_to_the_picker(name: str) -> None:
    text = json.dumps(objects(name))
    assert '"warmroute-picker", "port": ' in text and '"kind": "HTTPRoute"' in text


def test_the_pickers_pod_follows_its_configuration() -> None:
    found = {one["kind"]: one for one in objects("picker.yaml")}
    config = from_table(tomllib.loads(found["ConfigMap"]["data"]["warmroute.toml"]))
    pod = found["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["ports"][0]["containerPort"] == config.picker.port
    assert container["image"] == f"warmroute:{__version__}"
    assert pod["terminationGracePeriodSeconds"] > config.shutdown.delay_s + config.shutdown.deadline_s
    [port] = found["Service"]["spec"]["ports"]
    pool = next(one for one in objects("istio.yaml") if one["kind"] == "InferencePool")
    assert pool["metadata"]["name"] == config.discovery[0].inference_pool
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == port["port"]
    resources = {name for rule in found["Role"]["rules"] for name in rule["resources"]}
    assert resources == {"pods", "inferencepools", "inferenceobjectives"}


def test_plain_envoy_fits_the_configuration_that_the_guide_shows() -> None:
    [envoy] = objects("envoy.yaml")
    [listener] = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = manager["http_filters"][0]["typed_config"]
    guide = (ENVOY.parents[1] / "docs" / "guides" / "envoy.md").read_text()
    assert f"message_timeout_s = {ext_proc['message_timeout'][:-1]}.0" in guide
    assert f"max_message_timeout_s = {ext_proc['max_message_timeout'][:-1]}.0" in guide
    assert listener["per_connection_buffer_limit_bytes"] == from_table({}).limits.body_bytes
