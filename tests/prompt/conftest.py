"""Fixtures: directories, tokenizers and prompt tokenizers of the models in prompt_data.py."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmroute.prompt import chat_tokenizer, registry
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.tail_rendering import TailCheck
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from prompt_data import PUBLIC_MODELS, MakePromptTokenizer, find_model  # noqa: E402


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Returns the directory of the model with this name (prompt_data.py)."""

    def find(name: str) -> Path:
        data = request.getfixturevalue("data_dir") if name in PUBLIC_MODELS else None
        return find_model(name, tmp_path_factory.mktemp(name), data)

    return find


@pytest.fixture(scope="session")
def model_tokenizer(model_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    loaded: dict[str, Tokenizer] = {}

    def make(name: str = "thinking") -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_tokenizer(model_folder(name))
        return loaded[name]

    return make


@pytest.fixture(scope="session", autouse=True)
def check_each_template_once() -> Iterator[None]:
    """A check takes half a second, and the tests create many tokenizers with few templates."""
    checks: dict[str, TailCheck] = {}

    def cached_check(template: ChatTemplate | None) -> TailCheck:
        if template is None:
            return TailCheck(None)
        if template.source not in checks:
            checks[template.source] = TailCheck(template)
        return copy.copy(checks[template.source])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_tokenizer, "TailCheck", cached_check)
        yield


@pytest.fixture(scope="session")
def new_prompt_tokenizer(model_tokenizer: Callable[[str], Tokenizer]) -> MakePromptTokenizer:
    def make(name: str = "thinking", **options: object) -> PromptTokenizer:
        return PromptTokenizer(model_tokenizer(name), **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def thinking_folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("thinking")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of tokenizers that were loaded."""
    paths: list[str] = []

    def load(path: str) -> Tokenizer:
        assert threading.current_thread() is not threading.main_thread()
        paths.append(str(path))
        return load_tokenizer(path)

    monkeypatch.setattr(registry, "load_tokenizer", load)
    return paths


@pytest.fixture
def copy_model(tmp_path: Path) -> Callable[..., Path]:
    """Copies a model's files; with one more added token, the tokenizer is another one."""

    def make(source: Path, name: str, added: str = "") -> Path:
        target = tmp_path / name
        shutil.copytree(source, target)
        if added:
            tree = json.loads((target / "tokenizer.json").read_text())
            last = max(token["id"] for token in tree["added_tokens"])
            tree["added_tokens"].append({**tree["added_tokens"][-1], "id": last + 1, "content": added})
            (target / "tokenizer.json").write_text(json.dumps(tree))
        return target

    return make
