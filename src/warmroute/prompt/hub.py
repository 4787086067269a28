"""Tokenizer files of models on the Hugging Face hub: found in the local cache, or downloaded."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any, Final, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from warmroute.blocking import run_in_thread
from warmroute.event_log import where_it_failed

# Hugging Face's environment variables: where its cache is, which endpoint and token to use.

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""A name on the hub: `organisation/name`. Names without an organisation are not used: they look like the names that
operators give."""
MAX_TOKEN_BYTES: Final = 4096
"""A token file is a line. The path may name anything."""


class TokenizerUnavailable(Exception):
    """Why the router has no tokenizer files for a hub id, as part of a sentence for the operator."""


def is_hub_id(text: str) -> bool:
    return HUB_ID.fullmatch(text) is not None and ".." not in text and "--" not in text


def folder_name(hub_id: str) -> str:
    """Return the name of a repository's folder in the cache. Raises ValueError if that would be another path."""
    if not is_hub_id(hub_id):
        raise ValueError(f"{hub_id[:200]!r} is not the name of a model on the hub")
    return "models--" + hub_id.replace("/", "--")


def _home(environment: Mapping[str, str]) -> Path:
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser()
    return user_cache(environment) / "huggingface"


def user_cache(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cache_folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the caches that Hugging Face's library would use, the one it prefers first."""
    named = [environment.get(name) for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")]
    folders = [Path(path).expanduser() for path in named if path]
    return list(dict.fromkeys([*folders, _home(environment) / "hub"]))


def endpoint(environment: Mapping[str, str]) -> str:
    """Return the hub's base URL. Raises TokenizerUnavailable."""
    url = (environment.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not url.startswith(("https://", "http://")):
        raise TokenizerUnavailable("HF_ENDPOINT is not an http or https URL")
    return url


def token(environment: Mapping[str, str]) -> str:
    """Return the token from HF_TOKEN, or from the file that `hf auth login` writes; empty if there is none."""
    found = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not found:
        try:
            path = environment.get("HF_TOKEN_PATH") or _home(environment) / "token"
            with open(path, "rb") as file:
                found = file.read(MAX_TOKEN_BYTES).decode("ascii", "replace")
        except OSError:
            return ""
    found = found.strip()
    return found if found.isascii() and found.isprintable() else ""


def is_offline(environment: Mapping[str, str]) -> bool:
    return environment.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


# Find a model's tokenizer in the local Hugging Face cache, which engines and `hf download` fill. Only reads names:
#
# models--ORGANISATION--NAME/refs/main            the commit that `main` was at
# models--ORGANISATION--NAME/snapshots/COMMIT/    its files

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
TOKENIZER: Final = "tokenizer.json"


def find_cached(hub_id: str, environment: Mapping[str, str]) -> str | None:
    """Return the directory with the model's files; None if no cache has its tokenizer."""
    for cache in cache_folders(environment):
        found = _snapshot(cache / folder_name(hub_id))
        if found is not None:
            return str(found)
    return None


def _snapshot(repository: Path) -> Path | None:
    """Return the snapshot of `main`; without one, the only snapshot with a tokenizer."""
    snapshots = repository / "snapshots"
    try:
        with (repository / "refs" / "main").open("rb") as file:
            commit = file.read(64).decode("ascii", "replace").strip()
        if COMMIT.fullmatch(commit) and (snapshots / commit / TOKENIZER).is_file():
            return snapshots / commit
    except OSError:
        pass
    try:
        found = [folder for folder in snapshots.iterdir() if COMMIT.fullmatch(folder.name)]
    except OSError:
        return None
    # Without `main`, several snapshots are a guess: the engine may serve any of them.
    complete = [folder for folder in found if (folder / TOKENIZER).is_file()]
    return complete[0] if len(complete) == 1 else None


# Download a model's tokenizer files from the hub. Blocks: call it in a thread.
#
# The download fetches only files that the router reads as data (JSON and chat templates), never weights or code, within
# bounds on sizes and time. The files appear in their directory all at once, or not at all:
#
#     CACHE/warmroute/tokenizers/models--ORGANISATION--NAME/COMMIT/

FILES: Final = {
    TOKENIZER: 128 << 20,
    "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 1 << 20,
    "config.json": 4 << 20,
    "chat_template.jinja": 2 << 20,
}
"""The files that the router reads, and their largest size in bytes."""
_MORE_TEMPLATES: Final = re.compile(r"additional_chat_templates/[A-Za-z0-9_-]{1,64}\.jinja")
_MAX_MORE_TEMPLATES: Final = 16
"""Further templates of one model that are fetched."""
_MARKERS: Final = re.compile(r"tekken\.json|tokenizer\.model\.v[0-9]{1,4}")
"""Files whose presence tells that the engine may use another tokenizer. They are created empty."""
_MAX_LISTING_BYTES: Final = 8 << 20
"""Large repositories list thousands of files."""
_CHUNK_BYTES: Final = 1 << 18
SOCKET_TIMEOUT_S: Final = 15.0
"""Without a byte for this time, the download fails."""
DEADLINE_S: Final = 300.0
"""Time for all files of a model. The search runs in a thread, of which there are three."""


def download_folder(hub_id: str, environment: Mapping[str, str]) -> Path:
    return user_cache(environment) / "warmroute" / "tokenizers" / folder_name(hub_id)


def find_downloaded(hub_id: str, environment: Mapping[str, str]) -> str | None:
    """Return the directory of the latest download; None if there is none."""
    try:
        folders = [one for one in download_folder(hub_id, environment).iterdir() if COMMIT.fullmatch(one.name)]
        complete = [folder for folder in folders if (folder / TOKENIZER).is_file()]
        return str(max(complete, key=lambda folder: folder.stat().st_mtime)) if complete else None
    except OSError:
        return None


def download_tokenizer(hub_id: str, environment: Mapping[str, str]) -> str:
    """Download the files of the `main` revision. Return their directory. Raises TokenizerUnavailable."""
    folder = download_folder(hub_id, environment)
    hub = _Hub(endpoint(environment), token(environment))
    try:
        listing = json.loads(hub.fetch(f"/api/models/{hub_id}/revision/main", _MAX_LISTING_BYTES))
        commit, names = _commit(listing), _names(listing)
        if TOKENIZER not in names:
            raise TokenizerUnavailable(f"{hub_id} has no {TOKENIZER} on the hub")
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        try:
            for name in names:
                content = b""
                if not _MARKERS.fullmatch(name):
                    content = hub.fetch(f"/{hub_id}/resolve/{commit}/{name}", FILES.get(name, 2 << 20))
                (unfinished / name).parent.mkdir(exist_ok=True)
                (unfinished / name).write_bytes(content)
            # mkdtemp makes folders for their owner alone; other users' routers may share the cache.
            os.chmod(unfinished, 0o755)
            shutil.rmtree(folder / commit, ignore_errors=True)
            os.rename(unfinished, folder / commit)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except HTTPError as error:
        raise TokenizerUnavailable(_status_reason(error.code)) from None
    except URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise TokenizerUnavailable(f"cannot reach the hub: {reason}") from None
    except (OSError, HTTPException) as error:
        raise TokenizerUnavailable(f"the download failed: {error.__class__.__name__}: {error}"[:300]) from None
    except ValueError:
        raise TokenizerUnavailable("the hub's answer is not a list of files") from None
    return str(folder / commit)


def _status_reason(status: int) -> str:
    if status in (401, 403):
        return f"the hub answers {status}: the model is private or gated, or does not exist; set HF_TOKEN"
    return f"the hub answers {status}"


def _commit(listing: Any) -> str:
    commit = listing.get("sha") if isinstance(listing, dict) else None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise ValueError("no commit")
    return commit


def _names(listing: dict[str, Any]) -> list[str]:
    """Return the listed files to fetch. All other names, whatever they contain, are ignored."""
    siblings = listing.get("siblings")
    listed = [one.get("rfilename") for one in siblings if isinstance(one, dict)] if isinstance(siblings, list) else []
    names = {name for name in listed if isinstance(name, str)}
    more = sorted(name for name in names if _MORE_TEMPLATES.fullmatch(name))[:_MAX_MORE_TEMPLATES]
    markers = sorted(name for name in names if _MARKERS.fullmatch(name))[:_MAX_MORE_TEMPLATES]
    return [*(name for name in FILES if name in names), *more, *markers]


class _Hub:
    """The hub over HTTP, by proxy if the environment names one."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._opener: OpenerDirector = build_opener(
            _Redirects(url.startswith("https://")), HTTPSHandler(context=ssl.create_default_context())
        )
        self._deadline_s = time.monotonic() + DEADLINE_S

    def fetch(self, path: str, limit_bytes: int) -> bytes:
        """Raises HTTPError, URLError, OSError, HTTPException, TokenizerUnavailable."""
        request = Request(self._url + path, headers={"User-Agent": "warmroute", "Accept-Encoding": "identity"})
        if self._token:  # not for the host that a redirect names
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        body = bytearray()
        with self._opener.open(request, timeout=SOCKET_TIMEOUT_S) as response:
            while piece := response.read(_CHUNK_BYTES):
                body += piece
                if len(body) > limit_bytes:
                    name = path.rpartition("/")[2]
                    raise TokenizerUnavailable(f"{name} on the hub is larger than {limit_bytes:,} bytes")
                if time.monotonic() > self._deadline_s:
                    raise TokenizerUnavailable(f"the download took longer than {DEADLINE_S:g} s")
            # urllib ends a short body without an error.
            if response.length:
                raise TokenizerUnavailable("the hub closed the connection in the middle of a file")
        return bytes(body)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects (large files are on another host), but never from https to http."""

    max_redirections = 5

    def __init__(self, needs_https: bool) -> None:
        self._needs_https = needs_https

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        if not newurl.startswith("https://" if self._needs_https else ("https://", "http://")):
            raise URLError("it redirects to an address that is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# Where the tokenizer files of a model on the hub are on this machine. Blocks: call it in a thread.

HubSource = Literal["hugging_face_cache", "download"]


def locate_tokenizer(
    hub_id: str, may_download: bool, environment: Mapping[str, str] = os.environ
) -> tuple[str, HubSource]:
    """Return the directory, and where it came from. Raises TokenizerUnavailable."""
    if not is_hub_id(hub_id):
        raise TokenizerUnavailable("the node names neither a path nor a model on the hub")
    if (path := find_cached(hub_id, environment)) is not None:
        return path, "hugging_face_cache"
    if (path := find_downloaded(hub_id, environment)) is not None:
        return path, "download"
    if not may_download:
        raise TokenizerUnavailable(
            "it is not in this machine's Hugging Face cache, and prompts.download_tokenizers is off"
        )
    if is_offline(environment):
        raise TokenizerUnavailable("it is not in this machine's Hugging Face cache, and HF_HUB_OFFLINE is set")
    return download_tokenizer(hub_id, environment), "download"


# The tokenizers of models that nodes report by their name on a hub: where their files are on this machine.
#
# Looking for the files can take minutes (a download), so it happens elsewhere; the event loop only keeps the results:
#
#     unknown    no request or node has named the model yet
#     searching  the search runs
#     located    the directory is known
#     missing    the search found nothing; it is repeated after RETRY_S if a node still reports the name
#
# A node may name very many models, and others each time: at most MAX_SEARCHES searches run at once, at most MAX_NAMES
# names of a node count, and names that no node reports any more are forgotten.

RETRY_S: Final = 300.0
"""How long after a failed search the files are searched again."""

MAX_SEARCHES: Final = 3
"""Searches that run at once. Each takes a thread."""
MAX_NAMES: Final = 64
"""Names of one node that count. An engine serves one base model, under a few names."""

Locate = Callable[[str], Awaitable[tuple[str, HubSource]]]
"""Takes a name on the hub. Returns the directory with its files and how it was found. Raises TokenizerUnavailable."""


def hub_id_of(model: str, root: str) -> str:
    """Return the hub name in a model card: its root, or its id where it has no root. Empty if neither is one."""
    name = root or model
    return name if is_hub_id(name) else ""


class HubTokenizers:
    def __init__(
        self,
        locate: Locate | None,
        now: Callable[[], float],
        start: Callable[[Coroutine[Any, Any, None]], None],
        on_result: Callable[[str], None],
    ) -> None:
        """`start` runs a coroutine in the background. `on_result` is called with a name after its search."""
        self._locate = locate
        self._now = now
        self._start = start
        self._on_result = on_result
        self._slots = asyncio.Semaphore(MAX_SEARCHES)
        self._models: dict[str, dict[str, None]] = {}
        """The models that nodes report, by their name on the hub."""
        self._searching: set[str] = set()
        self._located: dict[str, tuple[str, HubSource]] = {}
        self._missing: dict[str, tuple[str, float]] = {}
        """Why the last search found nothing, and when the next one is due."""

    def set_roots(self, nodes: Iterable[Mapping[str, str]]) -> None:
        """Set the root of each model, for every node. Forget what belongs to other names."""
        self._models = {}
        for roots in nodes:
            names: dict[str, dict[str, None]] = {}
            for model, root in roots.items():
                hub_id = "" if os.path.isabs(root) else hub_id_of(model, root)
                if hub_id and (hub_id in names or len(names) < MAX_NAMES):
                    names.setdefault(hub_id, {})[model] = None
            for hub_id, models in names.items():
                self._models.setdefault(hub_id, {}).update(models)
        self._located = {hub_id: found for hub_id, found in self._located.items() if hub_id in self._models}
        # A node whose names come and go does not search more often than others.
        now_s = self._now()
        self._missing = {
            hub_id: (why, due_s)
            for hub_id, (why, due_s) in self._missing.items()
            if hub_id in self._models or now_s < due_s
        }

    def models(self, hub_id: str) -> Iterable[str]:
        """Return the models that nodes report with this name."""
        return self._models.get(hub_id, ())

    @property
    def paths(self) -> Iterable[str]:
        """All directories that are known."""
        return (path for path, _source in self._located.values())

    def path(self, hub_id: str) -> str:
        """Return the directory; empty while it is not known. Starts a search if one is due."""
        located = self._located.get(hub_id)
        if located is not None:
            return located[0]
        if hub_id in self._models and self._locate is not None and hub_id not in self._searching:
            _reason, due_s = self._missing.get(hub_id, ("", 0.0))
            if self._now() >= due_s:
                self._searching.add(hub_id)
                self._start(self._search(self._locate, hub_id))
        return ""

    def source(self, path: str) -> str:
        """Return how a directory was found; empty if no search found it."""
        return next((source for found, source in self._located.values() if found == path), "")

    def is_searching(self, hub_id: str) -> bool:
        return hub_id in self._searching

    def missing_reason(self, hub_id: str) -> str:
        if hub_id and hub_id not in self._models:
            return f"its node reports more than {MAX_NAMES} names on a hub"
        return self._missing.get(hub_id, ("", 0.0))[0]

    def forget(self, path: str) -> None:
        """Search again, later, for files that could not be loaded: somebody may have removed them."""
        for hub_id, (found, _source) in list(self._located.items()):
            if found == path:
                del self._located[hub_id]
                self._missing[hub_id] = f"the files in {path} cannot be loaded", self._now() + RETRY_S

    def search_again(self) -> None:
        """Forget failed searches: the configuration has changed."""
        self._missing.clear()

    async def _search(self, locate: Locate, hub_id: str) -> None:
        try:
            async with self._slots:
                if hub_id not in self._models:
                    return
                located = await locate(hub_id)
            if hub_id in self._models:
                self._located[hub_id] = located
            self._missing.pop(hub_id, None)
        except TokenizerUnavailable as problem:
            self._missing[hub_id] = str(problem), self._now() + RETRY_S
        except Exception as error:
            self._missing[hub_id] = f"the search failed: {where_it_failed(error)}", self._now() + RETRY_S
        finally:
            self._searching.discard(hub_id)
        self._on_result(hub_id)


# Searches a hub model's tokenizer files, in threads: the search may download them.


async def find_tokenizer_files(hub_id: str, may_download: bool) -> tuple[str, HubSource]:
    """Raises TokenizerUnavailable."""
    return await run_in_thread(lambda: locate_tokenizer(hub_id, may_download), "tokenizer-files")
