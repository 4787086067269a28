"""A query: one request before its decision. What it asks for, who could serve it, and what each of them holds of it."""

from __future__ import annotations

from warmroute.fleet.group import Candidates, Group
from warmroute.index.beliefs import Beliefs, Hit
from warmroute.index.lookup import Lookup
from warmroute.prompt.ask import Ask
from warmroute.routing.stays import Stay


class Query:
    __slots__ = (
        "_beliefs",
        "_hits",
        "ask",
        "candidates",
        "crossing",
        "group",
        "looked_up_s",
        "lookup",
        "now_s",
        "stay",
    )

    def __init__(
        self, ask: Ask, candidates: Candidates, group: Group, now_s: float, lookup: Lookup | None, beliefs: Beliefs
    ) -> None:
        self.ask = ask
        self.candidates = candidates
        self.group = group
        self.now_s = self.looked_up_s = now_s
        self.lookup = lookup
        """The prompt in blocks; None where it was not read, or is too short to matter."""
        self.stay: Stay | None = None
        """The island where its conversation lives; None for a new one, or where there is only one island."""
        self.crossing: str | None = None
        """Why it leaves that island, in a word, where it does; None where islands have no say."""
        self._beliefs = beliefs
        self._hits: dict[str, Hit] | None = None

    def again(self, now_s: float) -> Query:
        """The same a moment later. When it was looked up stays."""
        again = Query(self.ask, self.candidates, self.group, now_s, self.lookup, self._beliefs)
        again._hits = self.hits()
        again.looked_up_s = self.looked_up_s
        again.stay, again.crossing = self.stay, self.crossing
        return again

    @property
    def adapter_ms(self) -> bytes | None:
        """For each candidate, as doubles: what loading the request's LoRA adapter takes there; None where it asks for
        none."""
        adapter = self.group.adapter
        return adapter.load_ms(self.candidates) if adapter is not None else None

    def hits(self) -> dict[str, Hit]:
        """By the node's name, for those that hold the beginning of the prompt. Worked out once."""
        if self._hits is None:
            self._hits = self._beliefs.hits(self.ask.model, self.lookup, self.now_s) if self.lookup is not None else {}
        return self._hits
