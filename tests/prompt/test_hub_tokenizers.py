"""Tokenizers of models that nodes report by their name on a hub."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from registry_harness import Clock, card, has_tokenizer, loading_done

from warmroute.config import ModelConfig, Prompts, from_table
from warmroute.prompt.hub import MAX_NAMES, MAX_SEARCHES, RETRY_S, HubSource, TokenizerUnavailable
from warmroute.prompt.registry import TokenizerRegistry, models_table

HUB_ID = "Qwen/Qwen3-8B"


class Search:
    """Stands for the search in the cache and on the hub."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.searched: list[tuple[str, bool]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, hub_id: str, may_download: bool) -> tuple[str, HubSource]:
        self.searched.append((hub_id, may_download))
        await self.go_on.wait()
        if hub_id not in self.folders:
            raise TokenizerUnavailable("it is nowhere")
        return str(self.folders[hub_id]), "hugging_face_cache"


def new_registry(
    search: Callable[[str, bool], Awaitable[tuple[str, HubSource]]],
    *models: ModelConfig,
    clock: Clock | None = None,
    **prompts: Any,
) -> TokenizerRegistry:
    return TokenizerRegistry(Prompts(**prompts), models, clock or Clock(), search)


async def test_a_hub_name_is_searched_once_for_all_nodes_and_loaded(thinking_folder: Path, loads: list[str]) -> None:
    search = Search()
    search.folders[HUB_ID] = thinking_folder
    registry = new_registry(search)
    for node in ("a", "b"):
        registry.set_model_cards(node, [card("qwen", HUB_ID), card("alias", HUB_ID)])
    assert registry.status("qwen").state == "loading"
    await loading_done(registry, patience_s=50)
    assert has_tokenizer(registry, "qwen") and has_tokenizer(registry, "alias")
    assert search.searched == [(HUB_ID, False)] and loads == [str(thinking_folder)]
    status = registry.status("qwen")
    assert (status.state, status.path, status.source, status.hub_id) == (
        "loaded", str(thinking_folder), "hugging_face_cache", HUB_ID,
    )  # fmt: skip
    registry.close()


async def test_a_card_without_a_root_is_searched_by_its_id(thinking_folder: Path) -> None:
    search = Search()
    search.folders[HUB_ID] = thinking_folder
    registry = new_registry(search)
    registry.set_model_cards("a", [card(HUB_ID, None), card("my-model", None)])
    await loading_done(registry, patience_s=50)
    assert has_tokenizer(registry, HUB_ID) and search.searched == [(HUB_ID, False)]
    registry.close()


async def test_a_missing_tokenizer_is_found_later(thinking_folder: Path) -> None:
    search, clock = Search(), Clock()
    registry = new_registry(search, clock=clock)
    cards = [card("qwen", HUB_ID)]
    for _ in range(3):
        registry.set_model_cards("a", cards)
        await loading_done(registry, patience_s=50)
    status = registry.status("qwen")
    assert (status.state, status.reason, status.hub_id) == ("missing", "it is nowhere", HUB_ID)
    assert len(search.searched) == 1
    search.folders[HUB_ID] = thinking_folder
    clock.s += RETRY_S + 1
    registry.set_model_cards("a", cards)
    await loading_done(registry, patience_s=50)
    assert has_tokenizer(registry, "qwen") and len(search.searched) == 2
    registry.close()


async def test_a_reload_searches_again_and_may_download(thinking_folder: Path) -> None:
    search = Search()
    registry = new_registry(search)
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await loading_done(registry, patience_s=50)
    search.folders[HUB_ID] = thinking_folder
    registry.reconfigure(Prompts(download_tokenizers=True), [])
    await loading_done(registry, patience_s=50)
    assert has_tokenizer(registry, "qwen") and search.searched == [(HUB_ID, False), (HUB_ID, True)]
    registry.close()


@pytest.mark.parametrize("off", [{"discover_tokenizers": False}, {}])
async def test_nothing_is_searched_if_discovery_is_off_or_a_path_is_configured(
    off: dict[str, Any], thinking_folder: Path
) -> None:
    search = Search()
    models = [] if off else [ModelConfig(name="qwen", tokenizer=str(thinking_folder))]
    registry = new_registry(search, *models, **off)
    await registry.load_configured()
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await loading_done(registry, patience_s=50)
    assert not search.searched
    status = registry.status("qwen")
    assert status.source == ("" if off else "configured")
    assert status.reason == ("the router does not look for tokenizers" if off else "")
    registry.close()


