"""Where the tokenizer files of a model on the hub are on this machine. Blocks: call it in a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from warmroute.hugging_face.environment import TokenizerUnavailable, is_hub_id, is_offline
from warmroute.hugging_face.local_cache import find_cached
from warmroute.hugging_face.tokenizer_download import download_tokenizer, find_downloaded

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
