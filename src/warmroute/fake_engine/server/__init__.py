"""A simulated engine as a real server: vLLM's HTTP surface, metrics and KV events around the engine core."""
