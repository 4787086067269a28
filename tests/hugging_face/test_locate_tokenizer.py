"""Tokenizer files of hub models: in the local cache of Hugging Face, or downloaded from a hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from http.client import HTTPMessage
from io import BytesIO
from pathlib import Path
from urllib.request import Request

import huggingface_hub
import pytest
from support.fake_hub import COMMIT, FakeHub, fake_hub

from warmroute.prompt import hub as tokenizer_download
from warmroute.prompt.hub import TokenizerUnavailable, cache_folders, is_hub_id, locate_tokenizer, token

SMALL_MODEL = Path(__file__).parents[1] / "prompt" / "small-model"
HUB_ID = "org/small-1.5B"
OTHER = "f" * 40


def fill_cache(cache: Path, commit: str = COMMIT, ref: str | None = None, hub_id: str = HUB_ID) -> Path:
    """Lay out a repository as huggingface_hub does: blobs, and links to them in the snapshot."""
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in SMALL_MODEL.iterdir():
        shutil.copy(file, repository / "blobs" / f"{file.name}-{commit}")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}-{commit}")
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(ref)
    return snapshot


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add(HUB_ID, SMALL_MODEL)
        yield running


@pytest.fixture
def environment(tmp_path: Path, hub: FakeHub) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}


# The cache.


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_is_where_hugging_faces_variables_say(tmp_path: Path, variable: str, below: str) -> None:
    snapshot = fill_cache(tmp_path / below, ref=COMMIT)
    assert locate_tokenizer(HUB_ID, False, {variable: str(tmp_path)}) == (str(snapshot), "hugging_face_cache")


def test_the_cache_is_in_the_home_directory_by_default() -> None:
    assert cache_folders({}) == [Path("~/.cache/huggingface/hub").expanduser()]


def test_the_snapshot_of_main_is_used(tmp_path: Path) -> None:
    fill_cache(tmp_path, OTHER)
    main = fill_cache(tmp_path, COMMIT, ref=f"{COMMIT}\n")
    assert locate_tokenizer(HUB_ID, False, {"HF_HUB_CACHE": str(tmp_path)})[0] == str(main)


def test_without_main_only_an_unambiguous_snapshot_is_used(tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path, COMMIT)
    (tmp_path / "models--org--small-1.5B" / "snapshots" / OTHER).mkdir()
    assert locate_tokenizer(HUB_ID, False, {"HF_HUB_CACHE": str(tmp_path)})[0] == str(snapshot)
    shutil.copytree(snapshot, snapshot.parent / OTHER, dirs_exist_ok=True)
    with pytest.raises(TokenizerUnavailable, match="not in this machine's Hugging Face cache"):
        locate_tokenizer(HUB_ID, False, {"HF_HUB_CACHE": str(tmp_path)})


@pytest.mark.parametrize("ref", ["../../../../etc", "/etc", "", "main", "0" * 5000])
def test_a_reference_that_is_no_commit_is_ignored(tmp_path: Path, ref: str) -> None:
    snapshot = fill_cache(tmp_path, ref=ref)
    assert locate_tokenizer(HUB_ID, False, {"HF_HUB_CACHE": str(tmp_path)})[0] == str(snapshot)


@pytest.mark.parametrize(
    "name", ["", "gpt2", "/etc/passwd", "../up", "a/../b", "a/b/c", "a/..", "./a", "a/b\n", "a--b/c", "a/b?x", "ä/b"]
)
def test_only_names_of_the_hub_are_searched(tmp_path: Path, name: str, environment: dict[str, str]) -> None:
    assert not is_hub_id(name)
    with pytest.raises(TokenizerUnavailable, match="neither a path nor a model on the hub"):
        locate_tokenizer(name, True, environment)


def test_a_cache_that_hugging_faces_library_filled_is_found(tmp_path: Path, hub: FakeHub) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        huggingface_hub.hf_hub_download(HUB_ID, name, cache_dir=tmp_path, endpoint=hub.url, token=False)
    path, source = locate_tokenizer(HUB_ID, False, {"HF_HUB_CACHE": str(tmp_path)})
    assert source == "hugging_face_cache" and sorted(os.listdir(path)) == sorted(names)
    assert huggingface_hub.try_to_load_from_cache(HUB_ID, names[0], cache_dir=tmp_path) == f"{path}/{names[0]}"


# Downloads.


def test_nothing_is_downloaded_unless_it_is_allowed(hub: FakeHub, environment: dict[str, str]) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"prompts\.download_tokenizers is off"):
        locate_tokenizer(HUB_ID, False, environment)
    with pytest.raises(TokenizerUnavailable, match="HF_HUB_OFFLINE is set"):
        locate_tokenizer(HUB_ID, True, environment | {"HF_HUB_OFFLINE": "1"})
    assert not hub.requests


def test_tokenizer_files_are_downloaded_once(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.repositories[HUB_ID] |= {
        "model.safetensors": b"weights", "tokenizer.py": b"code", "training_args.bin": b"pickle",
        "additional_chat_templates/tool_use.jinja": b"{{ messages }}", "tekken.json": b"large",
    }  # fmt: skip
    path, source = locate_tokenizer(HUB_ID, True, environment)
    assert source == "download" and Path(path).is_relative_to(environment["XDG_CACHE_HOME"])
    found = {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}
    expected = {file.name: file.read_bytes() for file in SMALL_MODEL.iterdir()}
    # a marker tells that the engine may use another tokenizer; its content is not needed
    assert found == {**expected, "additional_chat_templates/tool_use.jinja": b"{{ messages }}", "tekken.json": b""}
    requests = len(hub.requests)
    assert locate_tokenizer(HUB_ID, True, environment) == (path, "download") and len(hub.requests) == requests
    assert locate_tokenizer(HUB_ID, False, environment) == (path, "download")


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.token, hub.stored_elsewhere = "hf_secret", {"tokenizer.json"}
    locate_tokenizer(HUB_ID, True, environment | {"HF_TOKEN": "hf_secret"})
    stored = [authorization for path, authorization in hub.requests if path.startswith("/storage/")]
    assert stored == [None]
    assert {authorization for path, authorization in hub.requests if "/resolve/" in path} == {"Bearer hf_secret"}


def test_the_token_of_a_login_is_used(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_login\n")
    assert token({"HF_HOME": str(tmp_path)}) == "hf_login"
    assert token({"HF_HOME": str(tmp_path), "HF_TOKEN": "hf_variable"}) == "hf_variable"
    assert token({"HF_HOME": str(tmp_path), "HF_TOKEN": "two\nlines"}) == ""


def test_a_gated_model_asks_for_a_token(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.token = "hf_secret"
    with pytest.raises(TokenizerUnavailable, match=r"401.*set HF_TOKEN"):
        locate_tokenizer(HUB_ID, True, environment)


def nothing_is_left(environment: dict[str, str]) -> bool:
    return not any(path.is_file() for path in Path(environment["XDG_CACHE_HOME"]).rglob("*"))


def test_a_file_beyond_its_bound_is_refused(
    hub: FakeHub, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tokenizer_download.FILES, "tokenizer_config.json", 100)
    hub.repositories[HUB_ID]["tokenizer_config.json"] = b"x" * 101
    with pytest.raises(TokenizerUnavailable, match=r"tokenizer_config\.json on the hub is larger than 100 bytes"):
        locate_tokenizer(HUB_ID, True, environment)
    assert nothing_is_left(environment)


def test_a_download_that_breaks_off_leaves_nothing(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.truncate = True
    with pytest.raises(TokenizerUnavailable, match="in the middle of a file"):
        locate_tokenizer(HUB_ID, True, environment)
    assert nothing_is_left(environment)
    hub.truncate = False
    assert locate_tokenizer(HUB_ID, True, environment)[1] == "download"


@pytest.mark.parametrize(
    ("listing", "reason"),
    [
        ({"sha": COMMIT, "siblings": [{"rfilename": "model.bin"}]}, "has no tokenizer.json"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "../tokenizer.json"}, {}, 5]}, "has no tokenizer.json"),
        ({"sha": "../../x", "siblings": [{"rfilename": "tokenizer.json"}]}, "not a list of files"),
        ({"sha": COMMIT, "siblings": 5}, "has no tokenizer.json"),
        ([], "not a list of files"),
    ],
)
def test_a_strange_list_of_files_is_refused(
    hub: FakeHub, environment: dict[str, str], listing: object, reason: str
) -> None:
    hub.listings[HUB_ID] = json.dumps(listing).encode()
    with pytest.raises(TokenizerUnavailable, match=reason):
        locate_tokenizer(HUB_ID, True, environment)
    assert nothing_is_left(environment)


def test_names_outside_the_list_are_never_written(hub: FakeHub, environment: dict[str, str]) -> None:
    names = ["tokenizer.json", "../../evil.json", "additional_chat_templates/../../evil.jinja", "/etc/evil", "a\0b"]
    hub.listings[HUB_ID] = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()
    path, _source = locate_tokenizer(HUB_ID, True, environment)
    assert [file.name for file in Path(path).iterdir()] == ["tokenizer.json"]


def test_an_unreachable_hub_is_reported(environment: dict[str, str]) -> None:
    with pytest.raises(TokenizerUnavailable, match="cannot reach the hub: Connection refused"):
        locate_tokenizer(HUB_ID, True, environment | {"HF_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(TokenizerUnavailable, match="HF_ENDPOINT is not an http or https URL"):
        locate_tokenizer(HUB_ID, True, environment | {"HF_ENDPOINT": "file:///etc"})


def test_an_unknown_model_is_reported(environment: dict[str, str]) -> None:
    with pytest.raises(TokenizerUnavailable, match="the hub answers 404"):
        locate_tokenizer("org/unknown", True, environment)


def test_a_redirect_from_https_to_http_is_refused() -> None:
    redirects, request = tokenizer_download._Redirects(True), Request("https://127.0.0.1/x")
    with pytest.raises(OSError, match="not https"):
        redirects.redirect_request(request, BytesIO(), 302, "", HTTPMessage(), "http://127.0.0.1/x")
