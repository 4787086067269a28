"""The stand-in tokenizer keeps prefixes, and reads back what the simulated model says."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from engine_processes import SHARED
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import ConfigError
from warmroute.fake_engine.server.model_tokenizer import ModelTokenizer
from warmroute.fake_engine.server.fake_tokenizer import VOCABULARY, FakeTokenizer
from warmroute.fake_engine.server.word_list import WORDS

TOKENIZER = FakeTokenizer()
texts = st.text(st.sampled_from("ab z9.,\n\t<|>é漢") | st.characters(), max_size=60) | st.sampled_from(
    ["<|im_end|>", "a<|im_start|>b", "x.<|im_end|>\n"]
)


@given(texts)
def test_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = FakeTokenizer().encode(text)
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert TOKENIZER.encode(text) == tokens  # of another process, as it were
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts, texts)
def test_the_tokens_of_a_beginning_are_the_beginning_of_the_tokens(beginning: str, rest: str) -> None:
    whole = TOKENIZER.encode(beginning + rest)
    part = TOKENIZER.encode(beginning)
    last_word = re.search(r"\s*\S*\Z", beginning)
    assert last_word is not None
    common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, part, strict=False))]
    assert len(TOKENIZER.decode(common)) >= last_word.start()


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=5))
def test_a_chat_that_grows_keeps_its_tokens(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    whole = TOKENIZER.encode(TOKENIZER.render(messages, None, True))
    for count in range(len(messages)):
        part = TOKENIZER.encode(TOKENIZER.render(messages[:count], None, False))
        assert whole[: len(part)] == part


@given(st.integers(0, 2**32), st.integers(0, 200), texts)
def test_what_the_model_says_is_read_back_as_its_tokens(seed: int, count: int, asked: str) -> None:
    tokens, said = TOKENIZER.answer(Random(seed), count)
    assert len(tokens) == len(said) == count
    question = {"role": "user", "content": asked}
    before = TOKENIZER.render([question], None, True)
    after = TOKENIZER.render([question, {"role": "assistant", "content": "".join(said)}], None, False)
    prompt = TOKENIZER.encode(before)
    assert TOKENIZER.encode(after)[: len(prompt) + count] == prompt + tokens


def test_the_models_words_are_a_token_each() -> None:
    assert len(WORDS) > 250
    assert all(len(TOKENIZER.encode(form)) == 1 for word in WORDS for form in (word, " " + word, word.capitalize()))
    forms = [form for word in WORDS for form in (word, " " + word, word.capitalize(), " " + word.capitalize())]
    assert len({TOKENIZER.encode(form)[0] for form in forms}) == len(set(forms))


@pytest.mark.parametrize("model", ["qwen3-rebuilt", "tinyllama"])
def test_a_models_own_tokenizer_reads_back_what_is_said_in_it(model: str) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    pytest.importorskip("jinja2", reason="the package jinja2 is not installed")
    path = SHARED / "data" / "tokenizers" / model
    if not path.exists():
        pytest.skip(f"no tokenizer at {path}")
    tokenizer = ModelTokenizer(path)
    question = {"role": "user", "content": "What is it?"}
    prompt = tokenizer.encode(tokenizer.render([question], None, True))
    tokens, said = tokenizer.answer(Random(1), 300)
    answered = tokenizer.render([question, {"role": "assistant", "content": "".join(said)}, question], None, True)
    assert tokenizer.encode(answered)[: len(prompt) + 300] == prompt + tokens


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    with pytest.raises(ConfigError, match="there is no"):
        ModelTokenizer(tmp_path)
