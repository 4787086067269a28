"""Lists objects and then watches their changes, as Kubernetes' own clients do.

A list returns all objects and their resource version. A watch continues from a version: it sends each change, and now
and then a bookmark, which only moves the version on. The server ends a watch after WATCH_S, and the next one continues.
If the version is too old (410), the objects are listed again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple, TypeVar

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError as KubeConfigError

from warmroute.kubernetes.objects import Object, meta

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
