"""Small prompts, nodes and KV events for tests of the CacheView. Time is a number that tests choose."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from warmroute._kernel import Hit
from warmroute.config import Index
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import NodeCache
from warmroute.core.prediction import Prediction

MODEL = "m"
SIZE = 16


def cache_view_of(*names: str, **config: object) -> CacheView:
    cache_view = CacheView(Index(**config))  # type: ignore[arg-type]
    for name in names:
        cache_view.add_node(name, [MODEL])
    return cache_view


def cache_of(cache_view: CacheView, name: str) -> NodeCache:
    cache = cache_view.cache(name)
    assert cache is not None
    return cache


def tokens(*blocks: int, size: int = SIZE, more: int = 1) -> list[int]:
    """Return a prompt of numbered blocks, and `more` tokens that fill no block."""
    return [block * 1000 + at for block in blocks for at in range(size)] + [999_999] * more


def lookup(ids: Sequence[int], *, exact: int | None = None, **more: object) -> Lookup:
    exact_tokens = len(ids) if exact is None else exact
    return Lookup(array("I", ids).tobytes(), len(ids), exact_tokens, **more)  # type: ignore[arg-type]


def prompt(*blocks: int, more: int = 1, size: int = SIZE, **about: object) -> Lookup:
    return lookup(tokens(*blocks, more=more, size=size), **about)  # type: ignore[arg-type]


def with_events(cache: NodeCache, *ranks: int, now_s: float = 0.0) -> NodeCache:
    """Make the node's events known from the first on."""
    for rank in ranks or (0,):
        cache.add_rank(rank)
        cache.set_complete(rank, True)
    cache.last_contact_s = now_s
    return cache


def report_stored(
    cache: NodeCache, *blocks: int, rank: int = 0, size: int = SIZE, parent: int | None = None, **about: object
) -> bool:
    """Apply a store event of these blocks. Their numbers are the engine's hashes."""
    ids = [token for block in blocks for token in tokens(block, size=size, more=0)]
    return cache.blocks_stored(rank, parent, list(blocks), ids, size, **about)  # type: ignore[arg-type]


def route(cache_view: CacheView, name: str, request: Lookup, now_s: float = 0.0, model: str = MODEL) -> Prediction:
    hit = cache_view.hits(model, request, now_s).get(name)
    prediction = cache_view.record_routed(model, request, name, hit, now_s)
    assert prediction is not None
    return prediction


def hit(cache_view: CacheView, name: str, request: Lookup, now_s: float = 0.0, model: str = MODEL) -> Hit | None:
    return cache_view.hits(model, request, now_s).get(name)


def hit_tokens(cache_view: CacheView, name: str, request: Lookup, now_s: float = 0.0, model: str = MODEL) -> int:
    """Return the tokens of the prompt that the node should have cached."""
    found = hit(cache_view, name, request, now_s, model)
    return found.tokens if found is not None else 0
