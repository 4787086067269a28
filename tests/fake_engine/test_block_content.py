"""Traces and tokens are converted to block hashes of the engine's block size."""

from __future__ import annotations

import pytest

from warmroute.lab.engine.blocks import TokenContent, TraceContent


def test_a_trace_block_of_512_is_32_engine_blocks_of_16() -> None:
    one = TraceContent([7, 8], 512, 16, 1000, seed=1)
    other = TraceContent([7, 9], 512, 16, 1000, seed=2)
    assert one.hashes(0, 32) == other.hashes(0, 32)
    assert not set(one.hashes(32, 62)) & set(other.hashes(32, 62))
    assert len(set(one.hashes(0, 62))) == 62
    assert one.hashes(0, 62) == one.hashes(0, 30) + one.hashes(30, 62), "slices give the same hashes"


def test_only_full_blocks_of_the_prompt_are_shared() -> None:
    one = TraceContent([7], 512, 16, 100, seed=1)
    other = TraceContent([7], 512, 16, 100, seed=2)
    assert one.hashes(0, 6) == other.hashes(0, 6)
    assert one.hashes(6, 9) != other.hashes(6, 9), "the outputs differ"


def test_prompt_tokens_without_an_id_are_unique_to_the_request() -> None:
    one = TraceContent([7], 64, 16, 100, seed=1)
    other = TraceContent([7], 64, 16, 100, seed=2)
    assert one.hashes(0, 4) == other.hashes(0, 4) and one.hashes(4, 6) != other.hashes(4, 6)


def test_an_engine_block_that_spans_ids_is_identified_by_the_last() -> None:
    assert TraceContent([1, 2, 3, 4, 5], 16, 32, 80, seed=1).hashes(0, 2) == [2, 4]
    with pytest.raises(ValueError, match="no multiple or divisor"):
        TraceContent([1], 24, 16, 24, seed=1)


def test_tokens_chain_over_prefix_lora_and_salt() -> None:
    tokens = list(range(64))
    plain = TokenContent(tokens, 16).hashes(0, 4)
    assert plain == TokenContent(tokens, 16).hashes(0, 4)
    changed = TokenContent([99, *tokens[1:]], 16).hashes(0, 4)
    salted = TokenContent(tokens, 16, cache_salt="s").hashes(0, 4)
    tuned = TokenContent(tokens, 16, lora_name="l").hashes(0, 4)
    assert len({*plain, *changed, *salted, *tuned}) == 16
    assert TokenContent(tokens, 16).token_ids(1, 3) == list(range(16, 48))


def test_a_trace_in_another_namespace_shares_nothing() -> None:
    plain = TraceContent([1, 2], 16, 16, 32, seed=1)
    salted = TraceContent([1, 2], 16, 16, 32, seed=1, cache_salt="s")
    assert plain.hashes(0, 2) == [1, 2]
    assert not set(plain.hashes(0, 2)) & set(salted.hashes(0, 2))
