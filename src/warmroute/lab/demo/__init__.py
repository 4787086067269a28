"""`warmroute demo`: the router in front of simulated engines, as real processes and sockets.

part_routing.py    part 1: the same conversations with round_robin and with price
part_scaling.py    part 2: a load that rises and falls, and a fleet that follows it
demo_run.py        runs both, then leaves the router running
processes.py, die_with_parent.py    the processes of both
"""
