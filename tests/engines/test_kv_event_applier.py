"""KV events update the cache: a lookup finds the blocks of the same prompt, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_event_factory import MODEL, RECORDED_PAYLOADS, hit, one_node, prompt, recorded, stored

from warmroute.core.cache_view import CacheView
from warmroute.core.node_cache import NodeCache, Tier
from warmroute.engines.kv_events import (
    AllBlocksCleared,
    Applied,
    BlockRemoved,
    BlockStored,
    HashesStored,
    KvEventApplier,
    decode_batch,
    salt_and_extra_keys,
    tier_of,
)


def with_applier() -> tuple[CacheView, NodeCache, KvEventApplier]:
    cache_view, cache = one_node()
    cache.add_rank(0)
    return cache_view, cache, KvEventApplier(cache, 0)


def test_stored_blocks_are_found_until_they_are_removed() -> None:
    cache_view, _, applier = with_applier()
    tokens = prompt(1)
    assert applier.apply(stored([1, 2], tokens[:32])) is Applied.DONE
    assert applier.apply(stored([3, 4], tokens[32:], parent=2)) is Applied.DONE
    assert hit(cache_view, tokens) == 64
    applier.apply(BlockRemoved([3], "GPU"))
    assert hit(cache_view, tokens) == 32
    applier.apply(AllBlocksCleared())
    assert hit(cache_view, tokens) == 0


def test_a_block_stored_twice_must_be_removed_twice() -> None:
    cache_view, _, applier = with_applier()
    for _ in range(2):
        applier.apply(stored([1], prompt(1, 1)))
    applier.apply(BlockRemoved([1]))
    assert hit(cache_view, prompt(1, 1)) == 16
    applier.apply(BlockRemoved([1]))
    assert hit(cache_view, prompt(1, 1)) == 0


def test_an_unknown_parent_is_reported() -> None:
    cache_view, _, applier = with_applier()
    assert applier.apply(stored([9], prompt(1, 1), parent=8)) is Applied.ORPHANED
    assert hit(cache_view, prompt(1, 1)) == 0


@pytest.mark.parametrize("event", [stored([1, 2], prompt(1, 1)), stored([1], [1, 2], size=0)])
def test_an_inconsistent_event_is_reported(event: BlockStored) -> None:
    cache_view, _, applier = with_applier()
    assert applier.apply(event) is Applied.ORPHANED
    assert cache_view.index.stats()["pairs"] == 0


# Salts, adapters, images.


def test_salted_blocks_are_found_only_with_their_salt() -> None:
    """vLLM sends the salt only in the first block's extra keys; SGLang sends it with every page."""
    tokens = prompt(1, 6)
    for vllm in (True, False):
        cache_view, _, applier = with_applier()
        for number in range(6):
            more = {"extra_keys": [["s1"]] if number == 0 else [None]} if vllm else {"cache_salt": "s1"}
            event = stored([number + 1], tokens[number * 16 : number * 16 + 16], parent=number or None, **more)
            assert applier.apply(event) is Applied.DONE
        assert hit(cache_view, tokens, salt="s1") == 96
        assert hit(cache_view, tokens, salt="s2") == hit(cache_view, tokens) == 0


def test_salted_and_unsalted_blocks_of_one_prompt_are_separate() -> None:
    cache_view, _, applier = with_applier()
    tokens = prompt(1, 2)
    applier.apply(stored([1, 2], tokens))
    applier.apply(stored([11, 12], tokens, extra_keys=[["s"], None]))
    applier.apply(BlockRemoved([1]))
    assert (hit(cache_view, tokens), hit(cache_view, tokens, salt="s")) == (0, 32)


def test_adapters_share_no_blocks_with_the_base_model_or_each_other() -> None:
    cache_view, cache, applier = with_applier()
    cache_view.set_models(cache, MODEL, (), ("ad1", "ad2"))
    tokens = prompt(1, 2)
    applier.apply(stored([1, 2], tokens, lora_id=1, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]]))
    assert (hit(cache_view, tokens, "ad1"), hit(cache_view, tokens, "ad2"), hit(cache_view, tokens)) == (32, 0, 0)
    applier.apply(stored([3, 4], tokens, lora_id=1, lora_name="ad1", extra_keys=[["ad1", "ad1"], ["ad1"]]))
    assert hit(cache_view, tokens, "ad1", salt="ad1") == 32, "the salt has the adapter's name"


def test_blocks_of_an_adapter_without_a_name_match_no_request() -> None:
    cache_view, cache, applier = with_applier()
    cache_view.set_models(cache, MODEL, (), ("ad1",))
    tokens = prompt(1, 2)
    assert applier.apply(stored([1], tokens[:16], lora_id=1)) is Applied.DONE
    assert applier.apply(stored([2], tokens[16:], parent=1, lora_id=1)) is Applied.DONE
    assert hit(cache_view, tokens) == hit(cache_view, tokens, "ad1") == hit(cache_view, tokens, "1") == 0


def test_image_tokens_depend_on_the_image() -> None:
    cache_view, _, applier = with_applier()
    tokens = prompt(1, 3)
    event = stored([1, 2, 3], tokens, extra_keys=[["salt"], [["a1b2", 3]], [["a1b2", -13]]])
    salt, extra = salt_and_extra_keys(event)
    assert salt == "salt"
    assert extra is not None and extra[0] is None and extra[1] and extra[2] and extra[1] != extra[2]
    applier.apply(event)
    assert hit(cache_view, tokens, salt="salt") == 16, "the text before the image"


