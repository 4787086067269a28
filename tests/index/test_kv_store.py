"""Shared KV stores: what one node has prefilled, every node attached to the store can load."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from warmroute._kernel import BlockIndex
from warmroute.config import ConfigError, Index, from_table
from warmroute.core.cache_view import CacheView
from warmroute.core.messages import Lookup
from warmroute.core.node_cache import NodeCache
from warmroute.engines.kv_events import Applied, BlockRemoved, BlockStored, KvEventApplier

BLOCK = 16


def lookup(tokens: int, first: int = 0) -> Lookup:
    return Lookup(array("I", range(first, first + tokens)).tobytes(), tokens, tokens)


def cache_view(capacity_tokens: int = 10_000, share: float = 0.8) -> CacheView:
    view = CacheView(Index())
    view.set_stores({"shared": capacity_tokens})
    view.saved_shares = lambda _model, _store, nodes, _now_s: [share] * len(nodes)
    for name in ("a", "b", "c"):
        view.add_node(name, ["m"]).set_size(BLOCK, 100 * BLOCK)
        view.attach(name, "shared" if name != "c" else "")
    return view


def prefill(view: CacheView, name: str, prompt: Lookup, now_s: float = 1.0) -> None:
    hit = view.hits("m", prompt, now_s).get(name)
    prediction = view.record_routed("m", prompt, name, hit, now_s)
    assert prediction is not None
    view.first_token(prediction, now_s + 0.1)


def test_a_prefilled_prompt_is_a_hit_for_every_attached_node() -> None:
    view = cache_view()
    prefill(view, "a", lookup(160))
    hits = view.hits("m", lookup(200), 2.0)
    assert set(hits) == {"a", "b"}
    assert (hits["a"].tokens, hits["a"].expected) == (160, 160.0), "its own cache comes first"
    assert hits["b"].tokens == 160 and hits["b"].expected == pytest.approx(0.8 * 160)


def test_the_store_extends_what_a_node_has_itself() -> None:
    view = cache_view()
    prefill(view, "b", lookup(64))
    prefill(view, "a", lookup(160))
    hit = view.hits("m", lookup(200), 2.0)["b"]
    assert hit.tokens == 160 and hit.expected == pytest.approx(64 + 0.8 * 96)
    prediction = view.record_routed("m", lookup(200), "b", hit, 2.0)
    assert prediction is not None and prediction.store_tokens == 96
    assert view.from_store("m", lookup(200), "b", hit) == ("", 0), "now its own cache should hold it"


def test_a_store_that_is_slower_than_prefilling_does_not_count() -> None:
    view = cache_view(share=0.0)
    prefill(view, "a", lookup(160))
    assert set(view.hits("m", lookup(200), 2.0)) == {"a"}


def test_wrong_expectations_of_the_store_do_not_count_against_the_node() -> None:
    view = cache_view()
    prefill(view, "a", lookup(160))
    for turn in range(20):
        hit = view.hits("m", lookup(160), 2.0 + turn).get("b")
        prediction = view.record_routed("m", lookup(160), "b", hit, 2.0 + turn)
        assert prediction is not None
        prediction.check_cached_tokens(0, 2.0 + turn)
        prediction.withdraw()
    store, node = view.stores["shared"], view.cache("b")
    assert node is not None and node.accuracy.agreement() == 1.0 and store.accuracy.agreement() == 0.0
    assert view.hits("m", lookup(160), 30.0)["b"].expected < 0.8 * 144


def test_the_least_recently_used_prompts_leave_a_full_store() -> None:
    view = cache_view(capacity_tokens=320)
    for turn in range(3):
        prefill(view, "a", lookup(160, 1000 * turn), 1.0 + turn)
    found = [view.hits("m", lookup(160, 1000 * turn), 9.0).get("b") for turn in range(3)]
    assert found[0] is None and found[1] is not None and found[2] is not None
    assert view.stores["shared"].blocks == 20


def test_stores_and_nodes_come_and_go() -> None:
    view = cache_view()
    prefill(view, "a", lookup(160))
    view.attach("b", "")
    assert set(view.hits("m", lookup(200), 2.0)) == {"a"}
    view.attach("c", "shared")
    assert set(view.hits("m", lookup(200), 2.0)) == {"a", "c"}
    view.remove_node("a")
    assert set(view.hits("m", lookup(200), 2.0)) == {"c"}, "the store keeps what a node that left has stored"
    view.set_stores({"shared": 64})
    assert view.hits("m", lookup(200), 2.0)["c"].tokens == 64
    view.set_stores({})
    assert not view.hits("m", lookup(200), 2.0) and view.cache("c").store is None  # type: ignore[union-attr]


# KV events.


def event(numbers: range, medium: str, parent: int | None = None) -> BlockStored:
    tokens = [token for number in numbers for token in range(number * BLOCK, (number + 1) * BLOCK)]
    return BlockStored(
        block_hashes=[number + 100 for number in numbers], parent_block_hash=parent, token_ids=tokens,
        block_size=BLOCK, medium=medium, extra_keys=msgspec.Raw(msgspec.msgpack.encode([None] * len(numbers))),
    )  # fmt: skip


def applier(view: CacheView, name: str) -> tuple[KvEventApplier, NodeCache]:
    cache = view.cache(name)
    assert cache is not None
    cache.add_rank(0)
    cache.last_contact_s = 1.0
    return KvEventApplier(cache, 0), cache


@pytest.mark.parametrize("medium", ["cpu", "CPU", "STORAGE", "remote"])
def test_blocks_that_an_engine_reports_outside_the_gpu_are_in_the_store(medium: str) -> None:
    view = cache_view()
    events, _ = applier(view, "a")
    events.apply(event(range(10), "GPU"))
    assert set(view.hits("m", lookup(200), 2.0)) == {"a"}
    events.apply(event(range(10), medium))
    hits = view.hits("m", lookup(200), 2.0)
    assert hits["b"].expected == pytest.approx(0.8 * 160) and hits["a"].expected == 160.0
    events.apply(BlockRemoved(block_hashes=[105, 106], medium=medium))
    assert view.hits("m", lookup(200), 2.0)["b"].tokens == 80


def test_more_reports_than_fit_are_forgotten() -> None:
    view = cache_view(capacity_tokens=160)
    events, _ = applier(view, "a")
    events.apply(event(range(8), "GPU"))
    events.apply(event(range(8), "cpu"))
    assert view.hits("m", lookup(200), 2.0)["b"].tokens == 128
    events.apply(event(range(8, 12), "GPU", 107))
    events.apply(event(range(8, 12), "cpu", 107))
    assert "b" not in view.hits("m", lookup(200), 2.0)


def test_repeated_reports_of_a_block_are_one_block() -> None:
    view = cache_view(capacity_tokens=160)
    events, _ = applier(view, "a")
    events.apply(event(range(8), "GPU"))
    events.apply(event(range(8), "cpu"))
    for _ in range(30):
        events.apply(event(range(1), "cpu"))
    assert view.hits("m", lookup(200), 2.0)["b"].tokens == 128


def test_forgotten_reports_leave_the_prefilled_prompts() -> None:
    view = cache_view(capacity_tokens=160)
    prefill(view, "b", lookup(96, 5000))
    events, _ = applier(view, "a")
    for first in (0, 8):
        events.apply(event(range(first, first + 8), "GPU"))
        events.apply(event(range(first, first + 8), "cpu"))
    assert "b" not in view.hits("m", lookup(128), 2.0)
    assert view.hits("m", lookup(128, 8 * BLOCK), 2.0)["b"].tokens == 112
    assert view.hits("m", lookup(96, 5000), 2.0)["a"].tokens == 80, "the store has it all the same"


def offloaded(view: CacheView) -> KvEventApplier:
    """A rank whose first ten blocks are in the store only."""
    events, _ = applier(view, "a")
    events.apply(event(range(10), "GPU"))
    events.apply(event(range(10), "cpu"))
    events.apply(BlockRemoved(block_hashes=list(range(100, 110)), medium="GPU"))
    return events


@pytest.mark.parametrize("medium", ["GPU", "cpu"])
def test_a_parent_may_be_in_the_store_only(medium: str) -> None:
    view = cache_view()
    events = offloaded(view)
    assert events.apply(event(range(10, 12), medium, 109)) is Applied.DONE
    hits = view.hits("m", lookup(300), 2.0)
    assert hits["b"].tokens == (160 if medium == "GPU" else 192)
    assert hits["a"].expected == pytest.approx(0.8 * hits["a"].tokens), "the parent is still not its own"
    assert events.apply(event(range(20, 22), "GPU", 119)) is Applied.ORPHANED, "that parent is nowhere"


def test_a_block_leaves_the_store_after_it_has_left_the_gpu() -> None:
    view = cache_view()
    events = offloaded(view)
    events.apply(BlockRemoved(block_hashes=[105], medium="cpu"))
    assert view.hits("m", lookup(200), 2.0)["b"].tokens == 80
    events.apply(event(range(5, 6), "cpu", 104))
    assert view.hits("m", lookup(200), 2.0)["b"].tokens == 160
    events.apply(BlockRemoved(block_hashes=[100], medium="cpu"))
    assert not view.hits("m", lookup(200), 2.0)


def test_the_blocks_that_a_rank_has_in_the_store_take_little_memory() -> None:
    view = cache_view(capacity_tokens=20 * BLOCK)
    events, cache = applier(view, "a")
    for first in range(0, 300, 5):
        events.apply(event(range(first, first + 5), "GPU", first + 99 if first else None))
        events.apply(event(range(first, first + 5), "cpu", first + 99 if first else None))
        events.apply(BlockRemoved(block_hashes=list(range(first + 100, first + 105)), medium="GPU"))
    view.tidy(2.0)
    assert cache.knows(0, 399) and view.index.stats()["pairs"] <= 40, "they are parents of what follows"
    cache.restarted()
    assert not cache.knows(0, 399)
    offloaded(view)
    view.set_stores({})
    view.remove_node("a")
    view.tidy(3.0)
    assert not view.index.stats()["pairs"]


def test_a_node_that_gets_a_store_forgets_blocks_outside_the_gpu_as_they_leave() -> None:
    view = cache_view()
    events, _ = applier(view, "c")
    events.apply(event(range(10), "GPU"))
    events.apply(event(range(10), "cpu"))
    view.attach("c", "shared")
    for medium in ("GPU", "cpu"):
        events.apply(BlockRemoved(block_hashes=list(range(100, 110)), medium=medium))
    assert not view.hits("m", lookup(200), 2.0)


def test_without_a_store_blocks_outside_the_gpu_are_the_nodes_own() -> None:
    view = cache_view()
    events, _ = applier(view, "c")
    events.apply(event(range(10), "GPU"))
    events.apply(event(range(10), "cpu"))
    events.apply(BlockRemoved(block_hashes=list(range(100, 110)), medium="GPU"))
    hits = view.hits("m", lookup(200), 2.0)
    assert set(hits) == {"c"} and hits["c"].expected == pytest.approx(0.9 * 160)


# Configuration.


def test_contradicting_stores_are_rejected() -> None:
    store = {"name": "s", "capacity_tokens": 1000}
    node = {"url": "http://a:1", "kv_store": "t"}
    for table, problem in (
        ({"kv_stores": [store, store]}, "defined twice"),
        ({"kv_stores": [{**store, "island": "i"}, {**store, "name": "t", "island": "i"}]}, "have the island"),
        ({"kv_stores": [store], "nodes": [node]}, "no \\[\\[kv_stores\\]\\] has the name 't'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            from_table(table, experiment=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_an_engine_that_no_longer_loads_what_is_slow_to_load_is_recognized(restarted: bool) -> None:
    view = cache_view(share=0.0)
    cache = view.cache("b")
    assert cache is not None
    prefill(view, "a", lookup(800))
    prediction = view.record_routed("m", lookup(800), "b", None, 2.0)
    assert prediction is not None and prediction.declined_tokens >= 784
    prediction.check_cached_tokens(784, 2.1)
    prediction.withdraw()
    assert cache.loads_always
    if restarted:
        cache.restarted()
    else:
        hit = view.hits("m", lookup(800), 3.0)["b"]
        prediction = view.record_routed("m", lookup(800), "b", hit, 3.0)
        assert prediction is not None and prediction.store_tokens == 784
        prediction.check_cached_tokens(784, 3.1)
        assert cache.loads_always, "it still does"
        prediction.check_cached_tokens(300, 3.2)
    assert not cache.loads_always


@pytest.mark.parametrize(("tokens", "shown"), [(256, True), (255, False)])
def test_only_what_would_be_long_to_load_shows_that_an_engine_loads(tokens: int, shown: bool) -> None:
    """256 tokens are enough. Of 255 the engine could load 240: whole blocks of 16."""
    view = cache_view(share=0.0)
    prefill(view, "a", lookup(tokens))
    prediction = view.record_routed("m", lookup(tokens), "b", None, 2.0)
    assert prediction is not None and prediction.declined_tokens == (256 if shown else 240)
    prediction.check_cached_tokens(prediction.declined_tokens, 2.1)
    cache = view.cache("b")
    assert cache is not None and cache.loads_always is shown


def test_a_dispatch_to_a_node_with_a_store_matches_the_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view = cache_view()
    prefill(view, "a", lookup(160))
    hit = view.hits("m", lookup(200), 2.0)["b"]
    matches: list[bytes] = []

    class Noting:
        def __init__(self, index: BlockIndex) -> None:
            self._index = index

        def match(self, chain: bytes) -> list[tuple[int, ...]]:
            matches.append(chain)
            return self._index.match(chain)  # type: ignore[return-value]

        def __getattr__(self, name: str) -> object:
            return getattr(self._index, name)

    noting = Noting(view.index)
    monkeypatch.setattr(view, "index", noting)
    monkeypatch.setattr(view.stores["shared"], "_index", noting)
    prediction = view.record_routed("m", lookup(200), "b", hit, 2.0)
    assert prediction is not None and prediction.store_tokens == 160 and len(matches) == 1
