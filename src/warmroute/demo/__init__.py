"""`warmroute demo`: what the router does, for people to see, with simulated engines.

    acts.py              one act after the other, then a router that stays up
    compare.py           the same conversations through three engines twice: in turn, then by price
    scale.py             a load that rises and falls, and a fleet that follows it
      scaled_fleet.py    the router with its scaling, the engines that it starts, and their certain end
      rising_load.py     requests at a rate that may change, and what became of each
    routers.py           the router as a child process
    show_comparison.py, show_scaling.py    what is seen of it on a terminal

What runs is real: processes, sockets, the whole router. Only the engines' GPUs are simulated.
"""

from warmroute.demo.demo_run import DemoPart, DemoOptions, run

__all__ = ["Act", "DemoOptions", "run"]
