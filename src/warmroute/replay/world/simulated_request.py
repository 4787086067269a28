"""What a simulated client asks: the router's RoutingRequest, with what the prompt's bytes would have told laid open beside it."""

from __future__ import annotations

from array import array

from warmroute.index.lookup import Lookup
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL, RoutingRequest
from warmroute.replay.workloads.prompt import Priority, Prompt
from warmroute.replay.workloads.text import Form, beginnings

PRIORITIES: dict[Priority, int] = {"high": HIGH, "normal": NORMAL, "low": LOW}
MODEL = "sim"
"""The one model that simulated fleets serve, beside adapters on it."""


class SimLookup(Lookup):
    """Blocks by the engine's own hashes: simulated prompts have no tokens."""

    __slots__ = ("_request",)

    def __init__(self, request: SimulatedRequest) -> None:
        super().__init__(b"", request.prompt_tokens, request.prompt_tokens)
        self._request = request

    @property
    def prompt(self) -> Prompt:
        return self._request.prompt

    def beginning(self, tokens: int) -> SimLookup:
        return self

    def blocks(self, model: str, lora: str, block_size: int) -> bytes:
        key = (model, lora, block_size)
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = array("Q", self._request.blocks(block_size)).tobytes()
        return found


class SimulatedRequest(RoutingRequest):
    __slots__ = ("_chains", "_form", "number", "prompt")

    def __init__(self, prompt: Prompt, number: int, form: Form = "chat") -> None:
        super().__init__(prompt.lora_name or MODEL, session=prompt.session)
        self.tenant = prompt.tenant
        self.prompt = prompt
        self.priority = PRIORITIES[prompt.priority]
        self.number = number
        """Counts the world's requests; its name in everybody's books."""
        self._form = form
        self._chains: dict[int, list[int]] = {}

    def prefix_key(self) -> bytes | None:
        self.first_words()
        return super().prefix_key()

    def first_words(self) -> bytes:
        """The beginning of the first user message. Made when first asked for: few policies care."""
        if self._user is None:
            self._system, self._user = beginnings(self.prompt, self._form)
        return self._user

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.prompt_tokens

    def blocks(self, block_size: int) -> list[int]:
        """Hashes of the prompt's full blocks, as an engine with blocks of that size names them."""
        chain = self._chains.get(block_size)
        if chain is None:
            content = self.prompt.blocks.content(block_size)
            chain = self._chains[block_size] = content.hashes(0, self.prompt.prompt_tokens // block_size)
        return chain
