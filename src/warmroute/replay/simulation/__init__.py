"""A simulated fleet in virtual time: fake engines behind the production router core."""

from warmroute.replay.simulation.calendar import Calendar
from warmroute.replay.simulation.conditions import Conditions, Island, NodeSpec
from warmroute.replay.simulation.policy_listener import PolicyListener
from warmroute.replay.simulation.results import RequestResults
from warmroute.replay.simulation.simulated_node import ProcessState, SimulatedNode
from warmroute.replay.simulation.simulated_request import MODEL, SimulatedRequest
from warmroute.replay.simulation.world import World

__all__ = [
    "MODEL",
    "Calendar",
    "Conditions",
    "Island",
    "NodeSpec",
    "PolicyListener",
    "ProcessState",
    "RequestResults",
    "SimulatedNode",
    "SimulatedRequest",
    "World",
]
