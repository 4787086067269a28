"""KV events of every release are read; a numbered feed misses nothing and believes nothing that was lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.engines.kv_events import AllBlocksCleared, BadPayload, BlockRemoved, BlockStored, read_batch, salt_of
from warmroute.engines.kv_feed import Feed

FRAMES = Path(__file__).parent / "frames"


def recorded(name: str) -> bytes:
    return (FRAMES / name).read_bytes()


@pytest.mark.parametrize("path", sorted(FRAMES.glob("synthetic_*")), ids=lambda path: path.name)
def test_every_release_says_the_same(path: Path) -> None:
    stored, removed, cleared = read_batch(path.read_bytes()).events
    assert (
        isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved) and isinstance(cleared, AllBlocksCleared)
    )
    assert stored.block_hashes == [10782738191534376704, 13397126663502732708]
    assert stored.token_ids == list(range(32)) and stored.block_size == 16 and stored.parent_block_hash is None
    assert removed.block_hashes == [10782738191534376704]


def test_what_vllm_sent_is_read() -> None:
    first = read_batch(recorded("chat_first_prompt_5_blocks_int_hashes.frame2.bin"))
    assert first.rank == 0
    [stored] = first.events
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 5 and len(stored.token_ids) == 5 * stored.block_size
    [tail] = read_batch(recorded("shared_prefix_only_new_tail_block_parent_set.frame2.bin")).events
    assert isinstance(tail, BlockStored) and tail.parent_block_hash in stored.block_hashes
    assert read_batch(recorded("data_parallel_rank_1.frame2.bin")).rank == 1
    assert read_batch(recorded("all_blocks_cleared.frame2.bin")).events == [AllBlocksCleared()]


def test_hashes_of_32_bytes_salts_and_adapters_are_read() -> None:
    [stored] = read_batch(recorded("bytes_lora_and_salt.frame2.bin")).events
    assert isinstance(stored, BlockStored)
    assert all(isinstance(name, bytes) and len(name) == 32 for name in stored.block_hashes)
    assert stored.lora_name == "ad1" and salt_of(stored) == "SALT"
    [salted] = read_batch(recorded("cache_salt_s1_first_block_extra_key.frame2.bin")).events
    assert isinstance(salted, BlockStored) and salt_of(salted) == "s1"


def test_what_a_later_release_adds_is_passed_over() -> None:
    event = {"type": "BlockStored", "block_hashes": [-5], "token_ids": [1], "block_size": 1, "news": {"a": 1}}
    [stored] = read_batch(msgspec.msgpack.encode([1.0, [event], None, "more"])).events
    assert isinstance(stored, BlockStored) and stored.block_hashes == [-5]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"no": 1}), b"garbage"])
def test_garbage_is_told(payload: bytes) -> None:
    with pytest.raises(BadPayload):
        read_batch(payload)


class Engine:
    """Publishes numbers, and keeps them for replay."""

    def __init__(self, life: bytes = b"") -> None:
        self.buffer: list[bytes] = []
        self.life = life

    def publish(self) -> tuple[int, bytes]:
        self.buffer.append(b"%b%d" % (self.life, len(self.buffer)))
        return len(self.buffer) - 1, self.buffer[-1]


class Believer:
    def __init__(self) -> None:
        self.believed: list[bytes] = []
        self.feed = Feed(self.believed.append, self.believed.clear)

    def replay_from(self, engine: Engine, start: int = 0) -> None:
        wanted = self.feed.wants_from
        if wanted is not None:
            self.feed.replay_began()
            for number in range(max(wanted, start), len(engine.buffer)):
                self.feed.replayed(number, engine.buffer[number])
            self.feed.replay_ended()


@given(st.lists(st.sampled_from(["arrives", "lost", "restart", "told of a restart"]), max_size=60))
def test_after_a_replay_what_is_believed_is_what_was_said(story: list[str]) -> None:
    engine, believer = Engine(), Believer()
    for happened in [*story, "arrives"]:
        if happened == "restart":
            engine = Engine(engine.life + b"later ")
            continue
        if happened == "told of a restart":
            engine = Engine(engine.life + b"later ")
            believer.feed.began_anew()
            continue
        number, payload = engine.publish()
        if happened == "arrives":
            believer.feed.message(number, payload)
            believer.replay_from(engine)
            if number >= 1 or "restart" not in story:
                assert believer.believed[-1] == payload
    # A restart shows only by a number that is not above the last: until then the two lives can't be told apart.
    if "restart" not in story:
        assert believer.believed == engine.buffer


def test_a_restart_shows_by_its_number_and_purges() -> None:
    engine, believer = Engine(), Believer()
    for _ in range(5):
        believer.feed.message(*engine.publish())
    engine = Engine()
    believer.feed.message(*engine.publish())
    assert believer.believed == [b"0"] and believer.feed.restarts == 1


def test_without_a_replay_a_gap_forgets_what_came_before() -> None:
    believer = Believer()
    believer.feed.message(0, b"0")
    believer.feed.message(3, b"3")
    assert believer.believed == [b"0"] and believer.feed.wants_from == 1
    believer.feed.replay_began()
    believer.feed.replay_ended()
    assert believer.believed == [b"3"] and believer.feed.incomplete


def test_a_replay_that_no_longer_reaches_back_forgets_too() -> None:
    engine, believer = Engine(), Believer()
    believer.feed.message(*engine.publish())
    for _ in range(4):
        last = engine.publish()
    believer.feed.message(*last)
    believer.replay_from(engine, start=3)
    assert believer.believed == [b"3", b"4"] and believer.feed.incomplete


def test_what_a_replay_brought_first_is_no_restart_when_it_comes_live() -> None:
    engine, believer = Engine(), Believer()
    said = [engine.publish() for _ in range(6)]
    believer.feed.message(*said[3])
    believer.replay_from(engine)
    for number, payload in said[4:]:
        believer.feed.message(number, payload)
    believer.feed.message(*engine.publish())
    assert believer.believed == engine.buffer and believer.feed.restarts == 0
    believer.feed.message(2, b"another life")
    assert believer.feed.restarts == 1


def test_messages_that_come_during_a_replay_are_applied_after_it_once() -> None:
    engine, believer = Engine(), Believer()
    for _ in range(3):
        last = engine.publish()
    believer.feed.message(*last)
    believer.feed.replay_began()
    believer.feed.message(*engine.publish())
    for number, payload in enumerate(engine.buffer):
        believer.feed.replayed(number, payload)
    believer.feed.replay_ended()
    assert believer.believed == engine.buffer


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.lists(st.lists(st.booleans(), max_size=40), max_size=6),
    st.integers(0, 10),
)
def test_a_replay_that_drops_some_of_itself_never_has_a_lie_believed(
    arrives: list[bool], drops: list[list[bool]], oldest: int
) -> None:
    """Whatever the live stream and the replays lose: what is believed is the end of what was said, without a hole; and
    all of it, where it is said to be complete."""
    engine, believer = Engine(), Believer()
    feed = believer.feed
    rounds = iter(drops)
    for heard in [*arrives, True]:
        number, payload = engine.publish()
        if heard:
            feed.message(number, payload)
        for _ in range(100):
            wanted = feed.wants_from
            if wanted is None:
                break
            feed.replay_began()
            dropped = next(rounds, [])
            for at in range(max(wanted, oldest), len(engine.buffer)):
                if not (at < len(dropped) and dropped[at]) or at == max(wanted, oldest):
                    feed.replayed(at, engine.buffer[at])
            feed.replay_ended(answered=not dropped[-1:])
        assert feed.wants_from is None, "it ends"
    assert believer.believed == engine.buffer[len(engine.buffer) - len(believer.believed) :]
    assert not feed.complete or believer.believed == engine.buffer
