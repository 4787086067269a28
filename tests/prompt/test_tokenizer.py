"""Tokenizer: it equals the reference library, text can be cut safely, and files are read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer, pack_token_ids, read_tokenizer_files

HERE = Path(__file__).parent
SPECIAL = ["<|end|>", "<|start|>", "<think>", "</think>", "<|bos|>"]

pieces = st.lists(
    st.one_of(st.text(max_size=12), st.sampled_from([*SPECIAL, " ", "\n", "<|", "|>", "end"])), max_size=8
)


@pytest.fixture(scope="module")
def tokenizer(model_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return model_tokenizer("thinking")


def test_fastokens_is_used_and_equals_the_reference(tokenizer: Tokenizer) -> None:
    assert tokenizer.slow_reason == ""
    for text in tokenizer.check_texts():
        assert tokenizer.encode(text) == tokenizer._encode_reference(text)


@given(pieces.map("".join))
def test_any_text_is_encoded_like_the_reference(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer._encode_reference(text)
    assert tokenizer.encode(text, add_special_tokens=True) == pack_token_ids(tokenizer._reference.encode(text).ids)


@given(pieces, st.sampled_from(SPECIAL), pieces)
def test_text_can_be_cut_after_an_added_token_if_both_halves_contain_it(
    tokenizer: Tokenizer, before: list[str], token: str, after: list[str]
) -> None:
    assert tokenizer.can_cut_after(token)
    first, second = "".join(before) + token, token + "".join(after)
    head, rest = tokenizer.encode(first), tokenizer.encode_cached(second)
    assert rest[:4] == tokenizer.token_id(token)
    assert head + rest[4:] == tokenizer._encode_reference(first + "".join(after))


def changed_model(tmp_path: Path, tokens: list[dict[str, object]] | None = None, **config: object) -> Path:
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
def test_text_cannot_be_cut_after_a_token_that_depends_on_the_text_around_it(
    tmp_path: Path, token: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(changed_model(tmp_path, [token]))
    assert not tokenizer.can_cut_after("<a>")
    assert tokenizer.can_cut_after("<|end|>")


def test_text_cannot_be_cut_after_a_token_that_another_token_contains(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(changed_model(tmp_path, [{"content": "<|end|>x"}, {"content": "y<"}]))
    assert not tokenizer.can_cut_after("<|end|>")
    assert not tokenizer.can_cut_after("<|start|>")  # "y<" may swallow its first character
    assert not tokenizer.can_cut_after("no token")


def test_fastokens_is_not_used_if_it_differs_from_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fastokens  # type: ignore[import-untyped]

    class Wrong:
        def __init__(self, fast: Any) -> None:
            self._fast = fast

        def enable_segment_cache(self, _bytes: int) -> None:
            pass

        def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, Any]:
            ids, ends = self._fast.encode_batch_flat(texts)
            return (ids[:-4], ends) if "👍" in texts[0] else (ids, ends)

    original = fastokens.Tokenizer

    class Module:
        @staticmethod
        def from_json_str(definition: str) -> Wrong:
            return Wrong(original.from_json_str(definition))

    monkeypatch.setattr(fastokens, "Tokenizer", Module)
    tokenizer = load_tokenizer(HERE / "small-model")
    assert tokenizer.slow_reason
    assert tokenizer.encode("👍 <|end|>") == tokenizer._encode_reference("👍 <|end|>")
    assert tokenizer.encode_cached("👍") == tokenizer.encode_cached("👍") == tokenizer._encode_reference("👍")


def test_different_tokenizers_have_different_fingerprints(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.fingerprint == load_tokenizer(HERE / "small-model" / "tokenizer.json").fingerprint
    assert tokenizer.fingerprint != load_tokenizer(changed_model(tmp_path, [{"content": "<a>"}])).fingerprint
    assert len(tokenizer.fingerprint) == 16


def test_both_libraries_refuse_text_that_has_no_utf8(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800b")
    with pytest.raises(UnicodeEncodeError):
        tokenizer._encode_reference("a\ud800b")


def test_token_ids_are_packed_as_little_endian_bytes() -> None:
    assert pack_token_ids([258]) == b"\x02\x01\0\0"
    with pytest.raises(OverflowError):
        pack_token_ids([-1])


# ---- Files ----


def test_some_tokenizer_classes_change_the_definition_in_the_file(tmp_path: Path) -> None:
    folder = changed_model(tmp_path, tokenizer_class="Qwen2TokenizerFast")
    rebuilt = json.loads(read_tokenizer_files(folder).tokenizer.to_str())
    pattern = rebuilt["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert r"|\p{N}|" in pattern and r"\p{N}{1,3}" not in pattern
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    unchanged = json.loads(read_tokenizer_files(folder).tokenizer.to_str())
    assert r"\p{N}{1,3}" in unchanged["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


def test_a_class_that_the_router_does_not_reproduce_is_inexact(tmp_path: Path) -> None:
    files = read_tokenizer_files(changed_model(tmp_path, tokenizer_class="RobertaTokenizerFast"))
    assert "RobertaTokenizer" in files.inexact_reason
    tokenizer = Tokenizer(files)
    assert tokenizer.inexact_reason


def test_chats_that_the_engine_renders_with_code_are_inexact(tmp_path: Path) -> None:
    folder = changed_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert read_tokenizer_files(folder).chat_inexact_reason


def test_special_tokens_from_the_configuration_are_added(tmp_path: Path) -> None:
    folder = changed_model(tmp_path, pad_token="<pad>", additional_special_tokens=["<more>"], image_token="<img>")
    files = read_tokenizer_files(folder)
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<pad>"}
    for token in ("<pad>", "<more>", "<img>"):
        assert len(files.tokenizer.encode(token, add_special_tokens=False).ids) == 1


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    folder = changed_model(
        tmp_path, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    )
    assert list(read_tokenizer_files(folder).templates) == ["default"]  # the file takes precedence
    (folder / "chat_template.jinja").unlink()
    assert read_tokenizer_files(folder).templates == {"default": "a", "tool_use": "b"}


def test_an_invalid_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ValueError):
        load_tokenizer(tmp_path)