async def test_files_that_cannot_be_loaded_are_searched_again_later(thinking_folder: Path, tmp_path: Path) -> None:
    search, clock = Search(), Clock()
    search.folders[HUB_ID] = tmp_path
    (tmp_path / "tokenizer.json").write_text("[")
    registry = new_registry(search, clock=clock)
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await loading_done(registry, patience_s=50)
    status = registry.status("qwen")
    assert status.state == "missing" and "cannot be loaded" in status.reason
    search.folders[HUB_ID] = thinking_folder
    clock.s += RETRY_S + 1
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await loading_done(registry, patience_s=50)
    assert has_tokenizer(registry, "qwen")
    registry.close()


async def test_a_search_that_raises_anything_is_reported(tmp_path: Path) -> None:
    async def broken(_hub_id: str, _may_download: bool) -> tuple[str, HubSource]:
        raise RuntimeError("secret")

    registry = new_registry(broken)
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await loading_done(registry, patience_s=50)
    reason = registry.status("qwen").reason
    assert "RuntimeError" in reason and "secret" not in reason
    registry.close()


async def test_a_search_does_not_outlive_the_registry() -> None:
    search = Search()
    search.go_on.clear()
    registry = new_registry(search)
    registry.set_model_cards("a", [card("qwen", HUB_ID)])
    await asyncio.sleep(0)
    registry.close()
    await loading_done(registry, patience_s=50)


def test_a_node_path_is_named_as_the_source(thinking_folder: Path) -> None:
    async def run() -> str:
        registry = new_registry(Search())
        registry.set_model_cards("a", [card("m", str(thinking_folder))])
        await loading_done(registry, patience_s=50)
        registry.close()
        return registry.status("m").source

    assert asyncio.run(run()) == "node_path"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", 'a "quoted"\nname\x7f', "näme 🙂", "\\", "\x00\x1b[31m"])
def test_the_suggested_lines_are_valid_toml_for_any_name(name: str) -> None:
    table = tomllib.loads(models_table(name, "", has_table=False))
    config = from_table(table)
    assert config.models[0].name == name and config.models[0].tokenizer.startswith("/models/")
    assert "tokenizer" in tomllib.loads(models_table(name, "", has_table=True))


async def test_a_node_with_many_names_starts_few_searches() -> None:
    search = Search()
    search.go_on.clear()
    registry = new_registry(search)
    cards = [card(f"m{number}", f"org/model{number}") for number in range(1000)]
    registry.set_model_cards("a", cards)
    await asyncio.sleep(0.01)
    assert len(search.searched) == MAX_SEARCHES
    search.go_on.set()
    await loading_done(registry, patience_s=50)
    assert len(search.searched) == MAX_NAMES
    assert registry.status("m0").reason == "it is nowhere"
    assert "names on a hub" in registry.status("m999").reason
    registry.set_model_cards("b", [card("m999", "org/model999")])
    await loading_done(registry, patience_s=50)
    assert len(search.searched) == MAX_NAMES + 1
    registry.close()


async def test_names_that_no_node_reports_are_forgotten(tmp_path: Path) -> None:
    search, clock = Search(), Clock()
    registry = new_registry(search, clock=clock)
    for turn in range(5):
        cards = [card(f"m{turn}-{number}", f"org/model{turn}-{number}") for number in range(20)]
        cards += [card(f"p{turn}-{number}", str(tmp_path / f"{turn}-{number}")) for number in range(20)]
        registry.set_model_cards("a", cards)
        await loading_done(registry, patience_s=50)
        assert len(registry._hub._missing) == len(registry._retry_at_s) == 20
        clock.s += 2 * RETRY_S
    registry.remove_node("a")
    assert not registry._hub._missing and not registry._retry_at_s and not registry._entries
    registry.close()


async def test_a_name_that_comes_and_goes_is_not_searched_more_often() -> None:
    search, clock = Search(), Clock()
    registry = new_registry(search, clock=clock)
    for _ in range(5):
        registry.set_model_cards("a", [card("qwen", HUB_ID)])
        await loading_done(registry, patience_s=50)
        registry.set_model_cards("a", [card("other", "/nowhere")])
        await loading_done(registry, patience_s=50)
        clock.s += 1.0
    assert len(search.searched) == 1
    registry.close()
