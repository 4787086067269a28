"""Lets the capture record the recent traffic for scaling by replay."""

from __future__ import annotations

from warmroute.capture.capture import Capture
from warmroute.capture.capture_run import CaptureRun
from warmroute.scaling.recent_traffic import BLOCK_TOKENS, RecentTraffic


def record_recent_traffic(capture: Capture, traffic: RecentTraffic | None) -> None:
    """`traffic`: None if the autoscaler goes by thresholds only."""
    if traffic is not None:
        capture.start(traffic, CaptureRun(BLOCK_TOKENS, traffic.started_s), internal=True)
