"""The tokenizers of models that nodes report by their name on a hub: where their files are on this machine.

Looking for the files can take minutes (a download), so it happens elsewhere; the event loop only keeps the results:

    unknown    no request or node has named the model yet
    searching  the search runs
    located    the directory is known
    missing    the search found nothing; it is repeated after RETRY_S if a node still reports the name

A node may name very many models, and others each time: at most MAX_SEARCHES searches run at once, at most MAX_NAMES
names of a node count, and names that no node reports any more are forgotten.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from warmroute.event_log import where_it_failed
from warmroute.hugging_face.environment import TokenizerUnavailable, is_hub_id
from warmroute.hugging_face.locate_tokenizer import HubSource

RETRY_S: Final = 300.0
"""How long after a failed search the files are searched again."""

MAX_SEARCHES: Final = 3
"""Each takes a thread."""
MAX_NAMES: Final = 64
"""Of one node. An engine serves one base model, under a few names."""

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
