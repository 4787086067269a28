"""A small model of our own, with any template; the real tokenizers where they are at hand."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmroute.prompt import chat_reading
from warmroute.prompt.chat_template import ChatTemplate
from warmroute.prompt.locality import Locality
from warmroute.prompt.reading import PromptTokenizer
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from prompt_data import template_text  # noqa: E402

MakeReader = Callable[..., PromptTokenizer]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with the small tokenizer and this template."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(HERE / "small-model", folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template_text(name))
        return folder

    return make


@pytest.fixture(scope="session")
def small_tokenizer(small_folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def make(name: str = "thinking") -> Tokenizer:
        if name not in made:
            made[name] = load_tokenizer(small_folder(name))
        return made[name]

    return make


@pytest.fixture(scope="session", autouse=True)
def templates_are_tried_out_once() -> Iterator[None]:
    """It takes half a second for each, and the tests make many readers of few templates."""
    made: dict[str, Locality] = {}

    def tried_out(template: ChatTemplate | None) -> Locality:
        if template is None:
            return Locality(None)
        if template.source not in made:
            made[template.source] = Locality(template)
        return copy.copy(made[template.source])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_reading, "Locality", tried_out)
        yield


@pytest.fixture(scope="session")
def fresh_reader(small_tokenizer: Callable[[str], Tokenizer]) -> MakeReader:
    def make(name: str = "thinking", **options: object) -> PromptTokenizer:
        return PromptTokenizer(small_tokenizer(name), **options)  # type: ignore[arg-type]

    return make
