"""Validation of offers and of provisioner configurations."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import tomllib
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmroute.config import ConfigError, ProvisionerConfig, from_table
from warmroute.config.section import keys_of
from warmroute.scaling.offers import MAX_START_S, Offer, OfferValidator
from warmroute.scaling.provisioners import create_provisioner

GOOD = Offer(provisioner="p", name="a", island="i", gpu="L4", usd_per_hour=1.0)


def check(offer: Offer, **limits: Any) -> tuple[list[Offer], tuple[str, ...]]:
    validator = OfferValidator(ProvisionerConfig(kind="command", name="p", **limits))
    return validator.validate([offer]), validator.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"usd_per_hour": 0.0}, "costs $0, which stands for an unknown price"),
        ({"usd_per_hour": -0.5}, "costs $-0.5/hour, which is below 0"),
        ({"usd_per_hour": nan}, "costs nan, which is not a price"),
        ({"usd_per_hour": inf}, "costs inf, which is not a price"),
        ({"usd_per_hour": 0.01}, "a bid floor, not a price"),
        ({"usd_per_hour": 0.1, "gpus": 8}, "below $0.02 per GPU (it has 8)"),
        ({"usd_per_hour": 501.0}, "above the maximum of $500"),
        ({"gpus": 0}, "has 0 GPUs"),
        ({"gpu": ""}, "has no GPU name"),
        ({"name": ""}, "has no name"),
    ],
)
def test_an_impossible_offer_is_dropped_and_reported(change: dict[str, Any], words: str) -> None:
    kept, problems = check(msgspec.structs.replace(GOOD, **change))
    assert kept == [] and len(problems) == 1 and words in problems[0] and "dropped" in problems[0]


def test_a_valid_offer_is_unchanged() -> None:
    assert check(GOOD) == ([GOOD], ())
    free = msgspec.structs.replace(GOOD, usd_per_hour=0.0)
    assert check(free, allow_free=True) == ([free], ())


@pytest.mark.parametrize(("start_s", "used_s"), [(nan, 0.0), (-1.0, 0.0), (inf, MAX_START_S)])
def test_an_impossible_start_time_is_repaired_and_reported(start_s: float, used_s: float) -> None:
    (kept,), problems = check(msgspec.structs.replace(GOOD, start_s=start_s, max_nodes=-3))
    assert (kept.start_s, kept.max_nodes) == (used_s, 0) and len(problems) == 2


@pytest.mark.parametrize("round_trip_ms", [nan, -1.0, 1e9])
def test_an_impossible_round_trip_counts_as_unknown(round_trip_ms: float) -> None:
    (kept,), problems = check(msgspec.structs.replace(GOOD, round_trip_ms=round_trip_ms))
    assert kept.round_trip_ms is None and "round_trip_ms" in problems[0]
    far = msgspec.structs.replace(GOOD, round_trip_ms=250.0)
    assert check(far) == ([far], ())


def test_problems_name_only_keys_that_the_file_has() -> None:
    """An operator would search for the others in vain."""
    settable = set(keys_of(ProvisionerConfig))
    named = {
        name
        for change in ({"usd_per_hour": 0.0}, {"usd_per_hour": 0.01}, {"usd_per_hour": 501.0}, {"start_s": nan})
        for problem in check(msgspec.structs.replace(GOOD, **change))[1]
        for name in re.findall(r"[a-z]+_[a-z_]+", problem)
    }
    offered = {field.name for field in msgspec.structs.fields(Offer)}
    assert named and named <= settable | offered


def test_the_same_problem_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    validator = OfferValidator(ProvisionerConfig(kind="command", name="p"))
    invalid = msgspec.structs.replace(GOOD, usd_per_hour=-1.0)
    with caplog.at_level(logging.WARNING, "warmroute.scaling"):
        for _ in range(3):
            assert validator.validate([GOOD, invalid, GOOD]) == [GOOD]
    assert len(caplog.records) == 2  # the price, and the repeated name
    assert "is listed twice" in validator.problems[1]


def rejection(**table: Any) -> str:
    with pytest.raises(ConfigError) as error:
        from_table({"provisioners": [table]}, experiment=True)
    return str(error.value)


def test_a_configuration_that_does_not_fit_its_kind_is_rejected() -> None:
    assert rejection(kind="nebula").startswith("provisioners[0].kind: unknown value 'nebula'")
    assert rejection(kind="process") == "provisioners.gpu: kind 'process' requires it (process)"
    assert "kind 'process' does not have this key" in rejection(kind="process", gpu="L4", regions=["x"])
    assert "provisioners.workload_name: kind" in rejection(kind="kubernetes", gpu="L4")
    ec2: dict[str, Any] = {"kind": "ec2", "regions": ["r", "s"], "instance_types": ["t"]}
    assert "has no image for r, s; add one for each region, or set launch_template" in rejection(**ec2)
    assert "has no image for s;" in rejection(**ec2, images={"r": "ami-1"})
    elsewhere = rejection(**ec2, images={"r": "ami-1", "s": "ami-2", "x": "ami-3"})
    assert elsewhere == "provisioners.images: 'x' is not one of the regions (r, s)"
    assert "provisioners.images: 'x' is not one" in rejection(**ec2, launch_template="l", images={"x": "ami-3"})
    assert "provisioners.subnets: 'x' is not one" in rejection(**ec2, launch_template="l", subnets={"x": "net"})
    assert "provisioners.url: kind 'webhook' requires it" in rejection(kind="webhook")
    assert "whole catalog" in rejection(kind="skypilot", task_file="t.yaml", clouds=["aws"])
    assert rejection(kind="process", gpus=0, gpu="x").startswith("provisioners[0].gpus: ")
    assert "did you mean provisioners.workload_name" in rejection(kind="kubernetes", workload_nam="x")
    assert "is not a valid price" in rejection(
        kind="ec2", regions=["r"], instance_types=["t"], launch_template="l", prices={"t": float("nan")}
    )


def test_two_provisioners_with_one_name_are_rejected() -> None:
    one = {"kind": "process", "gpu": "L4"}
    with pytest.raises(ConfigError, match="two have the name 'process'"):
        from_table({"provisioners": [one, one]}, experiment=True)
    assert len(from_table({"provisioners": [one, one | {"name": "second"}]}, experiment=True).provisioners) == 2


EC2 = {"kind": "ec2", "regions": ["a", "b"], "instance_types": ["t"], "launch_template": "l"}
SKY = {"kind": "skypilot", "task_file": "t.yaml", "clouds": ["aws"], "gpu": "L4"}
KUBERNETES = {"kind": "kubernetes", "workload_name": "vllm", "gpu": "L4"}


@pytest.mark.parametrize(
    ("one", "same", "apart"),
    [
        (EC2, {"regions": ["b", "c"]}, {"regions": ["c"]}),
        (EC2, {"instance_types": ["u"]}, {"deployment": "other"}),
        (SKY, {"clouds": ["gcp"]}, {"deployment": "other"}),
        (KUBERNETES, {"gpu": "H100"}, {"workload_name": "sglang"}),
        (KUBERNETES, {"deployment": "other"}, {"context": "elsewhere"}),
    ],
)
def test_two_provisioners_that_would_share_machines_are_rejected(
    one: dict[str, Any], same: dict[str, Any], apart: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"would end each other's machines: (give|scale) each"):
        from_table({"provisioners": [one, one | {"name": "second"} | same]}, experiment=True)
    assert len(from_table({"provisioners": [one, one | {"name": "second"} | apart]}, experiment=True).provisioners) == 2


@pytest.mark.parametrize(("kind", "library"), [("ec2", "boto3"), ("kubernetes", "lightkube")])
def test_a_missing_extra_is_a_configuration_error(kind: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("warmroute.scaling.provisioners.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"kind '{kind}' needs .*{library}.* extra '{kind}'"):
        create_provisioner(ProvisionerConfig(kind=kind))  # type: ignore[arg-type]


def test_the_configurations_in_the_docs_are_valid() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "provisioners.md").read_text()
    shown = re.findall(r"^    \[\[provisioners\]\]\n(?:(?:    .*)?\n)+", text, re.MULTILINE)
    kinds = [from_table(tomllib.loads(textwrap.dedent(one)), experiment=True).provisioners[0].kind for one in shown]
    assert kinds == ["process", "kubernetes", "ec2", "skypilot", "command", "webhook"]
