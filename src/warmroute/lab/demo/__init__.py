"""`warmroute demo` and `warmroute load`: the router in front of simulated engines, as real processes and sockets.

demo_run.py              runs the two parts of the demo, then leaves the router running
routing_comparison.py    part 1: the same conversations with round_robin and with price
scaling_demo.py          part 2: a load that rises and falls, and a fleet that follows it
  autoscaled_fleet.py    a router that starts and stops engines
  variable_load.py       requests at a rate that changes
show_comparison.py, show_scaling.py    the output on the terminal
router_process.py, child_processes.py, die_with_parent.py    processes
load_generator/          `warmroute load`
"""
