"""Events become beliefs: what an engine tells is found by a lookup of the same prompt, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from told import MODEL, believing, hit, payload, prompt, stored

from warmroute.engines.kv_apply import Applied, Applier, tier_of
from warmroute.engines.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, extra_of, read_batch, salt_of
from warmroute.index.cache_view import CacheView
from warmroute.index.node_cache import NodeCache
from warmroute.index.tiers import Tier

FRAMES = Path(__file__).parent / "frames"


def listening() -> tuple[CacheView, NodeCache, Applier]:
    cache_view, cache = believing()
    cache.follow(0)
    return cache_view, cache, Applier(cache, 0)


def test_what_is_stored_is_found_and_what_is_removed_is_not() -> None:
    cache_view, _, applier = listening()
    tokens = prompt(1)
    assert applier.apply(stored([1, 2], tokens[:32])) is Applied.DONE
    assert applier.apply(stored([3, 4], tokens[32:], parent=2)) is Applied.DONE
    assert hit(cache_view, tokens) == 64
    applier.apply(BlockRemoved([3], "GPU"))
    assert hit(cache_view, tokens) == 32
    applier.apply(AllBlocksCleared())
    assert hit(cache_view, tokens) == 0


def test_a_block_stored_twice_is_there_until_it_is_removed_twice() -> None:
    cache_view, _, applier = listening()
    for _ in range(2):
        applier.apply(stored([1], prompt(1, 1)))
    applier.apply(BlockRemoved([1]))
    assert hit(cache_view, prompt(1, 1)) == 16
    applier.apply(BlockRemoved([1]))
    assert hit(cache_view, prompt(1, 1)) == 0


def test_a_parent_that_is_not_known_is_told() -> None:
    cache_view, _, applier = listening()
    assert applier.apply(stored([9], prompt(1, 1), parent=8)) is Applied.ORPHANED
    assert hit(cache_view, prompt(1, 1)) == 0


@pytest.mark.parametrize("event", [stored([1, 2], prompt(1, 1)), stored([1], [1, 2], size=0)])
def test_an_event_that_makes_no_sense_is_told(event: BlockStored) -> None:
    cache_view, _, applier = listening()
    assert applier.apply(event) is Applied.ORPHANED
    assert cache_view.index.stats()["pairs"] == 0


# Salts, adapters, pictures.


def test_a_salted_chain_is_found_by_its_salt_only_however_it_is_told() -> None:
    """vLLM has the salt in the first block's extra keys alone; SGLang says it with every page."""
    tokens = prompt(1, 6)
    for vllm in (True, False):
        cache_view, _, applier = listening()
        for number in range(6):
            event = stored([number + 1], tokens[number * 16 : number * 16 + 16], parent=number or None)
            if vllm:
                event.extra_keys = [["s1"]] if number == 0 else [None]
            else:
                event.cache_salt = "s1"
            assert applier.apply(event) is Applied.DONE
        assert hit(cache_view, tokens, salt="s1") == 96
        assert hit(cache_view, tokens, salt="s2") == hit(cache_view, tokens) == 0


def test_salted_and_plain_blocks_of_one_prompt_lie_side_by_side() -> None:
    cache_view, _, applier = listening()
    tokens = prompt(1, 2)
    applier.apply(stored([1, 2], tokens))
    applier.apply(stored([11, 12], tokens, extra_keys=[["s"], None]))
    applier.apply(BlockRemoved([1]))
    assert (hit(cache_view, tokens), hit(cache_view, tokens, salt="s")) == (0, 32)


def test_adapters_are_apart_from_the_base_and_from_each_other() -> None:
    cache_view, cache, applier = listening()
    cache_view.serves(cache, MODEL, (), ("ad1", "ad2"))
    tokens = prompt(1, 2)
    applier.apply(stored([1, 2], tokens, lora_id=1, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]]))
    assert (hit(cache_view, tokens, "ad1"), hit(cache_view, tokens, "ad2"), hit(cache_view, tokens)) == (32, 0, 0)
    applier.apply(stored([3, 4], tokens, lora_id=1, lora_name="ad1", extra_keys=[["ad1", "ad1"], ["ad1"]]))
    assert hit(cache_view, tokens, "ad1", salt="ad1") == 32, "a salt that is named as the adapter"


def test_an_adapter_without_a_name_is_nobodys() -> None:
    cache_view, cache, applier = listening()
    cache_view.serves(cache, MODEL, (), ("ad1",))
    tokens = prompt(1, 2)
    assert applier.apply(stored([1], tokens[:16], lora_id=1)) is Applied.DONE
    assert applier.apply(stored([2], tokens[16:], parent=1, lora_id=1)) is Applied.DONE
    assert hit(cache_view, tokens) == hit(cache_view, tokens, "ad1") == hit(cache_view, tokens, "1") == 0


def test_the_same_tokens_under_two_pictures_are_two_blocks() -> None:
    cache_view, _, applier = listening()
    tokens = prompt(1, 3)
    event = stored([1, 2, 3], tokens, extra_keys=[["salt"], [["a1b2", 3]], [["a1b2", -13]]])
    assert salt_of(event) == "salt"
    extra = extra_of(event)
    assert extra is not None and extra[0] is None and extra[1] and extra[2] and extra[1] != extra[2]
    applier.apply(event)
    assert hit(cache_view, tokens, salt="salt") == 16, "text before the picture"


