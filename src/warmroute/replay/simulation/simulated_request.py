"""A simulated request: the router's RoutingRequest, filled from a workload's prompt instead of from HTTP bytes."""

from __future__ import annotations

from array import array

import msgspec

from warmroute.config.priority import PRIORITY_NUMBERS
from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import RoutingRequest
from warmroute.replay.workloads.prompt_text import Form, leading_text
from warmroute.replay.workloads.workload_prompt import WorkloadPrompt
from warmroute.routing.route_matching import Route

MODEL = "sim"
"""The model that every simulated node serves."""


class SimulatedLookup(Lookup, kw_only=True):
    """A lookup by the engine's own block hashes, because simulated prompts have no tokens."""

    request: SimulatedRequest

    @property
    def prompt(self) -> WorkloadPrompt:
        return self.request.prompt

    def prefix(self, tokens: int) -> SimulatedLookup:
        return self

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = array("Q", self.request.blocks(block_size)).tobytes()
        return found


class SimulatedRequest(RoutingRequest, kw_only=True):
    prompt: WorkloadPrompt
    number: int
    """The request's number in this run, which identifies it everywhere."""
    form: Form = "chat"
    _hashes: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """The result of `blocks`, by block size."""

    def lookup(self) -> SimulatedLookup:
        return SimulatedLookup(b"", self.prompt_tokens, self.prompt_tokens, cache_group=self.cache_group, request=self)

    def prefix_key(self) -> bytes | None:
        self.first_user_text()
        return super().prefix_key()

    def first_user_text(self) -> bytes:
        """Return the leading text of the first user message. It is generated on first use: few policies need it."""
        if self.user is None:
            self.system, self.user = leading_text(self.prompt, self.form)
        return self.user

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.prompt_tokens

    def blocks(self, block_size: int) -> list[int]:
        """Return the hashes of the prompt's full blocks, as in an engine with this block size."""
        chain = self._hashes.get(block_size)
        if chain is None:
            content = self.prompt.blocks.content(block_size)
            chain = self._hashes[block_size] = content.hashes(0, self.prompt.prompt_tokens // block_size)
        return chain


def simulated_request(
    prompt: WorkloadPrompt, number: int, form: Form = "chat", route: Route | None = None, now_s: float = 0.0,
    isolated_tenant: str = "", streams: bool = True,
) -> SimulatedRequest:  # fmt: skip
    """A simulated client always states its priority, so a route does not set it. `isolated_tenant` sends the request
    instead of the prompt's own tenant, and shares no knowledge of caches with others."""
    return SimulatedRequest(
        prompt.lora_name or MODEL,
        session=prompt.session,
        tenant=isolated_tenant or prompt.tenant,
        cache_group=f"only {isolated_tenant}" if isolated_tenant else "",
        priority=PRIORITY_NUMBERS[prompt.priority],
        arrived_s=now_s,
        route=route.name if route is not None else "",
        deadline_s=now_s + route.ttft_s if route is not None and route.ttft_s else 0.0,
        total_deadline_s=now_s + route.total_s if route is not None and route.total_s else 0.0,
        ends_late=route is not None and route.ends_late and bool(route.ttft_s or route.total_s),
        streams=streams,
        prompt=prompt,
        number=number,
        form=form,
        may_split=True,
    )
