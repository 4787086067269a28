"""Find a model's tokenizer in the local Hugging Face cache, which engines and `hf download` fill. Only reads names:

models--ORGANISATION--NAME/refs/main            the commit that `main` was at
models--ORGANISATION--NAME/snapshots/COMMIT/    its files
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from warmroute.hugging_face.environment import cache_folders, folder_name

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
    complete = [folder for folder in found if (folder / TOKENIZER).is_file()]
    return complete[0] if len(complete) == 1 else None
