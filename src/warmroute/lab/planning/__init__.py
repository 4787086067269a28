"""Scaling by replay: searches the cheapest fleet on which the recorded traffic meets the objective.

search.py             which fleets are replayed, and which one is chosen; the process that does it beside a router
recorded_traffic.py   recent requests → a sample that can be replayed, and its trend
fleet_replay.py       one replay of the sample on one fleet: learned speeds as the timing of simulated engines, and the
                      load of more or fewer conversations
"""
