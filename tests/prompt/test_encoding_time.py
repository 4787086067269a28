"""How long a text is expected to take to encode, and so where it is encoded."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt import encoding_time
from warmroute.prompt.encoding_time import LOOP_MS, MIN_WORST_MS_PER_BYTE, EncodingTime, _sample

pytestmark = pytest.mark.interpreted

KNOWN_MS, NEW_MS, SLOW_MS = 2e-6, 30e-6, 150e-6
"""A byte of a known word, of a new word, and of a very long one: what fastokens takes."""
WORDS = ["cache", "block", "prefix", "node", "engine", "router", "token", "the", "of"]


class WordTokenizer:
    """Takes time by the words of a text, and remembers them. `clock` is the thread's CPU time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.encoded: list[str] = []
        self._known: set[str] = set()

    def clock(self) -> float:
        return self.now_s

    def cost_ms(self, text: str) -> float:
        words = re.findall("[^ ]+| +", text)
        return sum(len(w) * (KNOWN_MS if w in self._known else NEW_MS if len(w) < 100 else SLOW_MS) for w in words)

    def encode(self, text: str) -> bytes:
        self.now_s += self.cost_ms(text) / 1000.0
        self._known.update(re.findall("[^ ]+| +", text))
        self.encoded.append(text)
        return b""


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> WordTokenizer:
    made = WordTokenizer()
    monkeypatch.setattr(encoding_time, "thread_time", made.clock)
    return made


def known_words(rng: Random, size: int) -> str:
    return " ".join(rng.choices(WORDS, k=size // 3))[:size]


def new_words(rng: Random, size: int) -> str:
    return " ".join("".join(rng.choices(string.ascii_letters, k=6)) for _ in range(size // 6))[:size]


def letters(rng: Random, size: int) -> str:
    return "".join(rng.choices(string.ascii_letters, k=size))


def half_letters(rng: Random, size: int) -> str:
    return known_words(rng, size // 2) + letters(rng, size - size // 2)


def half_spaces(rng: Random, size: int) -> str:
    return known_words(rng, size // 2) + "word" + " " * (size - size // 2 - rng.randrange(1000))


def one_letter(rng: Random, size: int) -> str:
    return known_words(rng, size // 2) + "a" * (size - size // 2 - rng.randrange(1000))


def estimate_ms(made: EncodingTime, tokenizer: WordTokenizer, text: str) -> float:
    body = text.encode()
    return made.estimate_ms(tokenizer.encode, body, [(0, len(body))])


def test_the_worst_rate_is_that_of_the_slowest_texts(tokenizer: WordTokenizer) -> None:
    assert EncodingTime(tokenizer.encode, has_cache=True).worst_ms_per_byte == pytest.approx(SLOW_MS, rel=0.01)


def test_the_worst_rate_is_never_believed_to_be_low(tokenizer: WordTokenizer) -> None:
    assert EncodingTime(lambda _text: b"", has_cache=True).worst_ms_per_byte == MIN_WORST_MS_PER_BYTE


def test_a_short_text_is_not_sampled(tokenizer: WordTokenizer) -> None:
    made = EncodingTime(tokenizer.encode, has_cache=True)
    tokenizer.encoded.clear()
    assert estimate_ms(made, tokenizer, letters(Random(1), 6_000)) == pytest.approx(6_000 * made.worst_ms_per_byte)
    assert not tokenizer.encoded


def test_a_long_text_of_known_words_is_quick(tokenizer: WordTokenizer) -> None:
    made = EncodingTime(tokenizer.encode, has_cache=True)
    rng = Random(1)
    tokenizer.encode(known_words(rng, 100_000))
    tokenizer.encoded.clear()
    assert estimate_ms(made, tokenizer, known_words(rng, 40_000)) < LOOP_MS
    (sample,) = tokenizer.encoded
    assert len(sample) <= 2_048


def test_only_long_texts_of_a_tokenizer_with_a_cache_are_sampled(tokenizer: WordTokenizer) -> None:
    text = known_words(Random(1), 20_000)
    made = EncodingTime(tokenizer.encode, has_cache=False)
    tokenizer.encoded.clear()
    assert estimate_ms(made, tokenizer, text) == pytest.approx(20_000 * made.worst_ms_per_byte)
    made = EncodingTime(tokenizer.encode, has_cache=True)
    tokenizer.encoded.clear()
    assert estimate_ms(made, tokenizer, text * 3) == pytest.approx(60_000 * made.worst_ms_per_byte)
    assert not tokenizer.encoded


@pytest.mark.parametrize("text", [new_words, letters, half_letters, half_spaces, one_letter])
def test_texts_that_hold_the_loop_are_found(tokenizer: WordTokenizer, text: Callable[[Random, int], str]) -> None:
    """However many texts of the same kind came before."""
    made = EncodingTime(tokenizer.encode, has_cache=True)
    rng = Random(7)
    tokenizer.encode(known_words(rng, 100_000))
    missed = 0
    for _ in range(300):
        slow = text(rng, 40_000)
        assert tokenizer.cost_ms(slow) > LOOP_MS
        missed += estimate_ms(made, tokenizer, slow) <= LOOP_MS
    assert missed <= 3


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=40), st.integers(0, 200))
def test_a_sample_comes_from_the_given_parts(sizes: list[int], gap: int) -> None:
    body, spans = bytearray(), []
    for size in sizes:
        body += b"!" * gap
        spans.append((len(body), len(body) + size))
        body += (b"ab " * size)[:size]
    sample = _sample(bytes(body), spans, sum(sizes))
    assert sample is not None and b"!" not in sample
    assert len(sample) <= 2_048
    if min(sizes) >= 128:
        assert len(sample) > 1_900
