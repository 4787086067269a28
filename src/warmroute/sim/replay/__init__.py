"""Replay: workloads through simulated fleets, policy against policy."""

from warmroute.sim.replay.contenders import POLICIES, BadPolicy, Contender, contender
from warmroute.sim.replay.run import Setup, replay, world_of
from warmroute.sim.replay.summary import Run

__all__ = ["POLICIES", "BadPolicy", "Contender", "Run", "Setup", "contender", "replay", "world_of"]
