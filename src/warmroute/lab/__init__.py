"""Replay: run a workload through a simulated fleet in virtual time, and compare routing policies."""

from warmroute.replay.policy_spec import POLICIES, BadPolicy, PolicySpec, parse_policy
from warmroute.replay.run import Setup, build_world, replay
from warmroute.replay.summary import Run

__all__ = ["POLICIES", "BadPolicy", "PolicySpec", "Run", "Setup", "build_world", "parse_policy", "replay"]
