"""Searches a hub model's tokenizer files, in threads: the search may download them."""

from __future__ import annotations

from warmroute.blocking import run_in_thread
from warmroute.hugging_face.locate_tokenizer import HubSource, locate_tokenizer


async def find_tokenizer_files(hub_id: str, may_download: bool) -> tuple[str, HubSource]:
    """Raises TokenizerUnavailable."""
    return await run_in_thread(lambda: locate_tokenizer(hub_id, may_download), "tokenizer-files")
