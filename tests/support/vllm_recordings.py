"""Responses, metrics and KV events that were recorded from a real vLLM 0.32 (tests/fixtures/vllm-0.32)."""

from __future__ import annotations

from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
TOPIC = "kv@127.0.0.1:8001@tiny"


def event_payload(name: str) -> bytes:
    """Return the msgpack payload of one recorded event batch."""
    return (RECORDINGS / "frames" / f"{name}.payload").read_bytes()
