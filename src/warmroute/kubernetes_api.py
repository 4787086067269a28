"""Kubernetes' API: reaches a cluster, reads objects, lists and watches them, and keeps a text in a ConfigMap. Needs
the extra `kubernetes`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping
from contextlib import aclosing, asynccontextmanager
from copy import copy
from typing import Any, Final, Literal, NamedTuple, TypeVar

import httpx2
import msgspec
from lightkube import AsyncClient, KubeConfig
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError

from warmroute.config import ConfigError

# Where a cluster's API server is, and how the router authenticates: a kubeconfig, or the Pod's service account.


def cluster_config(kubeconfig: str, context: str, plugin_variables: Container[str]) -> SingleConfig:
    """Empty values: the Pod's service account, or kubectl's default. `plugin_variables`: environment variables that a
    plugin for credentials may see. Raises ConfigError."""
    try:
        kube = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        found = kube.get(context) if context else kube.get()
    except (KubeConfigError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(error)) from None
    if found is None:
        raise ConfigError("the kubeconfig has no current context")
    return _hide_secrets(found, plugin_variables)


def _hide_secrets(cluster: SingleConfig, allowed: Container[str]) -> SingleConfig:
    """Let the plugin that the kubeconfig names for credentials (`exec`) start without the router's secrets. lightkube
    gives it the router's whole environment, so `env` removes the rest."""
    if cluster.user is None or cluster.user.exec is None:
        return cluster
    user, plugin = copy(cluster.user), copy(cluster.user.exec)
    own = {variable.name for variable in plugin.env or ()}
    hidden = [f"--unset={name}" for name in sorted(os.environ) if name not in allowed and name not in own]
    plugin.command, plugin.args = "env", [*hidden, plugin.command, *(plugin.args or ())]
    user.exec = plugin
    return cluster._replace(user=user)


def typed_client(cluster: SingleConfig, namespace: str, timeout_s: float) -> AsyncClient:
    """Return lightkube's client, which knows the kinds of objects. Raises ConfigError."""
    try:
        return AsyncClient(
            config=cluster, namespace=namespace or None, timeout=httpx2.Timeout(timeout_s), field_manager="warmroute",
            trust_env=False,
        )  # fmt: skip
    except (KubeConfigError, OSError) as error:
        raise ConfigError(str(error)) from None


def http_client(cluster: SingleConfig, timeout_s: float) -> httpx2.AsyncClient:
    """Return an HTTP client for the API server that authenticates each request. Raises ConfigError."""
    parameters = client_adapter.ConnectionParams(timeout=httpx2.Timeout(timeout_s), trust_env=False)
    try:
        return client_adapter.AsyncClient(cluster, parameters)
    except (KubeConfigError, OSError) as error:
        raise ConfigError(str(error)) from None


# Reads objects as the API server returns them: metadata, conditions, and where a Kubernetes node runs.

Object = dict[str, Any]

REGION = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
ZONE = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")


def meta(one: Object) -> Object:
    found: Object = one.get("metadata") or {}
    return found


def annotations_of(one: Object) -> dict[str, str]:
    return meta(one).get("annotations") or {}


def labels_of(one: Object) -> dict[str, str]:
    return meta(one).get("labels") or {}


def condition(one: Object, kind: str) -> Object:
    for found in (one.get("status") or {}).get("conditions") or ():
        if found.get("type") == kind:
            result: Object = found
            return result
    return {}


def first_label(labels: dict[str, str], keys: tuple[str, ...]) -> str:
    return next((str(labels[key]) for key in keys if labels.get(key)), "")


def island_of(node: Object | None) -> str:
    """Return provider and region of a Kubernetes node by its labels; empty without them."""
    region = first_label(labels_of(node or {}), REGION)
    provider = str(((node or {}).get("spec") or {}).get("providerID") or "").partition(":")[0]
    return f"{provider or 'kubernetes'}/{region}" if region else ""


# Lists objects and then watches their changes, as Kubernetes' own clients do.
#
# A list returns all objects and their resource version. A watch continues from a version: it sends each change, and now
# and then a bookmark, which only moves the version on. The server ends a watch after WATCH_S, and the next one
# continues. If the version is too old (410), the objects are listed again.

WATCH_S: Final = 60
"""After this time the server ends a watch: a connection that died without a trace is noticed that soon."""
GRACE_S: Final = 10.0
PAGE: Final = 100
"""Objects that are decoded at once: a Pod may have 10 KB and more."""
MAX_BODY_BYTES: Final = 64 << 20
"""Of a page of objects, or of one change."""
GONE: Final = 410

T = TypeVar("T")


