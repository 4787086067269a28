"""Replay: workloads through simulated fleets, policy against policy."""

from warmroute.replay.contenders import POLICIES, BadPolicy, Contender, contender
from warmroute.replay.run import Setup, replay, world_of
from warmroute.replay.summary import Run

__all__ = ["POLICIES", "BadPolicy", "Contender", "Run", "Setup", "contender", "replay", "world_of"]
