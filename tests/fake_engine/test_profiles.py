"""Profiles reproduce the measurements on an H200, and scale to other GPUs as documented."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from step_durations import decode_ms, prefill_ms

from warmroute.lab.engine.timing import PROFILE_NAMES, Profile, Timing, profile

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHAPES = {"1.5b": "qwen2.5-1.5b", "8b": "llama-3.1-8b", "32b": "qwen3-32b"}


@pytest.mark.parametrize(
    ("name", "new", "cached", "measured_ms", "tolerance"),
    [
        ("h200-8b", 8192, 0, 212, 0.02),
        ("h200-32b", 8192, 0, 919, 0.01),
        ("h200-8b", 512, 8192, 16, 0.08),
        ("h200-32b", 512, 8192, 70, 0.01),
    ],
)
def test_prefill_takes_about_as_long_as_measured_on_an_h200(
    name: str, new: int, cached: int, measured_ms: float, tolerance: float
) -> None:
    assert prefill_ms(profile(name).timing, new, cached) == pytest.approx(measured_ms, rel=tolerance)


def test_the_formulas_are_the_documented_ones() -> None:
    t = Timing(m=100, a=1, b=2, d=3, h=5, e=7, f=11, e2=13, f2=17, g=19)
    assert prefill_ms(t, 10, 4) == 100 + 3 * 10 * (4 + 5) + 5 * 4
    assert prefill_ms(t, 60, 0) == 1 + 2 * 60 + 3 * 60 * 30
    assert decode_ms(t, 1, 2) == max(7 + 11, 13 + 17) + 19 * 2
    assert t.mixed_ms(60, t.attention_ms(60, 4), 8, 900) == 1 + 2 * 68 + 3 * 60 * 34 + 5 * 4 + 19 * 900


@pytest.mark.parametrize("model", SHAPES)
def test_the_coefficients_are_those_fitted_to_the_measurements(model: str) -> None:
    assert_fitted(model, FIXTURES / "h200_timing.json")


@pytest.mark.data
@pytest.mark.parametrize("model", SHAPES)
def test_the_coefficients_are_those_of_the_whole_report(data_dir: Path, model: str) -> None:
    assert_fitted(model, data_dir / "h200_timing.json")


def assert_fitted(model: str, report: Path) -> None:
    fits = json.loads(report.read_text())["shapes"][SHAPES[model]]["fits"]
    prefill, decode = fits["prefill_roofline_form"], fits["decode_two_regime_form"]
    timing = profile(f"h200-{model}").timing
    for key in "mabdh":
        assert getattr(timing, key) == pytest.approx(prefill[key])
    for key in ("e", "f", "e2", "f2", "g"):
        assert getattr(timing, key) == pytest.approx(decode[key])


def test_two_h100s_have_the_prefill_speed_and_kv_tokens_that_llm_d_published() -> None:
    pod = profile("2xh100-32b")
    assert 7200 / prefill_ms(pod.timing, 7200) * 1000 == pytest.approx(15_900, rel=0.005)
    assert pod.kv_tokens == 307_328
    assert msgspec.structs.replace(profile("h100-32b"), name=pod.name) == pod


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_every_profile_has_a_cache_and_plausible_timing(name: str) -> None:
    one = profile(name)
    assert one.kv_tokens >= 32_768 and one.num_blocks(16) == one.kv_tokens // 16
    assert 0 < decode_ms(one.timing, 1, 1000) < 1000 and 0 < prefill_ms(one.timing, 1000) < 10_000
    assert 1000 * one.timing.reload_us_per_token < 1000 * prefill_ms(one.timing, 1000), "reloading is faster"


def test_slower_gpus_have_slower_profiles() -> None:
    timings = [profile(f"1x{gpu}-1.5b").timing for gpu in ("h200", "h100", "a100", "l4", "t4")]
    prefill = [prefill_ms(timing, 4096) for timing in timings]
    assert prefill == sorted(prefill)
    decode = [decode_ms(timing, 8, 8000) for timing in timings[:3]]
    assert decode == sorted(decode)


def test_the_error_for_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="h100-32b"):
        profile("h100-33b")
    with pytest.raises(ValueError, match="does not fit"):
        profile("1xt4-32b")


def test_a_profile_can_have_custom_coefficients() -> None:
    timing = {"m": 1, "a": 1, "b": 0.1, "d": 0, "h": 0, "e": 1, "f": 0, "e2": 0, "f2": 0, "g": 0}
    custom = {"name": "mine", "timing": timing, "kv_tokens": 1000, "kv_bytes_per_token": 10}
    assert prefill_ms(msgspec.convert(custom, Profile).timing, 100) == 11
    with pytest.raises(msgspec.ValidationError, match="z"):
        msgspec.convert(custom | {"timing": timing | {"z": 1}}, Profile)
