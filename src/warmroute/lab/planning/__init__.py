"""Scaling by replay: searches the cheapest fleet on which the recorded traffic meets the objective.

recorded_traffic.py  recent requests → a sample that can be replayed, and its trend
fleet_replay.py      one replay of the sample on one fleet, with the learned speeds, with more or fewer conversations
search.py            which fleets are replayed, and which one is chosen; the process that does it beside a router
"""
