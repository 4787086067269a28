"""Workloads: trace files and synthetic generators."""
