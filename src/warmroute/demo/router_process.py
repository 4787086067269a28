"""The router as a child process, with a configuration file written for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from warmroute import http_client
from warmroute.config import ConfigError
from warmroute.demo.child_processes import Child, Children, free_port

HOST: Final = "127.0.0.1"
FIRST_ADMIN_PORT: Final = 8181
_READY_WITHIN_S: Final = 60.0
_REQUEST_TIMEOUT_S: Final = 30.0
_MAX_RESPONSE_BYTES: Final = 64 << 20


async def send_request(method: str, url: str) -> tuple[int, bytes]:
    """Return status and body. Raises OSError if there is no complete response in time."""
    return await http_client.request(method, url, timeout_s=_REQUEST_TIMEOUT_S, limit_bytes=_MAX_RESPONSE_BYTES)


class RouterProcess:
    """A router that is ready."""

    def __init__(self, child: Child, port: int, admin_port: int) -> None:
        self.child = child
        self.url = f"http://{HOST}:{port}"
        self.admin_url = f"http://{HOST}:{admin_port}"

    async def admin_get(self, path: str) -> Any:
        """Return the JSON of an admin endpoint. Raises ConfigError."""
        try:
            status, body = await send_request("GET", self.admin_url + path)
        except OSError as error:
            if self.child.has_ended():
                raise ConfigError(f"the router exited with status {self.child.process.returncode}") from None
            raise ConfigError(f"the router's admin API does not answer: {error}") from None
        if status != 200:
            raise ConfigError(f"the router's admin API returned {status} for {path}")
        return msgspec.json.decode(body)


async def start_router(children: Children, folder: Path, port: int, tables: Mapping[str, Any]) -> RouterProcess:
    """Start a router and wait until it is ready. Raises ConfigError."""
    admin_port = free_port(max(FIRST_ADMIN_PORT, port + 1))
    ports = {"listen": {"host": HOST, "port": port}, "admin": {"port": admin_port}}
    file = folder / f"router-{port}.toml"
    file.write_text(as_toml({**ports, **tables}), encoding="utf-8")
    router = RouterProcess(children.start("serve", "--config", str(file)), port, admin_port)
    try:
        async with asyncio.timeout(_READY_WITHIN_S):
            while True:
                await asyncio.sleep(0.05)
                if router.child.has_ended():
                    raise ConfigError(router.child.start_error())
                try:
                    status, _ = await send_request("GET", f"{router.url}/ready")
                except OSError:
                    continue
                if status == 200:
                    return router
    except BaseException as error:
        children.end(router.child)
        if isinstance(error, TimeoutError):
            raise ConfigError(f"the router was not ready within {_READY_WITHIN_S:g} s") from None
        raise


def as_toml(tables: Mapping[str, Any]) -> str:
    """Write tables, and lists of tables, as TOML. Values are encoded as JSON, which is valid TOML for them."""
    lines: list[str] = []
    for name, content in tables.items():
        several = isinstance(content, list)
        for table in content if several else (content,):
            head = f"[[{name}]]" if several else f"[{name}]"
            lines += [head, *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()), ""]
    return "\n".join(lines)
