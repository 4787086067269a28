"""Small prompts, nodes and answers for tests of what is believed. Time is a number that tests move on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from warmroute.config import Index
from warmroute.index.cache_view import CacheView, Hit
from warmroute.index.lookup import Lookup
from warmroute.index.node_cache import NodeCache
from warmroute.index.prediction import Prediction

MODEL = "m"
SIZE = 16


def beliefs_of(*names: str, **config: object) -> CacheView:
    cache_view = CacheView(Index(**config))  # type: ignore[arg-type]
    for name in names:
        cache_view.join(name, [MODEL])
    return cache_view


def cache_of(cache_view: CacheView, name: str) -> NodeCache:
    cache = cache_view.cache(name)
    assert cache is not None
    return cache


def tokens(*blocks: int, size: int = SIZE, more: int = 1) -> list[int]:
    """A prompt of these blocks, each known by its number, and some tokens that fill no block."""
    return [block * 1000 + at for block in blocks for at in range(size)] + [999_999] * more


def lookup(ids: Sequence[int], *, sure: int | None = None, **more: object) -> Lookup:
    sure_tokens = len(ids) if sure is None else sure
    return Lookup(array("I", ids).tobytes(), len(ids), sure_tokens, **more)  # type: ignore[arg-type]


def prompt(*blocks: int, more: int = 1, size: int = SIZE, **about: object) -> Lookup:
    return lookup(tokens(*blocks, more=more, size=size), **about)  # type: ignore[arg-type]


def follows(cache: NodeCache, *ranks: int, now_s: float = 0.0) -> NodeCache:
    """Its events are heard from the first on."""
    for rank in ranks or (0,):
        cache.follow(rank)
        cache.tells_all(rank, True)
    cache.heard(now_s)
    return cache


def tells(cache: NodeCache, *blocks: int, rank: int = 0, size: int = SIZE, parent: int | None = None, **about: object):
    """The engine says that it holds these blocks; each goes by its number there, too."""
    ids = [token for block in blocks for token in tokens(block, size=size, more=0)]
    return cache.stored(rank, parent, list(blocks), ids, size, **about)  # type: ignore[arg-type]


def sends(cache_view: CacheView, name: str, asked: Lookup, now_s: float = 0.0, model: str = MODEL) -> Prediction:
    hit = cache_view.hits(model, asked, now_s).get(name)
    sent = cache_view.sent(model, asked, name, hit, now_s)
    assert sent is not None
    return sent


def hit(cache_view: CacheView, name: str, asked: Lookup, now_s: float = 0.0, model: str = MODEL) -> Hit | None:
    return cache_view.hits(model, asked, now_s).get(name)


def held(cache_view: CacheView, name: str, asked: Lookup, now_s: float = 0.0, model: str = MODEL) -> int:
    """Tokens of it that the node is believed to hold."""
    found = hit(cache_view, name, asked, now_s, model)
    return found.tokens if found is not None else 0
