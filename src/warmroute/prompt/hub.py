"""Download a model's tokenizer files from the hub. Blocks: call it in a thread.

The download fetches only files that the router reads as data (JSON and chat templates), never weights or code, within
bounds on sizes and time. The files appear in their directory all at once, or not at all:

    CACHE/warmroute/tokenizers/models--ORGANISATION--NAME/COMMIT/
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from warmroute.hugging_face.environment import TokenizerUnavailable, endpoint, folder_name, token, user_cache
from warmroute.hugging_face.local_cache import COMMIT, TOKENIZER

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
_MARKERS: Final = re.compile(r"tekken\.json|tokenizer\.model\.v[0-9]{1,4}")
"""Files whose presence tells that the engine may use another tokenizer. They are created empty."""
_MAX_LISTING_BYTES: Final = 8 << 20
_CHUNK_BYTES: Final = 1 << 18
SOCKET_TIMEOUT_S: Final = 15.0
DEADLINE_S: Final = 300.0


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
