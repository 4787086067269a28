"""Warmroute: an OpenAI-compatible proxy that sends each request where it costs the least new GPU work."""

__version__ = "0.2.0"
