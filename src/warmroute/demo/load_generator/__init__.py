"""The load generator: the simulator's workloads, sent to a real endpoint, measured from outside."""
