"""priority_mix: shared system prompts with three priorities, by default 20 % high, 60 % normal, 20 % low."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from warmroute.replay.workloads.shared_system_prompts import SharedSystemPrompts
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt


class PriorityMix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    high: float = 0.2
    low: float = 0.2
    prompts: int = 5
    system_tokens: int = 200
    question_tokens: int = 50
    output_tokens: int = 100
    spread: float = 0.2
    tenants: int = 4
    rate: float = 10.0
    """Requests per second."""

    def generate(self, random: Random) -> Iterator[WorkloadPrompt]:
        requests = SharedSystemPrompts(
            self.prompts, self.system_tokens, self.question_tokens, self.output_tokens, self.spread
        ).generate(Random(random.getrandbits(64)))
        for prompt in requests:
            chance = random.random()
            prompt.priority = "high" if chance < self.high else "low" if chance >= 1.0 - self.low else "normal"
            prompt.tenant = f"tenant-{random.randrange(self.tenants)}"
            yield prompt
