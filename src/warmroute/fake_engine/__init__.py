"""A simulated LLM engine that behaves like vLLM 0.32, without a GPU. The router does not import it.

core/          the scheduler, the prefix cache and the step timing, without a clock or I/O
profiles.py    timing and memory of models on GPUs
server/        the core behind vLLM's HTTP API, metrics and KV events (`warmroute engine`)
"""
