"""The load generator: sends replay's workloads to a real endpoint and measures the responses as a client sees them."""
