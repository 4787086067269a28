"""A text in a ConfigMap that the router reads and replaces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from warmroute.config import ConfigError
from warmroute.kubernetes.cluster import cluster_config, http_client
from warmroute.kubernetes.objects import meta
from warmroute.kubernetes.watch import ApiFailure, get_object, patch_object

API_TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 900_000
"""Kubernetes takes 1 MiB for the whole object."""
MAX_ASIDE_BYTES: Final = 64_000
"""What stays of content that cannot be read."""
CONFLICT: Final = 409
CONFLICTS: Final = 8
"""Attempts to replace a ConfigMap that other replicas write at the same time."""

Merge = Callable[[bytes], bytes]


class ConfigMapText:
    """The text of one key. Its methods raise OSError. Of two replicas that write at once, the API server takes one, and
    the other merges again."""

    def __init__(self, name: str, key: str) -> None:
        self._name = name
        self._key = key
        self.where = f"ConfigMap {name}"

    async def read(self) -> bytes:
        async with _config_map(self._name) as (client, path):
            return self._content(await get_object(client, path))

    async def update(self, merge: Merge) -> None:
        await self._patch(merge)

    async def move_aside(self) -> str:
        key = f"{self._key}.bad"
        await self._patch(lambda _content: b"", key)
        return f"{self.where}, key {key}"

    async def _patch(self, merge: Merge, aside: str = "") -> None:
        """`aside`: the key to which the former content goes."""
        async with _config_map(self._name) as (client, path):
            for attempt in range(1, CONFLICTS + 1):
                found = await get_object(client, path)
                before = self._content(found)
                content = merge(before)
                if content == before:
                    return
                if len(content) > MAX_BYTES:
                    raise OSError(f"the state is larger than {MAX_BYTES:,} bytes")
                data = {self._key: content.decode()}
                if aside:
                    data[aside] = before[:MAX_ASIDE_BYTES].decode("utf-8", "replace")
                version = {"resourceVersion": meta(found).get("resourceVersion")}
                try:
                    await patch_object(client, path, {"metadata": version, "data": data})
                    return
                except ApiFailure as failure:
                    if failure.status != CONFLICT or attempt == CONFLICTS:
                        raise

    def _content(self, found: dict[str, Any]) -> bytes:
        data = found.get("data")
        content = data.get(self._key) if isinstance(data, dict) else None
        return content.encode("utf-8", "replace") if isinstance(content, str) else b""


@asynccontextmanager
async def _config_map(name: str) -> AsyncIterator[tuple[Any, str]]:
    """Yield a client for the API server, and the path of a ConfigMap. Its failures become OSErrors."""
    try:
        cluster = cluster_config("", "", ())
        async with http_client(cluster, API_TIMEOUT_S) as client:
            yield client, f"/api/v1/namespaces/{cluster.namespace}/configmaps/{name}"
    except (ApiFailure, ConfigError) as error:
        raise OSError(str(error)) from None
