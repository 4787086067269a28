"""The prompt doctor: finds what prevents prompts of a route from sharing their KV cache.

It compares a bounded sample of recent prompts in a background thread. Text stays in this process's memory.
"""
