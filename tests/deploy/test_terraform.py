"""The Terraform modules: formatted; the module for EKS checked and planned by AWS's provider against moto; the values
for the chart rendered. Google's provider is not on this machine, so the module for GKE is only parsed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from support.free_port import free_port

from warmroute.config import from_table

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / "deploy" / "terraform"
PLUGINS = Path("/opt/tf-plugins")
"""A mirror of providers, for machines that cannot download them."""
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


def terraform(folder: Path, *arguments: str, stdin: str = "") -> str:
    environment = os.environ | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(
        ["terraform", *arguments],
        cwd=folder,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"terraform {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def initialise(folder: Path) -> None:
    mirror = [f"-plugin-dir={PLUGINS}"] if PLUGINS.exists() else []
    terraform(folder, "init", "-backend=false", "-input=false", "-no-color", *mirror)


def test_all_modules_are_formatted() -> None:
    terraform(MODULES, "fmt", "-check", "-recursive")


PROVIDER = """
provider "aws" {{
  region                      = "us-east-1"
  access_key                  = "test"
  secret_key                  = "test"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  endpoints {{
    ec2 = "{url}"
    eks = "{url}"
    iam = "{url}"
    sts = "{url}"
  }}
}}
"""


def test_the_module_for_eks_is_valid_and_can_be_planned(tmp_path: Path) -> None:
    folder, port = tmp_path / "eks", free_port()
    shutil.copytree(MODULES / "eks", folder, ignore=shutil.ignore_patterns(".terraform*"))
    initialise(folder)
    assert json.loads(terraform(folder, "validate", "-json"))["valid"]
    (folder / "provider.tf").write_text(PROVIDER.format(url=f"http://127.0.0.1:{port}"))
    (folder / "terraform.tfvars.json").write_text(
        json.dumps({"name": "w", "peer": {"address": "192.0.2.1", "cidrs": ["10.20.0.0/20", "10.21.0.0/16"]}})
    )
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        plan = terraform(folder, "plan", "-input=false", "-no-color")
        assert 'island             = "aws/us-east-1"' in plan and "0 to change, 0 to destroy" in plan
    finally:
        moto.terminate()
        moto.wait()


def render_values(folder: Path, home: str, other_island: str, other: str) -> str:
    """Return the chart's values as the module `two-clouds` writes them."""
    variables = f'{{home_island="{home}", other_island="{other_island}", other="{other}", egress_usd_per_gb=0.09}}'
    template = MODULES / "two-clouds" / "values.yaml.tftpl"
    text = terraform(folder, "console", stdin=f'jsonencode(templatefile("{template}", {variables}))\n')
    return str(json.loads(json.loads(text)))


def test_the_charts_values_for_two_clouds(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(render_values(tmp_path, "aws/us-east-1", "gce/us-east4", "gke"))
    helm = ROOT / ".venv-deploy" / "bin" / "helm"
    chart = ROOT / "deploy" / "helm" / "warmroute"
    done = subprocess.run([helm, "template", "r", chart, "-f", values], capture_output=True, text=True, check=True)
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    config = from_table(
        tomllib.loads(next(one for one in found if one["kind"] == "ConfigMap")["data"]["warmroute.toml"])
    )
    assert [source.label for source in config.discovery] == ["kubernetes", "gke"]
    assert config.islands[0].name == config.discovery[1].island == "gce/us-east4"
    assert "/etc/gke" in str(next(one for one in found if one["kind"] == "Deployment"))