class ApiFailure(Exception):
    """The API server cannot be reached, refuses, or answers nonsense."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Change(NamedTuple):
    kind: Literal["listed", "changed", "deleted"]
    objects: list[Object]
    """All objects, if they were listed; otherwise those that changed."""


class _Event(msgspec.Struct):
    type: str
    object: Object


class _Page(msgspec.Struct):
    metadata: Object
    items: list[Object] | None = None


async def get_object(client: httpx2.AsyncClient, path: str) -> Object:
    """Raises ApiFailure."""
    return _decode(await _get(client, path, {}), dict)


async def patch_object(client: httpx2.AsyncClient, path: str, patch: Object) -> None:
    """Merge a patch into an object. Raises ApiFailure."""
    try:
        response = await client.patch(path, json=patch, headers={"Content-Type": "application/merge-patch+json"})
    except (httpx2.HTTPError, KubeConfigError, OSError) as error:
        raise ApiFailure(f"{path}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise _refused(path, response.status_code, response.content)


async def list_and_watch(
    client: httpx2.AsyncClient, path: str, selector: str, max_objects: int
) -> AsyncGenerator[Change, None]:
    """Yield all objects, and then their changes, for ever. Raises ApiFailure."""
    parameters = {"labelSelector": selector} if selector else {}
    while True:
        objects, version = await _list(client, path, parameters, max_objects)
        yield Change("listed", objects)
        try:
            while True:
                async with aclosing(_watch(client, path, parameters, version)) as events:
                    async for event in events:
                        version = str(meta(event.object).get("resourceVersion") or version)
                        if event.type in ("ADDED", "MODIFIED"):
                            yield Change("changed", [event.object])
                        elif event.type == "DELETED":
                            yield Change("deleted", [event.object])
        except ApiFailure as failure:
            if failure.status != GONE:
                raise


async def _list(
    client: httpx2.AsyncClient, path: str, parameters: Mapping[str, str], max_objects: int
) -> tuple[list[Object], str]:
    objects: list[Object] = []
    more: dict[str, Any] = {"limit": PAGE}
    while True:
        page = _decode(await _get(client, path, {**parameters, **more}), _Page)
        objects += page.items or []
        following = page.metadata.get("continue")
        if not following or len(objects) >= max_objects:
            return objects[:max_objects], str(page.metadata.get("resourceVersion") or "")
        more["continue"] = str(following)


async def _get(client: httpx2.AsyncClient, path: str, parameters: Mapping[str, Any]) -> bytes:
    body = bytearray()
    try:
        async with client.stream("GET", path, params=dict(parameters)) as response:
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise ApiFailure(f"{path}: the answer is larger than {MAX_BODY_BYTES:,} bytes")
    except (httpx2.HTTPError, httpx2.InvalidURL, KubeConfigError, OSError) as error:
        raise ApiFailure(f"{path}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise _refused(path, response.status_code, bytes(body))
    return bytes(body)


async def _watch(
    client: httpx2.AsyncClient, path: str, parameters: Mapping[str, str], version: str
) -> AsyncGenerator[_Event, None]:
    more = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
    timeout = httpx2.Timeout(client.timeout.connect, read=WATCH_S + GRACE_S)
    buffer = bytearray()
    try:
        async with client.stream("GET", path, params={**parameters, **more}, timeout=timeout) as response:
            async for piece in response.aiter_bytes():
                buffer += piece
                if len(buffer) > MAX_BODY_BYTES:
                    raise ApiFailure(f"{path}: a change is larger than {MAX_BODY_BYTES:,} bytes")
                if response.status_code != 200:
                    continue
                *lines, rest = bytes(buffer).split(b"\n") if b"\n" in piece else (buffer,)
                buffer = bytearray(rest)
                for line in lines:
                    if line.strip():
                        yield _event(path, line)
    except (httpx2.HTTPError, KubeConfigError, OSError) as error:  # a TimeoutError is an OSError
        raise ApiFailure(f"watch {path}: {error or type(error).__name__}") from None
    if response.status_code != 200:
        raise _refused(path, response.status_code, bytes(buffer))


def _event(path: str, line: bytes) -> _Event:
    event = _decode(line, _Event)
    if event.type == "ERROR":
        code = event.object.get("code")
        raise ApiFailure(f"watch {path}: {event.object.get('message')}", code if isinstance(code, int) else 0)
    return event


def _refused(path: str, status: int, body: bytes) -> ApiFailure:
    try:
        message = str(msgspec.json.decode(body, type=dict[str, Any]).get("message") or "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = ""
    return ApiFailure(f"{path}: {status} {message[:300]}".rstrip(), status)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiFailure(f"the API server's answer is not what was asked for: {error}") from None


# A text in a ConfigMap that the router reads and replaces.

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
