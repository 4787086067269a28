"""How the prompts of a route differ from those of the last hour: changed at a place, or new altogether."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median_low
from typing import Final, NamedTuple

from warmroute.prompt_doctor.compare_prompts import MIN_COMMON
from warmroute.prompt_doctor.findings import describe_part
from warmroute.prompt_doctor.masked_prompt import MaskedPrompt, common_prefix
from warmroute.prompt_doctor.prompt_samples import PromptSample

MIN_OLDER: Final = 3
MIN_RECENT: Final = 6
RECENT_S: Final = 60.0
NEW_WITHIN: Final = 64
"""A prompt that differs from all earlier ones within this many characters is new, not changed."""


class PromptChange(NamedTuple):
    changed_share: float
    """Recent prompts that agree with earlier ones much less far than those agreed with each other, but begin alike."""
    new_share: float
    """Recent prompts that begin like no earlier one."""
    new_tenant_share: float
    """Recent prompts of tenants that earlier samples do not have."""
    place: str
    """Where changed prompts differ from the earlier ones; empty without any."""


def find_change(recent: Sequence[PromptSample], older: Sequence[PromptSample]) -> PromptChange | None:
    """Compare the prompts of the last minute with the older ones. Return None without enough of both."""
    if not recent:
        return None
    since_s = recent[-1].arrived_s - RECENT_S
    now = [sample for sample in recent if sample.arrived_s >= since_s and sample.prompt is not None]
    before = [sample for sample in (*older, *recent) if sample.arrived_s < since_s and sample.prompt is not None]
    if len(now) < MIN_RECENT or len(before) < MIN_OLDER:
        return None
    earlier = sorted([sample.prompt for sample in before if sample.prompt is not None], key=lambda prompt: prompt.text)
    usual = median_low([_agreement(one, earlier[:at] + earlier[at + 1 :]) for at, one in enumerate(earlier)])
    changed: list[tuple[int, MaskedPrompt]] = []
    new = 0
    for sample in now:
        prompt = sample.prompt
        assert prompt is not None
        agreement = _agreement(prompt, earlier)
        if agreement > usual - MIN_COMMON:
            continue
        first = prompt.parts[0]
        if agreement < first.start + min(NEW_WITHIN, len(first.text)):
            new += 1
        else:
            changed.append((agreement, prompt))
    tenants = {sample.tenant for sample in before}
    place = ""
    if changed:
        at, prompt = sorted(changed, key=lambda one: one[0])[len(changed) // 2]
        position = prompt.position(at)
        part = position.part
        place = f"{describe_part(part.kind, part.number, part.role)}, character {position.character}"
    strangers = sum([sample.tenant not in tenants for sample in now])
    return PromptChange(len(changed) / len(now), new / len(now), strangers / len(now), place)


def _agreement(prompt: MaskedPrompt, ordered: Sequence[MaskedPrompt]) -> int:
    """Return how many characters of the masked text a prompt has in common with the most similar one of `ordered`."""
    at = bisect_left(ordered, prompt.text, key=lambda other: other.text)
    near = ordered[max(0, at - 1) : at + 1]
    return max([common_prefix(prompt.text, other.text) for other in near], default=0)
