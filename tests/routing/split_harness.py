"""Requests that one node prefills and another one decodes."""

from __future__ import annotations

from typing import Any

from routing_harness import FakeRequest, RoutingHarness

from warmroute.config import Hedging, Pricing
from warmroute.core.messages import Lookup


class SplitHarness(RoutingHarness):
    def __init__(self, prefill: int = 1, decode: int = 2, engine: str = "vllm") -> None:
        super().__init__(0, pricing=Pricing(split="always"), hedging=Hedging(min_delay_s=1.0))
        for number in range(prefill):
            self.add(f"p{number}", 400_000, role="prefill", engine=engine)
        for number in range(decode):
            self.add(f"d{number}", 400_000, role="decode", engine=engine)

    def submit_split(self, tokens: int | Lookup = 2000, **fields: Any) -> FakeRequest:
        request = self.submit(tokens, may_split=True, **fields)
        assert request.split.pair.prefill_node.inflight
        return request

    def finish(self, request: FakeRequest) -> None:
        request.answer()
        self.assert_all_counters_are_zero()


def other(name: str) -> str:
    return "d1" if name == "d0" else "d0"
