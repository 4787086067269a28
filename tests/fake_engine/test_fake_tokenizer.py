"""The simulated tokenizer preserves prefixes, and encodes generated text to the tokens it was generated from."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.config import ConfigError
from warmroute.lab.engine.tokenizers import VOCABULARY, WORDS, FakeTokenizer, ModelTokenizer

TOKENIZER = FakeTokenizer()
texts = st.text(st.sampled_from("ab z9.,\n\t<|>é漢") | st.characters(), max_size=60) | st.sampled_from(
    ["<|im_end|>", "a<|im_start|>b", "x.<|im_end|>\n"]
)


@given(texts)
def test_decoding_the_tokens_gives_the_text(text: str) -> None:
    tokens = FakeTokenizer().encode(text)
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert TOKENIZER.encode(text) == tokens, "the ids depend on no state"
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts, texts)
def test_the_tokens_of_a_prefix_are_a_prefix_of_the_tokens(prefix: str, rest: str) -> None:
    whole = TOKENIZER.encode(prefix + rest)
    part = TOKENIZER.encode(prefix)
    last_word = re.search(r"\s*\S*\Z", prefix)
    assert last_word is not None
    common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, part, strict=False))]
    assert len(TOKENIZER.decode(common)) >= last_word.start()


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), min_size=1, max_size=5))
def test_a_new_message_only_appends_tokens(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    whole = TOKENIZER.encode(TOKENIZER.render(messages, None, True))
    for count in range(len(messages)):
        part = TOKENIZER.encode(TOKENIZER.render(messages[:count], None, False))
        assert whole[: len(part)] == part


@given(st.integers(0, 2**32), st.integers(0, 200), texts)
def test_generated_text_is_encoded_to_the_generated_tokens(seed: int, count: int, question: str) -> None:
    tokens, generated = TOKENIZER.generate(Random(seed), count)
    assert len(tokens) == len(generated) == count
    message = {"role": "user", "content": question}
    before = TOKENIZER.render([message], None, True)
    after = TOKENIZER.render([message, {"role": "assistant", "content": "".join(generated)}], None, False)
    prompt = TOKENIZER.encode(before)
    assert TOKENIZER.encode(after)[: len(prompt) + count] == prompt + tokens


def test_each_word_of_the_model_is_one_token() -> None:
    assert len(WORDS) > 250
    assert all(len(TOKENIZER.encode(form)) == 1 for word in WORDS for form in (word, " " + word, word.capitalize()))
    forms = [form for word in WORDS for form in (word, " " + word, word.capitalize(), " " + word.capitalize())]
    assert len({TOKENIZER.encode(form)[0] for form in forms}) == len(set(forms))


def assert_encodes_generated_text_to_its_tokens(path: Path) -> None:
    tokenizer = ModelTokenizer(path)
    question = {"role": "user", "content": "What is it?"}
    prompt = tokenizer.encode(tokenizer.render([question], None, True))
    tokens, generated = tokenizer.generate(Random(1), 300)
    answer = {"role": "assistant", "content": "".join(generated)}
    next_turn = tokenizer.render([question, answer, question], None, True)
    assert tokenizer.encode(next_turn)[: len(prompt) + 300] == prompt + tokens


@pytest.mark.parametrize("model", ["small-model", "small-llama"])
def test_a_models_own_tokenizer_encodes_generated_text_to_its_tokens(model: str) -> None:
    assert_encodes_generated_text_to_its_tokens(Path(__file__).parents[1] / "prompt" / model)


@pytest.mark.data
@pytest.mark.parametrize("model", ["qwen3-rebuilt", "tinyllama"])
def test_a_large_tokenizer_encodes_generated_text_to_its_tokens(data_dir: Path, model: str) -> None:
    assert_encodes_generated_text_to_its_tokens(data_dir / "tokenizers" / model)


def test_the_error_for_a_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        ModelTokenizer(tmp_path)
