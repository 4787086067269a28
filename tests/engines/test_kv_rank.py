"""The KV events of one rank: completeness, recovery after a loss, bounded slices of time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from kv_event_factory import hit, one_node, payload, prompt, stored

from warmroute.core.node_cache import NodeCache
from warmroute.engines.kv_events import (
    REREAD_INTERVAL_S,
    AllBlocksCleared,
    BlockRemoved,
    NodeKvEvents,
    RankEvents,
    decode_batch,
    sent_time_s,
)


def rank_events(
    cache: NodeCache, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
) -> RankEvents[bytes]:
    return RankEvents(cache, 0, lambda: lambda payload: decode_batch(payload).events, sent_time_s, now, wall)


class Engine:
    """Stores one prompt with each message, and keeps the messages for replay."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def publish(self, *events: object) -> tuple[int, bytes]:
        number = len(self.messages)
        events = events or (stored([number * 10 + 1], prompt(number, 1)),)
        self.messages.append(payload(*events, sent_s=100.0 + number))
        return number, self.messages[-1]


class Subscriber:
    def __init__(self) -> None:
        self.cache_view, self.cache = one_node()
        self.now_s = 0.0
        self.rank = rank_events(self.cache, lambda: self.now_s, lambda: self.now_s + 5000)

    def receive(self, number: int, message: bytes) -> None:
        self.rank.receive(number, message)
        self.work()

    def work(self) -> None:
        while self.rank.work(time.monotonic() + 1):
            pass

    def replay(self, engine: Engine, oldest: int = 0, finished: bool = True) -> None:
        sequence = self.rank.sequence
        start = sequence.missing_from or 0
        sequence.start_replay()
        for number in range(max(start, oldest), len(engine.messages)):
            sequence.receive_replayed(number, engine.messages[number])
        sequence.end_replay(finished)
        self.work()

    def hits(self, count: int) -> list[bool]:
        return [hit(self.cache_view, prompt(number, 1)) == 16 for number in range(count)]


def test_events_are_complete_from_the_first_message_on() -> None:
    subscriber, engine = Subscriber(), Engine()
    assert subscriber.cache.has_events and not subscriber.cache.complete
    subscriber.receive(*engine.publish())
    assert subscriber.cache.complete and subscriber.hits(1) == [True]


def test_an_engine_without_messages_is_complete() -> None:
    subscriber = Subscriber()
    subscriber.replay(Engine())
    assert subscriber.cache.complete
    silent = Subscriber()
    silent.replay(Engine(), finished=False)
    assert not silent.cache.complete, "the replay did not answer"


@pytest.mark.parametrize(("oldest", "complete"), [(0, True), (2, False)])
def test_events_are_complete_only_if_the_replay_starts_at_0(oldest: int, complete: bool) -> None:
    subscriber, engine = Subscriber(), Engine()
    for _ in range(4):
        engine.publish()
    subscriber.receive(*engine.publish())
    subscriber.replay(engine, oldest)
    assert subscriber.hits(5) == [number >= oldest for number in range(5)]
    assert subscriber.cache.complete is complete


def test_events_are_complete_again_after_the_cache_is_cleared() -> None:
    subscriber, engine = Subscriber(), Engine()
    for _ in range(3):
        engine.publish()
    subscriber.receive(*engine.publish())
    subscriber.replay(engine, oldest=3)
    assert not subscriber.cache.complete
    subscriber.receive(*engine.publish({"type": "AllBlocksCleared"}))
    assert subscriber.cache.complete and not any(subscriber.hits(4))


def test_a_lost_removal_leaves_no_stale_block() -> None:
    subscriber, engine = Subscriber(), Engine()
    subscriber.receive(*engine.publish())
    engine.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
    subscriber.receive(*engine.publish())
    subscriber.replay(Engine(), finished=False)
    assert subscriber.hits(3) == [False, False, True]
    assert not subscriber.cache.complete and subscriber.cache.gaps == 1


def test_a_restart_forgets_old_blocks_and_is_complete_from_its_first_message() -> None:
    subscriber, engine = Subscriber(), Engine()
    for _ in range(3):
        subscriber.receive(*engine.publish())
    again = Engine()
    again.messages.append(payload(stored([77], prompt(9, 1)), sent_s=500.0))
    subscriber.receive(0, again.messages[0])
    assert not any(subscriber.hits(3)) and hit(subscriber.cache_view, prompt(9, 1)) == 16
    assert subscriber.cache.complete and subscriber.cache.gaps == 0 and subscriber.rank.first_sent_s == 500.0


def test_an_unknown_parent_causes_one_reread() -> None:
    subscriber, engine = Subscriber(), Engine()
    subscriber.receive(*engine.publish())
    subscriber.receive(*engine.publish(stored([500], prompt(50, 1), parent=499)))
    assert subscriber.rank.sequence.missing_from == 0 and not any(subscriber.hits(1)) and not subscriber.cache.complete
    subscriber.replay(engine)
    assert subscriber.hits(1) == [False], "the replay has the same contradiction: the blocks are dropped"
    assert subscriber.rank.sequence.missing_from is None and not subscriber.cache.complete, "no endless rereading"
    subscriber.receive(*engine.publish())
    assert subscriber.hits(3) == [False, False, True]


def test_a_parent_from_before_the_subscription_causes_no_reread() -> None:
    subscriber, engine = Subscriber(), Engine()
    for _ in range(3):
        engine.publish()
    subscriber.receive(*engine.publish())
    subscriber.replay(engine, oldest=3)
    subscriber.receive(*engine.publish(stored([500], prompt(50, 1), parent=499)))
    assert subscriber.rank.sequence.missing_from is None
    assert subscriber.hits(4) == [False, False, False, True]


