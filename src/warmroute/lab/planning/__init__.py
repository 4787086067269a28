"""Scaling by replay: searches the cheapest fleet on which the recorded traffic meets the objective.

engine_fit.py        learned speeds → the timing of simulated engines
recorded_traffic.py  recent requests → a sample that can be replayed, and its trend
other_loads.py       the sample with more or fewer conversations
fleet_replay.py      one replay of the sample on one fleet
fleet_search.py      which fleets are replayed, and which one is chosen
process.py           the process that does it beside a router
"""
