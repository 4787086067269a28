"""Requests that one node prefills and another one decodes."""

from __future__ import annotations

from typing import Any

from attempt_harness import AttemptHarness, NotingDriver

from warmroute.config import Hedging, Pricing
from warmroute.core.calls import Attempts, SplitRequest
from warmroute.core.node import Node

TRANSFER = b'{"remote_engine_id":"p0"}'


class SplitHarness(AttemptHarness):
    def __init__(self, prefill: int = 1, decode: int = 2, engine: str = "vllm") -> None:
        super().__init__(0, pricing=Pricing(split="always"), hedging=Hedging(min_delay_s=1.0))
        for number in range(prefill):
            self.add(f"p{number}", 400_000, role="prefill", engine=engine)
        for number in range(decode):
            self.add(f"d{number}", 400_000, role="decode", engine=engine)

    def split(self, tokens: int = 2000, **fields: Any) -> tuple[Attempts, NotingDriver, SplitRequest]:
        attempts, driver = self.start(tokens, may_split=True, **fields)
        assert attempts.split is not None
        return attempts, driver, attempts.split

    def node(self, name: str) -> Node:
        return self.fleet.node(name)

    def finish(self, attempts: Attempts) -> None:
        self.answer(attempts)
        self.assert_all_counters_are_zero()


def other(name: str) -> str:
    return "d1" if name == "d0" else "d0"
