"""The tokenizer: both libraries agree or the slower one works, cuts are clean, and files are read as transformers
would.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer, packed, unpacked
from warmroute.prompt.tokenizer_files import read_tokenizer_files

HERE = Path(__file__).parent
SPECIAL = ["<|end|>", "<|start|>", "<think>", "</think>", "<|bos|>"]

pieces = st.lists(
    st.one_of(st.text(max_size=12), st.sampled_from([*SPECIAL, " ", "\n", "<|", "|>", "end"])), max_size=8
)


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    return small_tokenizer("thinking")


def test_the_fast_one_works_and_is_the_same(tokenizer):
    assert tokenizer.slow_because == ""
    for text in tokenizer.check_texts():
        assert tokenizer.encode(text) == tokenizer._slowly(text)


@given(pieces.map("".join))
def test_any_text_is_encoded_as_the_reference_does(tokenizer, text):
    assert tokenizer.encode(text) == tokenizer._slowly(text)
    assert tokenizer.encode(text, add_special_tokens=True) == packed(tokenizer._reference.encode(text).ids)


@given(pieces, st.sampled_from(SPECIAL), pieces)
def test_text_may_be_cut_behind_an_added_token_that_both_halves_get(tokenizer, before, token, behind):
    assert tokenizer.cuts(token)
    first, second = "".join(before) + token, token + "".join(behind)
    own, rest = tokenizer.encode(first), tokenizer.encode_again(second)
    assert rest[:4] == tokenizer.token_id(token)
    assert own + rest[4:] == tokenizer._slowly(first + "".join(behind))


def changed(tmp_path: Path, tokens: list[dict[str, object]] | None = None, **config: object) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(HERE / "small-model", folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    for number, token in enumerate(tokens or []):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        definition["added_tokens"].append({"id": 5000 + number, **flags, **token})
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    own = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **config}))
    return folder


@pytest.mark.parametrize(
    "token",
    [
        {"content": "<a>", "lstrip": True},
        {"content": "<a>", "rstrip": True},
        {"content": "<a>", "single_word": True},
        {"content": "<a>", "normalized": True},
    ],
)
def test_a_token_that_depends_on_what_is_around_it_does_not_cut(tmp_path, token):
    tokenizer = load_tokenizer(changed(tmp_path, [token]))
    assert not tokenizer.cuts("<a>")
    assert tokenizer.cuts("<|end|>")


def test_a_token_within_another_does_not_cut(tmp_path):
    tokenizer = load_tokenizer(changed(tmp_path, [{"content": "<|end|>x"}, {"content": "y<"}]))
    assert not tokenizer.cuts("<|end|>")
    assert not tokenizer.cuts("<|start|>")  # "y<" may swallow its first character
    assert not tokenizer.cuts("no token")


def test_a_fast_tokenizer_that_differs_is_not_used(tmp_path, monkeypatch):
    import fastokens

    class Wrong:
        def __init__(self, fast):
            self._fast = fast

        def enable_segment_cache(self, _bytes):
            pass

        def encode_batch_flat(self, texts):
            ids, ends = self._fast.encode_batch_flat(texts)
            return (ids[:-4], ends) if "👍" in texts[0] else (ids, ends)

    original = fastokens.Tokenizer

    class Module:
        @staticmethod
        def from_json_str(definition):
            return Wrong(original.from_json_str(definition))

    monkeypatch.setattr(fastokens, "Tokenizer", Module)
    tokenizer = load_tokenizer(HERE / "small-model")
    assert tokenizer.slow_because
    assert tokenizer.encode("👍 <|end|>") == tokenizer._slowly("👍 <|end|>")
    assert tokenizer.encode_again("👍") == tokenizer.encode_again("👍") == tokenizer._slowly("👍")


def test_the_fingerprint_tells_tokenizers_apart(tmp_path, tokenizer):
    assert tokenizer.fingerprint == load_tokenizer(HERE / "small-model" / "tokenizer.json").fingerprint
    assert tokenizer.fingerprint != load_tokenizer(changed(tmp_path, [{"content": "<a>"}])).fingerprint
    assert len(tokenizer.fingerprint) == 16


def test_text_without_utf8_is_refused_by_both(tokenizer):
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")
    with pytest.raises(UnicodeEncodeError):
        tokenizer._slowly("a\ud800b")


def test_ids_travel_as_bytes():
    assert unpacked(packed([0, 1, 2**32 - 1])) == [0, 1, 2**32 - 1]
    assert packed([258]) == b"\x02\x01\0\0"
    with pytest.raises(OverflowError):
        packed([-1])


# ---- Files ----


def test_a_class_with_a_pipeline_of_its_own_changes_the_file(tmp_path):
    folder = changed(tmp_path, tokenizer_class="Qwen2TokenizerFast")
    rebuilt = json.loads(read_tokenizer_files(folder).tokenizer.to_str())
    words = rebuilt["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert r"|\p{N}|" in words and r"\p{N}{1,3}" not in words
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    as_it_stands = json.loads(read_tokenizer_files(folder).tokenizer.to_str())
    assert r"\p{N}{1,3}" in as_it_stands["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


def test_what_is_not_followed_is_doubted(tmp_path, fresh_reader):
    files = read_tokenizer_files(changed(tmp_path, tokenizer_class="RobertaTokenizerFast"))
    assert "RobertaTokenizer" in files.doubt
    tokenizer = Tokenizer(files)
    assert tokenizer.doubt


def test_a_model_whose_chats_are_rendered_by_code_is_doubted(tmp_path):
    folder = changed(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert read_tokenizer_files(folder).chat_doubt


def test_special_tokens_of_the_configuration_are_added(tmp_path):
    folder = changed(tmp_path, pad_token="<pad>", additional_special_tokens=["<more>"], image_token="<img>")
    files = read_tokenizer_files(folder)
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<pad>"}
    for token in ("<pad>", "<more>", "<img>"):
        assert len(files.tokenizer.encode(token, add_special_tokens=False).ids) == 1


def test_templates_are_found_where_transformers_looks(tmp_path):
    folder = changed(
        tmp_path, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    )
    assert list(read_tokenizer_files(folder).templates) == ["default"]  # the file goes first
    (folder / "chat_template.jinja").unlink()
    assert read_tokenizer_files(folder).templates == {"default": "a", "tool_use": "b"}


def test_what_is_no_tokenizer_is_an_error(tmp_path):
    with pytest.raises(OSError):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ValueError):
        load_tokenizer(tmp_path)
