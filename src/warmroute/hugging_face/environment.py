"""Hugging Face's environment variables: where its cache is, which endpoint and token to use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""`organisation/name`. Names without an organisation are not used: they look like the names that operators give."""
MAX_TOKEN_BYTES: Final = 4096


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
