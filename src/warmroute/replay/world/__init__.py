"""Fleets in virtual time: simulated engines under the production router core."""

from warmroute.replay.world.calendar import Calendar
from warmroute.replay.world.conditions import Conditions, Island, NodeSpec
from warmroute.replay.world.listener import Listener
from warmroute.replay.world.node import Life, SimNode
from warmroute.replay.world.simulated_request import MODEL, SimulatedRequest
from warmroute.replay.world.tally import Tally
from warmroute.replay.world.world import World

__all__ = [
    "MODEL",
    "Calendar",
    "Conditions",
    "Island",
    "Life",
    "Listener",
    "NodeSpec",
    "SimNode",
    "SimulatedRequest",
    "Tally",
    "World",
]
