"""Prompts of an application: a system prompt, tools, documents, and questions that differ."""

from __future__ import annotations

import json
import uuid
from random import Random
from typing import Any

from warmroute.app.prompt_doctor.findings import Comparison, compare_prompts
from warmroute.app.prompt_doctor.samples import MaskedPrompt, read_parts

CHAT = b"/v1/chat/completions"
SYSTEM = "You are the assistant of a shop.\n" + "\n".join(
    f"Rule {number}: read section {number} of the policy before you promise anything to a customer."
    for number in range(12)
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"find_{name}", "description": f"Finds {name} in the database. " * 4}}
    for name in ("orders", "customers", "products", "returns")
]
TEXT = "why does my order take so long when will the parcel come can you help me with a refund of this item"
WORDS = TEXT.split()


class Examples:
    def __init__(self, seed: int = 1) -> None:
        self.random = Random(seed)

    def question(self, words: int = 25) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def stamp(self) -> str:
        random = self.random
        return f"2026-11-16T{random.randrange(24):02}:{random.randrange(60):02}:{random.randrange(60):02}Z"

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.random.getrandbits(128)))

    def shuffled(self, items: list[Any]) -> list[Any]:
        return self.random.sample(items, len(items))

    def chat(self, system: str = SYSTEM, tools: list[dict[str, Any]] | None = None, turns: int = 1) -> bytes:
        messages = [{"role": "system", "content": system}]
        for turn in range(turns):
            messages.append({"role": "user", "content": self.question()})
            if turn < turns - 1:
                messages.append({"role": "assistant", "content": self.question(60)})
        return json.dumps({"model": "m", "messages": messages, **({"tools": tools} if tools else {})}).encode()


def masked(body: bytes, path: bytes = CHAT) -> MaskedPrompt:
    parts = read_parts(path, body)
    assert parts is not None
    return MaskedPrompt(parts)


def compared(bodies: list[bytes]) -> Comparison:
    return compare_prompts([masked(body) for body in bodies])
