"""KV events on their way to a listener: complete, in order, late, and lost where the conditions say so."""

from __future__ import annotations

from small_worlds import prompt, specs

from warmroute.config import Config, Routing
from warmroute.fake_engine.core.events import BlockRemoved, BlockStored, KvEvent
from warmroute.fleet.node import Node
from warmroute.replay.workloads import choose
from warmroute.replay.world import Conditions, Island, Listener, World


class Ears(Listener):
    wants_kv_events = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int, list[KvEvent], float]] = []

    def kv_events(self, node: Node, incarnation: int, sequence: int, events: list[KvEvent], now_s: float) -> None:
        self.heard.append((node.name, incarnation, sequence, events, now_s))


def held(ears: Ears, name: str) -> set[int]:
    blocks: set[int] = set()
    for node, _, _, events, _ in ears.heard:
        if node == name:
            for event in events:
                if isinstance(event, BlockStored):
                    blocks.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    blocks.difference_update(event.block_hashes)
    return blocks


def test_events_arrive_after_the_lag_and_the_way_back() -> None:
    ears = Ears()
    world = World(specs(1), Conditions(islands={"local": Island(10.0)}, kv_lag_ms=50.0), listener=ears)
    world.run(iter([prompt("a", tokens=160, output=1)]))
    assert not ears.heard  # the answer is here, the event is not
    world.calendar.run_until(1000.0)
    (_, incarnation, sequence, events, at_s) = ears.heard[0]
    assert (incarnation, sequence) == (1, 0)
    assert at_s * 1000 == 5 + 160 + 5 + 50
    assert sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)) == 10


def test_a_listener_that_hears_all_knows_what_each_engine_holds() -> None:
    ears = Ears()
    world = World(specs(3, blocks=200), Conditions(), listener=ears)
    rag = choose(["rag", "document_tokens=300", "system_tokens=100", "rate=2", "output_tokens=40"])
    world.run(rag.arrive(3), limit=150)
    world.calendar.run_until(world.calendar.now_ms + 5000)
    for name, sim in world.nodes.items():
        pool = sim.engine._pool
        assert held(ears, name) == set(pool._cached)
        sequences = [sequence for node, _, sequence, _, _ in ears.heard if node == name]
        assert sequences == list(range(len(sequences)))


def test_lost_batches_leave_gaps_in_the_sequence() -> None:
    ears = Ears()
    world = World(specs(1), Conditions(kv_loss=0.5, seed=4), listener=ears)
    world.run(choose(["unique_batch", "prompt_tokens=100", "rate=5"]).arrive(1), limit=200)
    sent = world.nodes["node-0"].events_sent
    sequences = [sequence for _, _, sequence, _, _ in ears.heard]
    assert 0.35 * sent < len(sequences) < 0.65 * sent
    assert sequences == sorted(set(sequences))


def test_a_restart_begins_another_sequence() -> None:
    ears = Ears()
    world = World(specs(1), Conditions(), listener=ears)
    world.run(iter([prompt("a")]))
    world.restart("node-0")
    world.calendar.run_until(3000.0)
    world.run(iter([prompt("b", at_ms=3000.0)]))
    world.calendar.run_until(6000.0)
    first = [(incarnation, sequence) for _, incarnation, sequence, _, _ in ears.heard]
    assert (1, 0) in first
    assert (2, 0) in first


def test_engines_without_a_listener_make_no_events() -> None:
    world = World(specs(1), Conditions(), Config(routing=Routing(policy="round_robin")))
    assert world.nodes["node-0"].engine._sink is None
