"""One source of events: complete or not, right again after a loss, and never long at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from told import believing, hit, payload, prompt, stored

from warmroute.engines.kv_events import AllBlocksCleared, BlockRemoved
from warmroute.engines.kv_source import ASTRAY_S, KvSource


class Engine:
    """Tells of one prompt with each message, and keeps the messages for replay."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def say(self, *events: object) -> tuple[int, bytes]:
        number = len(self.said)
        self.said.append(payload(*(events or (stored([number * 10 + 1], prompt(number, 1)),)), sent_s=100.0 + number))
        return number, self.said[-1]


class TokenSink:
    def __init__(self) -> None:
        self.cache_view, self.cache = believing()
        self.now_s = 0.0
        self.source = KvSource(self.cache, 0, lambda: self.now_s, lambda: self.now_s + 5000)

    def hear(self, number: int, message: bytes) -> None:
        self.source.heard(message)
        self.source.feed.message(number, message)
        self.work()

    def work(self) -> None:
        while self.source.work(time.monotonic() + 1):
            pass

    def replay(self, engine: Engine, oldest: int = 0, answered: bool = True) -> None:
        feed = self.source.feed
        start = feed.wants_from or 0
        feed.replay_began()
        for number in range(max(start, oldest), len(engine.said)):
            feed.replayed(number, engine.said[number])
        feed.replay_ended(answered)
        self.work()

    def hits(self, count: int) -> list[bool]:
        return [hit(self.cache_view, prompt(number, 1)) == 16 for number in range(count)]


def test_read_from_the_first_message_on_everything_is_told() -> None:
    hearer, engine = TokenSink(), Engine()
    assert hearer.cache.is_told and not hearer.cache.complete
    hearer.hear(*engine.say())
    assert hearer.cache.complete and hearer.hits(1) == [True]


def test_an_engine_that_has_said_nothing_is_known_in_whole() -> None:
    hearer = TokenSink()
    hearer.replay(Engine())
    assert hearer.cache.complete
    silent = TokenSink()
    silent.replay(Engine(), answered=False)
    assert not silent.cache.complete, "nobody answered"


@pytest.mark.parametrize(("oldest", "complete"), [(0, True), (2, False)])
def test_it_is_complete_only_where_the_replay_reaches_back_to_the_beginning(oldest: int, complete: bool) -> None:
    hearer, engine = TokenSink(), Engine()
    for _ in range(4):
        engine.say()
    hearer.hear(*engine.say())
    hearer.replay(engine, oldest)
    assert hearer.hits(5) == [number >= oldest for number in range(5)]
    assert hearer.cache.complete is complete


def test_an_emptied_cache_is_known_in_whole_again() -> None:
    hearer, engine = TokenSink(), Engine()
    for _ in range(3):
        engine.say()
    hearer.hear(*engine.say())
    hearer.replay(engine, oldest=3)
    assert not hearer.cache.complete
    hearer.hear(*engine.say({"type": "AllBlocksCleared"}))
    assert hearer.cache.complete and not any(hearer.hits(4))


