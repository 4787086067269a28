"""Which islands a request may go to, where a model's nodes stand on several. For the policy `price`.

    a new conversation        anywhere, by price: the distance is a part of it
    one that lives somewhere  its home, and nowhere else, unless that can't serve it in time:
                                down         no node of the home is up
                                slow         its first token would come over `spill_ms` later there than elsewhere
                                deadline     it would come too late there, and elsewhere it would not
                                passed_over  its nodes are up, and none may take it: their queues are too long, or they
                                             have come back just now
    one that had to leave     its home or where it went, whichever is cheaper now: it comes home where enough of it is
                              still cached there, and stays away where not

What is decided here changes nothing; what is sent is remembered and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from warmroute.config import Crossing
from warmroute.fleet.group import Candidates
from warmroute.fleet.islands import Islands
from warmroute.fleet.node import Node
from warmroute.index.cache_view import CacheView
from warmroute.routing.conversation_affinity import Stay, Stays, ends_at
from warmroute.routing.deadlines import most_own_ms
from warmroute.routing.decision import Decision, Policy
from warmroute.routing.outputs import OutputLengths
from warmroute.routing.query import Query

PROMPT_TOKEN_BYTES: Final = 4.5
ANSWER_TOKEN_BYTES: Final = 220.0
"""An answer is mostly streamed, an event for each token."""
DOWN, SLOW, DEADLINE, PASSED_OVER, STOOD_IN = "down", "slow", "deadline", "passed_over", "stood_in"
REASONS: Final = (DOWN, SLOW, DEADLINE, PASSED_OVER, STOOD_IN)


class Crossings:
    """Keeps conversations at home, and counts those that leave."""

    def __init__(self, islands: Islands, cache_view: CacheView, outputs: OutputLengths) -> None:
        self._islands = islands
        self._cache_view = cache_view
        self._outputs = outputs
        self._stays = Stays(islands.crossing.remembered_s)
        self.books = islands.books

    @property
    def remembered(self) -> int:
        return len(self._stays)

    @property
    def minds_waiting(self) -> bool:
        """Whether to tell of those who wait: with several islands, and until those are forgotten who waited then."""
        return self._islands.several or self._islands.has_lines

    def saw_waiting(self, decisions: Iterable[Decision]) -> None:
        """What those who wait here would have done now. Told now and then."""
        work_ms: defaultdict[str, float] = defaultdict(float)
        for decision in decisions:
            if decision.price is not None:
                work_ms[decision.node.island] += decision.price.prefill
        self._islands.saw_waiting(work_ms)

    # Before.

    def decide(self, query: Query, policy: Policy) -> Decision:
        settings = self._islands.crossing
        if policy.name != "price" or not settings.sticky:
            return policy.decide(query)
        query.crossing = ""
        stay = query.stay
        if stay is None:
            stay = query.stay = self._stay(query)
            if stay is None:
                return policy.decide(query)
        everyone = query.candidates
        home, at = stay
        bound_to = (home,) if at == home else tuple(sorted((home, at)))
        bound = self._on(query, *bound_to)
        if not bound.nodes:
            decision = policy.decide(query)
            if query.group.on(*bound_to).nodes:
                _cross(query, decision, PASSED_OVER, f"the nodes of its home {home} are passed over")
            else:
                _cross(query, decision, DOWN, f"no node of its home {home} is up")
            return decision
        if len(bound) == len(everyone):
            return policy.decide(query)
        query.candidates = bound
        try:
            decision = policy.decide(query)
        finally:
            query.candidates = everyone
        return self._spilled(query, policy, decision, settings) or decision.with_more(everyone.nodes)

    def _stay(self, query: Query) -> Stay | None:
        request, lookup = query.request, query.lookup
        if request.session_header:
            return self._stays.by_name(request.tenant, request.model, request.session_header)
        if lookup is None:
            return None
        chain, size = self._cache_view.chain(request.model, lookup)
        return self._stays.by_prompt(chain, ends_at(lookup.token_count, size), lookup.sharing) if chain else None

    def _on(self, query: Query, *islands: str) -> Candidates:
        if query.candidates is query.group.up:
            return query.group.on(*islands)
        nodes = query.candidates.nodes
        return Candidates([node for node in nodes if node.island in islands], len(nodes))

    def _spilled(self, query: Query, policy: Policy, there: Decision, settings: Crossing) -> Decision | None:
        """Elsewhere, where its home can't serve it in time."""
        price, request = there.price, query.request
        if price is None:
            return None
        there.query = query
        late = bool(request.deadline_s or request.total_deadline_s) and price.own > most_own_ms(
            request, there, query.now_s
        )
        if price.own <= settings.spill_ms and not late:
            return None
        elsewhere = policy.decide(query)
        elsewhere.query = query
        best = elsewhere.price
        if best is None or elsewhere.node.island == there.node.island:
            return None
        if late and best.own <= most_own_ms(request, elsewhere, query.now_s):
            _cross(query, elsewhere, DEADLINE, f"{there.node.island} can't serve it by its deadline")
        elif price.own - best.own > settings.spill_ms:
            _cross(query, elsewhere, SLOW, f"{there.node.island} would take {price.own - best.own:,.0f} ms longer")
        else:
            return None
        return elsewhere

    # After.

    def sent(self, query: Query, node: Node, now_s: float) -> None:
        """It goes to this node: the one that was decided on, or one that stands in."""
        stay, island = query.stay, node.island
        self._stays.remembered_s = self._islands.crossing.remembered_s
        if stay is None:
            home = island
            self.books.fresh[island] += 1
        else:
            home = self._counted(stay, island, query)
        request, lookup = query.request, query.lookup
        if request.session_header:
            self._stays.keep_name(request.tenant, request.model, request.session_header, (home, island), now_s)
        elif lookup is not None:
            chain, size = self._cache_view.chain(request.model, lookup)
            if chain:
                blocks = ends_at(lookup.token_count, size)
                self._stays.keep_prompt(chain, blocks, lookup.sharing, (home, island), now_s)
        if lookup is not None:
            answer = self._outputs.expected(request.model, request.tenant, request.max_output_tokens)
            self._islands.saw_request(PROMPT_TOKEN_BYTES * lookup.token_count + ANSWER_TOKEN_BYTES * answer)

    def _counted(self, stay: Stay, island: str, query: Query) -> str:
        """The conversation's home from now on."""
        books, (home, at) = self.books, stay
        if island == home:
            books.stayed[home] += 1
            if at != home:
                books.came_home[home] += 1
            return home
        books.away[home] += 1
        if island != at:
            books.crossed[home, island, query.crossing or STOOD_IN] += 1
        return home


def _cross(query: Query, decision: Decision, why: str, words: str) -> None:
    query.crossing = why
    decision.reason = f"crossed to {decision.node.island}: {words}"
