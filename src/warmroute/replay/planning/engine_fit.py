"""The timing of a simulated engine that is as fast as a node: from what the router has learned about the node.

    prefill     = max(step_ms, ms_per_token · n) + ms_per_token · ATTENTION_WORK · n · (c + n/2)
    decode step = step_ms + slope_ms · context

(n new tokens behind c cached ones; fake_engine/core/step_timing.py.) The router learns the same quantities for its
prices (fleet/node_speed.py, fleet/decode_speed.py).
"""

from __future__ import annotations

from typing import Final

from warmroute._kernel import ATTENTION_WORK
from warmroute.fake_engine.core.step_timing import Timing
from warmroute.fake_engine.profiles import Profile
from warmroute.scaling.fleet_plan import NodeFigures

MAX_NUM_SEQS: Final = 512
"""Sequences in one step. Engines do not report their limit; vLLM's is 256 or 1024."""


def fitted_profile(gpu: str, figures: NodeFigures) -> Profile:
    per_token_ms, step_ms = figures.ms_per_token, figures.step_ms
    timing = Timing(
        m=step_ms,
        a=0.0,
        b=per_token_ms,
        d=per_token_ms * ATTENTION_WORK,
        h=0.0,
        e=step_ms,
        f=0.0,
        e2=0.0,
        f2=0.0,
        g=figures.slope_ms,
        overhead_ms=0.0,
    )
    return Profile(
        name=gpu or "gpu", timing=timing, kv_tokens=figures.kv_tokens, kv_bytes_per_token=1, max_num_seqs=MAX_NUM_SEQS
    )
