"""Scaling: observes the fleet, decides how many nodes it needs, and has them started and stopped."""