# Tiers.


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.GPU), ("GPU", "LOCAL", Tier.GPU), ("gpu", None, Tier.GPU), ("CPU", None, Tier.CPU),
        ("CPU_PINNED", None, Tier.CPU), ("DISK", None, Tier.DISK), ("STORAGE", None, Tier.DISK),
        ("STORAGE", "REMOTE", Tier.REMOTE), ("EXTERNAL", None, Tier.REMOTE), ("TAPE", None, Tier.REMOTE),
    ],
)  # fmt: skip
def test_media_of_all_engines_have_their_tier(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert tier_of(medium, locality) is tier


def tiers(cache_view: CacheView) -> list[tuple[int, ...]]:
    return [tuple(row[1:]) for row in cache_view.index.holdings(cache_view.cache("node").ranks[0])]  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [[], prompt(1, 2)])
def test_a_block_goes_to_host_memory_and_stays_a_hit(tokens: list[int]) -> None:
    """vLLM tells of an offloaded block with its tokens or, by default, without; never with its salt."""
    cache_view, _, applier = listening()
    applier.apply(stored([1, 2], prompt(1, 2), medium="GPU", extra_keys=[["s"], None]))
    assert applier.apply(stored([1, 2], tokens, medium="CPU", size=16 if tokens else 0)) is Applied.DONE
    assert tiers(cache_view) == [(1, 1, 0, 0)] * 2
    applier.apply(BlockRemoved([1, 2], "GPU"))
    assert hit(cache_view, prompt(1, 2), salt="s") == 32 and hit(cache_view, prompt(1, 2)) == 0
    applier.apply(BlockRemoved([1, 2], "CPU"))
    assert tiers(cache_view) == []


def test_an_offloaded_block_that_can_not_be_placed_is_no_gap() -> None:
    cache_view, _, applier = listening()
    assert applier.apply(stored([1], prompt(1, 1), medium="CPU")) is Applied.DONE
    assert applier.apply(stored([2], prompt(2, 1), parent=1, medium="CPU")) is Applied.DONE
    assert tiers(cache_view) == []


# Groups of layers, and sizes.


def test_of_several_groups_the_one_of_full_attention_counts() -> None:
    cache_view, _, applier = listening()
    tokens = prompt(1, 2)
    window, full = {"kv_cache_spec_kind": "sliding_window"}, {"kv_cache_spec_kind": "full_attention"}
    applier.apply(stored([1, 2], tokens, group_idx=0, **window))
    applier.apply(stored([1, 2], tokens, group_idx=1, **full))
    applier.apply(stored([1, 2], tokens, group_idx=2, **full))
    assert tiers(cache_view) == [(1, 0, 0, 0)] * 2
    applier.apply(BlockRemoved([1, 2], "GPU", group_idx=0))
    assert hit(cache_view, tokens) == 32
    applier.apply(BlockRemoved([1, 2], "GPU", group_idx=1))
    assert hit(cache_view, tokens) == 0


def test_blocks_of_another_size_than_the_others_are_passed_over() -> None:
    cache_view, cache, applier = listening()
    applier.apply(stored([1], prompt(1, 1, 32), size=32))
    assert cache.block_size == applier.block_size == 32
    assert applier.apply(stored([2], prompt(2, 1, 8), size=8)) is Applied.DONE
    assert cache.block_size == 32 and hit(cache_view, prompt(1, 1, 32)) == 32


# As recorded.


@pytest.mark.parametrize("path", sorted(FRAMES.glob("*.bin")), ids=lambda path: path.name)
def test_recorded_frames_are_found_by_their_prompts(path: Path) -> None:
    cache_view, cache, applier = listening()
    cache_view.serves(cache, MODEL, (), ("ad1",))
    for event in read_batch(path.read_bytes()).events:
        applied = applier.apply(event)
        if not isinstance(event, BlockStored):
            continue
        if event.parent_block_hash is not None:
            assert applied is Applied.ORPHANED
            continue
        model = event.lora_name or MODEL
        assert applied is Applied.DONE
        assert hit(cache_view, event.token_ids, model, salt_of(event) or "") == len(event.token_ids)


def test_the_tail_of_a_recorded_conversation_joins_its_beginning() -> None:
    cache_view, _, applier = listening()
    events = [
        read_batch((FRAMES / f"{name}.frame2.bin").read_bytes()).events[0]
        for name in ("chat_first_prompt_5_blocks_int_hashes", "shared_prefix_only_new_tail_block_parent_set")
    ]
    first, tail = events
    assert isinstance(first, BlockStored) and isinstance(tail, BlockStored)
    assert [applier.apply(event) for event in events] == [Applied.DONE, Applied.DONE]
    shared = first.block_hashes.index(tail.parent_block_hash or 0) + 1
    assert hit(cache_view, first.token_ids[: shared * 32] + tail.token_ids) == (shared + 1) * 32


def test_a_payload_says_when_it_was_sent_without_being_read() -> None:
    from warmroute.engines.kv_events import sent_at_s

    assert sent_at_s(payload(sent_s=1794709587.25)) == 1794709587.25
    assert sent_at_s((FRAMES / "data_parallel_rank_1.frame2.bin").read_bytes()) == pytest.approx(1794710455.0231237)
    assert sent_at_s(b"") is None and sent_at_s(b"\x93\xcb") is None and sent_at_s(b"\x93\x01") is None