# Tiers.


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.GPU), ("GPU", "LOCAL", Tier.GPU), ("gpu", None, Tier.GPU), ("CPU", None, Tier.CPU),
        ("CPU_PINNED", None, Tier.CPU), ("DISK", None, Tier.DISK), ("STORAGE", None, Tier.DISK),
        ("STORAGE", "REMOTE", Tier.REMOTE), ("EXTERNAL", None, Tier.REMOTE), ("TAPE", None, Tier.REMOTE),
    ],
)  # fmt: skip
def test_every_medium_has_a_tier(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert tier_of(medium, locality) is tier


def tiers(cache_view: CacheView) -> list[tuple[int, ...]]:
    return [tuple(row[1:]) for row in cache_view.index.holdings(cache_view.cache("node").ranks[0])]  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [[], prompt(1, 2)])
def test_an_offloaded_block_stays_a_hit(tokens: list[int]) -> None:
    """vLLM reports an offloaded block with its tokens or, by default, without; never with its salt."""
    cache_view, _, applier = with_applier()
    applier.apply(stored([1, 2], prompt(1, 2), medium="GPU", extra_keys=[["s"], None]))
    assert applier.apply(stored([1, 2], tokens, medium="CPU", size=16 if tokens else 0)) is Applied.DONE
    assert tiers(cache_view) == [(1, 1, 0, 0)] * 2
    applier.apply(BlockRemoved([1, 2], "GPU"))
    assert hit(cache_view, prompt(1, 2), salt="s") == 32 and hit(cache_view, prompt(1, 2)) == 0
    applier.apply(BlockRemoved([1, 2], "CPU"))
    assert tiers(cache_view) == []


def test_an_offloaded_block_without_a_known_parent_is_no_sign_of_loss() -> None:
    cache_view, _, applier = with_applier()
    assert applier.apply(stored([1], prompt(1, 1), medium="CPU")) is Applied.DONE
    assert applier.apply(stored([2], prompt(2, 1), parent=1, medium="CPU")) is Applied.DONE
    assert tiers(cache_view) == []


# Layer groups and block sizes.


def test_only_the_full_attention_group_counts() -> None:
    cache_view, _, applier = with_applier()
    tokens = prompt(1, 2)
    applier.apply(stored([1, 2], tokens, group_idx=0, kv_cache_spec_kind="sliding_window"))
    applier.apply(stored([1, 2], tokens, group_idx=1, kv_cache_spec_kind="full_attention"))
    applier.apply(stored([1, 2], tokens, group_idx=2, kv_cache_spec_kind="full_attention"))
    assert tiers(cache_view) == [(1, 0, 0, 0)] * 2
    applier.apply(BlockRemoved([1, 2], "GPU", group_idx=0))
    assert hit(cache_view, tokens) == 32
    applier.apply(BlockRemoved([1, 2], "GPU", group_idx=1))
    assert hit(cache_view, tokens) == 0


def test_blocks_of_another_size_are_ignored() -> None:
    cache_view, cache, applier = with_applier()
    applier.apply(stored([1], prompt(1, 1, 32), size=32))
    assert cache.block_size == applier.block_size == 32
    assert applier.apply(stored([2], prompt(2, 1, 8), size=8)) is Applied.DONE
    assert cache.block_size == 32 and hit(cache_view, prompt(1, 1, 32)) == 32


# Recorded messages.


@pytest.mark.parametrize("path", sorted(RECORDED_PAYLOADS.glob("*.payload")), ids=lambda path: path.name)
def test_prompts_of_recorded_messages_are_found(path: Path) -> None:
    cache_view, cache, applier = with_applier()
    cache_view.set_models(cache, MODEL, (), ("ad1",))
    for event in decode_batch(path.read_bytes()).events:
        applied = applier.apply(event)
        if not isinstance(event, BlockStored):
            continue
        if event.parent_block_hash is not None:
            assert applied is Applied.ORPHANED
            continue
        model = event.lora_name or MODEL
        assert applied is Applied.DONE
        assert hit(cache_view, event.token_ids, model, salt_and_extra_keys(event)[0] or "") == len(event.token_ids)


def test_a_recorded_second_turn_extends_the_first() -> None:
    cache_view, _, applier = with_applier()
    events = [
        decode_batch(recorded(name)).events[0]
        for name in ("chat_first_prompt_5_blocks_int_hashes", "shared_prefix_only_new_tail_block_parent_set")
    ]
    first, tail = events
    assert isinstance(first, BlockStored) and isinstance(tail, BlockStored)
    assert [applier.apply(event) for event in events] == [Applied.DONE, Applied.DONE]
    shared = first.block_hashes.index(tail.parent_block_hash or 0) + 1
    assert hit(cache_view, first.token_ids[: shared * 32] + tail.token_ids) == (shared + 1) * 32


# Simulated engines.


def test_blocks_with_index_hashes_are_stored_if_their_parent_is_known() -> None:
    cache_view, cache, applier = with_applier()
    assert applier.apply(HashesStored([1, 2], None)) is Applied.DONE
    assert applier.apply(HashesStored([3], 2)) is Applied.DONE
    assert applier.apply(HashesStored([9], 8)) is Applied.ORPHANED
    assert cache_view.index.match([1, 2, 3, 9]) == [(cache.ranks[0], 3, 3, 3, 3)]
    applier.apply(BlockRemoved([3], "GPU"))
    assert cache_view.index.match([1, 2, 3]) == [(cache.ranks[0], 2, 2, 2, 2)]