def test_a_lost_removal_is_never_believed_away() -> None:
    hearer, engine = TokenSink(), Engine()
    hearer.hear(*engine.say())
    engine.say({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
    hearer.hear(*engine.say())
    hearer.replay(Engine(), answered=False)
    assert hearer.hits(3) == [False, False, True]
    assert not hearer.cache.complete and hearer.cache.gaps == 1


def test_a_restart_is_complete_from_its_first_message_and_nothing_of_before_stays() -> None:
    hearer, engine = TokenSink(), Engine()
    for _ in range(3):
        hearer.hear(*engine.say())
    again = Engine()
    again.said.append(payload(stored([77], prompt(9, 1)), sent_s=500.0))
    hearer.hear(0, again.said[0])
    assert not any(hearer.hits(3)) and hit(hearer.cache_view, prompt(9, 1)) == 16
    assert hearer.cache.complete and hearer.cache.gaps == 0 and hearer.source.began_s == 500.0


def test_a_parent_that_is_not_known_has_everything_read_again_once() -> None:
    hearer, engine = TokenSink(), Engine()
    hearer.hear(*engine.say())
    hearer.hear(*engine.say(stored([500], prompt(50, 1), parent=499)))
    assert hearer.source.feed.wants_from == 0 and not any(hearer.hits(1)) and not hearer.cache.complete
    hearer.replay(engine)
    assert hearer.hits(1) == [False], "it does not fit this time either: nothing is believed"
    assert hearer.source.feed.wants_from is None and not hearer.cache.complete, "and not read for ever"
    hearer.hear(*engine.say())
    assert hearer.hits(3) == [False, False, True]


def test_a_parent_told_before_this_router_listened_costs_nothing() -> None:
    hearer, engine = TokenSink(), Engine()
    for _ in range(3):
        engine.say()
    hearer.hear(*engine.say())
    hearer.replay(engine, oldest=3)
    hearer.hear(*engine.say(stored([500], prompt(50, 1), parent=499)))
    assert hearer.source.feed.wants_from is None and hearer.source.orphans == 1
    assert hearer.hits(4) == [False, False, False, True]


def test_after_a_while_it_is_tried_again() -> None:
    hearer, engine = TokenSink(), Engine()
    orphan = stored([500], prompt(50, 1), parent=499)
    for _ in range(2):
        hearer.hear(*engine.say({"type": "AllBlocksCleared"}))
        hearer.hear(*engine.say(orphan))
        assert hearer.source.feed.wants_from == 0
        hearer.replay(Engine(), answered=False)
        hearer.now_s += ASTRAY_S
        hearer.hear(*engine.say())
        hearer.replay(Engine(), answered=False)


def test_a_message_that_can_not_be_read_is_a_loss_and_those_after_it_count() -> None:
    hearer, engine = TokenSink(), Engine()
    hearer.hear(*engine.say())
    for message in (b"garbage", engine.say()[1], engine.say()[1]):
        hearer.source.feed.message(hearer.source.feed.next_number, message)
    hearer.work()
    assert hearer.hits(3) == [False, True, True] and not hearer.cache.complete and hearer.cache.gaps == 1


def test_a_replay_with_holes_is_asked_for_again_while_it_brings_something() -> None:
    """vLLM's replay socket drops what it can't send at once."""
    hearer, engine = TokenSink(), Engine()
    hearer.hear(*engine.say())
    for _ in range(5):
        last = engine.say()
    hearer.hear(*last)
    feed = hearer.source.feed
    for start, upto in ((1, 3), (3, 6)):
        assert feed.wants_from == start
        feed.replay_began()
        for number in range(feed.next_number, upto):
            feed.replayed(number, engine.said[number])
        if upto == 3:
            feed.replayed(4, engine.said[4])
        feed.replay_ended()
        hearer.work()
    assert hearer.hits(6) == [True] * 6 and hearer.cache.complete and hearer.cache.gaps == 0


def test_lateness_is_measured_against_the_quickest_whatever_the_clocks_say() -> None:
    hearer, engine = TokenSink(), Engine()
    hearer.hear(*engine.say())
    assert hearer.cache.lag_s == 0 and hearer.cache.heard_s == 0
    hearer.now_s = 4.0
    hearer.hear(*engine.say())
    assert hearer.cache.lag_s == pytest.approx(3.0) and hearer.cache.heard_s == 4.0


# Time.


def many(count: int, of: Callable[[int], object]) -> bytes:
    return payload(*(of(number) for number in range(count)))


def test_a_message_of_a_thousand_events_takes_a_few_milliseconds_and_no_slice_more_than_a_few() -> None:
    """By CPU time, the best of some: the machine has other work."""
    wholes, longest = [], []
    for _ in range(8):
        cache_view, cache = believing()
        source = KvSource(cache, 0)
        stores = many(1000, lambda n: stored([n + 1], prompt(n, 1), parent=n or None, medium="GPU", group_idx=0))
        removals = many(1000, lambda n: BlockRemoved([n + 1], "GPU", group_idx=0))
        for number, message in enumerate((stores, removals)):
            source.feed.message(number, message)
            slices = []
            left = True
            while left:
                began_s = time.process_time()
                left = source.work(time.monotonic() + 0.002)
                slices.append(time.process_time() - began_s)
            wholes.append(sum(slices))
            longest.append(max(slices))
        assert cache_view.index.stats()["pairs"] == 0 and cache.complete
    assert min(wholes) < 0.010
    assert min(longest) < 0.005


def test_an_event_between_two_slices_is_not_lost() -> None:
    cache_view, cache = believing()
    source = KvSource(cache, 0)
    source.feed.message(0, many(100, lambda n: stored([n + 1], prompt(n, 1))))
    source.feed.message(1, payload(AllBlocksCleared(), stored([7], prompt(3, 1))))
    turns = 1
    while source.work(0.0):
        turns += 1
    assert turns > 5
    assert cache_view.index.pairs_of(cache.ranks[0]) == 1
    assert hit(cache_view, prompt(3, 1)) == 16 and hit(cache_view, prompt(4, 1)) == 0
