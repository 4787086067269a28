"""A simulated LLM engine that behaves like vLLM 0.32, without a GPU.

core.py, scheduler.py, blocks.py, timing.py    the engine without a clock or I/O
server.py, rank.py, generation.py              the same behind vLLM's HTTP API, metrics and KV events
"""