def test_a_reread_is_allowed_again_after_the_interval() -> None:
    subscriber, engine = Subscriber(), Engine()
    orphan = stored([500], prompt(50, 1), parent=499)
    for _ in range(2):
        subscriber.receive(*engine.publish({"type": "AllBlocksCleared"}))
        subscriber.receive(*engine.publish(orphan))
        assert subscriber.rank.sequence.missing_from == 0
        subscriber.replay(Engine(), finished=False)
        subscriber.now_s += REREAD_INTERVAL_S
        subscriber.receive(*engine.publish())
        subscriber.replay(Engine(), finished=False)


def test_an_unreadable_message_counts_as_lost_and_later_ones_are_applied() -> None:
    subscriber, engine = Subscriber(), Engine()
    subscriber.receive(*engine.publish())
    for message in (b"garbage", engine.publish()[1], engine.publish()[1]):
        subscriber.rank.sequence.receive(subscriber.rank.sequence.next_number, message)
    subscriber.work()
    assert subscriber.hits(3) == [False, True, True] and not subscriber.cache.complete and subscriber.cache.gaps == 1


def test_a_replay_with_gaps_is_repeated_while_it_brings_messages() -> None:
    """vLLM's replay socket drops messages above its high-water mark."""
    subscriber, engine = Subscriber(), Engine()
    subscriber.receive(*engine.publish())
    for _ in range(5):
        last = engine.publish()
    subscriber.receive(*last)
    sequence = subscriber.rank.sequence
    for start, upto in ((1, 3), (3, 6)):
        assert sequence.missing_from == start
        sequence.start_replay()
        for number in range(sequence.next_number, upto):
            sequence.receive_replayed(number, engine.messages[number])
        if upto == 3:
            sequence.receive_replayed(4, engine.messages[4])
        sequence.end_replay()
        subscriber.work()
    assert subscriber.hits(6) == [True] * 6 and subscriber.cache.complete and subscriber.cache.gaps == 0


def test_lag_is_measured_against_the_fastest_message() -> None:
    subscriber, engine = Subscriber(), Engine()
    subscriber.receive(*engine.publish())
    assert subscriber.cache.event_lag_s == 0 and subscriber.cache.last_contact_s == 0
    subscriber.now_s = 4.0
    subscriber.receive(*engine.publish())
    assert subscriber.cache.event_lag_s == pytest.approx(3.0) and subscriber.cache.last_contact_s == 4.0


def test_a_node_restart_keeps_ranks_that_have_reported_since() -> None:
    subscriber, engine = Subscriber(), Engine()
    node = NodeKvEvents(subscriber.cache)
    node.ranks[0] = subscriber.rank
    subscriber.receive(*engine.publish())
    assert node.restarted(started_s=97.0) == [] and subscriber.hits(1) == [True], "sent at 100.0: the new process"
    assert node.restarted(started_s=99.3) == [0] and subscriber.hits(1) == [False], "start times are too early by 1 s"
    subscriber.receive(0, engine.messages[0])
    assert node.restarted(started_s=101.0) == [0] and subscriber.hits(1) == [False]
    assert not subscriber.cache.complete
    subscriber.receive(0, engine.messages[0])
    assert subscriber.cache.complete and subscriber.hits(1) == [True]
    subscriber.now_s = 20.0
    subscriber.receive(0, Engine().publish()[1])
    assert node.restarted(started_s=99.3, polled_s=19.0) == [], "its numbers have started again since"
    assert node.restarted(started_s=101.0, polled_s=19.0) == [0], "sent before the start: by a process between them"
    subscriber.receive(0, engine.messages[0])
    assert node.restarted(started_s=99.3, polled_s=19.0) == [0], "the restart that the router noticed shows nothing"


# Time.


def many(count: int, of: Callable[[int], object]) -> bytes:
    return payload(*(of(number) for number in range(count)))


def test_a_thousand_events_take_a_few_milliseconds_in_short_slices() -> None:
    """Best of several runs, by CPU time: the machine has other work."""
    wholes, longest = [], []
    for _ in range(8):
        cache_view, cache = one_node()
        rank = rank_events(cache)
        stores = many(1000, lambda n: stored([n + 1], prompt(n, 1), parent=n or None, medium="GPU", group_idx=0))
        removals = many(1000, lambda n: BlockRemoved([n + 1], "GPU", group_idx=0))
        for number, message in enumerate((stores, removals)):
            rank.sequence.receive(number, message)
            slices = []
            left = True
            while left:
                began_s = time.process_time()
                left = rank.work(time.monotonic() + 0.002)
                slices.append(time.process_time() - began_s)
            wholes.append(sum(slices))
            longest.append(max(slices))
        assert cache_view.index.stats()["pairs"] == 0 and cache.complete
    assert min(wholes) < 0.010
    assert min(longest) < 0.005


def test_no_event_is_lost_between_two_slices() -> None:
    cache_view, cache = one_node()
    rank = rank_events(cache)
    rank.sequence.receive(0, many(100, lambda n: stored([n + 1], prompt(n, 1))))
    rank.sequence.receive(1, payload(AllBlocksCleared(), stored([7], prompt(3, 1))))
    slices = 1
    while rank.work(0.0):
        slices += 1
    assert slices > 5
    assert cache_view.index.pair_count(cache.ranks[0]) == 1
    assert hit(cache_view, prompt(3, 1)) == 16 and hit(cache_view, prompt(4, 1)) == 0
