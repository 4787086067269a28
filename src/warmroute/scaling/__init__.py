"""How many nodes, where, and getting them: observe, decide, carry out.

    observer.py           what a decision is made from: samples of the fleet, windows, impossible values removed
    autoscaler.py         one decision an interval
      scaler.py             by plan (replay_planner.py: recent traffic is replayed in a process of its own), else
      thresholds.py         by thresholds
      offer_selection.py    which offer the next node is
    node_controller.py    the decision carried out, without I/O; node_lifecycle.py has a node's states
    control_loop.py       the same in real time: orders to provisioners, machines compared, prefixes prewarmed
    provisioner.py        what a provisioner does; provisioners/ has one file for each kind
    scaling_service.py    the parts put together

One process scales at a time (lease.py). keda.py tells KEDA the number instead of buying nodes.
"""
