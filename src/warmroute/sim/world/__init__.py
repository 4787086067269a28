"""Fleets in virtual time: simulated engines under the production router core."""

from warmroute.sim.world.ask import MODEL, SimAsk
from warmroute.sim.world.calendar import Calendar
from warmroute.sim.world.conditions import Conditions, Island, NodeSpec
from warmroute.sim.world.listener import Listener
from warmroute.sim.world.node import Life, SimNode
from warmroute.sim.world.tally import Tally
from warmroute.sim.world.world import World

__all__ = [
    "MODEL",
    "Calendar",
    "Conditions",
    "Island",
    "Life",
    "Listener",
    "NodeSpec",
    "SimAsk",
    "SimNode",
    "Tally",
    "World",
]
